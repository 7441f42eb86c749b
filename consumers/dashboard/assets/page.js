// What a page does besides links and forms: it asks again for its live parts, sends a form when a choice changes, shows the
// figures below the pointer, and takes keys. Everything works without it, except that nothing moves by itself.
"use strict";

const main = document.getElementById("main");

// --- light and dark

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* for this page alone, then */ }
});

// --- choices

document.addEventListener("change", event => {
  if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
});

// Fields that say nothing stay out of the address.
document.addEventListener("submit", event => {
  if (event.target.method !== "get" || event.target.matches(".post")) return;
  for (const field of event.target.elements) if (field.name && field.value === "") field.disabled = true;
});
addEventListener("pageshow", () => {
  for (const field of document.querySelectorAll("form[method=get] :disabled")) field.disabled = false;
});

// --- actions: a form whose fields are sent as JSON, which no other site can do

function fieldsOf(form) {
  const fields = {};
  for (const field of form.elements) {
    if (!field.name || field.disabled || field.tagName === "BUTTON") continue;
    if (field.dataset.kind === "list") {
      fields[field.name] ??= [];
      if (field.type === "checkbox" ? field.checked : field.value) fields[field.name].push(field.value);
    } else if (field.type === "checkbox") fields[field.name] = field.checked;
    else if (field.dataset.kind === "number") fields[field.name] = Number(field.value.replace(",", "."));
    else fields[field.name] = field.value;
  }
  return fields;
}

document.addEventListener("submit", async event => {
  const form = event.target;
  if (!form.matches("form.post")) return;
  event.preventDefault();
  const fields = fieldsOf(form);
  const pressed = event.submitter;
  if (pressed?.name) fields[pressed.name] = pressed.dataset.kind === "flag" ? pressed.value === "yes" : pressed.value;
  const told = form.querySelector("output");
  const buttons = [...form.querySelectorAll("button")];
  buttons.forEach(button => { button.disabled = true; });
  told.textContent = "";
  try {
    const answer = await fetch(form.getAttribute("action"), {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(fields),
    });
    if (answer.ok) return location.assign(form.dataset.then || location.href);
    told.textContent = (await answer.json()).error;
  } catch {
    told.textContent = "The server does not answer: nothing is known of what was sent.";
  }
  buttons.forEach(button => { button.disabled = false; });
});

// --- live parts

function replaceLive(fresh) {
  for (const old of document.querySelectorAll("[data-live]")) {
    const found = fresh.getElementById(old.id);
    // Another page than the one that stands here: the run has appeared, or the store is back.
    if (!found) return location.reload();
    if (found.outerHTML === old.outerHTML || old.matches(":focus-within") && old.querySelector("input:focus, select:focus, textarea:focus")) continue;
    const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const opened = new Set([...old.querySelectorAll("details[open][id]")].map(part => part.id));
    const scrolled = [...old.querySelectorAll(".scroll")].map(part => [part.scrollLeft, part.scrollTop]);
    const part = document.importNode(found, true);
    for (const details of part.querySelectorAll("details[id]")) if (opened.has(details.id)) details.open = true;
    old.replaceWith(part);
    part.querySelectorAll(".scroll").forEach((box, place) => {
      if (scrolled[place]) [box.scrollLeft, box.scrollTop] = scrolled[place];
    });
    if (focused) part.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
  }
  document.title = fresh.title;
}

async function refresh() {
  const seconds = Number(main.dataset.refreshSeconds || 0);
  if (!seconds) return;
  if (!document.hidden) {
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      replaceLive(new DOMParser().parseFromString(await answer.text(), "text/html"));
      document.body.classList.remove("stale");
    } catch {
      // The server is away: what is shown stays, marked as old.
      document.body.classList.add("stale");
    }
  }
  setTimeout(refresh, seconds * 1000);
}
setTimeout(refresh, Number(main.dataset.refreshSeconds || 0) * 1000);

// --- plots

document.addEventListener("pointerover", event => {
  const figure = event.target.closest?.(".plot");
  if (!figure) return;
  const told = event.target.closest("a, g")?.querySelector("title");
  const output = figure.querySelector("output");
  if (output) output.textContent = told ? told.textContent : output.dataset.rest ?? "";
});
document.addEventListener("pointerout", event => {
  const figure = event.target.closest?.(".plot");
  if (!figure || figure.contains(event.relatedTarget)) return;
  const output = figure.querySelector("output");
  if (output) output.textContent = output.dataset.rest ?? "";
});

// On a phone the navigation is wider than the page.
document.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });

// --- keys

const KEYS = { n: "a[rel=next]", p: "a[rel=prev]", "/": "input[type=search]", "?": "#keys" };

document.addEventListener("keydown", event => {
  const typing = event.target.matches("input, textarea, select, [contenteditable]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "j" || event.key === "k") {
    const rows = [...document.querySelectorAll("main [data-row]")];
    const here = rows.indexOf(document.activeElement);
    const next = event.key === "j" ? here + 1 : Math.max(0, here - 1);
    rows[Math.min(next, rows.length - 1)]?.focus();
    return;
  }
  const target = KEYS[event.key] && document.querySelector(KEYS[event.key]);
  if (!target) return;
  event.preventDefault();
  if (target.matches("a, summary")) target.click();
  if (!target.matches("a")) target.focus();
});
