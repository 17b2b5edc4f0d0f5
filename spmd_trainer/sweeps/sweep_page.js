/* The page of a sweep: the facts, parallel coordinates, curves and the table of trials. */

const data = JSON.parse($("data").textContent);
const HEIGHT = 300, TOP = 44, BOTTOM = 30;
const lines = new Map();
const nameOf = text => text.split(".").pop();
const valueText = value => typeof value === "number" ? Number(value.toPrecision(5)).toString() : String(value);
const resultText = trial => trial.diverged ? "diverged" : trial.value === null ? "none" : valueText(trial.value);
const described = trial =>
  [`trial ${trial.number}`, ...data.paths.map(name => `${nameOf(name)} ${valueText(trial.values[name])}`),
    `${data.metric} ${resultText(trial)}`].join(", ");

function choose(trial) {
  for (const element of document.querySelectorAll(".chosen")) element.classList.remove("chosen");
  for (const element of trial ? lines.get(trial.number) || [] : []) element.classList.add("chosen");
  $("readout").textContent = trial ? described(trial) : "";
}
function remember(trial, element) {
  if (!lines.has(trial.number)) lines.set(trial.number, []);
  lines.get(trial.number).push(element);
  return element;
}
function follow(trial, element) {
  element.addEventListener("pointerenter", () => choose(trial));
  element.addEventListener("pointerleave", () => choose(null));
  return element;
}
const kindOf = trial => `${trial.status}${trial.number === data.best ? " best" : ""}`;

/* A scale of an axis: {place: value -> 0 to 1, marks: [[text, place]]}. */
function scaleOf(values) {
  if (!values.every(value => typeof value === "number")) {
    const texts = [...new Set(values.map(String))];
    const place = value => texts.length > 1 ? texts.indexOf(String(value)) / (texts.length - 1) : 0.5;
    return { place, marks: texts.map(text => [text.length > 18 ? `${text.slice(0, 17)}…` : text, place(text)]) };
  }
  const low = Math.min(...values), high = Math.max(...values);
  const isLog = low > 0 && high / low >= 20;
  const size = value => isLog ? Math.log(value) : value;
  const place = value => high > low ? (size(value) - size(low)) / (size(high) - size(low)) : 0.5;
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  const marks = distinct.length <= 6 ? distinct
    : isLog ? [low, Math.sqrt(low * high), high] : linearTicks(low, high, 4).filter(x => x >= low && x <= high);
  return { place, marks: marks.map(value => [Number(value.toPrecision(3)).toString(), place(value)]) };
}

function drawParallel() {
  const shown = data.trials.filter(trial => trial.value !== null);
  const svg = $("parallel"), width = Math.max(svg.clientWidth, 280);
  svg.replaceChildren();
  svg.setAttribute("height", HEIGHT);
  if (!shown.length) return;
  const axes = [...data.paths.map(name => [nameOf(name), trial => trial.values[name]]), [data.metric, trial => trial.value]];
  const scales = axes.map(([, read]) => scaleOf(shown.map(read)));
  const x = index => 60 + (width - 120) * (axes.length > 1 ? index / (axes.length - 1) : 0.5);
  /* Good results are at the top. */
  const turned = index => index === axes.length - 1 && data.goal === "min";
  const y = (index, place) => TOP + (HEIGHT - TOP - BOTTOM) * (turned(index) ? place : 1 - place);
  for (const trial of [...shown].reverse()) {
    const points = axes.map(([, read], index) => `${x(index)},${y(index, scales[index].place(read(trial)))}`).join(" ");
    svg.append(
      remember(trial, draw("polyline", { class: `line ${kindOf(trial)}`, points })),
      follow(trial, draw("polyline", { class: "hit", points })),
    );
  }
  axes.forEach(([name], index) => {
    svg.prepend(draw("line", { class: "axis", x1: x(index), x2: x(index), y1: TOP, y2: HEIGHT - BOTTOM }));
    svg.append(draw("text", { class: "axis-name", x: x(index), y: 16, "text-anchor": "middle" }, name));
    const rows = [];
    for (const [text, place] of scales[index].marks) {
      const row = y(index, place);
      if (rows.some(other => Math.abs(other - row) < 13)) continue;
      rows.push(row);
      svg.append(draw("text", { x: x(index) + 6, y: row + 4 }, text));
    }
  });
}

function drawCurves() {
  const shown = data.trials.filter(trial => trial.curve.length);
  const svg = $("curves"), width = Math.max(svg.clientWidth, 280);
  svg.replaceChildren();
  svg.setAttribute("height", HEIGHT);
  if (!shown.length) return;
  const steps = shown.flatMap(trial => trial.curve.map(([step]) => step));
  /* The first values are often far above the others: nine tenths of all points decide the height. */
  const values = shown.flatMap(trial => trial.curve.map(([, value]) => value)).sort((a, b) => a - b);
  const cut = Math.floor(0.05 * values.length);
  const [low, high] = data.goal === "min" ? [values[0], values[values.length - 1 - cut]] : [values[cut], values[values.length - 1]];
  const first = Math.min(...steps), last = Math.max(...steps);
  const x = step => 60 + (width - 80) * (last > first ? (step - first) / (last - first) : 0.5);
  const y = value => 10 + (HEIGHT - 40) * (high > low ? 1 - clamp((value - low) / (high - low), 0, 1.03) : 0.5);
  for (const tick of linearTicks(low, high, 5))
    svg.append(
      draw("line", { class: "axis", x1: 60, x2: width - 20, y1: y(tick), y2: y(tick) }),
      draw("text", { x: 54, y: y(tick) + 4, "text-anchor": "end" }, valueText(tick)),
    );
  for (const tick of linearTicks(first, last, 6))
    svg.append(draw("text", { x: x(tick), y: HEIGHT - 8, "text-anchor": "middle" }, many(tick)));
  for (const trial of [...shown].reverse()) {
    const points = trial.curve.map(([step, value]) => `${x(step)},${y(value)}`).join(" ");
    svg.append(
      remember(trial, draw("polyline", { class: `line ${kindOf(trial)}`, points })),
      follow(trial, draw("polyline", { class: "hit", points })),
    );
  }
}

