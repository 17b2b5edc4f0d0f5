/* Curves, drawn by uPlot: one plot for each scalar, with a line for each run. Their cursors and their ranges of steps go together. */

let data = JSON.parse($("data").textContent);
const view = { hidden: new Set(), smoothing: 0, logarithmic: new Set(), range: null };
const plots = new Map();
const SYNC = "steps";

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = run => style(`--run${run % 8}`);
const swatch = run => make("i", { class: "swatch", style: `background: var(--run${run % 8})` });

/* Values as text: in full for readouts, short for axes. */
const METRIC = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]];
const exponent = (value, digits) => value.toExponential(digits).replace(/\.?0+e/, "e");
function numberText(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size >= 1e9 || size && size < 1e-4) return exponent(value, 3);
  if (size >= 1e3) return value.toLocaleString("en", { maximumFractionDigits: size < 1e4 ? 1 : 0 });
  return String(Number(value.toPrecision(5)));
}
function shortText(value) {
  const size = Math.abs(value);
  if (size >= 1e15 || size && size < 1e-3) return exponent(value, 2);
  const [unit, scale] = METRIC.find(([, least]) => size >= Math.max(least, 1e4)) || ["", 1];
  return `${Number((value / scale).toPrecision(4))}${unit}`;
}
const UNITS = { bytes: value => bytesText(value), share: value => `${Number((100 * value).toPrecision(4))}%` };
const valueText = (value, unit, plain = numberText) => value !== null && unit in UNITS ? UNITS[unit](value) : plain(value);

/* Steps come as differences. A smoothed line is a mean that forgets, over the points as they are drawn. */
function unpack(chart) {
  for (const series of chart.series) {
    let step = 0;
    series.at = series.steps.map(more => step += more);
  }
}
function smoothed(values, weight) {
  let mean = 0, norm = 0;
  return values.map(value => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}
/* A mean of few points would only lag behind them, and a learning rate has no noise. */
const isSmoothed = (chart, series) => view.smoothing && series.at.length >= 50 && !/(^|\/)lr$/.test(chart.name);
function tableOf(chart) {
  const lines = [];
  for (const series of chart.series) {
    lines.push([series.at, series.values]);
    if (isSmoothed(chart, series)) lines.push([series.at, smoothed(series.values, view.smoothing)]);
  }
  return lines.length === 1 ? lines[0] : uPlot.join(lines);
}
const canBeLogarithmic = chart =>
  chart.series.some(one => one.values.length) && chart.series.every(one => one.values.every(value => value === null || value > 0));

/* The point of a series that is nearest to a step. */
function pointAt({ at }, step) {
  let low = 0, high = at.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (at[middle] <= step) low = middle; else high = middle - 1;
  }
  return low + 1 < at.length && at[low + 1] - step < step - at[low] ? low + 1 : low;
}

function lineStyles(chart) {
  return chart.series.flatMap(series => {
    const colour = colourOf(series.run), show = !view.hidden.has(series.run);
    const points = { show: series.at.length <= 40, size: 5, fill: colour, stroke: colour };
    const line = { stroke: colour, width: 1.6, show, points };
    if (!isSmoothed(chart, series)) return [line];
    return [{ ...line, stroke: `${colour}55`, width: 1, points: { show: false } }, { ...line, points: { show: false } }];
  });
}
/* The marks of a logarithmic axis. */
function logarithmicMarks(low, high) {
  if (high < 12 * low) return linearTicks(low, high, 4).filter(tick => tick >= low);
  const marks = [], factors = high > 2000 * low ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const factor of factors) marks.push(Number((factor * 10 ** power).toPrecision(6)));
  const inside = marks.filter(mark => mark >= low && mark <= high), every = Math.ceil(inside.length / 7);
  return inside.filter((_, index) => index % every === 0);
}
function axesOf(chart, logarithmic) {
  const font = '12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  const common = { stroke: style("--soft"), font, grid: { stroke: style("--line"), width: 1 }, ticks: { show: false } };
  return [
    { ...common, grid: { show: false }, size: 30, space: 70, values: (_, steps) => steps.map(shortText) },
    { ...common, gap: 6, size: widest, space: 34,
      ...(logarithmic ? { splits: (_, index, low, high) => logarithmicMarks(low, high), filter: (_, marks) => marks } : {}),
      values: (_, ticks) => ticks.map(tick => tick === null ? "" : valueText(tick, chart.unit, shortText)) },
  ];
}
/* Room for the longest text of an axis. */
function widest(plot, texts) {
  if (!texts || !texts.length) return 44;
  const longest = texts.reduce((most, text) => text && text.length > most.length ? text : most, "");
  plot.ctx.save();
  plot.ctx.font = `${12 * devicePixelRatio}px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif`;
  const width = plot.ctx.measureText(longest).width / devicePixelRatio;
  plot.ctx.restore();
  return Math.ceil(width) + 12;
}

