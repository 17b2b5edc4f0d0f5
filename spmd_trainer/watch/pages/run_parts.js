/* The parts of the page below the curves: times, mesh and variables, samples, warnings, settings. All texts become text nodes. */

const PARTS = [["step", "steps"], ["input", "waiting for input"], ["compile", "compiling"], ["start", "starting"], ["save", "saving"],
  ["evaluation", "evaluation"], ["decode", "decoding"], ["other", "other"]];
const clock = seconds => new Date(1000 * seconds).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
function duration(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole % 3600 / 60);
  const two = number => String(number).padStart(2, "0");
  return hours ? `${hours}h${two(minutes)}m` : `${minutes}m${two(whole % 60)}s`;
}
const runName = number => make("span", { class: "run-name" }, ...(data.runs.length > 1 ? [swatch(number)] : []), data.runs[number].name);
const left = (count, what) => count ? `${many(count)} more ${what} are not shown.` : "";

/* The load of a layer's experts in the last summary: a bar for each expert. */
function showExperts() {
  const layers = [...new Set(data.runs.flatMap(run => run.experts.map(one => one.layer)))], select = $("experts-layer"), before = select.value;
  $("experts").hidden = !layers.length;
  select.replaceChildren(...layers.map(layer => make("option", { value: layer }, layer)));
  if (layers.includes(before)) select.value = before;
  $("experts-bars").replaceChildren(...data.runs.flatMap((run, number) =>
    run.experts.filter(one => one.layer === select.value).map(one => expertBars(number, one.shares))));
}
function expertBars(number, shares) {
  const most = Math.max(...shares) || 1, without = shares.filter(share => !share).length;
  const texts = shares.map((share, expert) => `expert ${expert}: ${percent(share)}`);
  const bars = shares.map((share, expert) => make("div", { style: `height: ${100 * share / most}%`, title: texts[expert] }));
  const note = `an even share is ${percent(1 / shares.length)}, the greatest is ${percent(most)}${without ? `; ${many(without)} without a token` : ""}`;
  return make("div", { class: "stack-row" }, make("div", { class: "stack-head" },
    data.runs.length > 1 ? runName(number) : make("span", {}, `${many(shares.length)} experts`), make("span", {}, note)),
  make("div", { class: "bars", role: "img", "aria-label": texts.join(", ") }, ...bars));
}

