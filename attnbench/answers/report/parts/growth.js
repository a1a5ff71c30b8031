// Time over length on two log scales, with the claimed power of n as a thin line.

const DASH = ["", "7 2", "3.5 2", "6 2 1 2", "1.5 1.8"];
const MARK = 3.2;
// Corners of the markers, in the order of attnbench plot; an empty one is a circle.
const CORNERS = [
  "", "-1,-1 1,-1 1,1 -1,1", "0,-1.3 1.2,1 -1.2,1", "0,-1.4 1.4,0 0,1.4 -1.4,0", "0,1.3 1.2,-1 -1.2,-1",
  "-.45,-1.3 .45,-1.3 .45,-.45 1.3,-.45 1.3,.45 .45,.45 .45,1.3 -.45,1.3 -.45,.45 -1.3,.45 -1.3,-.45 -.45,-.45",
  "-1.2,-.5 -.5,-1.2 0,-.6 .5,-1.2 1.2,-.5 .6,0 1.2,.5 .5,1.2 0,.6 -.5,1.2 -1.2,.5 -.6,0",
  "-1.3,0 1,-1.2 1,1.2", "1.3,0 -1,-1.2 -1,1.2", "0,-1.3 1.25,-.4 .75,1.1 -.75,1.1 -1.25,-.4",
  "-.7,-1.2 .7,-1.2 1.4,0 .7,1.2 -.7,1.2 -1.4,0", "0,-1.5 .4,-.4 1.5,-.4 .6,.3 .9,1.4 0,.7 -.9,1.4 -.6,.3 -1.5,-.4 -.4,-.4",
];

function marker(parent, kind, x, y) {
  if (!CORNERS[kind]) return draw(parent, "circle", { class: "marks", cx: x, cy: y, r: MARK });
  const corners = CORNERS[kind].split(" ").map((pair) => pair.split(",").map((one) => Number(one) * MARK));
  return draw(parent, "polygon", { class: "marks", points: corners.map(([a, b]) => `${x + a},${y + b}`).join(" ") });
}

function drawGrowth(section) {
  const figure = byId(`growth-figure-${section.id}`);
  if (!figure) return;
  const view = section.views[section.state.view];
  figure.hidden = !view.lines.length;
  byId(`growth-title-${section.id}`).hidden = !view.lines.length;
  if (!view.lines.length) return;
  legendOf(section, view);
  const holder = byId(`growth-${section.id}`);
  const width = Math.max(280, holder.clientWidth);
  const height = Math.min(440, Math.max(300, width * 0.62));
  const frame = { left: 62, right: width - 14, top: 18, bottom: height - 44 };
  const lines = view.lines.map((line) => ({ ...line, rows: line.rows.map((place) => section.rows[place]) }));
  const rows = lines.flatMap((line) => line.rows);
  const lengths = [...rows.map((row) => row.n), ...lines.flatMap((line) => (line.stopped ? [line.stopped[0]] : []))];
  const x = logScale(...padded(lengths, 0.03), frame.left, frame.right);
  const y = logScale(...padded(rows.flatMap((row) => [row.time, row.time_low, row.time_high]), 0.04), frame.bottom, frame.top);
  const svg = canvas(holder, width, height, `${view.name}: time over length`);
  const measured = [...new Set(lengths)].sort((a, b) => a - b);
  x.ticks = (_, most) => measured.filter((_n, k) => k % Math.ceil(measured.length / Math.max(2, most)) === 0);
  axes(svg, frame, x, y, {
    xBase: 2, xText: tokens, xTitle: "length n (log scale)", yBase: 10, yText: (value) => trimmed(seconds(value)),
  });
  draw(svg, "text", { class: "soft", x: 0, y: 8 }, "time of one call (log scale)");
  const groups = lines.map((line, k) => drawLine(svg, section, line, k, x, y, frame));
  roving(groups);
  dimLines(section);
}

