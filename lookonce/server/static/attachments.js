// Pictures, sounds, films and documents a person adds: from a file dialog, dropped, pasted or captured.

import { button, element, icon, iconButton } from "./dom.js";

const NAMES = {
  image: /\.(png|jpe?g|webp|gif)$/i,
  audio: /\.(wav|mp3|flac|ogg)$/i,
  video: /\.(mp4|m4v|mov|webm|mkv|avi)$/i,
  file: /\.(pdf|txt|md|csv|json|xml|ya?ml|py|js|ts|c|cpp|h|java|go|rs|sh|html?|css|toml|log)$/i,
};
const TYPES = { image: /^image\//, audio: /^audio\//, video: /^video\//, file: /^(text\/|application\/(pdf|json|xml|x?-?yaml))/ };
const NOUNS = { image: "pictures", audio: "sounds", video: "films" };
const SYMBOLS = { audio: "sound", video: "film", file: "file" };

/** "image", "audio", "video", "file" for PDF and text, or null for what is none of them. */
function kindOf(file) {
  const kinds = Object.keys(NAMES);
  return kinds.find((kind) => TYPES[kind].test(file.type)) ?? kinds.find((kind) => NAMES[kind].test(file.name)) ?? null;
}

/** Why a file cannot go along, in words for people, or null. `modalities` are the model's, where known. */
function refusalOf(file, kind, modalities) {
  if (!kind) return "This is neither a picture, a sound nor a film, a PDF or a text.";
  if (!file.size) return "This file is empty.";
  if (NOUNS[kind] && modalities && !modalities.includes(kind)) return `This model does not take ${NOUNS[kind]}.`;
  return null;
}

const WORDS = {
  too_large: "This is larger than the server takes.",
  unprocessable_media: "This could not be read. It may be damaged, or of a kind that the server does not know.",
  media_not_allowed: "The server does not take this.",
};

/** A server's refusal of a file: words for people, then its own without the address of the part. */
function refusalIn({ message, code }) {
  const told = message.replace(/^messages\[\d+\][^:]*:\s*/, "");
  return [WORDS[code] ?? "The server did not take this.", told].join(" ");
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

export class Attachment {
  constructor(file, kind) {
    this.name = file.name || NOUNS[kind]?.slice(0, -1) || "file";
    this.kind = kind;
    this.file = file;
    this.address = URL.createObjectURL(file);
  }

  /** Lets the browser drop its bytes; it must not be shown afterwards. */
  forget() {
    URL.revokeObjectURL(this.address);
  }

  /** The part of a chat message that carries it. */
  async part() {
    const url = await dataUrl(this.file);
    if (this.kind === "file") return { type: "file", file: { file_data: url, filename: this.name } };
    const type = `${this.kind}_url`;
    return { type, [type]: { url } };
  }

  /** A small picture of it for chips and receipts. */
  thumbnail() {
    if (this.kind === "image") return element("img", { class: "thumb", src: this.address, alt: "" });
    return element("span", { class: "thumb" }, icon(SYMBOLS[this.kind]));
  }

  /** How it stands in the conversation. */
  figure() {
    switch (this.kind) {
      case "image": return element("img", { class: "shown", src: this.address, alt: this.name });
      case "audio": return element("audio", { controls: true, src: this.address, "aria-label": this.name });
      case "video": return element("video", { class: "shown", controls: true, src: this.address, "aria-label": this.name });
      default: return element("span", { class: "chip" }, this.thumbnail(), element("span", { class: "name" }, this.name));
    }
  }
}

/** What will go with the next question. */
export class Tray {
  /** `modalities()` are what the model takes, or undefined where nobody knows yet. */
  constructor(list, { onChange, modalities }) {
    this.list = list;
    this.onChange = onChange;
    this.modalities = modalities;
    this.items = [];
    this.refused = []; // {name, text, item}: what cannot go along; `item` where it stays in the tray
  }

  addFiles(files) {
    for (const file of files) {
      const kind = kindOf(file);
      const text = refusalOf(file, kind, this.modalities());
      if (text) this.refused.push({ name: file.name, text });
      else this.items.push(new Attachment(file, kind));
    }
    this.#show();
  }

  put(items) {
    this.items = [...items];
    this.refused = [];
    this.#show();
  }

  take() {
    const taken = this.items;
    this.put([]);
    return taken;
  }

  /** Says at a file, which the server has refused, why. */
  refuse(item, error) {
    this.refused.push({ name: item.name, text: refusalIn(error), item });
    this.#show();
  }

  #remove(item) {
    const index = this.items.indexOf(item);
    this.items.splice(index, 1);
    this.refused = this.refused.filter((refusal) => refusal.item !== item);
    this.#show();
    const next = this.list.children[Math.min(index, this.items.length - 1)];
    next?.querySelector("button").focus();
  }

  #dismiss(refusal) {
    this.refused = this.refused.filter((other) => other !== refusal);
    this.#show();
  }

  #show() {
    const chips = this.items.map((item) => element(
      "li", { class: "chip" }, item.thumbnail(), element("span", { class: "name" }, item.name),
      iconButton("close", `Remove ${item.name}`, () => this.#remove(item)),
    ));
    const refusals = this.refused.map((refusal) => element(
      "li", { class: "chip refused" },
      element("span", { role: "alert" }, element("strong", {}, refusal.name), " ", refusal.text),
      button("OK", { class: "quiet", "aria-label": `Dismiss the refusal of ${refusal.name}` }, () => this.#dismiss(refusal)),
    ));
    this.list.replaceChildren(...chips, ...refusals);
    this.list.hidden = !this.list.children.length;
    this.onChange();
  }
}

/** Lets `add(files)` have what is dropped on or pasted into the page; `veil` shows while dragging. */
export function acceptFiles(veil, add) {
  let depth = 0;
  const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
  const enter = (by) => (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    depth = Math.max(depth + by, 0);
    veil.hidden = depth === 0;
  };
  document.addEventListener("dragenter", enter(1));
  document.addEventListener("dragleave", enter(-1));
  document.addEventListener("dragover", (event) => carriesFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    depth = 0;
    veil.hidden = true;
    add(event.dataTransfer.files);
  });
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  });
}
