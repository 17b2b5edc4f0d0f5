/* Draws the charts and tables of a plan from the data in the page. All texts of the data become text nodes. */

/* Memory of a chip over the schedule. */
let plan = null, point = 0;
const colourOf = (groups, index) => {
  const layer = groups.slice(0, index).filter(group => group.kind === "layer").length;
  return `color: var(--${groups[index].kind === "layer" ? `layer${layer % 5}` : groups[index].kind})`;
};
const totalAt = (memory, index) => memory.groups.reduce((sum, group) => sum + group.num_bytes[index], 0);

/* A group's bytes come as runs: [points, bytes]. */
for (const found of data.search ? data.search.shown.map(entry => entry.plan) : [data.plan]) {
  for (const group of found && found.memory ? found.memory.groups : [])
    group.num_bytes = group.runs.flatMap(([points, bytes]) => new Array(points).fill(bytes));
}
/* The outline of an area in steps: forwards along its upper levels, one per point, and back along its lower ones. */
function outline(upper, lower, edge) {
  const count = upper.length;
  let path = `M${edge(0)},${upper[0]}`;
  for (let i = 1; i < count; i++) if (upper[i] !== upper[i - 1]) path += `H${edge(i)}V${upper[i]}`;
  path += `H${edge(count)}V${lower[count - 1]}`;
  for (let i = count - 1; i > 0; i--) if (lower[i] !== lower[i - 1]) path += `H${edge(i)}V${lower[i - 1]}`;
  return `${path}H${edge(0)}Z`;
}
function areas(memory, x, y) {
  const count = memory.positions.length, edge = index => x.place(index * memory.length / count).toFixed(1);
  const levels = bytes => bytes.map(value => y.place(value).toFixed(1));
  let below = new Array(count).fill(0);
  return memory.groups.map((group, index) => {
    const above = below.map((bytes, i) => bytes + group.num_bytes[i]);
    const d = outline(levels(above), levels(below), edge);
    below = above;
    return draw("path", { class: "area", d, style: colourOf(memory.groups, index) });
  });
}
function loops(svg, memory, x, top) {
  for (const loop of memory.loops) {
    const begin = x.place(loop.begin), end = x.place(loop.end + 1), room = end - begin;
    const times = `×${many(loop.times)}`, text = loop.part ? `${loop.part} ${times}` : times;
    svg.append(draw("path", { class: "loop", d: `M${begin},${top + 10}v-5H${end}v5` }, draw("title", {}, `loop, ${text}`)));
    if (room < 24) continue;
    const label = room > 7 * text.length ? text : times;
    svg.append(draw("text", { x: (begin + end) / 2, y: top, "text-anchor": "middle" }, label));
  }
}
function drawMemory() {
  const memory = plan.memory, last = memory.positions.length - 1;
  const select = index => { point = clamp(index, 0, last); showPoint(); };
  const box = {};
  const { svg, width } = interactive($("memory-chart"), 340, "Position in the schedule; arrow keys move", {
    pick: at => select(Math.floor((at - box.left) / (box.right - box.left) * (last + 1))),
    step: places => select(point + places), first: () => select(0), last: () => select(last),
  });
  Object.assign(box, { left: 46, right: width - 4, top: 62, bottom: 296 });
  /* A line far above the areas is left out: they would be too flat. */
  const peak = totalAt(memory, memory.peak), near = bytes => bytes && bytes <= 2.5 * peak ? bytes : 0;
  const most = Math.max(peak, near(plan.total), near(plan.usable_memory)) * 1.06, [unit, size] = unitOf(BYTES, most);
  const x = scale(0, memory.length, box.left, box.right, { count: width < 500 ? 4 : 8 });
  const inUnits = scale(0, most / size, box.bottom, box.top), y = { place: bytes => inUnits.place(bytes / size) };
  axes(svg, box, x, inUnits, "position in the schedule", `live bytes, ${unit}`);
  svg.append(...areas(memory, x, y));
  loops(svg, memory, x, 42);
  level(svg, box, y.place(plan.total), "allocated");
  if (plan.usable_memory) level(svg, box, y.place(plan.usable_memory), "limit");
  const middle = index => x.place((index + 0.5) * memory.length / (last + 1));
  const dot = { class: "peak", r: 4.5 };
  svg.append(draw("circle", { ...dot, cx: middle(memory.peak), cy: y.place(peak) }));
  const legend = [entry(`peak ${bytesText(peak)}`, draw("circle", { ...dot, cx: 11, cy: 7 })),
    limitEntry("allocated", plan.total, most, "allocated")];
  if (plan.usable_memory) {
    const name = plan.usable_memory === plan.chip_memory ? "memory of a chip" : "memory that JAX can take";
    legend.push(limitEntry(name, plan.usable_memory, most));
  }
  $("memory-legend").replaceChildren(...legend);
  svg.append(draw("line", { class: "cursor", id: "memory-cursor", y1: box.top, y2: box.bottom }));
  svg.middle = middle;
  showPoint();
}
function showPoint() {
  const memory = plan.memory, svg = $("memory-chart").firstChild, at = svg.middle(point);
  for (const key of ["x1", "x2"]) $("memory-cursor").setAttribute(key, at);
  const where = `position ${many(memory.positions[point])} of ${many(memory.length)}${point === memory.peak ? ", the peak" : ""}`;
  const operation = memory.operation_names[memory.operations[point]];
  const total = bytesText(totalAt(memory, point));
  $("memory-readout").replaceChildren(make("b", {}, total), ` live at ${where}: ${operation}`);
  announce(svg, point, memory.positions.length - 1, `${total} at ${where}, ${operation}`);
  memory.groups.forEach((group, index) => { $(`here-${index}`).textContent = bytesText(group.num_bytes[point]); });
  $("here-total").textContent = total;
}
function memoryTable() {
  const memory = plan.memory, peak = totalAt(memory, memory.peak);
  const here = name => make("td", { class: "num", id: `here-${name}` });
  const rows = memory.groups.map((group, index) => make("tr", {},
    rowHead(make("i", { class: "swatch", style: colourOf(memory.groups, index) }),
      make("span", { class: group.kind === "layer" ? "mono" : "" }, ...path(group.name))),
    numberCell(bytesText(group.num_bytes[memory.peak])),
    numberCell(percent(group.num_bytes[memory.peak] / peak)), here(index)));
  const total = make("tr", {}, rowHead("total"), numberCell(bytesText(peak)), make("td"), here("total"));
  $("memory-table").replaceChildren(
    header(["Live bytes, in the order of the chart", "At the peak", "Share", "At the cursor"]),
    make("tbody", {}, ...rows.reverse()), make("tfoot", {}, total));
  $("memory-note").textContent = "Live bytes are an estimate from the program's text. The compiler allocates " +
    `${bytesText(plan.total)}: ${bytesText(plan.arguments)} for arguments, ${bytesText(plan.temporaries)} for temporaries, ` +
    `${bytesText(plan.outputs)} for outputs. The difference is tile padding, and gaps between buffers. The body of a loop ` +
    "is in the schedule once.";
}

