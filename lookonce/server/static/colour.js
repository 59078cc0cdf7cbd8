// Code in colours. highlight.js tells its parts apart, and only `element` makes elements of them.

import { element } from "./dom.js";

const LONGEST = 20_000; // characters; an answer that grows is read again at each piece
const KINDS = {
  addition: "string", attr: "name", attribute: "name", built_in: "name", bullet: "keyword", char: "string", code: "string", comment: "comment",
  deletion: "keyword", doctag: "comment", keyword: "keyword", link: "string", literal: "number", meta: "comment", name: "keyword", number: "number",
  property: "name", quote: "comment", regexp: "string", section: "title", string: "string", subst: "plain", symbol: "number", tag: "plain",
  title: "title", type: "title", variable: "name",
};
let library = null;
let loading = null;

/** A `code` element; without colours until the library is here, and where it does not know the language. */
export function coloured(text, language) {
  const place = element("code", {}, text);
  if (!language || text.length > LONGEST) return place;
  if (library) colour(place, text, language);
  else {
    loading ??= import("./highlight.js").then((module) => { library = module.default; });
    loading.then(() => colour(place, text, language), () => {});
  }
  return place;
}

function colour(place, text, language) {
  if (!library.getLanguage(language)) return;
  const { _emitter: { rootNode } } = library.highlight(text, { language, ignoreIllegals: true });
  place.replaceChildren(...rootNode.children.map(part));
}

function part(node) {
  if (typeof node === "string") return node;
  const kind = KINDS[node.scope?.split(".")[0]];
  return element("span", { class: kind && `of-${kind}` }, ...node.children.map(part));
}
