// Speed to the right, agreement, score or less loss upwards, peak memory as area.

const EXACT = 0;
const MEASURED = 1;
const MISSING = 2;
const LANE = 20;
const TITLE = 16;
const GAP = 18;

function drawTradeoff(section) {
  const holder = byId(`tradeoff-${section.id}`);
  const view = section.views[section.state.view];
  const found = view && view.at[section.state.n];
  if (!found) return;
  const width = Math.max(300, holder.clientWidth);
  const largest = Math.min(24, width / 26);
  const points = pointsOf(section, found, largest);
  const exact = points.filter((point) => point.kind === EXACT);
  const placeless = points.filter((point) => point.kind > MEASURED);
  const measured = points.filter((point) => point.kind === MEASURED);
  const frame = { left: view.log ? 48 : 40, right: width - 14, top: 4 };
  const x = logScale(...padded(points.flatMap((p) => [p.speed, p.fast, p.slow]), 0.08), frame.left + largest, frame.right - largest);
  for (const point of points) {
    point.x = x(point.speed);
    point.spread = point.fast === null || point.slow === null ? null : [x(point.slow), x(point.fast)];
  }
  const above = bandHeight(exact);
  const below = bandHeight(placeless);
  const tall = measured.length ? Math.min(430, Math.max(250, width * 0.42)) : 0;
  const scaleTop = frame.top + above + (tall ? GAP : 0);
  const scaleBottom = scaleTop + tall;
  frame.bottom = scaleBottom + (below && tall ? 8 : 0) + below;
  const svg = canvas(holder, width, frame.bottom + 44, `${about(view)} at n = ${section.state.n}; arrow keys go from variant to variant`);
  const y = measured.length ? scaleOf(view, found, measured, scaleTop + largest * 0.7, scaleBottom - largest * 0.7) : null;
  const inner = { ...frame, top: scaleTop, bottom: scaleBottom };
  const taken = [];
  if (above) band(svg, frame, frame.top, above, whyExact(view), taken);
  if (below) band(svg, frame, frame.bottom - below, below, whyPlaceless(placeless, view), taken);
  if (y) backdrop(svg, inner, y, found, view, taken);
  axes(svg, frame, x, y || linearScale(0, 1, 0, 1), {
    xBase: 2, xText: halves, xTitle: "examples per second, faster →",
    yBase: 10, yText: y ? plain : () => "",
  });
  for (const point of points) {
    if (point.kind === MEASURED) point.y = y(point.value);
    else point.y = (point.kind === EXACT ? frame.top : frame.bottom - below) + point.down;
    if (point.spread) taken.push({ own: point, left: point.spread[0], right: point.spread[1], top: point.y - 1, bottom: point.y + 1 });
  }
  if (y) referenceLines(svg, inner, y, found, taken);
  front(svg, section, found, points, y ? inner.bottom : frame.bottom);
  const names = namePlaces(points, { ...frame, left: frame.left - 30, right: width }, taken);
  const made = [...points].sort((a, b) => b.radius - a.radius).map((point) => [point, mark(svg, section, point, y)]);
  for (const [point, group] of made) {
    const at = names.get(point);
    if (at) draw(group, "text", { class: "halo", ...at }, point.name);
  }
  roving(made.sort(([a], [b]) => a.x - b.x).map(([, group]) => group));
  keyOf(section, points, largest);
  captionOf(section, view, found, points.length - names.size);
  const what = exact.length || measured.length ? `Speed against ${view.y}` : "Speed and memory";
  byId(`tradeoff-title-${section.id}`).textContent = what;
  dimFiltered(section);
}

const about = (view) => `${view.name}: speed against ${view.y}`;

function pointsOf(section, found, largest) {
  const memories = found.points.map(([place]) => section.rows[place].peak).filter((size) => size > 0);
  const most = Math.max(...memories, 1);
  return found.points.map(([place, kind, value, low, high]) => {
    const row = section.rows[place];
    const known = row.peak !== null && row.peak > 0;
    return {
      place, row, kind, value, low, high, known,
      name: shortened(section.names[row.label] || row.label, 11.5, 150),
      speed: row.speed,
      fast: row.time_low === null ? null : (row.speed * row.time) / row.time_low,
      slow: row.time_high === null ? null : (row.speed * row.time) / row.time_high,
      radius: known ? Math.max(3, largest * Math.sqrt(row.peak / most)) : 6,
      front: found.front.includes(place),
    };
  });
}

