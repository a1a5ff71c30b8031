// Scores by training: a panel for each task, on one scale for all of them.

const STRIP = 100; // per cent of a strip's width

function drawTasks(section) {
  const holder = byId(`tasks-${section.id}`);
  if (!holder) return;
  const values = section.tasks.flatMap((task) => [
    task.chance, task.still,
    ...task.parts.flatMap((part) => [part.mean, part.low, part.high, ...part.seeds]),
  ]).filter((value) => value !== null);
  const low = Math.min(...values);
  const high = Math.max(...values);
  const extra = 0.03 * (high - low) || 0.05;
  const x = linearScale(low - extra, high + extra, 0, STRIP);
  for (const task of section.tasks) {
    const panel = add(holder, "div");
    add(panel, "h4", {}, task.name);
    const table = add(add(panel, "div", { class: "box" }), "table");
    const head = add(add(table, "thead"), "tr");
    add(head, "th", { scope: "col" }, "variant");
    const scale = add(add(head, "th", { scope: "col", class: "strip", "aria-label": "score on a scale" }), "span");
    for (const end of [low, high]) add(scale, "span", {}, end.toFixed(2));
    add(head, "th", { scope: "col", class: "number" }, "score");
    if (task.reference) add(head, "th", { scope: "col", class: "number" }, "minus softmax");
    const body = add(table, "tbody");
    for (const part of task.parts) taskRow(body, section, task, part, x);
  }
}

function taskRow(body, section, task, part, x) {
  const row = colour(add(body, "tr"), part.family);
  const [name, options] = splitLabel(part.label);
  const head = add(row, "th", { scope: "row" });
  add(head, "bdi", {}, name);
  if (options) breakable(add(add(head, "small"), "bdi"), options);
  const svg = draw(add(row, "td", { class: "strip" }), "svg", { "aria-hidden": "true" });
  if (task.band) {
    const [from, to] = task.band.map(x);
    draw(svg, "rect", { class: "band", x: `${from}%`, y: 0, width: `${Math.max(0.5, to - from)}%`, height: 22 });
  }
  draw(svg, "line", { class: "grid", x1: 0, x2: "100%", y1: 11, y2: 11 });
  const upright = (name, value, top = 0) => draw(svg, "line", { class: name, x1: `${x(value)}%`, x2: `${x(value)}%`, y1: top, y2: 22 - top });
  if (task.chance !== null) upright("reference", task.chance);
  if (task.still !== null) upright("reference still", task.still);
  if (part.low !== null) draw(svg, "line", { class: "span", x1: `${x(part.low)}%`, x2: `${x(part.high)}%`, y1: 11, y2: 11 });
  if (part.seeds.length > 1) part.seeds.forEach((seed) => upright("seed", seed, 6));
  draw(svg, "circle", { class: part.hollow ? "mean hollow" : "mean", cx: `${x(part.mean)}%`, cy: 11, r: 4 });
  const score = add(row, "td", { class: "number" }, part.mean.toFixed(3));
  if (part.low !== null) score.title = `${part.low.toFixed(3)} to ${part.high.toFixed(3)}`;
  if (task.reference) lessCell(add(row, "td", { class: "number" }), part);
}

function lessCell(cell, part) {
  if (!part.less) {
    cell.textContent = "–";
    return;
  }
  const [mean, low, high, verdict] = part.less;
  const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`.replace(/[+−](0\.000)$/, "$1");
  cell.textContent = signed(mean) + (verdict === "better" || verdict === "worse" ? ` ${verdict}` : "");
  if (low !== null) add(cell, "small", {}, ` ${signed(low)} to ${signed(high)}`);
}

function splitLabel(label) {
  const at = label.indexOf(":");
  return at < 0 ? [label, ""] : [label.slice(0, at), label.slice(at + 1)];
}
