// The only way this page makes elements: text is always set as text, never as markup.

/** An element with properties; `class` and `aria-*`/`data-*`/`role` become attributes. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function drawing(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** One of the symbols at the top of index.html. */
export function icon(name) {
  return drawing("svg", { class: "icon", "aria-hidden": "true" }, drawing("use", { href: `#icon-${name}` }));
}

/** A button that submits nothing. `label` is text or an element. */
export function button(label, properties, onclick) {
  return element("button", { type: "button", onclick, ...properties }, label);
}

/** A round one with a symbol alone; its name is for those who cannot see it, and shown on hovering. */
export function iconButton(symbol, name, onclick) {
  return button(icon(symbol), { class: "round quiet", "aria-label": name, title: name }, onclick);
}

/** What those hear who cannot see the page. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Puts `text` in the clipboard, also on pages that are not served securely, and says so at the button. */
export async function copyText(pressed, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", { value: text, class: "unseen" });
    pressed.after(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    pressed.focus();
  }
  announce("Copied");
  pressed.classList.add("copied");
  setTimeout(() => pressed.classList.remove("copied"), 1500);
}

export function byId(id) {
  return document.getElementById(id);
}

const DURATION = [[1000, 1000, "s", 2], [100, 1, "ms", 0], [10, 1, "ms", 0], [0, 1, "ms", 1]];

/** 3.4 ms, 120 ms, 1.25 s */
export function milliseconds(value) {
  const [, unit, name, digits] = DURATION.find(([least]) => value >= least) ?? DURATION.at(-1);
  return `${(value / unit).toFixed(digits)} ${name}`;
}

/** 0 B, 912 B, 1.4 MB: decimal units. */
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${value.toFixed(power > 0 && value < 100 ? 1 : 0)} ${units[power]}`;
}

/** 950, 12.4 k, 3.1 M */
export function count(value) {
  if (value < 10_000) return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
  return value < 1e6 ? `${(value / 1e3).toFixed(1)} k` : `${(value / 1e6).toFixed(1)} M`;
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
