/* The head of the page, what is shown again when there is newer data, and asking for it. */

function showHead() {
  const several = data.runs.length > 1, [run] = data.runs;
  $("kicker").textContent = several ? `${data.runs.length} runs` : "Run";
  const names = [...new Set(data.runs.map(one => one.experiment))];
  $("title").replaceChildren(...names.join(", ").split(/(?<=\.)/).flatMap(part => [part, make("wbr")]));
  $("state").replaceChildren(...(several ? [] : [make("span", { class: `state ${run.state.tone}` }, run.state.text),
    make("span", { class: "note" }, run.state.note)]));
  const rows = several ? [] : [["directory", run.path], ...run.about];
  $("about").replaceChildren(...(rows.length ? [make("dl", { class: "about" }, ...rows.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]))] : []));
  $("facts").hidden = several || !run.facts.length;
  $("facts").replaceChildren(...(several ? [] : run.facts.map(([name, value, note, tone]) =>
    make("div", { class: `fact ${tone}` }, make("span", {}, name), make("b", {}, value), make("small", {}, note)))));
  showRuns(several);
  const notes = data.runs.flatMap(one => one.notes.map(text => several ? `${one.name}: ${text}` : text));
  $("notes").replaceChildren(...(notes.length ? [make("div", { class: "card notes", role: "note" }, make("h2", {}, "Not everything could be read"),
    ...notes.map(text => make("p", {}, text)))] : []));
  document.title = `${data.runs.map(one => one.name).join(", ")}: ${several ? "runs" : run.state.text}`;
  $("written").textContent = `Written ${clock(data.written)} by spmd-trainer.`;
}
/* The table of several runs. Each has its own columns of facts: a fact that a run has not is left blank. */
function showRuns(several) {
  $("runs").hidden = $("toggles").hidden = !several;
  if (!several) return;
  const names = [...new Set(data.runs.flatMap(run => run.facts.map(fact => fact[0])))].filter(name => name !== "Step");
  const rows = data.runs.map((run, number) => make("tr", {}, make("th", { scope: "row" }, runName(number), make("small", { class: "path" }, run.path)),
    make("td", { class: run.state.tone, "data-name": "state" }, run.state.text),
    ...names.map(name => {
      const fact = run.facts.find(one => one[0] === name);
      return make("td", { class: "num", "data-name": name, title: fact ? fact[2] : "" }, fact ? fact[1] : "–");
    })));
  $("runs-table").className = "listed";
  $("runs-table").replaceChildren(header(["run", "state", ...names], 2), make("tbody", {}, ...rows));
  $("toggles").replaceChildren(...data.runs.map((_, number) => toggle(number)));
}
function toggle(number) {
  const button = make("button", { type: "button", "aria-pressed": !view.hidden.has(number) }, runName(number));
  button.onclick = () => {
    if (!view.hidden.delete(number)) view.hidden.add(number);
    button.setAttribute("aria-pressed", !view.hidden.has(number));
    redraw();
  };
  return button;
}

/* Parts of the page and what they show; a part is drawn again only if that has changed, so that choices and positions stay. */
const SHOWN = [
  [showHead, () => [data.runs.map(run => [run.state, run.facts, run.about, run.notes]), data.written]],
  [showCurves, () => [data.charts, data.runs.map(run => [run.restarts, run.invalid, run.spikes])]],
  [showExperts, () => data.runs.map(run => run.experts)],
  [showTimes, () => data.runs.map(run => [run.times, run.goodput])],
  [showLayout, () => data.runs.map(run => run.report)],
  [showSamples, () => data.runs.map(run => run.samples)],
  [showWarnings, () => data.runs.map(run => run.warnings)],
  [showSettings, () => [data.settings, data.differences, data.runs.map(run => [run.overrides, run.changes])]],
];
const drawn = new Map();
function showAll() {
  for (const [show, of] of SHOWN) {
    const now = JSON.stringify(of());
    if (drawn.get(show) === now) continue;
    drawn.set(show, now);
    show();
  }
}
$("experts-layer").onchange = showExperts;
$("layout-run").onchange = showLayout;
$("samples-group").onchange = showSamples;
showAll();

/* A page that is served asks for newer data; the server says by the tag whether there is any. */
const FOLLOW_SECONDS = 2;
let tag = null;
async function ask() {
  try {
    const answer = await fetch("data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag");
      data = await answer.json();
      showAll();
    }
    $("written").textContent = `Following the run; newest data of ${clock(data.written)}.`;
  } catch (error) {
    $("written").textContent = `The server has ended; this is how the run was at ${clock(data.written)}.`;
  }
  setTimeout(ask, 1000 * FOLLOW_SECONDS);
}
if (data.follow) ask();
