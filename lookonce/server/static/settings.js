// What a person sets. The key lives in this tab's session storage and nowhere else; the rest in this browser.

import { byId } from "./dom.js";

const KEY = "lookonce-key";
const KEPT = "lookonce-settings";
const FIELDS = [
  "system", "temperature", "top-p", "top-k", "max-tokens", "seed", "stop", "form", "schema", "tools",
  "processor", "theme", "keep",
];
const NUMBERS = { "top-p": "top_p", "top-k": "top_k", "max-tokens": "max_tokens", seed: "seed" };

export class Settings {
  constructor({ onClosed, onForget }) {
    this.dialog = byId("settings");
    this.problem = byId("settings-problem");
    byId("api-key").value = sessionStorage.getItem(KEY) ?? "";
    this.#restore();
    byId("open-settings").addEventListener("click", () => this.open());
    byId("form").addEventListener("change", () => this.#showSchema());
    byId("theme").addEventListener("change", () => this.#showTheme());
    byId("forget-all").addEventListener("click", () => this.#forget(onForget));
    byId("settings-form").addEventListener("submit", (event) => {
      if (!this.#check()) event.preventDefault();
    });
    this.dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, this.key);
      if (this.#check()) this.#keep();
      byId("forget-all").textContent = FORGET;
      onClosed();
    });
  }

  get key() {
    return byId("api-key").value.trim();
  }

  get keeps() {
    return byId("keep").checked;
  }

  get asksJson() {
    return byId("form").value !== "text";
  }

  get systemMessages() {
    const text = byId("system").value.trim();
    return text ? [{ role: "system", content: text }] : [];
  }

  /** The fields of a chat request; JSON leaves out what is undefined. What cannot be read is not sent. */
  get fields() {
    const fields = { temperature: byId("temperature").valueAsNumber || 0 };
    for (const [id, name] of Object.entries(NUMBERS)) {
      const value = byId(id).valueAsNumber;
      if (!Number.isNaN(value)) fields[name] = value;
    }
    const stop = byId("stop").value.split("\n").filter(Boolean);
    if (stop.length) fields.stop = stop;
    const form = byId("form").value;
    if (form === "object") fields.response_format = { type: "json_object" };
    if (form === "schema") fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: read("schema") ?? {} } };
    const tools = read("tools");
    if (tools?.length) fields.tools = tools.map(asTool);
    const processor = read("processor");
    if (processor) fields.mm_processor_kwargs = processor;
    return fields;
  }

  /** With `problem`, the reason why the dialog came by itself. */
  open(problem = "") {
    this.#say(problem);
    if (!this.dialog.open) this.dialog.showModal();
    byId("api-key").focus();
  }

  #say(problem) {
    this.problem.textContent = problem;
    this.problem.hidden = !problem;
  }

  /** Whether all that is typed can be read; shows what cannot. */
  #check() {
    for (const [id, shape] of [["schema", "an object"], ["tools", "a list"], ["processor", "an object"]]) {
      const field = byId(id);
      const problem = problemOf(field, shape);
      field.setAttribute("aria-invalid", String(Boolean(problem)));
      if (problem) {
        this.#say(problem);
        field.closest("details").open = true;
        field.focus();
        return false;
      }
    }
    this.#say("");
    return true;
  }

  #restore() {
    let kept = {};
    try {
      kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    } catch {
      // What cannot be read is set anew.
    }
    for (const id of FIELDS) {
      if (!(id in kept)) continue;
      if (byId(id).type === "checkbox") byId(id).checked = kept[id];
      else byId(id).value = kept[id];
    }
    this.#showSchema();
    this.#showTheme();
  }

  #keep() {
    const kept = FIELDS.map((id) => [id, byId(id).type === "checkbox" ? byId(id).checked : byId(id).value]);
    localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(kept)));
  }

  #showSchema() {
    byId("schema-place").hidden = byId("form").value !== "schema";
  }

  #showTheme() {
    document.documentElement.dataset.theme = byId("theme").value;
  }

  #forget(onForget) {
    const pressed = byId("forget-all");
    if (pressed.textContent === FORGET) {
      pressed.textContent = "Delete them all for good?";
      return;
    }
    onForget();
    pressed.textContent = "Deleted";
  }
}

const FORGET = "Delete all conversations";

/** undefined where nothing is typed, or nothing that is JSON. */
function read(id) {
  try {
    return JSON.parse(byId(id).value);
  } catch {
    return undefined;
  }
}

function problemOf(field, shape) {
  if (!field.value.trim() || field.closest("[hidden]")) return "";
  try {
    const value = JSON.parse(field.value);
    const fits = shape === "a list" ? Array.isArray(value) : value !== null && typeof value === "object" && !Array.isArray(value);
    return fits ? "" : `${field.dataset.name}: ${shape} in JSON is needed.`;
  } catch (error) {
    return `${field.dataset.name} is not JSON: ${error.message}`;
  }
}

/** A function alone stands for the tool that has it. */
function asTool(tool) {
  return tool.type ? tool : { type: "function", function: tool };
}
