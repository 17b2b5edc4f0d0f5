/* The table of variables: search, filters, sorting, selection, and the visible rows. */

/* (50257+3, 512): the logical size, and the padding after the plus sign. */
const withPadding = v => shape(v.logical_shape.map((n, dim) => {
  const added = v.padded_shape[dim] - n;
  return added ? `${n}+${added}` : n;
}));

/* Derives, once, what the table shows of each variable. */
for (const [index, v] of variables.entries()) {
  v.index = index;
  v.padded = v.padding_bytes > 0;
  v.split = v.spec.some(entry => entry.length);
  v.counts = v.padded_shape.map((_, dim) => product((v.spec[dim] || []).map(axis => sizeOf[axis])));
  v.shape_text = withPadding(v);
  v.search_text = [v.path, v.spec_text, v.reason, v.dtype, shape(v.logical_shape)].join(" ").toLowerCase();
}

/* A path breaks behind its slashes; its last two parts stand out. */
function pathCell(v) {
  const cell = make("span", "mono path"), parts = v.path.split(/(?<=\/)/);
  for (const [i, part] of parts.entries()) cell.append(make("bdi", i < parts.length - 2 ? "dim" : "", part), make("wbr"));
  return cell;
}
/* fr: the least and the most share of the width; between them, the column's longest text decides. */
const COLUMNS = [
  { key: "path", title: "Variable", value: v => v.path, cell: pathCell, fr: [18, 36] },
  { key: "shape", title: "Shape", value: v => product(v.padded_shape), text: v => v.shape_text, fr: [10, 18],
    cell: v => make("span", v.padded ? "mono waste" : "mono", v.shape_text) },
  { key: "spec", title: "Spec", value: v => v.spec_text, fr: [9, 20],
    cell: v => make("span", v.split ? "mono" : "mono dim", v.spec_text) },
  { key: "bytes", title: "Per device", number: true, value: v => v.bytes_per_device, width: "76px",
    cell: v => make("span", "num", v.words.per_device) },
  { key: "waste", title: "Padding", number: true, value: v => v.padding_bytes, width: "64px",
    cell: v => make("span", v.padded ? "num waste" : "num dim", v.padded ? "+" + v.words.padding_share : "none") },
  { key: "reason", title: "Why", value: v => v.reason, fr: [14, 40],
    cell: v => make("span", v.again ? "why again" : "why", v.reason) },
];
const FILTERS = [
  ["all", "All", () => true], ["split", "Split", v => v.split],
  ["replicated", "Replicated", v => !v.split], ["padded", "Padded", v => v.padded],
];
const KINDS = [["", "All kinds"], ["parameters", "Parameters"], ["optimizer_state", "Optimizer state"], ["other", "Other"]];

/* The page's address holds the view, so a link can open it: #q=kernel&filter=split&sort=bytes&desc=1&at=path */
const view = { q: "", kind: "", filter: "all", sort: "", desc: false };
const opening = data.opening === null ? null : variables[data.opening];
let selected = opening;
let rows = [], offsets = [0];
/* Row elements in the page, by variable index; row heights, by heightKey. */
const drawn = new Map(), heights = new Map();
/* Number of rows drawn above and below the visible ones. */
const MARGIN = 16;

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const key of ["q", "kind", "filter", "sort"]) if (given.has(key)) view[key] = given.get(key);
  view.desc = given.get("desc") === "1";
  selected = variables.find(v => v.path === given.get("at")) || opening;
}
function writeAddress() {
  const out = new URLSearchParams();
  for (const key of ["q", "kind", "sort"]) if (view[key]) out.set(key, view[key]);
  if (selected !== opening) out.set("at", selected.path);
  if (view.filter !== "all") out.set("filter", view.filter);
  if (view.desc) out.set("desc", "1");
  try { history.replaceState(null, "", "#" + out); } catch { /* a sandboxed frame may not change its address */ }
}

