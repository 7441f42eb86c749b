// The SQL console: completion by the words of the page, Ctrl-Enter, and the statement that is saved.
"use strict";

const box = document.getElementById("sql");
const form = document.getElementById("console");
const list = document.getElementById("completions");
const words = [...document.querySelectorAll("#words option")].map(option => option.value);
let place = 0;

// --- completion

function wordBefore() {
  return /[A-Za-z_][A-Za-z0-9_]*$/.exec(box.value.slice(0, box.selectionStart))?.[0] ?? "";
}

function offer() {
  const word = wordBefore();
  const found = word.length < 2 ? [] : words.filter(known => known.toLowerCase().startsWith(word.toLowerCase()) && known !== word).slice(0, 8);
  place = 0;
  list.replaceChildren(...found.map((known, number) => {
    const item = document.createElement("li");
    item.textContent = known;
    item.className = number === 0 ? "chosen" : "";
    item.addEventListener("mousedown", event => { event.preventDefault(); take(known); });
    return item;
  }));
  list.hidden = found.length === 0;
}

function take(known) {
  const end = box.selectionStart;
  box.setRangeText(known, end - wordBefore().length, end, "end");
  list.hidden = true;
}

function move(step) {
  const items = [...list.children];
  items[place].className = "";
  place = (place + step + items.length) % items.length;
  items[place].className = "chosen";
}

box.addEventListener("input", offer);
box.addEventListener("blur", () => { list.hidden = true; });
box.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    return form.requestSubmit();
  }
  if (list.hidden) return;
  const known = list.children[place]?.textContent;
  if (event.key === "ArrowDown") move(1);
  else if (event.key === "ArrowUp") move(-1);
  else if (event.key === "Enter" || event.key === "Tab") take(known);
  else if (event.key === "Escape") list.hidden = true;
  else return;
  event.preventDefault();
});

// --- saving: page.js sends the form, with the statement as it stands in the box

document.getElementById("save")?.addEventListener("submit", event => {
  event.target.elements.sql.value = box.value;
});