/* Restarts as dashed lines, invalid steps as triangles at the foot, loss spikes as hollow ones at the top that point down. */
function drawMarks(plot, chart) {
  if (!chart.key.startsWith("train/")) return;
  const { ctx, bbox } = plot, scale = devicePixelRatio, several = data.runs.length > 1;
  const inside = step => step >= plot.scales.x.min && step <= plot.scales.x.max;
  ctx.save();
  data.runs.forEach((run, number) => {
    if (view.hidden.has(number)) return;
    ctx.strokeStyle = several ? colourOf(number) : style("--soft");
    ctx.setLineDash([4 * scale, 4 * scale]);
    ctx.lineWidth = scale;
    for (const step of run.restarts.filter(inside)) {
      const x = Math.round(plot.valToPos(step, "x", true));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    ctx.fillStyle = style("--bad");
    const foot = bbox.top + bbox.height;
    for (const [step] of run.invalid) {
      if (!inside(step)) continue;
      const x = plot.valToPos(step, "x", true);
      ctx.beginPath();
      ctx.moveTo(x - 4.5 * scale, foot);
      ctx.lineTo(x + 4.5 * scale, foot);
      ctx.lineTo(x, foot - 8 * scale);
      ctx.fill();
    }
    ctx.strokeStyle = style("--bad");
    ctx.lineWidth = 1.5 * scale;
    for (const [step] of run.spikes) {
      if (!inside(step)) continue;
      const x = plot.valToPos(step, "x", true), top = bbox.top + scale;
      ctx.beginPath();
      ctx.moveTo(x - 4.5 * scale, top);
      ctx.lineTo(x + 4.5 * scale, top);
      ctx.lineTo(x, top + 8 * scale);
      ctx.closePath();
      ctx.stroke();
    }
  });
  ctx.restore();
}

/* What the readout says: the values at the cursor's step, or the last ones. */
function readout(chart, step) {
  const shown = chart.series.filter(series => series.at.length && !view.hidden.has(series.run));
  const rows = shown.map(series => {
    const index = step === null ? series.at.length - 1 : pointAt(series, step);
    return { run: series.run, step: series.at[index], value: series.values[index] };
  });
  const several = data.runs.length > 1;
  const marked = name => rows.length === 1 ? data.runs[rows[0].run][name].find(([at]) => at === rows[0].step) : undefined;
  const invalid = marked("invalid"), spike = marked("spikes");
  return rows.map(row => {
    const text = make("span", {}, ...(several ? [swatch(row.run)] : []), make("b", {}, valueText(row.value, chart.unit)),
      ` at ${many(row.step)}`);
    if (invalid && chart.key.startsWith("train/")) text.append(make("em", {}, ` ${invalid[1] > 1 ? `${invalid[1]} invalid steps` : "invalid"}`));
    if (spike && chart.key.startsWith("train/")) text.append(make("em", {}, ` ${spike[1] > 1 ? `${spike[1]} loss spikes` : "loss spike"}`));
    return text;
  });
}

class Chart {
  constructor(host, chart) {
    this.chart = chart;
    this.box = make("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": `${chart.title}; arrow keys move` });
    this.values = make("p", { class: "values" });
    this.log = make("button", { type: "button", class: "log", "aria-pressed": "false" }, "log");
    this.log.title = "Logarithmic axis";
    const title = chart.main ? chart.title : chart.title.replace(/^train: /, "");
    this.element = make("figure", { class: "card", "data-key": chart.key },
      make("figcaption", {}, make("span", {}, ...path(title)), this.log), this.values, this.box);
    host.append(this.element);
    this.log.onclick = () => {
      if (!view.logarithmic.delete(chart.key)) view.logarithmic.add(chart.key);
      this.draw();
    };
    this.box.addEventListener("keydown", event => this.press(event));
    this.box.addEventListener("blur", () => this.say(null));
    this.width = 0;
    new ResizeObserver(() => {
      if (this.plot && this.box.clientWidth && this.box.clientWidth !== this.width) this.resize();
    }).observe(this.box);
    this.draw();
  }
  get height() { return this.chart.main ? 196 : 150; }
  resize() {
    this.width = this.box.clientWidth;
    this.plot.setSize({ width: this.width, height: this.height });
  }
  draw() {
    const { chart } = this, logarithmic = view.logarithmic.has(chart.key) && canBeLogarithmic(chart);
    this.log.hidden = !canBeLogarithmic(chart);
    this.log.setAttribute("aria-pressed", logarithmic);
    if (this.plot) this.plot.destroy();
    this.width = Math.max(200, this.box.clientWidth);
    this.plot = new uPlot({
      width: this.width, height: this.height, padding: [8, 20, 0, 0], legend: { show: false }, axes: axesOf(chart, logarithmic),
      scales: { x: { time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high] },
        y: logarithmic ? { distr: 3, range: (_, low, high) => logarithmicRoom(low, high) } : { range: (_, low, high) => room(low, high) } },
      series: [{}, ...lineStyles(chart)],
      cursor: { sync: { key: SYNC, setSeries: false }, y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
      hooks: {
        draw: [plot => drawMarks(plot, chart)],
        setCursor: [plot => this.say(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null)],
        setSelect: [plot => this.zoomTo(plot)],
      },
    }, tableOf(chart), this.box);
    this.plot.over.addEventListener("dblclick", () => zoom(null));
    if (view.range) this.plot.setScale("x", view.range);
    plots.set(chart.key, this.plot);
    this.say(null);
  }
  zoomTo(plot) {
    if (plot.select.width < 4) return;
    const low = plot.posToVal(plot.select.left, "x"), high = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    zoom({ min: low, max: high });
  }
  /* New values of the same lines; the range and the cursor stay. */
  update(chart) {
    const lines = one => one.series.map(series => [series.run, Boolean(isSmoothed(one, series)), series.at.length <= 40]).join();
    const before = lines(this.chart);
    this.chart = chart;
    if (lines(chart) !== before || view.logarithmic.has(chart.key) && !canBeLogarithmic(chart)) return this.draw();
    this.log.hidden = !canBeLogarithmic(chart);
    this.plot.setData(tableOf(chart), true);
    if (view.range) this.plot.setScale("x", view.range);
    this.say(null);
  }
  say(step) {
    const parts = readout(this.chart, step);
    this.values.replaceChildren(...parts);
    if (!this.plot) return;
    const steps = this.plot.data[0], last = steps.at(-1) ?? 0;
    const values = { "aria-valuemin": steps[0] ?? 0, "aria-valuemax": last, "aria-valuenow": Math.round(step ?? last),
      "aria-valuetext": this.values.textContent };
    for (const [name, value] of Object.entries(values)) this.box.setAttribute(name, value);
  }
  press(event) {
    const steps = this.plot.data[0], now = this.plot.cursor.idx ?? steps.length - 1;
    const { min, max } = this.plot.scales.x, middle = steps[clamp(now, 0, steps.length - 1)];
    const keys = {
      ArrowRight: () => this.move(now + 1), ArrowLeft: () => this.move(now - 1), PageUp: () => this.move(now + 20),
      PageDown: () => this.move(now - 20), Home: () => this.move(0), End: () => this.move(steps.length - 1),
      "+": () => zoom({ min: Math.max(min, middle - (max - min) / 4), max: Math.min(max, middle + (max - min) / 4) }),
      "-": () => zoom(widened(min, max)), Escape: () => zoom(null),
    };
    const act = keys[event.key === "=" ? "+" : event.key];
    if (!act || !steps.length) return;
    act();
    event.preventDefault();
  }
  move(index) {
    const steps = this.plot.data[0], step = steps[clamp(index, 0, steps.length - 1)];
    for (const plot of plots.values()) plot.setCursor({ left: plot.valToPos(step, "x"), top: plot.over.clientHeight / 2 });
  }
}
/* The range of an axis: a little more than the values take. Values that differ by rounding alone count as one. */
function room(low, high) {
  if (low === null || low === undefined) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high)), extent = high - low > 1e-6 * size ? high - low : size || 1;
  const more = extent * 0.06;
  return [low >= 0 && low - more < 0 ? 0 : low - more, high + more];
}
const logarithmicRoom = (low, high) => low > 0 ? [low / 1.15, high * 1.15] : [0.1, 1];
function allSteps() {
  const ends = data.charts.filter(chart => chart.main).flatMap(chart => chart.series)
    .flatMap(series => series.at.length ? [series.at[0], series.at.at(-1)] : []);
  return { min: Math.min(...ends), max: Math.max(...ends) };
}
function widened(low, high) {
  const all = allSteps(), range = { min: Math.max(all.min, low - (high - low) / 2), max: Math.min(all.max, high + (high - low) / 2) };
  return range.min === all.min && range.max === all.max ? null : range;
}
/* Shows a range of steps in all plots; null shows all steps. */
function zoom(range) {
  view.range = range;
  $("zoom-out").hidden = !range;
  for (const plot of plots.values()) {
    const steps = plot.data[0];
    plot.setScale("x", range || { min: steps[0], max: steps.at(-1) });
  }
}