/* Applies search, filters and sorting. */
function update() {
  const terms = view.q.toLowerCase().split(/\s+/).filter(Boolean);
  const filter = (FILTERS.find(f => f[0] === view.filter) || FILTERS[0])[2];
  const kept = v => filter(v) && (!view.kind || v.kind === view.kind) && terms.every(term => v.search_text.includes(term));
  rows = variables.filter(kept);
  const column = COLUMNS.find(c => c.key === view.sort), sign = view.desc ? -1 : 1;
  const compare = (x, y) => typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
  if (column) rows.sort((a, b) => sign * compare(column.value(a), column.value(b)) || a.index - b.index);
  /* A reason that the row above has is one line. */
  for (const [i, v] of rows.entries()) v.again = i > 0 && rows[i - 1].reason === v.reason;
  for (const row of drawn.values()) row.remove();
  drawn.clear();
  const count = variables.length === 1 ? "1 variable" : `${many(variables.length)} variables`;
  $("shown").textContent = rows.length === variables.length ? count : `${many(rows.length)} of ${count}`;
  $("kind").value = view.kind;
  for (const button of $("filters").children) button.setAttribute("aria-pressed", button.dataset.key === view.filter);
  for (const [i, { key, title }] of COLUMNS.entries()) {
    const head = $("head").children[i], on = key === view.sort;
    if (on) head.setAttribute("aria-sort", view.desc ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
    head.firstChild.textContent = title + (on ? (view.desc ? " ↓" : " ↑") : "");
  }
  layOut();
  writeAddress();
}
function change(part) {
  Object.assign(view, part);
  $("scroll").scrollTop = 0;
  update();
}

/* The wrapped texts of a row decide its height. In a monospaced font, paths whose parts have equal lengths wrap alike, unless a
   line may end inside a part, as behind a hyphen. */
const heightKey = v => [/^[\w./]*$/.test(v.path) ? v.path.replace(/[\w.]/g, "x") : v.path, v.shape_text, v.spec_text,
  v.again ? "" : v.reason].join("\n");

/* Measures unknown row heights, computes the offset of every row, and draws the visible rows. */
function layOut() {
  const missing = new Map(), keys = rows.map(heightKey);
  for (const [i, key] of keys.entries()) if (!heights.has(key)) missing.set(key, rows[i]);
  if (missing.size) {
    const trial = make("div", "trial");
    trial.append(...[...missing.values()].map(makeRow));
    $("space").append(trial);
    const measured = [...trial.children].map(row => row.getBoundingClientRect().height);
    for (const [i, key] of [...missing.keys()].entries()) heights.set(key, measured[i]);
    trial.remove();
  }
  offsets = [0];
  for (const key of keys) offsets.push(offsets.at(-1) + heights.get(key));
  $("space").style.height = rows.length ? offsets.at(-1) + "px" : "";
  $("grid").setAttribute("aria-rowcount", rows.length + 1);
  drawRows();
}
function resize() {
  const width = $("list").clientWidth;
  $("list").classList.toggle("cards", width < 620);
  if (width !== resize.width) heights.clear();
  resize.width = width;
  layOut();
}

function makeRow(v) {
  const row = make("div", "row");
  row.setAttribute("role", "row");
  row.dataset.index = v.index;
  for (const column of COLUMNS) {
    const cell = column.cell(v);
    cell.setAttribute("role", "gridcell");
    row.append(cell);
  }
  return row;
}

/* Returns the index of the first row that ends below y. */
function rowAt(y) {
  let low = 0, high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (offsets[middle + 1] > y) high = middle; else low = middle + 1;
  }
  return low;
}

/* Only the visible rows and the selected row, which has the focus, exist in the page. So ten thousand variables scroll as
   smoothly as ten. */
function drawRows() {
  const space = $("space"), top = $("scroll").scrollTop, height = $("scroll").clientHeight || 800;
  const at = rows.indexOf(selected), wanted = new Set();
  const first = Math.max(0, rowAt(top) - MARGIN), last = Math.min(rows.length - 1, rowAt(top + height) + MARGIN);
  for (let i = first; i <= last; i++) wanted.add(i);
  if (at >= 0) wanted.add(at);
  const order = [...wanted].sort((a, b) => a - b), keep = new Set(order.map(i => rows[i].index));
  for (const [index, row] of drawn) if (!keep.has(index)) { row.remove(); drawn.delete(index); }
  $("none")?.remove();
  /* The Tab key stops at one row: the selected row, or the first row if the selected one is filtered out. */
  const tabStop = at >= 0 ? at : order[0];
  for (const [place, i] of order.entries()) {
    const v = rows[i];
    if (!drawn.has(v.index)) drawn.set(v.index, makeRow(v));
    const row = drawn.get(v.index);
    row.style.top = offsets[i] + "px";
    row.tabIndex = i === tabStop ? 0 : -1;
    row.setAttribute("aria-rowindex", i + 2);
    row.setAttribute("aria-selected", i === at);
    if (space.children[place] !== row) space.insertBefore(row, space.children[place] || null);
  }
  if (!rows.length) {
    space.append(make("div", "", variables.length ? "No variable matches." : "No variables."));
    space.firstChild.id = "none";
  }
}