/* Time per part: a bar for each run, and one for each of its starts if there are several. */
function showTimes() {
  const bars = [], used = new Set(), wholes = [];
  data.runs.forEach((run, number) => {
    if (!run.times.length) return;
    const whole = Object.fromEntries(PARTS.map(([part]) => [part, run.times.reduce((sum, one) => sum + one.seconds[part], 0)]));
    PARTS.forEach(([part]) => { if (whole[part] > 0) used.add(part); });
    wholes.push(whole);
    bars.push(timeBar(data.runs.length > 1 ? runName(number) : make("span", {}, "whole run"), whole, goodputText(run)));
    if (run.times.length < 2) return;
    run.times.slice(-12).forEach(one => {
      const to = one.ended ? `, ${one.ended}` : one === run.times.at(-1) ? "" : ", killed";
      const label = make("span", { class: "start" }, clock(one.start), make("small", {}, ` steps ${many(one.first_step)} to ${many(one.step)}${to}`));
      bars.push(timeBar(label, one.seconds, ""));
    });
  });
  $("times").hidden = !bars.length;
  $("times-bars").replaceChildren(...bars);
  $("times-legend").replaceChildren(...PARTS.filter(([part]) => used.has(part)).map(([part, name]) =>
    make("span", {}, make("i", { class: `swatch part-${part}` }), name, ...(wholes.length > 1 ? [] : [make("b", {}, partText(wholes[0], part))]))));
  const notes = data.runs.filter(run => run.goodput).map(run => lostText(run)).filter(Boolean);
  $("times-note").textContent = notes.join(" ");
}
const goodputText = run => `goodput ${(100 * run.goodput.share).toFixed(1)}%`;
function lostText(run) {
  const { redone, redone_steps: steps, away } = run.goodput, parts = [];
  if (steps) parts.push(`${many(steps)} steps (${duration(redone)}) were taken again after a restart and don't count`);
  if (away > 1) parts.push(`the run stood still for ${duration(away)} between its starts, which is in none of these bars`);
  return parts.length ? `${data.runs.length > 1 ? `${run.name}: ` : ""}${parts.join("; ")}.` : "";
}
const sumOf = seconds => PARTS.reduce((sum, [part]) => sum + seconds[part], 0) || 1;
const partText = (seconds, part) => `${duration(seconds[part])}, ${(100 * seconds[part] / sumOf(seconds)).toFixed(1)}%`;
function timeBar(label, seconds, note) {
  const total = sumOf(seconds);
  const texts = PARTS.filter(([part]) => seconds[part] > 0).map(([part, name]) => `${name}: ${partText(seconds, part)}`);
  const bar = make("div", { class: "stack", role: "img", "aria-label": texts.join(", ") });
  for (const [part, name] of PARTS) {
    if (!(seconds[part] > 0)) continue;
    const share = seconds[part] / total;
    bar.append(make("i", { class: `part-${part}`, style: `flex-grow: ${share}`, title: `${name}: ${partText(seconds, part)}` },
      share > 0.09 ? `${Math.round(100 * share)}%` : ""));
  }
  const head = make("div", { class: "stack-head" }, label, make("span", {}, [duration(total), note].filter(Boolean).join(" · ")));
  return make("div", { class: "stack-row" }, head, bar);
}

/* The mesh: its two innermost axes are a rectangle, whichever way the devices get larger; the others are blocks. */
const ROOM = { width: 520, height: 320 };
const MOST_ALONG = 64, MOST_CELLS = 512, GAP = 14;
function meshSizes(nx, ny, blocks, hasHead) {
  const shownX = Math.min(nx, MOST_ALONG), shownY = Math.min(ny, MOST_ALONG), head = hasHead ? 18 : 2;
  const shown = clamp(Math.floor(MOST_CELLS / (shownX * shownY)), 1, blocks);
  let best = { side: 0 };
  for (let perLine = 1; perLine <= shown; perLine++) {
    const lines = Math.ceil(shown / perLine);
    const wide = (ROOM.width - (perLine - 1) * GAP) / (perLine * shownX), high = (ROOM.height - lines * (head + GAP)) / (lines * shownY);
    const side = Math.min(34, Math.floor(wide), Math.floor(high));
    if (side > best.side) best = { side, perLine };
  }
  return { shownX, shownY, shown, head, side: Math.max(7, best.side), perLine: best.perLine || 1 };
}
function meshPicture({ axes, device_ids: ids }) {
  const long = axes.filter(axis => axis[1] > 1), inner = long.at(-1), next = long.at(-2), outer = long.slice(0, -2);
  const product = list => list.reduce((all, axis) => all * axis[1], 1), blocks = product(outer);
  const nInner = inner ? inner[1] : 1, nNext = next ? next[1] : 1;
  const upright = meshSizes(nInner, nNext, blocks, outer.length), turned = meshSizes(nNext, nInner, blocks, outer.length);
  const isTurned = next && turned.side > upright.side, sizes = isTurned ? turned : upright;
  const [across, down] = isTurned ? [next, inner] : [inner, next];
  const { shownX, shownY, shown, head, side, perLine } = sizes;
  const leftRoom = down ? 24 : 2, topRoom = across ? 20 : 2, wide = shownX * side + GAP, high = shownY * side + head + GAP;
  const width = leftRoom + Math.max(perLine * wide, 70), height = topRoom + Math.max(Math.ceil(shown / perLine) * high, down ? head + 60 : 0);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, style: `max-width: ${width}px`, role: "img",
    "aria-label": `Mesh ${axes.map(([name, size]) => `${name}=${size}`).join(", ")}` });
  if (across) svg.append(draw("text", { x: leftRoom, y: 13 }, `${across[0]} ${many(across[1])} →`));
  if (down) svg.append(draw("text", { transform: `translate(9 ${topRoom + head}) rotate(90)` }, `${down[0]} ${many(down[1])} →`));
  for (let block = 0; block < shown; block++) {
    const x0 = leftRoom + (block % perLine) * wide, y0 = topRoom + Math.floor(block / perLine) * high + head;
    if (outer.length) svg.append(draw("text", { x: x0, y: y0 - 5 }, placeOf(outer, block)));
    for (let y = 0; y < shownY; y++) for (let x = 0; x < shownX; x++) {
      const flat = block * nNext * nInner + (isTurned ? x * nInner + y : y * nInner + x), id = ids ? ids[flat] : flat;
      svg.append(...meshCell(x0 + x * side, y0 + y * side, side, id));
    }
  }
  const drawn = shown * shownX * shownY, all = product(axes), devices = `${many(all)} ${all > 1 ? "devices" : "device"}`;
  return [svg, `${axes.map(([name, size]) => `${name}=${size}`).join(", ")}: ${devices}${drawn < all ? `; ${many(drawn)} are drawn` : ""}`];
}
function meshCell(x, y, side, id) {
  const gap = side > 12 ? 3 : 1, cell = draw("rect", { x, y, width: side - gap, height: side - gap, rx: side > 12 ? 5 : 1.5, class: "device" });
  if (side < 24 || id === undefined) return [cell];
  return [cell, draw("text", { x: x + (side - gap) / 2, y: y + (side - gap) / 2 + 4, "text-anchor": "middle", class: "id" }, id)];
}
function placeOf(axes, block) {
  const names = [];
  for (const [name, size] of [...axes].reverse()) {
    names.unshift(`${name}=${block % size}`);
    block = Math.floor(block / size);
  }
  return names.join(" ");
}

