// Pictures and sounds a person adds: from a file dialog, dropped or pasted.

import { element, icon } from "./dom.js";

const SOUND_NAMES = /\.(wav|mp3|flac|ogg)$/i;
const PICTURE_NAMES = /\.(png|jpe?g|webp|gif)$/i;

/** "image", "audio", or null for what is neither. */
function kindOf(file) {
  if (file.type.startsWith("image/") || PICTURE_NAMES.test(file.name)) return "image";
  if (file.type.startsWith("audio/") || SOUND_NAMES.test(file.name)) return "audio";
  return null;
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
    this.name = file.name || (kind === "image" ? "picture" : "sound");
    this.kind = kind;
    this.file = file;
    this.address = URL.createObjectURL(file);
  }

  /** null for a file that is neither a picture nor a sound. */
  static of(file) {
    const kind = kindOf(file);
    return kind && new Attachment(file, kind);
  }

  /** Lets the browser drop its bytes; it must not be shown afterwards. */
  forget() {
    URL.revokeObjectURL(this.address);
  }

  /** The part of a chat message that carries it. */
  async part() {
    const url = await dataUrl(this.file);
    return this.kind === "image"
      ? { type: "image_url", image_url: { url } }
      : { type: "audio_url", audio_url: { url } };
  }

  /** A small picture of it for chips and receipts. */
  thumbnail() {
    if (this.kind === "image") return element("img", { class: "thumb", src: this.address, alt: "" });
    return element("span", { class: "thumb" }, icon("sound"));
  }

  /** How it stands in the conversation. */
  figure() {
    if (this.kind === "image") return element("img", { class: "shown", src: this.address, alt: this.name });
    return element("audio", { controls: true, src: this.address, "aria-label": this.name });
  }
}

/** What will go with the next question. */
export class Tray {
  constructor(list, { onChange, onRefused }) {
    this.list = list;
    this.onChange = onChange;
    this.onRefused = onRefused;
    this.items = [];
  }

  addFiles(files) {
    for (const file of files) {
      const made = Attachment.of(file);
      if (made) this.items.push(made);
      else this.onRefused(file.name);
    }
    this.#show();
  }

  put(items) {
    this.items = [...items];
    this.#show();
  }

  take() {
    const taken = this.items;
    this.put([]);
    return taken;
  }

  #remove(item) {
    const index = this.items.indexOf(item);
    this.items.splice(index, 1);
    this.#show();
    const next = this.list.children[Math.min(index, this.items.length - 1)];
    next?.querySelector("button").focus();
  }

  #show() {
    this.list.replaceChildren(...this.items.map((item) => element(
      "li", { class: "chip" }, item.thumbnail(), element("span", { class: "name" }, item.name),
      element("button", {
        type: "button", class: "round quiet", "aria-label": `Remove ${item.name}`, onclick: () => this.#remove(item),
      }, icon("close")),
    )));
    this.list.hidden = this.items.length === 0;
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
