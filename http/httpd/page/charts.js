// Line charts of the last minutes, as SVG. A chart knows its series, not where values come from.

const KEPT = 120; // readings: two minutes, at one a second
const WIDTH = 600;
const HEIGHT = 120;

class Chart {
  // series: [{ name, of: (reading) => number | null, area? }]; format: a value in words; most: of the
  // axis, where it is fixed
  constructor({ title, unit = "", series, format = short, most = null }) {
    Object.assign(this, { title, series, format, most });
    this.readings = [];
    this.values = series.map(() => make("b", {}, NONE));
    const key = make("ul", { class: "key" },
      ...series.map((each, index) => make("li", { class: `s${index}` }, `${each.name} `, this.values[index])));
    this.lines = series.map((_, index) => draw("path", { class: `line s${index}` }));
    this.areas = series.map((each, index) => draw("path", { class: `area s${index}`, visibility: each.area ? "visible" : "hidden" }));
    const grid = [0, 0.5, 1].map((y) => draw("line", { x1: 0, x2: WIDTH, y1: y * HEIGHT, y2: y * HEIGHT }));
    this.cursor = draw("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...grid, ...this.areas, ...this.lines, this.cursor);
    this.top = make("span", { class: "top-label" });
    this.ago = make("span", {}, "2 min ago");
    this.plot = make("div", { class: "plot" }, this.svg, this.top);
    this.element = make("figure", { class: "chart" },
      make("figcaption", {}, make("h2", {}, title, make("span", { class: "unit" }, unit ? ` ${unit}` : "")), key),
      this.plot, make("div", { class: "axis", "aria-hidden": "true" }, this.ago, make("span", {}, "now")));
    this.pointed = null;
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.point(null));
  }

  show(readings) {
    this.readings = readings;
    const values = this.series.map((each) => readings.map(each.of));
    const most = this.most ?? roundUp(Math.max(0, ...values.flat().filter(known)));
    this.top.textContent = this.format(most);
    values.forEach((of, index) => {
      this.lines[index].setAttribute("d", lineOf(of, most));
      if (this.series[index].area) this.areas[index].setAttribute("d", areaOf(of, most));
    });
    this.tell();
  }

  // Where the pointer is, what was then; else what is now.
  point(event) {
    const box = this.plot.getBoundingClientRect();
    const at = event ? KEPT - 1 - Math.round(((event.clientX - box.left) / box.width) * (KEPT - 1)) : null;
    this.pointed = at !== null && at >= 0 && at < this.readings.length ? at : null;
    this.tell();
  }

  tell() {
    const index = this.readings.length - 1 - (this.pointed ?? 0);
    const reading = this.readings[index];
    const told = this.series.map((each) => (reading ? this.format(each.of(reading)) : NONE));
    told.forEach((text, each) => { this.values[each].textContent = text; });
    const now = this.series.map((each, at) => `${each.name} ${told[at]}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, last two minutes; now: ${now}`);
    this.cursor.setAttribute("visibility", this.pointed === null ? "hidden" : "visible");
    this.ago.textContent = this.pointed === null ? "2 min ago" : `${this.pointed} s ago`;
    if (this.pointed !== null) {
      this.cursor.setAttribute("x1", xOf(index, this.readings.length));
      this.cursor.setAttribute("x2", xOf(index, this.readings.length));
    }
  }
}

const xOf = (index, length) => ((KEPT - length + index) / (KEPT - 1)) * WIDTH;
const yOf = (value, most) => HEIGHT - (Math.min(value, most) / most) * HEIGHT;

// A path through the known values; a gap where nothing is known.
function lineOf(values, most) {
  let pen = "M";
  let path = "";
  values.forEach((value, index) => {
    if (!known(value)) {
      pen = "M";
      return;
    }
    path += `${pen}${xOf(index, values.length).toFixed(1)} ${yOf(value, most).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

function areaOf(values, most) {
  const first = values.findIndex(known);
  const last = values.findLastIndex(known);
  if (first < 0) return "";
  const points = values.slice(first, last + 1).map((value, index) =>
    `${xOf(first + index, values.length).toFixed(1)} ${yOf(known(value) ? value : 0, most).toFixed(1)}`);
  return `M${xOf(first, values.length).toFixed(1)} ${HEIGHT}L${points.join("L")}L${xOf(last, values.length).toFixed(1)} ${HEIGHT}Z`;
}