/* A choice among runs that have something; it is shown if there are several. Returns the chosen run's number. */
function chooseRun(select, has) {
  const numbers = data.runs.map((_, number) => number).filter(number => has(data.runs[number]));
  const before = Number(select.value);
  select.replaceChildren(...numbers.map(number => make("option", { value: number }, data.runs[number].name)));
  select.hidden = numbers.length < 2;
  if (numbers.includes(before)) select.value = before;
  return numbers.length ? Number(select.value) : null;
}
function showLayout() {
  const chosen = chooseRun($("layout-run"), run => run.report);
  $("layout").hidden = chosen === null;
  if (chosen === null) return;
  const { report } = data.runs[chosen], { totals } = report;
  const [picture, note] = meshPicture(report);
  $("mesh").replaceChildren(picture);
  $("mesh-note").textContent = note;
  const rows = Object.entries(report.by_kind).filter(([, [count]]) => count).map(([kind, [count, whole, each]]) =>
    make("tr", {}, rowHead(kind.replace("_", " ")), numberCell(many(count)), numberCell(bytesText(whole)), numberCell(bytesText(each))));
  const sum = make("tr", {}, rowHead("sum"), numberCell(many(totals.num_variables)), numberCell(bytesText(totals.logical_bytes)),
    numberCell(bytesText(totals.bytes_per_device)));
  const words = `${many(totals.num_split)} split, ${many(totals.num_replicated)} on every device whole`;
  const padding = totals.padding_bytes ? `; padding adds ${bytesText(totals.padding_bytes)} to a copy` : "";
  $("totals").replaceChildren(header(["variables", "number", "one copy", "per device"]), make("tbody", {}, ...rows),
    make("tfoot", {}, sum), make("caption", {}, `${words}${padding}`));
  $("variables").querySelector("summary").textContent = `Where each variable lives (${many(totals.num_variables)})`;
  $("variables-table").replaceChildren(header(["variable", "shape", "split", "per device", "why"], 3), make("tbody", {},
    ...report.variables.map(variableRow)));
  $("variables-note").textContent = `${left(report.left_out, "variables, the smallest,")} sharding_report.html in the run's directory has a picture of each.`;
  filterRows($("variables-filter"), $("variables-table").querySelectorAll("tbody tr"));
}
function variableRow(v) {
  const padded = v.padded.some((n, i) => n !== v.shape[i]) ? ` stored as ${v.padded.join("×")}` : "";
  const cell = (name, kind, ...parts) => make("td", { class: kind, "data-name": name }, ...parts);
  return make("tr", {}, make("th", { scope: "row", class: "mono" }, ...path(v.path)),
    cell("shape", "", `${v.shape.join("×") || "scalar"} ${v.dtype}`, make("small", {}, padded)),
    cell("split", "mono", v.spec), cell("per device", "num", bytesText(v.bytes)), cell("why", "soft", v.reason));
}
function filterRows(input, rows) {
  input.oninput = () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  };
  input.oninput();
}

