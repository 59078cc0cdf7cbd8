// The list of kept conversations: find, open, rename, save as a file, delete; and open such a file.

import { button, byId, element, icon } from "./dom.js";
import { asJson, asMarkdown } from "./export.js";

const WIDE = matchMedia("(min-width: 80rem)");

export class History {
  /** `onOpen(record)` shows one, `onFile(file)` one that was saved as JSON; `onGone(id)` hears of each that was deleted. */
  constructor(store, { onOpen, onFile, onGone }) {
    this.store = store;
    this.onOpen = onOpen;
    this.onFile = onFile;
    this.onGone = onGone;
    this.find = byId("find");
    this.find.addEventListener("input", () => this.refresh());
    byId("open-saved").addEventListener("click", () => byId("saved-file").click());
    byId("saved-file").addEventListener("change", ({ target }) => this.#openFile(target));
    this.panel = byId("history");
    this.list = byId("history-list");
    this.toggle = byId("open-history");
    this.current = null;
    this.expanded = null; // id of the one whose actions are shown
    this.toggle.addEventListener("click", () => this.show(this.panel.hidden));
    byId("close-history").addEventListener("click", () => this.show(false));
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || WIDE.matches) return;
      event.stopPropagation();
      this.show(false);
    });
    WIDE.addEventListener("change", () => this.show(WIDE.matches, { focus: false }));
    this.show(WIDE.matches, { focus: false });
    this.refresh();
  }

  /** Over the page where there is no room beside it; what lies under it, in the landmark `main`, is then out of reach. */
  show(shown, { focus = true } = {}) {
    this.panel.hidden = !shown;
    this.toggle.setAttribute("aria-expanded", String(shown));
    for (const part of byId("main").children) part.inert = shown && !WIDE.matches;
    if (!focus) return;
    if (shown) (this.list.querySelector("button") ?? byId("close-history")).focus();
    else this.toggle.focus();
  }

  async refresh(current = this.current) {
    this.current = current;
    const records = await this.store.all();
    const words = this.find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = records.filter((record) => has(record, words));
    byId("history-empty").hidden = records.length > 0;
    byId("history-none").hidden = found.length > 0 || records.length === 0;
    this.find.hidden = records.length === 0;
    this.list.replaceChildren(...found.map((record) => this.#entry(record)));
  }

  async #openFile(field) {
    const problem = byId("saved-problem");
    problem.hidden = true;
    try {
      await this.onFile(field.files[0]);
      if (!WIDE.matches) this.show(false, { focus: false });
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
    field.value = "";
  }

  #entry(record) {
    const open = button(record.title, { class: "title", "aria-current": record.id === this.current ? "true" : undefined }, () => this.#open(record.id));
    const shown = record.id === this.expanded;
    const more = button(icon("more"), {
      class: "round quiet", "aria-label": `Actions for ${record.title}`, "aria-expanded": String(shown),
    }, () => this.#expand(shown ? null : record.id));
    return element(
      "li", { class: "kept", "data-id": record.id }, element("div", { class: "row" }, open, more),
      shown ? this.#actions(record) : null,
    );
  }

  #actions(record) {
    const remove = button("Delete", { class: "quiet" }, () => {
      if (remove.textContent === "Delete") remove.textContent = "Delete for good?";
      else this.#remove(record.id);
    });
    return element(
      "div", { class: "row actions", role: "group", "aria-label": `Actions for ${record.title}` },
      button("Rename", { class: "quiet" }, () => this.#rename(record)),
      button("Save as Markdown", { class: "quiet" }, async () => save(await this.store.get(record.id), asMarkdown, "md")),
      button("Save as JSON", { class: "quiet" }, async () => save(await this.store.get(record.id), asJson, "json")),
      remove,
    );
  }

  async #open(id) {
    const record = await this.store.get(id);
    if (!record) return;
    if (!WIDE.matches) this.show(false, { focus: false });
    this.onOpen(record);
  }

  async #expand(id) {
    const focused = id ?? this.expanded;
    this.expanded = id;
    await this.refresh();
    this.#row(focused)?.querySelector("[aria-expanded]").focus();
  }

  #row(id) {
    return [...this.list.children].find((row) => row.dataset.id === id);
  }

  #rename(record) {
    const title = element("input", { class: "rename", value: record.title, maxLength: 120, "aria-label": "Title" });
    const finish = async (keep) => {
      if (finish.done) return;
      finish.done = true;
      const now = keep && title.value.trim() ? await this.store.get(record.id) : null;
      if (now) await this.store.put({ ...now, title: title.value.trim(), named: true });
      await this.#expand(null);
    };
    title.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      finish(event.key === "Enter");
    });
    title.addEventListener("blur", () => finish(true));
    this.#row(record.id).querySelector(".title").replaceWith(title);
    title.select();
  }

  async #remove(id) {
    await this.store.remove(id);
    this.expanded = null;
    this.onGone(id);
    await this.refresh();
    (this.list.querySelector("button") ?? byId("new-chat")).focus();
  }
}

/** Whether all words occur in a conversation's title, questions, names of files and answers. */
function has({ title, turns }, words) {
  if (!words.length) return true;
  const said = turns.flatMap(({ question, attachments, answers }) => [
    question, ...attachments.map(({ name }) => name), ...answers.map(({ text }) => text),
  ]);
  const whole = [title, ...said].join("\n").toLowerCase();
  return words.every((word) => whole.includes(word));
}

async function save(record, write, ending) {
  if (!record) return;
  const name = record.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60).replace(/^-|-$/g, "") || "chat";
  const address = URL.createObjectURL(new Blob([await write(record)], { type: "text/plain" }));
  element("a", { href: address, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
