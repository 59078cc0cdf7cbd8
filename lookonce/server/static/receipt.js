// The reuse receipt: for each piece of the prompt, whether it was worked on or found.

import { count, element, milliseconds, plural } from "./dom.js";

const NOUNS = { image: "picture", audio: "sound", video: "film" };

/** What happened at one stage of one item: {reused: boolean, text, why}. */
function processing(item) {
  const took = milliseconds(item.decode_ms + item.process_ms);
  switch (item.processor) {
    case "hit": return found("reused", "its processed form was held");
    case "shared": return found("shared", "another request was processing it");
    case "injected": return found("injected", "it came processed from outside");
    case "not_needed": return found("not needed", "a later tier held the result");
    case "bypass": return worked(took, "too large for the cache");
    default: return worked(took, "decoded and processed");
  }
}

function encoding(item) {
  switch (item.encoder) {
    case "hit": return found("reused", "its encoder output was held");
    case "skipped": return found("not needed", "the prefix cache covered it");
    default: return worked(milliseconds(item.encode_ms), "run through the encoder");
  }
}

function prefill(item, cached) {
  const covered = Math.min(Math.max(cached - item.offset, 0), item.length);
  if (covered === item.length) return found("reused", "its KV blocks were held");
  if (covered === 0) return worked(plural(item.length, "token"), "computed");
  return worked(`${item.length - covered} of ${item.length} tokens`, "the rest was held");
}

const found = (text, why) => ({ reused: true, text, why });
const worked = (text, why) => ({ reused: false, text, why });

/** `stage` is the column's name, which a phone shows beside each cell. */
function cell(stage, { reused, text, why }) {
  return element(
    "td", { "data-stage": stage }, element("span", { class: reused ? "mark reused" : "mark done" }, text),
    element("span", { class: "why" }, why),
  );
}

/** The number of the picture or sound among its kind, as a person would count. */
function names(items) {
  const seen = {};
  return items.map(({ modality }) => {
    seen[modality] = (seen[modality] ?? 0) + 1;
    return `${NOUNS[modality] ?? modality} ${seen[modality]}`;
  });
}

function itemTable(receipt, thumbnails) {
  const cached = receipt.prefix_cached_tokens + receipt.external_cached_tokens;
  const titles = names(receipt.items);
  const rows = receipt.items.map((item, index) => element(
    "tr", {},
    element("th", { scope: "row" }, thumbnails[index]?.() ?? null, element(
      "span", { class: "item" }, titles[index], element("code", { title: "media hash" }, item.hash.slice(0, 8)),
    )),
    cell("Process", processing(item)), cell("Encode", encoding(item)), cell("Prefill", prefill(item, cached)),
  ));
  const head = ["Item", "Process", "Encode", "Prefill"].map((name) => element("th", { scope: "col" }, name));
  return element(
    "table", {}, element("caption", { class: "unseen" }, "Where each item's results came from"),
    element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows),
  );
}

function segment(name, tokens) {
  if (tokens <= 0) return null;
  const made = element("span", { class: name });
  made.style.flexGrow = String(tokens);
  return made;
}

/** The prompt from its first token to its last, and where in it the items are. */
function strip(receipt) {
  const { prompt_tokens: total, prefix_cached_tokens: device, external_cached_tokens: external } = receipt;
  const computed = total - device - external;
  const text = [
    device ? `${count(device)} from KV on the device` : null,
    external ? `${count(external)} from external KV` : null,
    `${count(computed)} computed`,
  ].filter(Boolean).join(", ");
  const spans = receipt.items.map((item) => {
    const made = element("span");
    made.style.left = `${(100 * item.offset) / total}%`;
    made.style.width = `${(100 * item.length) / total}%`;
    return made;
  });
  return element(
    "div", { class: "prompt" },
    element(
      "div", { class: "strip", "aria-hidden": "true" },
      segment("reused", device), segment("external", external), segment("done", computed),
    ),
    spans.length ? element("div", { class: "spans", "aria-hidden": "true" }, ...spans) : null,
    element("p", {}, `${plural(total, "prompt token")}: ${text}`),
  );
}

/** How the answer went: `timing` has milliseconds, as the browser saw them. */
function headline(receipt, usage, timing) {
  const reused = receipt.prefix_cached_tokens + receipt.external_cached_tokens;
  const share = Math.floor((100 * reused) / Math.max(receipt.prompt_tokens, 1));
  return [
    element("span", { class: "share" }, `${share} % of the prompt reused`),
    element("span", {}, timing.first === null ? "" : `first token ${milliseconds(timing.first)}`),
    element("span", {}, plural(usage?.completion_tokens ?? 0, "token")),
  ];
}

/** `thumbnails[i]()` makes a small picture of item i, or null. */
export function receiptCard({ receipt, usage, timing, thumbnails }) {
  return element(
    "details", { class: "receipt", open: true },
    element("summary", {}, ...headline(receipt, usage, timing)),
    strip(receipt),
    receipt.items.length ? itemTable(receipt, thumbnails) : null,
  );
}