function collectivesTable() {
  const rows = plan.collectives, longest = Math.max(...rows.map(row => row.seconds || 0), 1e-30);
  const most = Math.max(...rows.map(row => row.bytes), 1);
  const cell = (text, share) =>
    numberCell(text, make("span", { class: "bar", style: `width: ${(100 * share).toFixed(1)}%` }));
  const where = row => ` over ${row.axes.join(", ") || "one device"}${row.links ? ` (${row.links})` : ""}`;
  const body = rows.map(row => make("tr", {},
    rowHead(row.kind, make("small", {}, where(row))), numberCell(many(row.count)), cell(bytesText(row.bytes), row.bytes / most),
    row.seconds === null ? numberCell("unknown") : cell(secondsText(row.seconds), row.seconds / longest)));
  $("collectives-table").replaceChildren(header(["Kind and mesh axes", "Count", "Bytes", "Estimated time"]),
    make("tbody", {}, ...body));
}
function largestTable() {
  const isLayer = new Set(plan.memory.groups.filter(group => group.kind === "layer").map(group => group.name));
  /* The operation's path says the layer. */
  const madeBy = row => isLayer.has(row.group) ? row.operation : row.group + (row.operation && `: ${row.operation}`);
  const array = row => row.count === 1 ? row.array : `${row.count} × ${row.array}`;
  const body = plan.memory.largest.map(row => make("tr", {},
    rowHead(make("span", { class: "mono" }, array(row)), make("br"), make("small", {}, ...path(madeBy(row)))),
    numberCell(bytesText(row.num_bytes))));
  $("largest-table").replaceChildren(header(["Array and what made it", "Bytes"]), make("tbody", {}, ...body));
}
function showPlan(chosen) {
  plan = chosen;
  $("memory").hidden = !plan || !plan.memory;
  $("collectives").hidden = !plan || !plan.collectives.length;
  $("largest").hidden = !plan || !plan.memory || !plan.memory.largest.length;
  if (!plan) return;
  collectivesTable();
  if (!plan.memory) return;
  largestTable();
  point = plan.memory.peak;
  memoryTable();
  drawMemory();
}

