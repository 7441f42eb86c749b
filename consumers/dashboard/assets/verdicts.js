// Verdicts: buttons that fill the score in, and Escape, which gives the keys of the page back.
"use strict";

document.addEventListener("click", event => {
  const button = event.target.closest("[data-score]");
  if (!button) return;
  const score = document.getElementById("score");
  score.value = button.dataset.score;
  score.focus();
});

document.addEventListener("keydown", event => {
  if (event.key === "Escape") document.activeElement?.blur();
});
