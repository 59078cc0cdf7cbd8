// What a person sets. The key lives in this tab's session storage and nowhere else.

import { byId } from "./dom.js";

const KEY = "lookonce-key";

export class Settings {
  constructor(onClosed) {
    this.dialog = byId("settings");
    this.problem = byId("settings-problem");
    byId("api-key").value = sessionStorage.getItem(KEY) ?? "";
    byId("open-settings").addEventListener("click", () => this.open());
    this.dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, this.key);
      onClosed();
    });
  }

  get key() {
    return byId("api-key").value.trim();
  }

  get temperature() {
    return byId("temperature").valueAsNumber || 0;
  }

  /** undefined, which JSON leaves out, where nothing is typed. */
  get maxTokens() {
    return Math.round(byId("max-tokens").valueAsNumber) || undefined;
  }

  /** With `problem`, the reason why the dialog came by itself. */
  open(problem = "") {
    this.problem.textContent = problem;
    this.problem.hidden = !problem;
    if (!this.dialog.open) this.dialog.showModal();
    byId("api-key").focus();
  }
}