function drawLine(svg, section, line, place, x, y, frame) {
  const group = colour(draw(svg, "g", { class: "line", role: "img", "data-line": place }), line.rows[0].family);
  const power = powerWords(line);
  group.setAttribute("aria-label", [line.name, power].filter(Boolean).join(": "));
  const last = line.rows[line.rows.length - 1];
  const withEnds = line.rows.filter((row) => row.time_low !== null && row.time_high !== null);
  if (withEnds.length > 1) {
    const up = withEnds.map((row) => `${x(row.n)},${y(row.time_high)}`);
    const down = withEnds.map((row) => `${x(row.n)},${y(row.time_low)}`).reverse();
    draw(group, "polygon", { class: "spread", points: [...up, ...down].join(" ") });
  }
  if (line.claim !== null && line.rows.length > 1) {
    const [from, to] = clipped(line.rows[0].n, last, line.claim, y, frame);
    draw(group, "path", { class: "claim", d: `M${x(from)},${y(last.time * (from / last.n) ** line.claim)}L${x(to)},${y(last.time)}` });
  }
  const path = line.rows.map((row, k) => `${k ? "L" : "M"}${x(row.n)},${y(row.time)}`).join("");
  draw(group, "path", { d: path, "stroke-dasharray": DASH[line.dash] });
  draw(group, "path", { class: "hit", d: path });
  for (const row of line.rows) marker(group, line.marker, x(row.n), y(row.time));
  if (line.stopped) {
    const at = x(line.stopped[0]);
    const high = Math.max(frame.top + 6, y(last.time * (line.stopped[0] / last.n) ** (line.power || 1)));
    draw(group, "path", { class: "stop", d: `M${at - 4},${high - 4}l8,8m0,-8l-8,8` });
  }
  tells(group, () => [line.name, [
    ...(power ? [["power of n", power]] : []),
    ...line.rows.map((row) => [`n = ${row.n}`, `${seconds(row.time)}${row.time_low === null ? "" : `, ${ends(row.time_low, row.time_high, seconds)}`}`]),
    ...(line.stopped ? [[`n = ${line.stopped[0]}`, line.stopped[1]]] : []),
  ]]);
  lights(section, group, place);
  return group;
}

// The part of the claimed line that is inside the frame.
function clipped(first, last, claim, y, frame) {
  const least = y.low * 1.0001;
  if (claim <= 0 || last.time * (first / last.n) ** claim >= least) return [first, last.n];
  return [last.n * (least / last.time) ** (1 / claim), last.n];
}

function powerWords(line) {
  const measured = line.power === null ? "" : `n^${line.power.toFixed(2)}`;
  const claimed = line.claim === null ? "" : `claimed n^${line.claim}`;
  return [measured, claimed].filter(Boolean).join(", ");
}

function legendOf(section, view) {
  const table = byId(`lines-${section.id}`);
  table.replaceChildren();
  const head = add(add(table, "thead"), "tr");
  add(head, "th", { scope: "col" }, "");
  add(head, "th", { scope: "col" }, "variant");
  add(head, "th", { scope: "col", class: "number" }, "power");
  add(head, "th", { scope: "col", class: "number" }, "claimed");
  const body = add(table, "tbody");
  view.lines.forEach((line, place) => {
    const row = add(body, "tr", { "data-line": place });
    const family = section.rows[line.rows[0]].family;
    const svg = colour(draw(add(row, "td"), "svg", { width: 34, height: 14, "aria-hidden": "true", class: "line" }), family);
    draw(svg, "path", { d: "M1,7H33", "stroke-dasharray": DASH[line.dash] });
    marker(svg, line.marker, 17, 7);
    add(add(row, "th", { scope: "row" }), "bdi", {}, line.name);
    const half = line.half === null || line.half < 0.005 ? "" : ` ±${line.half.toFixed(2)}`;
    const power = line.power === null ? "–" : line.power.toFixed(2) + half;
    add(row, "td", { class: line.above ? "number more" : "number" }, power);
    add(row, "td", { class: "number" }, line.claim === null ? "–" : String(line.claim));
    lights(section, row, place);
  });
}

// Pointing at a line, or at its name, makes the others pale.
function lights(section, element, place) {
  const light = (wanted) => () => {
    const svg = byId(`growth-${section.id}`).querySelector("svg");
    if (!svg) return;
    svg.classList.toggle("quiet", wanted);
    for (const group of svg.querySelectorAll("g.line")) group.classList.toggle("on", wanted && Number(group.dataset.line) === place);
  };
  element.addEventListener("pointerenter", light(true));
  element.addEventListener("pointerleave", light(false));
  element.addEventListener("focus", light(true));
  element.addEventListener("blur", light(false));
}

function dimLines(section) {
  const holder = byId(`growth-${section.id}`);
  if (!holder) return;
  const { lines } = section.views[section.state.view];
  for (const group of holder.querySelectorAll("g.line")) {
    group.classList.toggle("dim", lines[Number(group.dataset.line)].rows.every((place) => section.rows[place].out));
  }
}
