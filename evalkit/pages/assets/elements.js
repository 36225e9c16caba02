// Elements whose texts are set as text and never parsed as HTML.

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function button(label, action, attributes = {}) {
  return element("button", { type: "button", onclick: action, ...attributes }, label);
}

let labels = 0;

function labelled(label, control) {
  control.id = `control-${++labels}`;
  return element("div", { class: "field" }, element("label", { for: control.id }, label), control);
}

function select(options, action) {
  const made = element("select", { onchange: () => action(made.value) });
  made.append(...options.map(([value, label]) => element("option", { value }, label)));
  return made;
}

function embedded(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

function announce(sentence) {
  document.getElementById("announcement").textContent = sentence;
}

const counted = new Intl.NumberFormat("en").format;

function fixed(number, decimals) {
  return Number.isFinite(number) ? number.toFixed(decimals).replace("-", "−") : "–";
}

// A number whose sign is never lost: small ones by their power of ten
function signed(number, decimals) {
  if (!Number.isFinite(number)) return "–";
  const small = number !== 0 && Number(number.toFixed(decimals)) === 0;
  return (number > 0 ? "+" : "") + (small ? number.toExponential(0) : number.toFixed(decimals)).replaceAll("-", "−");
}
