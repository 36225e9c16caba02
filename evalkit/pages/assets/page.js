// Buttons that copy tables, links that save figures, and printing.

async function copy(text) {
  // Browsers differ in whether file:// is a secure context, which the clipboard's interface needs
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyFromField(text);
  }
}

function copyFromField(text) {
  const field = element("textarea", { class: "unseen", readonly: true, "aria-hidden": "true", tabindex: "-1" });
  const focused = document.activeElement;
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return copied;
}

async function announceCopy(text, what) {
  announce("");
  const copied = await copy(text);
  announce(copied ? `${what} copied` : `${what} could not be copied: the browser does not permit it`);
  return copied;
}

function showCopied(pressed) {
  const label = pressed.dataset.label ?? pressed.textContent;
  pressed.dataset.label = label;
  pressed.textContent = "copied";
  setTimeout(() => (pressed.textContent = label), 1200);
}

function prepareCopying() {
  const texts = embedded("copied-texts");
  for (const pressed of document.querySelectorAll("button[data-table]")) {
    const text = texts[pressed.dataset.table][pressed.dataset.form];
    pressed.addEventListener("click", async () => {
      if (await announceCopy(text, pressed.dataset.label ?? pressed.textContent)) showCopied(pressed);
    });
  }
}

function prepareFigures() {
  for (const link of document.querySelectorAll("a.save")) {
    const [kind, data] = link.closest("figure").querySelector("img").src.split(",");
    link.href = `${kind},${btoa(atob(data).replace(/<style class="dark">[^<]*<\/style>/, ""))}`;
  }
}

// A fragment inside a closed part opens it, as the browser's own search does
function openAround(id) {
  const target = id && document.getElementById(id);
  if (!target) return;
  for (let part = target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
  target.scrollIntoView();
}

function preparePrinting() {
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const part of closed) part.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const part of closed) part.open = false;
  });
}

prepareCopying();
prepareFigures();
preparePrinting();
for (const shown of document.querySelectorAll(".scripted")) shown.hidden = false;
window.addEventListener("hashchange", () => openAround(location.hash.slice(1)));
if (document.querySelector("details")) openAround(location.hash.slice(1));
if (typeof startExplorer === "function") startExplorer();