const ofTrained = (view) => view.value === "loss_delta" || view.value === "features";

function whyExact(view) {
  return ofTrained(view) ? "as the untouched model, but for rounding" : "exact: no error but rounding";
}

function whyPlaceless(points, view) {
  if (view.value !== "error") return `no ${view.y}`;
  const missing = points.every((point) => point.kind === MISSING);
  return missing ? "no error measured" : "another operator, not fitted, or no error measured";
}

// Height of a band under its title; each point gets its place from the top of it.
function bandHeight(points) {
  if (!points.length) return 0;
  lanes(points, 9);
  const least = Math.min(...points.map((point) => point.lane * LANE - point.radius));
  const most = Math.max(...points.map((point) => point.lane * LANE + point.radius));
  for (const point of points) point.down = TITLE + 4 + point.lane * LANE - least;
  return TITLE + most - least + 9;
}

function scaleOf(view, found, measured, top, bottom) {
  const values = measured.flatMap((point) => [point.value, point.low, point.high]).filter((value) => value !== null);
  values.push(...found.lines.map(([, value]) => value));
  if (view.log) return logScale(...padded(values, 0.04), top, bottom);
  const low = Math.min(...values);
  const high = Math.max(...values);
  const extra = Math.max(0.03 * (high - low), 0.005);
  if (view.down) return linearScale(low - extra, high + extra, top, bottom);
  return linearScale(Math.max(0, low - extra), Math.min(1, high + extra), bottom, top);
}

function band(svg, frame, top, height, said, taken) {
  draw(svg, "rect", { class: "band", x: frame.left, y: top, width: frame.right - frame.left, height });
  draw(svg, "text", { class: "soft", x: frame.left + 6, y: top + 13 }, shortened(said, 12, frame.right - frame.left - 12));
  taken.push({ left: frame.left, right: frame.left + widthOf(said, 12) + 8, top, bottom: top + 15 });
}

function backdrop(svg, inner, y, found, view, taken) {
  const wide = inner.right - inner.left;
  if (found.trivial !== null && found.trivial !== undefined) {
    const top = Math.max(inner.top, y(found.trivial));
    draw(svg, "rect", { class: "worse", x: inner.left, y: top, width: wide, height: Math.max(0, inner.bottom - top) });
  }
  if (found.band) {
    const [low, high] = found.band;
    draw(svg, "rect", { class: "band", x: inner.left, y: y(high), width: wide, height: Math.max(1, y(low) - y(high)) });
  }
  const said = view.axis + (view.down ? ", less upwards" : "");
  draw(svg, "text", { class: "soft", x: 0, y: inner.top - 5 }, said);
  taken.push({ left: 0, right: widthOf(said, 12), top: inner.top - 16, bottom: inner.top - 2 });
}

function referenceLines(svg, inner, y, found, taken) {
  for (const [name, value] of found.lines) {
    const at = y(value);
    draw(svg, "line", { class: "reference", x1: inner.left, x2: inner.right, y1: at, y2: at });
    const said = `${name}: ${plain(Number(value.toPrecision(3)))}`;
    const wide = widthOf(said, 12);
    for (const base of [at - 4, at + 13]) {
      const box = { left: inner.left + 4, right: inner.left + wide + 8, top: base - 11, bottom: base + 3 };
      if (box.right < inner.right && taken.every((one) => apart(one, box))) {
        draw(svg, "text", { class: "soft halo", x: inner.left + 6, y: base }, said);
        taken.push(box);
        break;
      }
    }
  }
}

// Steps: what lies below and left of them is beaten in both.
function front(svg, section, found, points, bottom) {
  const corners = found.front.map((place) => points.find((point) => point.place === place)).filter(Boolean);
  if (corners.length < 2) return;
  let path = `M${corners[0].x},${bottom}`;
  corners.forEach((corner, k) => {
    path += `V${corner.y}`;
    if (k + 1 < corners.length) path += `H${corners[k + 1].x}`;
  });
  draw(svg, "path", { class: "front", d: path });
}

