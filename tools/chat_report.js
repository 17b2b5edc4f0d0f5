/* What stands above the runs' curves: the stages, their scores, the answers, and the plan. */

const road = data.road;
const cell = value => typeof value === "object" && value !== null
  ? make("td", {}, value.href ? make("a", { href: value.href }, value.text) : make("code", { class: "command" }, value.text))
  : make("td", { class: typeof value === "number" ? "num" : "" }, typeof value === "number" ? numberText(value) : value ?? "–");
function fill(id, names, rows, texts) {
  $(id).replaceChildren(header(names, texts), make("tbody", {}, ...rows.map(([first, ...rest]) =>
    make("tr", {}, make("th", { scope: "row" }, first), ...rest.map(cell)))));
}
$("road-title").textContent = road.title;
$("road-facts").replaceChildren(...road.facts.map(([name, value, note]) =>
  make("div", { class: "fact" }, make("span", {}, name), make("b", {}, value), make("small", {}, note))));
fill("stages", ["stage", "what", "data", "time", "page", "command"], road.stages, 6);
fill("scores", road.scores.names, road.scores.rows, 1);
$("scores-note").textContent = road.scores.note;
fill("talk", ["question", "answer", "right answer", "asked in training"], road.talk, 4);
$("plan").replaceChildren(...road.plan.map(text => make("p", {}, text)));
