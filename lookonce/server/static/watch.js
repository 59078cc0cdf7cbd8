// Looks at the server once a second while somebody looks at the page.

import * as api from "./api.js";
import { byId } from "./dom.js";
import { parse } from "./stats.js";

const EVERY = 1000; // milliseconds
const SAVINGS_EVERY = 5; // looks
const STATES = {
  ready: "ready", starting: "loading the model", draining: "shutting down", stuck: "engine does not answer",
  dead: "engine is down", gone: "not reachable",
};

export class Watch {
  /** `savings()` answers what was saved today, or null where the server does not tell. */
  constructor(tiles, { onReady, savings }) {
    this.tiles = tiles;
    this.onReady = onReady;
    this.savings = savings;
    this.looks = 0;
    this.timer = null;
    this.state = null;
    document.addEventListener("visibilitychange", () => this.look());
    this.look();
  }

  /** Looks now, and again a second after the look is done. */
  async look() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    const ticket = (this.ticket = {});
    try {
      const [state, text] = await Promise.all([api.state(), api.metrics()]);
      if (ticket !== this.ticket) return;
      this.#show(state);
      this.tiles.show(parse(text), performance.now() / 1000);
      if (this.looks++ % SAVINGS_EVERY === 0) this.lookAtSavings();
    } catch {
      if (ticket !== this.ticket) return;
      this.#show("gone");
    }
    this.timer = setTimeout(() => this.look(), EVERY);
  }

  /** Looks now at what was saved. */
  async lookAtSavings() {
    const told = await this.savings().catch(() => null);
    if (told) this.tiles.showSaved(told.saved);
  }

  #show(state) {
    if (state === this.state) return;
    this.state = state;
    byId("state").dataset.state = state;
    byId("state-text").textContent = STATES[state] ?? state;
    if (state === "ready") this.onReady();
  }
}
