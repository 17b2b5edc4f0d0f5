/* What the scripts of all pages share: elements, numbers as text, tables. */

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
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
/* An entry of a legend. */
const entry = (text, ...shapes) =>
  make("span", {}, draw("svg", { width: 22, height: 14, "aria-hidden": "true" }, ...shapes), text);
/* Round values for the marks of an axis. */
function linearTicks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-9); n++) ticks.push(Number((n * step).toPrecision(12)));
  return ticks;
}
