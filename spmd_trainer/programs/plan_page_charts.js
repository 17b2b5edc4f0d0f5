/* What the charts of a plan have in common: elements, numbers as text, scales, axes, selection by pointer and keys. */

const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/* A text that may break after each slash. */
const path = text => text.split(/(?<=\/)/).flatMap(part => [part, make("wbr")]);

/* Numbers as text. */
const BYTES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const SECONDS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
const unitOf = (units, value) => units.find(([, size]) => value >= size) || units[units.length - 1];
const bytesText = value => {
  const [unit, size] = unitOf(BYTES, value);
  return `${unit === "B" ? value : (value / size).toFixed(1)} ${unit}`;
};
const short = value => Number(value.toPrecision(3)).toString();
const secondsText = value => {
  const [unit, size] = unitOf(SECONDS, value);
  return `${short(value / size)} ${unit}`;
};
const many = value => value.toLocaleString("en");
const percent = share => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;

/* Tables: a header whose names after the first `texts` ones are of numbers, and cells. */
const header = (names, texts = 1) => make("thead", {}, make("tr", {}, ...names.map((name, index) =>
  make("th", { scope: "col", class: index < texts ? "" : "num" }, name))));
const rowHead = (...parts) => make("th", { scope: "row" }, ...parts);
const numberCell = (text, ...others) => make("td", { class: "num" }, text, ...others);

/* Scales of axes: from values to pixels, with the values that get a mark. */
function linearTicks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-9); n++) ticks.push(Number((n * step).toPrecision(12)));
  return ticks;
}
function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const factor of [1, 2, 5]) ticks.push(Number((factor * 10 ** power).toPrecision(6)));
  const inside = ticks.filter(tick => tick >= low && tick <= high);
  return inside.length > 7 ? inside.filter(tick => /^1/.test((tick).toExponential())) : inside;
}
function scale(low, high, from, to, { log = false, count = 5 } = {}) {
  const f = log ? Math.log : x => x;
  const place = value => from + (f(value) - f(low)) / (f(high) - f(low)) * (to - from);
  return { place, ticks: log ? logTicks(low, high) : linearTicks(low, high, count) };
}
/* A scale around positive values: logarithmic if they differ much. */
function scaleAround(values, from, to, count) {
  const low = Math.min(...values), high = Math.max(...values);
  if (high > 6 * low) return scale(low / 1.25, high * 1.25, from, to, { log: true });
  const room = (high - low || high * 0.2) * 0.12;
  return scale(Math.max(0, low - room), high + room, from, to, { count });
}

function axes(svg, box, x, y, xTitle, yTitle) {
  for (const tick of y.ticks) {
    const at = y.place(tick);
    svg.append(draw("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }),
      draw("text", { x: box.left - 7, y: at + 4, "text-anchor": "end" }, short(tick)));
  }
  for (const tick of x.ticks) {
    const at = x.place(tick);
    svg.append(draw("line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }),
      draw("text", { x: at, y: box.bottom + 18, "text-anchor": "middle" }, many(tick)));
  }
  svg.append(draw("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    draw("text", { x: (box.left + box.right) / 2, y: box.bottom + 36, "text-anchor": "middle" }, xTitle),
    draw("text", { x: 0, y: 12 }, yTitle));
}
/* An SVG that a pointer and the arrow keys move a selection in: `pick` gets a pixel position, `step` a number of places. */
function interactive(host, height, label, { pick, step, first, last }) {
  const width = Math.max(260, host.clientWidth);
  const hadFocus = host.contains(document.activeElement);
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "slider", "aria-label": label });
  for (const event of ["pointermove", "pointerdown"]) svg.addEventListener(event, found => {
    const box = svg.getBoundingClientRect();
    pick(found.clientX - box.left, found.clientY - box.top);
  });
  const keys = { ArrowRight: () => step(1), ArrowUp: () => step(1), ArrowLeft: () => step(-1), ArrowDown: () => step(-1),
    PageUp: () => step(20), PageDown: () => step(-20), Home: first, End: last };
  svg.addEventListener("keydown", found => {
    if (!keys[found.key]) return;
    keys[found.key]();
    found.preventDefault();
  });
  host.replaceChildren(svg);
  if (hadFocus) svg.focus();
  return { svg, width };
}
function announce(svg, now, most, text) {
  const values = { "aria-valuemin": 0, "aria-valuemax": most, "aria-valuenow": now, "aria-valuetext": text };
  for (const [key, value] of Object.entries(values)) svg.setAttribute(key, value);
}
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
/* A dashed line across the chart, if it is not above it. */
function level(svg, box, at, kind) {
  if (at >= box.top - 1) svg.append(draw("line", { class: kind, x1: box.left, x2: box.right, y1: at, y2: at }));
}
/* An entry of a legend. */
const entry = (text, ...shapes) =>
  make("span", {}, draw("svg", { width: 22, height: 14, "aria-hidden": "true" }, ...shapes), text);
function limitEntry(name, bytes, most, kind = "limit") {
  const text = `${name} ${bytesText(bytes)}${bytes > most ? ", above the chart" : ""}`;
  return entry(text, draw("line", { class: kind, x1: 0, x2: 22, y1: 7, y2: 7 }));
}