/* Candidates of a search. */
const search = data.search;
for (const p of search ? search.points : []) p.reason = search.reasons[p.reason];
const STATUS = { fits: "fits", "too large": "doesn't fit", failed: "failed to compile", out: "left out", waiting: "not reached" };
const perRow = candidate => search.per_row ? candidate.seconds / candidate.rows : candidate.seconds;
const isCompiled = p => p.status === "fits" || p.status === "too large";
const known = search ? search.points.filter(p => p.seconds && p.bytes).sort((a, b) => perRow(a) - perRow(b)) : [];
/* The candidates in the chart, and the index of the selected one. */
let placed = known, candidate = 0;

function mark(p, x, y) {
  if (p.status === "fits") return draw("circle", { class: "fits", cx: x, cy: y, r: p.front ? 6 : 4 });
  if (p.status === "too large") return draw("path", { class: "too-large", d: `M${x - 4},${y - 4}l8,8m0,-8l-8,8` });
  return draw("circle", { class: p.status, cx: x, cy: y, r: p.status === "waiting" ? 2.5 : 3.5 });
}
/* The most bytes that the chart shows. */
function highestOf(points) {
  const most = Math.max(...points.map(p => p.bytes));
  return search.chip_memory && search.chip_memory < 30 * most ? Math.max(most, search.chip_memory) : most;
}
function scatterLegend() {
  const entries = Object.entries(STATUS).filter(([status]) => placed.some(p => p.status === status)).map(([status, text]) => {
    const count = placed.filter(p => p.status === status).length;
    const note = isCompiled({ status }) ? "" : ": predicted step, bytes of the state alone";
    return entry(`${text} (${many(count)})${note}`, mark({ status }, 11, 7));
  });
  const onFront = [draw("path", { class: "front-line", d: "M0,7H22" }), mark({ status: "fits", front: true }, 11, 7)];
  if (placed.some(p => p.front)) entries.push(entry("Pareto front", ...onFront));
  if (search.chip_memory) entries.push(limitEntry("memory that JAX can take", search.chip_memory, highestOf(placed)));
  $("scatter-legend").replaceChildren(...entries);
}
/* Writes the numbers of the front's table; points that lie together share a text such as 2–4. */
function numbers(svg, front) {
  for (let begin = 0; begin < front.length;) {
    const isNear = ([x, y]) => Math.hypot(x - front[begin][0], y - front[begin][1]) < 18;
    let end = begin;
    while (end + 1 < front.length && isNear(front[end + 1])) end++;
    const text = begin === end ? `${begin + 1}` : `${begin + 1}–${end + 1}`;
    svg.append(draw("text", { class: "strong halo", x: front[begin][0] + 9, y: front[begin][1] - 7 }, text));
    begin = end + 1;
  }
}
function drawScatter() {
  const last = placed.length - 1, box = {};
  let at = [];
  const select = index => { candidate = clamp(index, 0, last); showCandidate(); };
  const { svg, width } = interactive($("scatter"), 380, "Candidates by step; arrow keys move", {
    pick: (px, py) => {
      const distances = at.map(([x, y]) => (x - px) ** 2 + (y - py) ** 2);
      select(distances.indexOf(Math.min(...distances)));
    },
    step: places => select(candidate + places), first: () => select(0), last: () => select(last),
  });
  Object.assign(box, { left: 46, right: width - 14, top: 30, bottom: 336 });
  const seconds = placed.map(perRow), bytes = placed.map(p => p.bytes), limit = search.chip_memory;
  const most = Math.max(...bytes), [xUnit, xSize] = unitOf(SECONDS, Math.max(...seconds)), [yUnit, ySize] = unitOf(BYTES, most);
  const isInside = limit && limit <= highestOf(placed), levels = isInside ? [...bytes, limit] : bytes;
  const xs = scaleAround(seconds.map(v => v / xSize), box.left + 8, box.right, width < 500 ? 4 : 8);
  const ys = scaleAround(levels.map(v => v / ySize), box.bottom - 8, box.top);
  const xTitle = search.per_row ? "estimated step per row of the batch" : "estimated step";
  axes(svg, box, xs, ys, `${xTitle}, ${xUnit}`, `bytes per chip, ${yUnit}`);
  if (isInside) level(svg, box, ys.place(limit / ySize), "limit");
  at = placed.map(p => [xs.place(perRow(p) / xSize), ys.place(p.bytes / ySize)]);
  const front = at.filter((_, index) => placed[index].front);
  const line = front.map(([x, y], i) => i ? `H${x}V${y}` : `M${x},${y}`).join("");
  svg.append(draw("path", { class: "front-line", d: line }));
  /* What was compiled lies above what was only predicted. */
  const order = [...placed.keys()].sort((a, b) => isCompiled(placed[a]) - isCompiled(placed[b]));
  for (const index of order) {
    const shape = mark(placed[index], ...at[index]);
    shape.append(draw("title", {}, placed[index].name));
    shape.classList.add("point");
    svg.append(shape);
  }
  numbers(svg, front);
  svg.append(draw("circle", { class: "ring", id: "ring", r: 9 }));
  svg.at = at;
  showCandidate();
}
function showCandidate() {
  const p = placed[candidate], svg = $("scatter").firstChild, [x, y] = svg.at[candidate];
  $("ring").setAttribute("cx", x);
  $("ring").setAttribute("cy", y);
  const rows = search.per_row ? ` for ${many(p.rows)} rows` : "";
  const numbers = isCompiled(p) ? `${secondsText(p.seconds)}${rows}, ${bytesText(p.bytes)} per chip`
    : `predicted ${secondsText(p.seconds)}${rows}, ${bytesText(p.bytes)} of state per chip`;
  const text = `: ${numbers}; ${p.front ? "on the Pareto front" : STATUS[p.status]}${p.reason ? `: ${p.reason}` : ""}`;
  $("scatter-readout").replaceChildren(make("b", {}, p.name), text);
  announce(svg, candidate, placed.length - 1, p.name + text);
}
const ALL = ["Candidate", "Result", "Reason", "Step", "Bytes per chip"];
function candidateRow(p) {
  const compiled = isCompiled(p);
  const step = p.seconds ? (compiled ? "" : "predicted ") + secondsText(p.seconds) : "unknown";
  const bytes = p.bytes ? (compiled ? "" : "state ") + bytesText(p.bytes) : "unknown";
  const texts = [p.front ? "Pareto front" : STATUS[p.status], p.reason || "none", step, bytes];
  return make("tr", {}, rowHead(p.name), ...texts.map((text, index) =>
    make("td", { class: index < 2 ? "" : "num", "data-name": ALL[index + 1] }, text)));
}
function fillAll() {
  const terms = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const textOf = p => `${p.name} ${STATUS[p.status]} ${p.reason}`.toLowerCase();
  const kept = search.points.filter(p => terms.every(term => textOf(p).includes(term)));
  $("all-table").replaceChildren(header(ALL, 3), make("tbody", {}, ...kept.map(candidateRow)));
  $("all-note").textContent = `${many(kept.length)} of ${many(search.points.length)} shown.` +
    (search.left_out ? ` ${many(search.left_out)} slower or unknown ones are only in plan_search.json.` : "");
}
function allCandidates() {
  const total = search.points.length + search.left_out;
  $("all").hidden = false;
  $("all").querySelector("summary").textContent =
    total === 1 ? "The candidate" : `All ${many(total)} candidates, and why some are out`;
  $("all").addEventListener("toggle", fillAll, { once: true });
  $("filter").addEventListener("input", fillAll);
}
/* Chooses the candidates of the chart, predicted ones only if asked for; at first, the fastest one is selected. */
function place() {
  placed = $("predicted").checked || !known.some(isCompiled) ? known : known.filter(isCompiled);
  const first = search.shown.length ? placed.findIndex(p => p.name === search.shown[0].name) : 0;
  candidate = Math.max(0, first);
  scatterLegend();
  drawScatter();
}
function showSearch() {
  const shown = search.shown.filter(entry => entry.plan);
  allCandidates();
  $("search").hidden = !known.length;
  $("front").hidden = !search.shown.length;
  if (search.shown.length && search.shown[0].seconds === null) {
    $("front").querySelector("h2").textContent = "Smallest candidate";
    $("front-note").textContent = "No candidate fits.";
  }
  for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch { button.textContent = "Selected"; }
  });
  if (known.length) place();
  $("predicted").parentNode.hidden = !known.some(isCompiled) || known.every(isCompiled);
  $("predicted").addEventListener("change", place);
  $("chosen").hidden = shown.length === 0;
  const missing = search.shown.length - shown.length;
  $("chosen").querySelector("small").textContent = missing ? `(not in this page: ${many(missing)} slower ones)` : "";
  $("choice").replaceChildren(...shown.map((entry, index) => make("option", { value: index }, entry.name)));
  $("choice").addEventListener("change", () => showPlan(shown[$("choice").value].plan));
  showPlan(shown.length ? shown[0].plan : null);
}

if (search) showSearch(); else showPlan(data.plan);
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawnWidth) return;
  drawnWidth = innerWidth;
  if (plan && plan.memory) drawMemory();
  if (known.length) drawScatter();
});
