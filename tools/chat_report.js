/* What stands above the runs' curves: the stages, their scores, the answers, and the plan. */

const road = data.road;
/* A table whose first `texts` columns hold text; a value with `href` is a link. */
function fill(id, names, rows, texts) {
  const cell = (value, column) => make("td", { class: column + 1 < texts ? "" : "num", "data-name": names[column + 1] },
    value.href ? make("a", { href: value.href }, value.text) : value);
  $(id).replaceChildren(header(names, texts), make("tbody", {}, ...rows.map(([first, ...rest]) =>
    make("tr", {}, rowHead(first), ...rest.map(cell)))));
}
$("road-title").textContent = road.title;
$("road-facts").replaceChildren(...road.facts.map(([name, value, note]) =>
  make("div", { class: "fact" }, make("span", {}, name), make("b", {}, value), make("small", {}, note))));
fill("stages", ["stage", "what it learns or does", "data", "page", "time"], road.stages, 4);
const command = text => make("p", {}, make("code", { style: "overflow-wrap: anywhere" }, text));
$("commands").replaceChildren(...road.commands.map(command));
fill("scores", road.scores.names, road.scores.rows, 1);
$("scores-note").textContent = road.scores.note;
fill("talk", ["question", "answer", "right answer", "question is"], road.talk, 4);
$("plan").replaceChildren(...road.plan.map(text => make("p", {}, text)));