/* The charts on the page by their keys. Those below 'More curves' are drawn when they come into sight. */
const charts = new Map();
const waiting = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    waiting.unobserve(entry.target);
    const chart = data.charts.find(one => one.key === entry.target.dataset.key);
    if (chart) charts.set(chart.key, new Chart(entry.target, chart));
  }
}, { rootMargin: "300px" });

function showCurves() {
  data.charts.forEach(unpack);
  const drawn = data.charts.filter(chart => chart.series.length);
  $("curves").hidden = !drawn.length;
  for (const chart of drawn) {
    if (charts.has(chart.key)) charts.get(chart.key).update(chart);
    else if (chart.main) charts.set(chart.key, new Chart($("main-charts"), chart));
    else if (![...$("other-charts").children].some(place => place.dataset.key === chart.key)) {
      const place = make("div", { "data-key": chart.key, class: "place" });
      $("other-charts").append(place);
      waiting.observe(place);
    }
  }
  const others = $("other-charts").children.length;
  $("others").hidden = !others;
  $("others").querySelector("summary").textContent = `More curves (${others})`;
  $("others-note").textContent = data.left_out ? `${many(data.left_out)} more scalars are in summaries/*/metrics.jsonl.` : "";
  showMarks();
}
function showMarks() {
  const marks = [];
  const line = draw("line", { x1: 11, x2: 11, y1: 0, y2: 14, class: "restart" });
  const triangle = draw("path", { d: "M5,13H17L11,3Z", class: "invalid" });
  const hollow = draw("path", { d: "M5,3H17L11,13Z", class: "spike" });
  const sum = runs => runs.reduce((all, run) => all + run, 0);
  const restarts = sum(data.runs.map(run => run.restarts.length)), invalid = sum(data.runs.flatMap(run => run.invalid.map(one => one[1])));
  if (restarts) marks.push(entry(restarts > 1 ? `${restarts} restarts` : "restart", line));
  if (invalid) marks.push(entry(invalid > 1 ? `${many(invalid)} invalid steps` : "invalid step", triangle));
  const spikes = sum(data.runs.flatMap(run => run.spikes.map(one => one[1])));
  if (spikes) marks.push(entry(spikes > 1 ? `${many(spikes)} loss spikes` : "loss spike", hollow));
  $("marks").replaceChildren(...marks);
}
const redraw = () => charts.forEach(chart => chart.draw());

$("smoothing").onchange = event => { view.smoothing = Number(event.target.value); redraw(); };
$("zoom-out").onclick = () => zoom(null);
$("others-filter").oninput = event => {
  const wanted = event.target.value.toLowerCase();
  for (const place of $("other-charts").children) place.hidden = !place.dataset.key.toLowerCase().includes(wanted);
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
