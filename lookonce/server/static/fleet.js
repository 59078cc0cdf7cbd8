// The fleet behind this address: each engine, what it had, and where requests went and why.

import { count, element, milliseconds, plural } from "./dom.js";

const CACHES = [["media", "mm_cache"], ["encoder", "encoder_cache"], ["KV", "prefix_cache"]];
const TIERS = [["encoder in", "encoder_tier"], ["KV in", "kv_tier"]];
const REASONS = {
  known: "known there", least_loaded: "least loaded", session: "same session", stored: "stored there", only: "no other engine",
};
const ENTRIES = { blocks: "KV blocks", outputs: "encoder outputs", items: "media" };

export function isFleet(look) {
  return look.samples.has("fleet_engine_ready");
}

/** Hit rate, or null where nothing was looked up. */
function rate(look, hits, queries, labels) {
  const asked = look.sum(queries, labels);
  return asked ? `${Math.floor((100 * look.sum(hits, labels)) / asked)} %` : null;
}

/** "media 75 %, KV in disk 20 %": hit rates of all that the engine looks into. */
function hitRates(look, engine) {
  const told = CACHES.map(([name, metric]) => [name, rate(look, `${metric}_hits_total`, `${metric}_queries_total`, { engine })]);
  for (const [name, metric] of TIERS) {
    for (const tier of look.values(`${metric}_lookups_total`, "tier")) {
      told.push([`${name} ${tier}`, rate(look, `${metric}_hits_total`, `${metric}_lookups_total`, { engine, tier })]);
    }
  }
  return told.filter(([, found]) => found !== null).map(([name, found]) => `${name} ${found}`).join(", ");
}

/** "12 known there, 3 least loaded". */
function reasons(look, labels) {
  return look.values("fleet_routed_total", "reason")
    .map((reason) => [look.sum("fleet_routed_total", { ...labels, reason }), REASONS[reason] ?? reason])
    .filter(([number]) => number).sort(([one], [other]) => other - one)
    .map(([number, text]) => `${count(number)} ${text}`).join(", ");
}

class EngineRow {
  constructor(engine) {
    this.engine = engine;
    this.name = element("strong", {}, engine);
    this.load = element("span");
    this.lines = [element("span"), element("span")];
    this.node = element("li", {}, this.name, " ", this.load, ...this.lines);
  }

  show(look) {
    const labels = { engine: this.engine };
    const ready = look.sum("fleet_engine_ready", labels) > 0;
    this.node.classList.toggle("away", !ready);
    const waits = milliseconds(1000 * look.sum("fleet_engine_backlog_seconds", labels));
    this.load.textContent = ready
      ? `${plural(look.sum("fleet_engine_requests", labels), "request")}, ${waits} of work`
      : "takes no requests";
    const found = hitRates(look, this.engine);
    this.lines[0].textContent = found ? `found since start: ${found}` : "nothing looked up yet";
    const routed = reasons(look, labels);
    this.lines[1].textContent = routed ? `sent there: ${routed}` : "no requests from here yet";
  }
}

export class FleetTile {
  constructor() {
    this.rows = new Map();
    this.value = element("span", { class: "value" });
    this.unit = element("span", { class: "unit" });
    this.facts = [element("span"), element("span")];
    this.list = element("ul", { class: "engines", "aria-label": "Engines" });
    this.node = element(
      "article", { class: "tile fleet", id: "tile-fleet" },
      element("header", { class: "tile-head" }, element("h3", {}, "Fleet"), element("span", { class: "window" }, "now")),
      element("p", { class: "figure" }, this.value, " ", this.unit),
      element("p", { class: "facts" }, ...this.facts),
      this.list,
    );
  }

  show(look) {
    const engines = look.values("fleet_engine_ready", "engine");
    this.value.textContent = count(look.sum("fleet_engine_ready"));
    this.unit.textContent = `of ${plural(engines.length, "engine")} take requests`;
    const held = Object.entries(ENTRIES).map(([of, text]) => `${count(look.sum("fleet_index_entries", { of }))} ${text}`);
    this.facts[0].textContent = `index: ${held.join(", ")}`;
    const routed = look.sum("fleet_routed_total");
    const each = routed ? `, ${milliseconds((1000 * look.sum("fleet_decision_seconds_total")) / routed)} each` : "";
    this.facts[1].textContent = `${plural(routed, "request")} routed${each}; ${count(look.sum("fleet_retried_total"))} sent to a second engine`;
    for (const [engine, row] of this.rows) {
      if (!engines.includes(engine)) {
        row.node.remove();
        this.rows.delete(engine);
      }
    }
    for (const engine of engines) {
      if (!this.rows.has(engine)) {
        this.rows.set(engine, new EngineRow(engine));
        this.list.append(this.rows.get(engine).node);
      }
      this.rows.get(engine).show(look);
    }
  }
}
