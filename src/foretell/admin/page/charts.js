// Small plots, drawn as SVG. Each one describes its content in an `aria-label`.

import { clock, element, name, say, shape } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 64;
/** Possible time spans of a plot, seconds: the shortest that shows every sample. */
const SPANS = [120, 300, 600, 900];

/** A round number at or above `value`. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

/** A plot over time: `value` of a sample (null: no value), `told` is a value's text, `most` the end
 * of the axis if that is fixed. */
export class Plot {
  constructor(title, unit, value, told, most) {
    Object.assign(this, { title, value, told, most, samples: [], now: 0, span: SPANS.at(-1), at: null });
    this.area = shape("path", { class: "area" });
    this.line = shape("path", { class: "line" });
    this.mark = shape("line", { class: "mark", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area, this.line, this.mark);
    this.figure = element("span", { class: "value" }, "–");
    this.top = element("span", { class: "axis" });
    this.left = element("span", {});
    this.right = element("span", {}, "now");
    this.frame = element("div", { class: "frame", tabindex: "0", role: "img" }, this.svg, this.top);
    const caption = element("figcaption", {}, element("span", {}, `${title} `, element("small", {}, unit)), this.figure);
    this.node = element("figure", { class: "plot" }, caption, this.frame,
      element("div", { class: "ends", "aria-hidden": "true" }, this.left, this.right));
    this.frame.addEventListener("pointermove", (event) => this.point(event.offsetX / this.frame.clientWidth));
    this.frame.addEventListener("pointerleave", () => this.read(null));
    this.frame.addEventListener("blur", () => this.read(null));
    this.frame.addEventListener("keydown", (event) => this.key(event));
  }

  draw(samples, now) {
    this.samples = samples;
    this.now = now;
    this.span = SPANS.find((span) => now - (samples[0]?.at ?? now) <= span) ?? SPANS.at(-1);
    say(this.left, `${this.span / 60} min ago`);
    const values = samples.map(this.value);
    const known = values.filter((value) => value !== null);
    const most = this.most ?? ceiling(Math.max(0, ...known));
    const x = (sample) => WIDTH * (1 - (now - sample.at) / this.span);
    const y = (value) => HEIGHT - 2 - (HEIGHT - 6) * Math.min(1, value / most);
    let line = "";
    let area = "";
    let run = [];
    const end = () => {
      if (run.length > 0) {
        const points = run.map(([across, up]) => `${across.toFixed(1)} ${up.toFixed(1)}`);
        // A single sample is a short line.
        line += `M${points.join("L")}${run.length === 1 ? "h1.5" : ""}`;
        area += `M${run[0][0].toFixed(1)} ${HEIGHT}L${points.join("L")}V${HEIGHT}Z`;
      }
      run = [];
    };
    samples.forEach((sample, place) => {
      const before = samples[place - 1];
      if (values[place] === null || (before !== undefined && sample.number !== before.number + 1)) end();
      if (values[place] !== null) run.push([x(sample), y(values[place])]);
    });
    end();
    name(this.line, "d", line);
    name(this.area, "d", area);
    say(this.top, known.length > 0 ? this.told(most) : "");
    if (this.at === null) this.read(null);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined || this.samples.length === 0) return;
    event.preventDefault();
    const place = this.samples.findIndex((sample) => sample.number === this.at);
    const next = place < 0 ? this.samples.length - 1 : Math.min(Math.max(place + step, 0), this.samples.length - 1);
    this.read(this.samples[next]);
  }

  point(across) {
    const at = this.now - this.span * (1 - across);
    const nearest = this.samples.reduce((best, sample) =>
      best === null || Math.abs(sample.at - at) < Math.abs(best.at - at) ? sample : best, null);
    this.read(nearest);
  }

  /** Shows one sample; none: the last. */
  read(sample) {
    this.at = sample?.number ?? null;
    const shown = sample ?? this.samples.at(-1);
    const value = shown === undefined ? null : this.value(shown);
    say(this.figure, value === null ? "–" : this.told(value));
    say(this.right, sample === null ? "now" : clock(sample.at));
    name(this.mark, "visibility", sample === null ? "hidden" : "visible");
    if (sample !== null) {
      const across = WIDTH * (1 - (this.now - sample.at) / this.span);
      name(this.mark, "x1", across);
      name(this.mark, "x2", across);
    }
    const known = this.samples.map(this.value).filter((each) => each !== null);
    const range = known.length === 0 ? "no value yet"
      : `${value === null ? "no value now" : this.told(value)}, from ${this.told(Math.min(...known))} to ${this.told(Math.max(...known))}`;
    name(this.frame, "aria-label", `${this.title}: ${range}${sample === null ? "" : `, at ${clock(sample.at)}`}`);
  }
}

/** An interval of speedups on a line from ¼ to 4 times; beyond that it ends at the edge. */
export function interval(low, middle, high) {
  const x = (value) => 60 + 58 * Math.max(-1, Math.min(1, Math.log(value) / Math.log(4)));
  const kind = low > 1 ? "good" : high < 1 ? "bad" : "open";
  const width = Math.max(2, x(high) - x(low));
  return shape("svg", { class: `interval ${kind}`, viewBox: "0 0 120 16", width: 120, height: 16, "aria-hidden": "true" },
    shape("line", { class: "rule", x1: 2, x2: 118, y1: 8, y2: 8 }),
    shape("line", { class: "one", x1: 60, x2: 60, y1: 1, y2: 15 }),
    shape("rect", { class: "range", x: x(low), y: 5, width, height: 6, rx: 1 }),
    shape("line", { class: "middle", x1: x(middle), x2: x(middle), y1: 2, y2: 14 }));
}

/** Acceptance by draft position, as one row of bars per drafter. */
export function places(drafter, counts) {
  const bar = counts.length > 16 ? 11 : 18;
  const bars = counts.flatMap(([drafted, accepted], place) => {
    const high = drafted > 0 ? (40 * accepted) / drafted : 0;
    return [
      shape("rect", { class: "behind", x: place * bar, y: 0, width: bar - 2, height: 40 }),
      shape("rect", { class: "bar", x: place * bar, y: 40 - high, width: bar - 2, height: high }),
    ];
  });
  const told = counts.map(([drafted, accepted], place) => `position ${place + 1}: ${drafted > 0 ? Math.round((100 * accepted) / drafted) : 0} %`);
  const width = counts.length * bar;
  return shape("svg", { class: "by-place", viewBox: `0 0 ${width} 40`, width, height: 40, role: "img",
    "aria-label": `${drafter}: ${told.join(", ")}` }, ...bars);
}

/** One round: a square for each drafted token, filled where it was accepted. */
export function squares(drafted, accepted) {
  const side = 8;
  const cells = Array.from({ length: drafted }, (_, place) =>
    shape("rect", { class: place < accepted ? "yes" : "no", x: place * (side + 2) + 0.5, y: 0.5, width: side - 1, height: side - 1 }));
  const width = Math.max(1, drafted * (side + 2));
  return shape("svg", { class: "squares", viewBox: `0 0 ${width} ${side}`, width, height: side, "aria-hidden": "true" }, ...cells);
}
