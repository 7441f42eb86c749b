// Light or dark: as the system says, unless somebody chose. Runs before the page is drawn, so that nothing flashes.
"use strict";
try {
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* storage is off: the system decides */ }