function select(v) {
  selected = v;
  drawRows();
  drawDetail();
  writeAddress();
}
/* Scrolls until the selected row is visible, `margin` pixels away from the edge. */
function reveal(margin = 0) {
  const at = rows.indexOf(selected), scroll = $("scroll"), height = scroll.clientHeight - $("head-group").offsetHeight;
  if (at < 0) return;
  if (offsets[at] < scroll.scrollTop) scroll.scrollTop = offsets[at] - margin;
  if (offsets[at + 1] > scroll.scrollTop + height) scroll.scrollTop = offsets[at + 1] - height + margin;
}
function showDetail() {
  $("detail").scrollIntoView({ block: "nearest" });
  $("detail").focus({ preventScroll: true });
}

function onKey(event) {
  const row = event.target.closest(".row");
  if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
  const at = rows.findIndex(v => v.index === Number(row.dataset.index));
  const page = Math.max(1, rowAt(offsets[at] + $("scroll").clientHeight - 80) - at);
  const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: rows.length - 1 };
  const to = moves[event.key];
  if (to !== undefined) {
    event.preventDefault();
    select(rows[Math.min(rows.length - 1, Math.max(0, to))]);
    reveal();
    drawRows();
    drawn.get(selected.index).focus({ preventScroll: true });
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    select(variables[Number(row.dataset.index)]);
    showDetail();
  }
}

function drawDetail() {
  const v = selected;
  $("detail").hidden = $("to-detail").hidden = !v;
  if (!v) return;
  $("detail-kind").textContent = v.kind.replaceAll("_", " ");
  $("path").textContent = v.path;
  $("to-detail").textContent = `Picture of ${v.path.split("/").slice(-2).join("/")} ↓`;
  $("reason").textContent = v.reason;
  $("reason").className = !v.split && /^replicated: (?!a scalar)/.test(v.reason) ? "look" : "";
  const piece = shape(v.padded_shape.map((n, dim) => n / v.counts[dim]));
  const facts = [
    ["Shape", `${shape(v.logical_shape)} ${v.dtype}`], ...(v.padded ? [["Padded", shape(v.padded_shape)]] : []), ["Spec", v.spec_text],
    ["Per device", `${v.words.per_device}, shard shape ${piece}`], ["One copy", v.words.one_copy], ["Padding", v.words.padding || "none"],
  ];
  $("facts").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", "", name), make("dd", "mono", value)]));
  drawArray(v);
  drawMesh(v);
}

function makeTools() {
  const kinds = KINDS.filter(([key]) => !key || variables.some(v => v.kind === key));
  $("kind").append(...kinds.map(([key, title]) => Object.assign(make("option", "", title), { value: key })));
  $("kind").hidden = kinds.length < 3;
  $("kind").onchange = event => change({ kind: event.target.value });
  $("filters").append(...FILTERS.map(([key, title]) => {
    const button = make("button", "", title);
    button.dataset.key = key;
    button.onclick = () => change({ filter: key });
    return button;
  }));
  $("head").append(...COLUMNS.map(({ key, title, number }) => {
    const head = make("span", number ? "num" : ""), button = make("button", "", title);
    head.setAttribute("role", "columnheader");
    button.onclick = () => change({ sort: key, desc: view.sort === key ? !view.desc : !!number });
    head.append(button);
    return head;
  }));
  const width = ({ key, width, text, value, fr }) => {
    if (width) return width;
    const longest = variables.reduce((most, v) => Math.max(most, (text || value)(v).length), 0);
    return `minmax(0, ${Math.min(fr[1], Math.max(fr[0], 1.25 * longest))}fr)`;
  };
  $("list").style.setProperty("--columns", COLUMNS.map(width).join(" "));
  $("search").value = view.q;
  $("search").oninput = event => change({ q: event.target.value });
  $("to-detail").onclick = showDetail;
}

function listen() {
  const space = $("space");
  $("scroll").onscroll = drawRows;
  space.onclick = event => {
    const row = event.target.closest(".row");
    if (row) select(variables[Number(row.dataset.index)]);
  };
  space.onkeydown = onKey;
  new ResizeObserver(resize).observe($("list"));
}

function start() {
  readAddress();
  makeTools();
  $("list").classList.toggle("cards", $("list").clientWidth < 620);
  resize.width = $("list").clientWidth;
  update();
  drawDetail();
  reveal($("scroll").clientHeight / 3);
  drawRows();
  listen();
}
start();
