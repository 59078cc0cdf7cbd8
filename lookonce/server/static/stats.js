// From the text of /metrics to figures over time.

const SAMPLE = /^lookonce_([a-z0-9_]+)(?:\{([^}]*)\})? (\S+)/;
const LABEL = /([a-z_]+)="((?:[^"\\]|\\.)*)"/g;

/** name → [{labels, value}], without the `lookonce_` prefix; histogram buckets are left out. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = SAMPLE.exec(line);
    if (!match || match[1].endsWith("_bucket")) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map(([, k, v]) => [k, v]));
    const samples = found.get(match[1]) ?? [];
    samples.push({ labels, value: Number(match[3]) });
    found.set(match[1], samples);
  }
  return found;
}

/** One look at the server. */
export class Look {
  constructor(samples, seconds) {
    this.samples = samples;
    this.seconds = seconds;
  }

  /** Sum over all series of `name`, or of those with `labels`; 0 where there is none. */
  sum(name, labels = {}) {
    const wanted = Object.entries(labels);
    return (this.samples.get(name) ?? [])
      .filter((sample) => wanted.every(([key, value]) => sample.labels[key] === value))
      .reduce((total, sample) => total + sample.value, 0);
  }

  values(name, label) {
    return [...new Set((this.samples.get(name) ?? []).map((sample) => sample.labels[label]))];
  }
}

/** What changed from one look to the next; a counter that fell began anew with its server. */
export class Change {
  constructor(before, now) {
    this.before = before;
    this.now = now;
    this.seconds = Math.max(now.seconds - before.seconds, 0.001);
  }

  of(name, labels) {
    return Math.max(this.now.sum(name, labels) - this.before.sum(name, labels), 0);
  }

  perSecond(name, labels) {
    return this.of(name, labels) / this.seconds;
  }

  /** Mean of a histogram's observations between the two looks; null where there were none. */
  mean(name) {
    const observed = this.of(`${name}_count`);
    return observed > 0 ? this.of(`${name}_sum`) / observed : null;
  }
}
