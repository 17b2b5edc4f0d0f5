/* What the charts of a plan have in common besides watch/pages/page.js: scales, axes, selection by pointer and keys. */

const data = JSON.parse(document.getElementById("data").textContent);

/* Scales of axes: from values to pixels, with the values that get a mark. */
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
/* A dashed line across the chart, if it is not above it. */
function level(svg, box, at, kind) {
  if (at >= box.top - 1) svg.append(draw("line", { class: kind, x1: box.left, x2: box.right, y1: at, y2: at }));
}
function limitEntry(name, bytes, most, kind = "limit") {
  const text = `${name} ${bytesText(bytes)}${bytes > most ? ", above the chart" : ""}`;
  return entry(text, draw("line", { class: kind, x1: 0, x2: 22, y1: 7, y2: 7 }));
}
