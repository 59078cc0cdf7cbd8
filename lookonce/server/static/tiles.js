// Live tiles: what each tier holds, how often it was asked, and how often it had the answer.

import { bytes, count, element, milliseconds, plural } from "./dom.js";
import { FleetTile, isFleet } from "./fleet.js";
import { SLOTS, Spark } from "./spark.js";
import { Change, Look } from "./stats.js";

const LEAST_SECONDS = 0.9;
const SINCE_START = "since start"; // what a tile's figure covers, unless it says another window

/** A tier that is asked for `unit`s and either has them or not. */
function reuse({ id, title, queries, hits, labels, unit, held }) {
  return {
    id, title,
    point: (change) => {
      const found = change.of(hits, labels);
      return { reused: found, done: Math.max(change.of(queries, labels) - found, 0) };
    },
    figure: (look) => {
      const asked = look.sum(queries, labels);
      return asked ? [Math.floor((100 * look.sum(hits, labels)) / asked), "%"] : ["–", ""];
    },
    facts: (look) => [
      `${count(look.sum(hits, labels))} of ${plural(look.sum(queries, labels), unit)}`, held(look),
    ],
  };
}

const MEDIA = reuse({
  id: "media", title: "Processed media", unit: "part",
  queries: "mm_cache_queries_total", hits: "mm_cache_hits_total",
  held: (look) => `${bytes(look.sum("mm_cache_bytes"))} held`,
});

const ENCODER = reuse({
  id: "encoder", title: "Encoder outputs", unit: "look-up",
  queries: "encoder_cache_queries_total", hits: "encoder_cache_hits_total",
  held: (look) => {
    const host = look.sum("encoder_cache_host_bytes");
    return `${bytes(look.sum("encoder_cache_bytes"))} held${host ? `, ${bytes(host)} in host memory` : ""}`;
  },
});

const PREFIX = reuse({
  id: "prefix", title: "KV on the device", unit: "token",
  queries: "prefix_cache_queries_total", hits: "prefix_cache_hits_total",
  held: (look) => `${(100 * look.sum("kv_cache_usage_ratio")).toFixed(1)} % in use`,
});

const LOOKED_AT = {
  id: "work", title: "Looked at",
  point: (change) => ({ done: change.of("media_decodes_total") }),
  figure: (look) => [count(look.sum("media_decodes_total")), "decoded"],
  facts: (look) => [
    `${count(look.sum("encoder_runs_total"))} encoded`,
    `${plural(look.sum("mm_cache_queries_total"), "part")} asked about`,
  ],
};

const REQUESTS = {
  id: "requests", title: "Requests", window: "now",
  point: (change) => ({ plain: change.of("request_success_total") }),
  figure: (look) => [count(look.sum("num_requests_running")), "running"],
  facts: (look) => [
    `${count(look.sum("num_requests_waiting"))} waiting`, `${count(look.sum("request_success_total"))} answered`,
  ],
};

const TOKENS = {
  id: "tokens", title: "Tokens generated", window: "last second",
  point: (change) => ({ plain: change.perSecond("generation_tokens_total") }),
  figure: (look, points) => [count(Math.round(points.at(-1)?.plain ?? 0)), "per second"],
  facts: (look, points) => [
    `peak ${count(Math.round(Math.max(0, ...points.map(({ plain }) => plain))))} per second`,
    `${count(look.sum("generation_tokens_total"))} in all`,
  ],
};

/** A histogram of seconds: its newest mean, and its mean since the server's start. */
function duration({ id, title, name }) {
  return {
    id, title, window: "newest second",
    point: (change) => ({ plain: change.mean(name) }),
    figure: (look, points) => {
      const newest = points.findLast(({ plain }) => plain !== null);
      return newest ? milliseconds(newest.plain * 1000).split(" ") : ["–", ""];
    },
    facts: (look) => {
      const observed = look.sum(`${name}_count`);
      if (!observed) return ["none yet", ""];
      return [`mean ${milliseconds((1000 * look.sum(`${name}_sum`)) / observed)}`, `of ${count(observed)}`];
    },
  };
}

const FIRST_TOKEN = duration({
  id: "first-token", title: "Time to first token", name: "time_to_first_token_seconds",
});
const TOKEN_GAP = duration({
  id: "token-gap", title: "Time between tokens", name: "inter_token_latency_seconds",
});

