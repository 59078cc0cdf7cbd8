// Markdown to elements. marked reads it, and only `element` makes elements of what it read: markup in an
// answer stays text, pictures become links, and a link goes nowhere but to the web or to a mail program.

import { coloured } from "./colour.js";
import { button, copyText, element } from "./dom.js";
import { Marked } from "./marked.js";

const BLOCK_MATHS = /^(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/;
const INLINE_MATHS = /^(?:\$\$([^$\n]+?)\$\$|\$(?![\s$])((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d)|\\\(((?:.|\n)+?)\\\))/;
const TARGETS = /^(?:https?:|mailto:)/i;
const BEGUN_MATHS = /(?:^|\n)(?:\$\$|\\\[)/;
const DEEPEST = 100; // levels of lists, quotes and emphasis in each other
const LIMITS = { maxExpand: 200, maxSize: [10, 10], trust: false, throwOnError: true, annotate: true };
const ENTITY = /&(?:#\d+|#x[\da-f]+|\w+);/i;

const reader = new Marked({
  gfm: true, breaks: true,
  extensions: [
    { name: "maths", level: "block", start: (text) => at(text, /\n(?:\$\$|\\\[)/), tokenizer: (text) => maths(BLOCK_MATHS.exec(text), true) },
    { name: "formula", level: "inline", start: (text) => at(text, /\$|\\\(/), tokenizer: (text) => formula(INLINE_MATHS.exec(text)) },
  ],
});

function at(text, sign) {
  const found = text.search(sign);
  return found < 0 ? undefined : found;
}

function maths(match, display) {
  if (!match) return undefined;
  return { type: "maths", raw: match[0], text: match.slice(1).find((part) => part !== undefined).trim(), display };
}

function formula(match) {
  const token = maths(match, match?.[1] !== undefined);
  return token && { ...token, type: "formula" };
}

/** Text that grows: blocks that are whole keep their elements, and are not read again. */
export class Markdown {
  constructor(node) {
    this.node = node;
    this.defined = ""; // what blocks that are whole say of links: [name]: address
    this.source = ""; // of the blocks that may still change
    this.blocks = []; // [source, element] of these
    this.literal = null; // the element of text that is not read
  }

  add(piece) {
    if (this.literal) {
      this.literal.append(piece);
      return;
    }
    this.source = (this.source + piece).replaceAll("\r\n", "\n");
    const tokens = tokensOf(this.defined + this.source);
    const shown = (tokens ?? []).filter(isShown);
    const same = this.blocks.findIndex(([source], index) => source !== shown[index]?.raw);
    const kept = same < 0 ? this.blocks.length : same;
    for (const [, old] of this.blocks.splice(kept)) old.remove();
    for (const token of shown.slice(kept)) {
      const made = block(token);
      this.blocks.push([token.raw, made]);
      this.node.append(made);
    }
    if (tokens) this.#settle(tokens, shown);
    else {
      this.literal = element("p", { class: "literal" }, this.source);
      this.node.append(this.literal);
    }
  }

  /** What comes may change the last two blocks, and all from where a formula begins that has no end yet. */
  #settle(tokens, shown) {
    const begun = shown.findIndex(({ type, raw }) => type !== "maths" && type !== "code" && BEGUN_MATHS.test(raw));
    const whole = Math.min(shown.length - 2, begun < 0 ? Infinity : begun);
    if (whole <= 0) return;
    const settled = tokens.slice(0, tokens.indexOf(shown[whole]));
    const read = settled.map(({ raw }) => raw).join("");
    const all = this.defined + this.source;
    if (!all.startsWith(read)) return;
    this.defined = settled.filter(({ type }) => type === "def").map(({ raw }) => `${raw.trim()}\n\n`).join("");
    this.source = all.slice(read.length);
    this.blocks.splice(0, whole);
  }
}

function isShown({ type }) {
  return type !== "space" && type !== "def";
}

/** Null for text that is nested too deeply to be shown, as where a model repeats a sign. */
function tokensOf(source) {
  try {
    const tokens = reader.lexer(source);
    return isDeeper(tokens, DEEPEST) ? null : tokens;
  } catch (error) {
    if (error instanceof RangeError) return null; // the stack was too small
    throw error;
  }
}

function isDeeper(tokens, levels) {
  return tokens.some((token) => levels === 0 || isDeeper(inside(token), levels - 1));
}

function inside({ type, tokens, items, header, rows }) {
  return type === "table" ? [...header, ...rows.flat()] : items ?? tokens ?? [];
}

function blocks(tokens) {
  return tokens.filter(isShown).map(block);
}

function block(token) {
  switch (token.type) {
    case "heading": return element(`h${Math.min(token.depth + 2, 6)}`, {}, ...inlines(token.tokens));
    case "code": return codeBlock(token.text, token.lang);
    case "blockquote": return element("blockquote", {}, ...blocks(token.tokens));
    case "list": return list(token);
    case "table": return table(token);
    case "hr": return element("hr");
    case "maths": return formulaOf(token);
    case "html": return element("p", { class: "literal" }, token.text.trim());
    default: return element(token.type === "text" ? "span" : "p", {}, ...inlines(token.tokens ?? [token]));
  }
}

function list(token) {
  const items = token.items.map((item) => element(
    "li", { class: item.task ? "task" : undefined },
    item.task ? element("input", { type: "checkbox", checked: item.checked, disabled: true, "aria-label": item.checked ? "done" : "open" }) : null,
    ...blocks(item.tokens.filter(({ type }) => type !== "checkbox")),
  ));
  if (!token.ordered) return element("ul", {}, ...items);
  return element("ol", { start: Number(token.start) === 1 ? undefined : Number(token.start) }, ...items);
}

function table({ header, rows, align }) {
  const cells = (name, row) => row.map((cell, column) => element(
    name, { class: align[column] ? `to-${align[column]}` : undefined, scope: name === "th" ? "col" : undefined },
    ...inlines(cell.tokens),
  ));
  return element(
    "div", { class: "wide", tabIndex: 0, role: "group", "aria-label": "Table" },
    element(
      "table", {}, element("thead", {}, element("tr", {}, ...cells("th", header))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row)))),
    ),
  );
}

export function codeBlock(text, language) {
  const copy = button("Copy", { class: "quiet copy-code", "aria-label": "Copy code" }, () => copyText(copy, text));
  const name = (language ?? "").split(/\s/)[0];
  return element(
    "figure", { class: "code" },
    element("figcaption", {}, element("span", {}, name || "text"), copy),
    element("pre", { tabIndex: 0, role: "group", "aria-label": "Code" }, coloured(text, name)),
  );
}

function inlines(tokens) {
  return tokens.map(inline);
}

function inline(token) {
  switch (token.type) {
    case "strong": case "em": case "del": return element(token.type, {}, ...inlines(token.tokens));
    case "codespan": return element("code", {}, token.text);
    case "br": return element("br");
    case "link": return link(token.href, inlines(token.tokens));
    case "image": return link(token.href, [token.text || "picture"]);
    case "formula": return formulaOf(token);
    case "html": return token.raw;
    default: return token.tokens ? element("span", {}, ...inlines(token.tokens)) : plain(token.text ?? token.raw);
  }
}

function link(href, children) {
  if (!TARGETS.test(href)) return element("span", {}, ...children);
  return element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/** With `&amp;` and its like as the letters they stand for. */
function plain(text) {
  if (!ENTITY.test(text)) return text;
  return new DOMParser().parseFromString(text.replaceAll("<", "&lt;"), "text/html").body.textContent;
}

let temml = null;

/** Its source until the library is here, and for good where the library cannot read it. */
function formulaOf({ text, display }) {
  const place = element(display ? "div" : "span", { class: display ? "formula shown-alone" : "formula", tabIndex: display ? 0 : undefined },
    element("code", {}, text));
  temml ??= import("./temml.js").then((module) => module.default);
  temml.then((library) => {
    const made = element("span");
    library.render(text, made, { ...LIMITS, displayMode: display });
    place.replaceChildren(...made.childNodes);
  }).catch(() => place.classList.add("unread"));
  return place;
}