function drawLaw() {
  $("law").hidden = !data.law;
  if (!data.law) return;
  const { points, line, exponent, floor, ahead, share } = data.law;
  const svg = $("law-plot"), width = Math.max(svg.clientWidth, 280);
  svg.replaceChildren();
  svg.setAttribute("height", HEIGHT);
  const losses = [...points.map(([, , loss]) => loss), ...line.flatMap(([, , low, high]) => [low, high])].filter(x => x > 0);
  const ends = (values) => [Math.log(Math.min(...values)), Math.log(Math.max(...values))];
  const [left, right] = ends(line.map(([flops]) => flops)), [low, high] = ends(losses);
  const x = flops => 60 + (width - 90) * (Math.log(flops) - left) / (right - left || 1);
  const y = loss => 10 + (HEIGHT - 50) * (1 - (Math.log(Math.max(loss, Math.exp(low))) - low) / (high - low || 1));
  for (const tick of linearTicks(Math.exp(low), Math.exp(high), 5).filter(tick => tick > 0))
    svg.append(
      draw("line", { class: "axis", x1: 60, x2: width - 30, y1: y(tick), y2: y(tick) }),
      draw("text", { x: 54, y: y(tick) + 4, "text-anchor": "end" }, valueText(tick)),
    );
  for (let power = Math.ceil(left / Math.LN10); power <= right / Math.LN10; power++)
    svg.append(draw("text", { x: x(10 ** power), y: HEIGHT - 22, "text-anchor": "middle" }, `1e${power}`));
  svg.append(draw("text", { x: width / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "FLOPs of training"));
  const at = (flops, loss) => `${x(flops)},${y(loss)}`;
  svg.append(
    draw("polygon", { class: "band", points: [...line.map(([c, , l]) => at(c, l)), ...[...line].reverse().map(([c, , , h]) => at(c, h))].join(" ") }),
    draw("polyline", { class: "line best", points: line.map(([c, mid]) => at(c, mid)).join(" ") }),
    ...points.map(([number, flops, loss]) =>
      draw("circle", { class: "point", cx: x(flops), cy: y(loss), r: 4 }, draw("title", {}, `trial ${number}`))),
  );
  const bars = ([value, lower, upper]) => `${valueText(value)} (${valueText(lower)} to ${valueText(upper)})`;
  $("law-text").textContent = `The loss falls to ${bars(floor)} with the compute to the power of ${bars(exponent.map(e => -e))}. ` +
    ahead.map(([times, ...loss]) => `With ${times} times the compute of the largest trial: ${bars(loss)}.`).join(" ") +
    ` In brackets: ${percent(share)} of the laws that the scatter of the trials allows.`;
}

function fillTable() {
  const rows = data.trials.map(trial => {
    const row = make("tr", { class: trial.number === data.best ? "best" : "" }, rowHead(String(trial.number)),
      make("td", {}, trial.status, ...(trial.reason ? [make("br"), make("small", {}, trial.reason)] : [])),
      ...data.paths.map(name => numberCell(valueText(trial.values[name]))),
      numberCell(resultText(trial)), numberCell(trial.step === null ? "" : many(trial.step)),
      numberCell(secondsText(trial.seconds || 0)));
    return follow(trial, remember(trial, row));
  });
  $("table").append(
    header(["Trial", "How it ended", ...data.paths.map(nameOf), data.metric, "Step", "Time"], 2), make("tbody", {}, ...rows));
}

function fillHead() {
  $("title").textContent = data.experiment;
  const about = { directory: data.directory, metric: `${data.metric}, ${data.goal === "min" ? "low" : "high"} is good`,
    method: data.method, varied: data.paths.join(", ") };
  for (const [name, text] of Object.entries(about)) $("about").append(make("dt", {}, name), make("dd", {}, text));
  const best = data.trials.find(trial => trial.number === data.best);
  const count = status => data.trials.filter(trial => trial.status === status).length;
  const others = ["pruned", "broken", "unfinished"].filter(count).map(status => `${count(status)} ${status}`);
  const diverged = data.trials.filter(trial => trial.diverged).length;
  const facts = [
    ["Trials", `${count("finished")} of ${data.total}`, ["finished", ...others, ...(diverged ? [`${diverged} diverged`] : [])].join(", ")],
    ["Best", best ? resultText(best) : "none yet", best ? described(best) : "no trial has finished"],
  ];
  for (const [name, value, note] of facts)
    $("facts").append(make("div", { class: "fact" }, make("span", {}, name), make("b", {}, value), make("small", {}, note)));
  $("command").textContent = data.command;
  $("best").hidden = !data.command;
}

fillHead();
fillTable();
const tableRows = new Map([...lines].map(([number, elements]) => [number, [...elements]]));
function drawAll() {
  lines.clear();
  for (const [number, elements] of tableRows) lines.set(number, [...elements]);
  drawParallel();
  drawCurves();
  drawLaw();
}
drawAll();
addEventListener("resize", drawAll);