/** One external KV tier; there may be none, or several. */
function kvTier(tier) {
  const labels = { tier };
  return reuse({
    id: `kv-${tier}`, title: `KV in ${tier}`, unit: "token", labels,
    queries: "kv_tier_lookups_total", hits: "kv_tier_hits_total",
    held: (look) => `${bytes(look.sum("kv_tier_held_bytes", labels))} held`,
  });
}

/** What reuse saved on this day of UTC. */
class SavedTile {
  constructor() {
    this.value = element("span", { class: "value" });
    this.unit = element("span", { class: "unit" });
    this.facts = [element("span"), element("span"), element("span")];
    this.node = element(
      "article", { class: "tile saved", id: "tile-saved" },
      element("header", { class: "tile-head" }, element("h3", {}, "Saved"), element("span", { class: "window" }, "today, UTC")),
      element("p", { class: "figure" }, this.value, " ", this.unit),
      element("p", { class: "facts" }, ...this.facts),
    );
  }

  show(saved) {
    const seconds = saved.media_seconds + saved.encoder_seconds + saved.prefill_seconds;
    const [value, unit] = milliseconds(seconds * 1000).split(" ");
    this.value.textContent = value;
    this.unit.textContent = `${unit} of work, at least`;
    this.facts[0].textContent = `${count(saved.cached_tokens)} of ${plural(saved.prompt_tokens, "prompt token")}: ${milliseconds(saved.prefill_seconds * 1000)}`;
    this.facts[1].textContent = `${count(saved.media_reused)} of ${plural(saved.media, "part")} not processed: ${milliseconds(saved.media_seconds * 1000)}`;
    this.facts[2].textContent = `${count(saved.encodings_reused)} of ${plural(saved.media, "part")} not encoded: ${milliseconds(saved.encoder_seconds * 1000)}`;
  }
}

class Tile {
  constructor(spec) {
    this.spec = spec;
    this.points = [];
    this.chart = new Spark();
    this.value = element("span", { class: "value" });
    this.unit = element("span", { class: "unit" });
    this.facts = [element("span"), element("span")];
    this.node = element(
      "article", { class: "tile", id: `tile-${spec.id}` },
      element("header", { class: "tile-head" }, element("h3", {}, spec.title), element("span", { class: "window" }, spec.window ?? SINCE_START)),
      element("p", { class: "figure" }, this.value, " ", this.unit),
      this.chart.node,
      element("p", { class: "facts" }, ...this.facts),
    );
  }

  show(look, change) {
    if (change) this.points = [...this.points, this.spec.point(change)].slice(-SLOTS);
    const [value, unit] = this.spec.figure(look, this.points);
    this.value.textContent = value;
    this.unit.textContent = unit;
    this.spec.facts(look, this.points).forEach((text, index) => { this.facts[index].textContent = text; });
    this.chart.draw(this.points);
  }
}

export class Tiles {
  constructor(parent) {
    this.parent = parent;
    this.tiles = new Map();
    this.last = null;
    this.saved = null;
    this.fleet = null;
    for (const spec of [MEDIA, ENCODER, PREFIX, LOOKED_AT, REQUESTS, TOKENS, FIRST_TOKEN, TOKEN_GAP]) this.add(spec);
  }

  add(spec, before = null) {
    const tile = new Tile(spec);
    this.tiles.set(spec.id, tile);
    this.parent.insertBefore(tile.node, before);
  }

  /** `saved`: as `/savings` has it. */
  showSaved(saved) {
    if (!this.saved) {
      this.saved = new SavedTile();
      if (this.fleet) this.fleet.node.after(this.saved.node);
      else this.parent.prepend(this.saved.node);
    }
    this.saved.show(saved);
  }

  /** Draws one more look at the server; `seconds` is when it was taken. */
  show(samples, seconds) {
    const look = new Look(samples, seconds);
    for (const tier of look.values("kv_tier_lookups_total", "tier")) {
      if (!this.tiles.has(`kv-${tier}`)) this.add(kvTier(tier), this.tiles.get("work").node);
    }
    if (isFleet(look)) {
      if (!this.fleet) this.parent.prepend((this.fleet = new FleetTile()).node);
      this.fleet.show(look);
    }
    // A look out of turn brings the figures up to date, but a bar stands for a second.
    const due = !this.last || seconds - this.last.seconds > LEAST_SECONDS;
    const change = due && this.last ? new Change(this.last, look) : null;
    for (const tile of this.tiles.values()) tile.show(look, change);
    if (due) this.last = look;
  }
}