function mark(svg, section, point, y) {
  const { row } = point;
  const group = colour(draw(svg, "g", { class: "point", role: "button", "data-row": point.place }), row.family);
  const view = section.views[section.state.view];
  const said = point.kind === MEASURED && point.value !== null ? plain(Number(point.value.toPrecision(2))) : "";
  const what = point.kind === EXACT ? "exact" : said && `${view.y} ${said}`;
  const parts = [row.label, `${plain(Number(row.speed.toPrecision(3)))} examples per second`, what, `peak memory ${bytes(row.peak)}`];
  group.setAttribute("aria-label", parts.filter(Boolean).join(", "));
  group.setAttribute("aria-pressed", "false");
  if (!point.known) group.classList.add("unknown");
  draw(group, "circle", { class: "dot", cx: point.x, cy: point.y, r: point.radius });
  if (point.spread) draw(group, "line", { x1: point.spread[0], x2: point.spread[1], y1: point.y, y2: point.y });
  if (point.kind === MEASURED && point.low !== null && point.high !== null && (point.low > 0 || !view.log)) {
    draw(group, "line", { x1: point.x, x2: point.x, y1: y(point.low), y2: y(point.high) });
  }
  tells(group, () => [row.label, aboutPoint(section, point)]);
  group.addEventListener("click", () => choose(section, point.place, "point"));
  group.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    choose(section, point.place, "point");
  });
  return group;
}

// The row, with the error or score that stands beside it; that is often measured in a row of its own.
function aboutPoint(section, point) {
  const lines = aboutRow(point.row);
  const { value, y } = section.views[section.state.view];
  if (point.kind === EXACT && value === "error") lines.push(["error", "exact"]);
  if (point.kind === MEASURED && point.row[value] === null) {
    const said = ends(point.low, point.high, (value) => plain(Number(value.toPrecision(2))));
    lines.push([y, plain(Number(point.value.toPrecision(3))) + (said && ` (${said})`)]);
  }
  return lines;
}

function keyOf(section, points, largest) {
  const key = byId(`key-${section.id}`);
  key.replaceChildren();
  for (const family of [...new Set(points.map(({ row }) => row.family))].sort((a, b) => a - b)) {
    const one = colour(add(key, "span"), family);
    add(one, "i");
    one.append(data.families[family] || "family not known");
  }
  const most = Math.max(...points.map(({ row }) => row.peak || 0));
  if (!most) return;
  const top = 2 ** Math.floor(Math.log2(most));
  for (const size of [top, top / 8]) {
    const radius = Math.max(3, largest * Math.sqrt(size / most));
    const one = add(key, "span", { class: "size" });
    const svg = draw(one, "svg", { width: 2 * radius + 2, height: 2 * radius + 2, "aria-hidden": "true" });
    draw(svg, "circle", { cx: radius + 1, cy: radius + 1, r: radius });
    one.append(trimmed(bytes(size)));
  }
}

const SPREAD = {
  error: "; of an error, one standard deviation over draws",
  score: " and of a score",
  loss_delta: ", and of the median loss over windows",
  features: "",
};

function captionOf(section, view, found, unnamed) {
  const caption = byId(`caption-${section.id}`);
  caption.replaceChildren();
  const front = found.front.length > 1 ? ` Dashed: the Pareto front; what lies below and left of it is beaten in speed and in ${view.y}.` : "";
  const shaded = found.trivial === null || found.trivial === undefined ? "" : " Shaded: no better than answering mean(V).";
  const band = found.band ? " Band: softmax's interval." : "";
  const names = unnamed ? ` ${unnamed} without room for a name say it when pointed at.` : "";
  add(caption, "p", {}, `Area: peak memory. Crosses: 95 % intervals of time${SPREAD[view.value]}.${front}${shaded}${band}${names}`);
  add(caption, "p", {}, `${view.name}. ${found.said}.`);
  for (const line of found.left) add(caption, "p", {}, line);
}

// Points and lines of rows that the filter leaves out are pale.
function dimFiltered(section) {
  for (const point of byId(`tradeoff-${section.id}`).querySelectorAll(".point")) {
    const place = Number(point.dataset.row);
    point.classList.toggle("dim", section.rows[place].out);
    point.classList.toggle("on", place === section.state.row);
    point.setAttribute("aria-pressed", String(place === section.state.row));
  }
}
