// A small bar chart in SVG. It is decoration beside the figures, and hidden from screen readers.

import { drawing } from "./dom.js";

export const SLOTS = 60;
const PITCH = 5;
const BAR = 4;
const WIDTH = SLOTS * PITCH;
const HEIGHT = 40;
const LEAST = 2; // a bar that is there can be seen

/** Points are {reused, done, plain}, each 0 or left out: one bar each, stacked in that order. */
export class Spark {
  constructor() {
    this.paths = ["reused", "done", "plain"].map((name) => [name, drawing("path", { class: name })]);
    this.node = drawing(
      "svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      drawing("path", { class: "ground", d: `M0 ${HEIGHT - 0.5}H${WIDTH}` }), ...this.paths.map(([, path]) => path),
    );
  }

  draw(points) {
    const highest = Math.max(Number.MIN_VALUE, ...points.map(total));
    const shapes = { reused: "", done: "", plain: "" };
    points.forEach((point, index) => {
      let bottom = HEIGHT;
      for (const [name] of this.paths) {
        if (!point[name]) continue;
        const height = Math.max((point[name] / highest) * (HEIGHT - LEAST), LEAST);
        shapes[name] += bar(WIDTH - (points.length - index) * PITCH, bottom, height);
        bottom -= height;
      }
    });
    for (const [name, path] of this.paths) path.setAttribute("d", shapes[name]);
  }
}

function total({ reused = 0, done = 0, plain = 0 }) {
  return reused + done + plain;
}

function bar(left, bottom, height) {
  return `M${left} ${bottom.toFixed(1)}h${BAR}v${(-height).toFixed(1)}h-${BAR}z`;
}