/* Samples: two steps side by side, of one run or of two. */
const compared = { left: null, right: null };
function showSamples() {
  const groups = [...new Set(data.runs.flatMap(run => Object.keys(run.samples)))].sort(), select = $("samples-group");
  $("samples").hidden = !groups.length;
  if (!groups.length) return;
  const before = select.value;
  select.replaceChildren(...groups.map(group => make("option", { value: group }, group.replace("_out/", ": "))));
  if (groups.includes(before)) select.value = before;
  const choices = data.runs.flatMap((run, number) => ((run.samples[select.value] || {}).steps || []).map(one => ({ run: number, ...one })));
  const name = choice => `${choice.run}:${choice.step}`, known = choices.map(name);
  /* Of one run, its first and its last step; of several, the last steps of the first and of the last one. */
  const ofFirst = choices.filter(choice => choice.run === choices[0].run);
  if (!known.includes(compared.left)) compared.left = name(data.runs.length > 1 ? ofFirst.at(-1) : choices[0]);
  if (!known.includes(compared.right) || compared.follows) { compared.right = known.at(-1); compared.follows = true; }
  for (const side of ["left", "right"]) {
    const options = choices.map(choice => make("option", { value: name(choice) }, sampleName(choice)));
    const chooser = make("select", { "aria-label": `Step on the ${side}` }, ...options);
    chooser.value = compared[side];
    chooser.onchange = () => {
      compared[side] = chooser.value;
      if (side === "right") compared.follows = chooser.value === known.at(-1);
      showExamples(choices, name);
    };
    $(`samples-${side}`).replaceChildren(chooser);
  }
  const out = data.runs.reduce((sum, run) => sum + ((run.samples[select.value] || {}).left_out || 0), 0);
  $("samples-note").textContent = left(out, "steps");
  showExamples(choices, name);
}
const sampleName = choice => `${data.runs.length > 1 ? `${data.runs[choice.run].name}, ` : ""}step ${many(choice.step)}`;
function showExamples(choices, name) {
  const [one, other] = ["left", "right"].map(side => choices.find(choice => name(choice) === compared[side]));
  const numbers = [...new Set([...one.examples, ...other.examples].map(example => example.index))].sort((a, b) => a - b);
  $("samples-rows").replaceChildren(...numbers.map(number => {
    const found = [one, other].map(choice => choice.examples.find(example => example.index === number));
    const prompt = (found[0] || found[1]).prompt;
    const texts = found.map((example, index) => sampleText(example, sampleName([one, other][index])));
    return make("div", { class: "example" }, make("pre", { class: "prompt" }, prompt || `example ${number}`), ...texts);
  }));
}

/* The text of a sample. One that nobody could see is written as a string. */
function sampleText(example, step) {
  const text = example ? example.output : "", blank = !text.trim();
  const shown = !example ? "not decoded" : blank ? JSON.stringify(text) : text;
  return make("pre", { "data-step": step, class: blank ? "blank" : "" }, shown);
}

function showWarnings() {
  const items = [], notes = [];
  data.runs.forEach((run, number) => {
    for (const kind of run.warnings.rows) items.push(warning(kind, data.runs.length > 1 ? number : null));
    notes.push(left(run.warnings.left_out, "kinds of warnings"));
  });
  $("warnings").hidden = !items.length;
  $("warnings-list").replaceChildren(...items);
  $("warnings-note").textContent = notes.filter(Boolean).join(" ");
}
function warning(kind, number) {
  const when = kind.count > 1 ? `${kind.first} to ${kind.last}` : kind.first;
  return make("div", { class: `warning ${kind.level.toLowerCase()}` },
    make("p", {}, make("b", {}, kind.level.toLowerCase()), kind.count > 1 ? make("span", { class: "count" }, `×${many(kind.count)}`) : "",
      ...(number === null ? [] : [runName(number)]), make("small", {}, `${kind.where}, ${when}`)),
    make("pre", {}, kind.text));
}

/* Settings: overrides, changes between starts, or for several runs what differs. */
function showSettings() {
  const parts = [], { differences } = data;
  if (differences) {
    parts.push(make("h3", {}, differences.rows.length ? "What differs" : "The runs have the same settings"));
    if (differences.rows.length) parts.push(make("div", { class: "scroll" }, differenceTable(differences)));
    parts.push(make("p", { class: "note" }, left(differences.left_out, "settings that differ")));
  } else if (data.runs[0].overrides.length) {
    parts.push(make("h3", {}, "Overrides"), ...data.runs[0].overrides.map(text => make("code", { class: "override" }, text)));
  } else parts.push(make("p", { class: "note" }, "All settings are those of the experiment's class."));
  $("overrides").replaceChildren(...parts);
  $("changes").replaceChildren(...data.runs.flatMap(changeTables));
  $("all-settings").hidden = !data.settings;
  $("settings").hidden = !(differences || data.settings && Object.keys(data.settings).length || data.runs[0].overrides.length);
  if (!data.settings) return;
  const rows = Object.entries(data.settings).map(([name, value]) => make("p", {}, make("b", {}, name), " ", value));
  $("all-settings").querySelector("summary").textContent = `All settings (${many(rows.length)})`;
  $("settings-list").replaceChildren(...rows);
  filterRows($("settings-filter"), rows);
}
/* What stands where a setting has no value: an attribute of the experiment's class has a line only where it is overridden. */
const absent = path => make("small", {}, /^[A-Z][A-Z0-9_]*$/.test(path) ? "the class's default" : "not there");
function differenceTable({ rows }) {
  return make("table", { class: "listed" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "setting"),
    ...data.runs.map((_, number) => make("th", { scope: "col" }, runName(number))))),
  make("tbody", {}, ...rows.map(row => make("tr", {}, make("th", { scope: "row", class: "mono" }, row.path), ...row.values.map((value, number) =>
    make("td", { class: "mono", "data-name": data.runs[number].name }, value ?? absent(row.path)))))));
}
function changeTables(run, number) {
  if (!run.changes.rows.length) return [];
  const of = data.runs.length > 1 ? `: ${run.name}` : "";
  return [make("h3", {}, `Changed between starts${of}`), make("table", { class: "listed" }, header(["setting", "before", "after"], 3),
    make("tbody", {}, ...run.changes.rows.map(change => make("tr", {}, make("th", { scope: "row", class: "mono" }, change.path),
      make("td", { class: "mono", "data-name": "before" }, change.before ?? absent(change.path)),
      make("td", { class: "mono", "data-name": "after" }, change.now ?? absent(change.path)))))),
  make("p", { class: "note" }, left(run.changes.left_out, "changes"))];
}
