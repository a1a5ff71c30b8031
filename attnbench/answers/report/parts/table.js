// The table of rows: every row of the run, which filters and sorts.

const NUMBER = true;
const failedLast = (row, value) => (row.status === "ok" ? value : null);

const TABLE = [
  { key: "label", title: "variant", value: (row) => row.label.toLowerCase(), cell: labelCell },
  { key: "n", title: "n", number: NUMBER, value: (row) => row.n, cell: (cell, row) => write(cell, String(row.n)) },
  { key: "time", title: "time", number: NUMBER, value: (row) => failedLast(row, row.time), cell: timeCell, bar: timeBar },
  { key: "ratio", title: "vs softmax", number: NUMBER, value: (row) => row.ratio, cell: ratioCell, bar: ratioBar },
  { key: "first_token", title: "first token", number: NUMBER, value: (row) => row.first_token, cell: secondsCell("first_token") },
  { key: "per_token", title: "per token", number: NUMBER, value: (row) => row.per_token, cell: secondsCell("per_token") },
  { key: "state", title: "cache or state", number: NUMBER, value: (row) => row.state, cell: (cell, row) => write(cell, row.state === null ? "" : bytes(row.state)) },
  { key: "peak", title: "peak memory", number: NUMBER, value: (row) => row.peak, cell: (cell, row) => write(cell, row.peak === null ? "" : bytes(row.peak)) },
  { key: "error", title: "error", number: NUMBER, value: (row) => row.error, cell: errorCell },
  { key: "score", title: "score", number: NUMBER, value: (row) => row.score, cell: scoreCell, bar: scoreBar },
  { key: "loss", title: "loss", number: NUMBER, value: (row) => row.loss_delta, cell: lossCell },
  { key: "features", title: "features", number: NUMBER, value: (row) => row.features, cell: featuresCell },
  { key: "change", title: "vs older run", number: NUMBER, value: (row) => row.change, cell: changeCell },
  { key: "verdict", title: "verdict", value: (row) => row.verdict, cell: (cell, row) => write(cell, row.verdict || "") },
  { key: "about", title: "measured", value: (row) => row.about || null, cell: aboutCell },
  { key: "status", title: "status", value: (row) => (row.status === "ok" ? null : row.status), cell: statusCell },
];

function secondsCell(key) {
  return (cell, row) => write(cell, row[key] === null ? "" : seconds(row[key]));
}

function buildTable(section) {
  const table = byId(`table-${section.id}`);
  const head = add(add(table, "thead"), "tr");
  section.body = add(table, "tbody");
  section.columns = TABLE.filter((column) => section.rows.some((row) => column.value(row) !== null || (column.key === "error" && row.error_kind === "learned")));
  const scales = { time: timeScale(section.rows), ratio: ratioScale(section.rows), score: scoreScale(section.rows) };
  for (const column of section.columns) {
    const cell = add(head, "th", { scope: "col", class: column.number ? "number" : "" });
    const button = add(cell, "button", { type: "button" }, column.title);
    button.addEventListener("click", () => sortBy(section, column.key));
    column.head = column.head || new Map();
    column.head.set(section, cell);
    if (column.bar) add(head, "td", { "aria-hidden": "true" });
  }
  for (const row of section.rows) {
    row.line = add(section.body, "tr", { "data-row": row.place });
    for (const column of section.columns) {
      const first = column.key === "label";
      column.cell(add(row.line, first ? "th" : "td", first ? { scope: "row" } : { class: column.number ? "number" : column.key === "about" ? "about" : "why" }), row, section);
      if (column.bar) column.bar(add(row.line, "td", { "aria-hidden": "true" }), row, scales[column.key]);
    }
  }
}

function labelCell(cell, row, section) {
  const button = colour(add(cell, "button", { type: "button" }), row.family);
  add(button, "i", { class: "dot" });
  breakable(add(button, "bdi"), row.label);
  button.addEventListener("click", () => choose(section, row.place, "row"));
  tells(button, () => [row.label, aboutRow(row)]);
}

// A label may be broken after its variant and between its options, and within a word only if it must.
function breakable(element, label) {
  label.split(/(?<=[:,])/).forEach((part, k) => {
    if (k) add(element, "wbr");
    element.append(part);
  });
}

function aboutCell(cell, row) {
  add(cell, "bdi", {}, row.about.split(" · ").map((part) => part.replaceAll(" ", "\u00a0")).join(" · "));
}

function timeCell(cell, row) {
  if (row.time === null) return;
  cell.textContent = row.time_text;
  if (row.spread) add(cell, "span", { class: "ends", title: ends(row.time_low, row.time_high, seconds) }, ` ${row.spread}`);
}

function ratioCell(cell, row) {
  if (row.ratio === null) return;
  cell.textContent = speedup(row.ratio);
  const said = ends(row.ratio_low, row.ratio_high, factor);
  if (said) add(cell, "span", { class: "ends" }, ` ${said}`);
}

function errorCell(cell, row) {
  if (!row.error_text) return;
  cell.textContent = row.error_text;
  if (KIND_WORDS[row.error_kind]) cell.title = errorText(row);
  if (row.error_std && row.error > 1e-5) add(cell, "span", { class: "ends" }, ` sd ${plain(Number(row.error_std.toPrecision(1)))}`);
}

function changeCell(cell, row) {
  if (row.change === null) return;
  cell.textContent = speedup(row.change);
  const said = ends(row.change_low, row.change_high, factor);
  if (said) add(cell, "span", { class: "ends" }, ` ${said}`);
}

function scoreCell(cell, row) {
  if (row.score === null) return;
  cell.textContent = row.score.toFixed(3);
  if (row.score_low !== null) cell.title = ends(row.score_low, row.score_high, (value) => value.toFixed(3));
}

function lossCell(cell, row) {
  if (row.loss === null) return;
  cell.textContent = `${row.loss.toFixed(3)} (${signed(row.loss_delta)})`;
  cell.title = lossText(row);
}

function featuresCell(cell, row) {
  if (row.features !== null) cell.textContent = plain(Number(row.features.toPrecision(2)));
}

function statusCell(cell, row) {
  if (row.status === "ok") return;
  add(cell, "b", {}, row.status);
  if (row.reason) add(cell, "bdi", {}, ` ${row.reason}`);
}

const timeScale = (rows) => logScale(...padded(rows.flatMap((row) => [row.time, row.time_low, row.time_high]), 0.01), 0, 100);

// Equal on both sides of softmax's own speed.
function ratioScale(rows) {
  const far = rows.flatMap((row) => [row.ratio, row.ratio_low, row.ratio_high]).filter((value) => value !== null);
  const most = Math.max(1.2, ...far.map((value) => Math.max(value, 1 / value)));
  return logScale(1 / most, most, 2, 98);
}

function timeBar(cell, row, scale) {
  if (row.time !== null) barOf(cell, row, scale, row.time, row.time_low, row.time_high);
}

function ratioBar(cell, row, scale) {
  if (row.ratio === null) return;
  barOf(cell, row, scale, row.ratio, row.ratio_low, row.ratio_high);
  add(cell.firstChild, "span", { class: "one" }).style.left = `${scale(1)}%`;
}

function scoreScale(rows) {
  const far = rows.flatMap((row) => [row.score, row.score_low, row.score_high]).filter((value) => value !== null);
  const low = Math.min(1, ...far);
  const high = Math.max(0, ...far);
  return linearScale(low, high > low ? high : low + 1, 2, 98);
}

function scoreBar(cell, row, scale) {
  if (row.score !== null) barOf(cell, row, scale, row.score, row.score_low, row.score_high);
}

function barOf(cell, row, scale, at, low, high) {
  const bar = colour(add(cell, "span", { class: "bar" }), row.family);
  if (low !== null && high !== null) {
    const span = add(bar, "span", { class: "span" });
    span.style.left = `${scale(low)}%`;
    span.style.width = `${scale(high) - scale(low)}%`;
  }
  add(bar, "span", { class: "at" }).style.left = `${scale(at)}%`;
}

// "-time" is descending; rows without a value come last either way.
function sortRows(section) {
  const { sort } = section.state;
  const key = sort.replace(/^-/, "");
  const sign = sort.startsWith("-") ? -1 : 1;
  const column = section.columns.find((one) => one.key === key);
  for (const one of section.columns) {
    const wanted = one === column ? (sign > 0 ? "ascending" : "descending") : "none";
    one.head.get(section).setAttribute("aria-sort", wanted);
  }
  const value = column ? column.value : (row) => row.place;
  const compare = (a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return Number(one === null) - Number(other === null) || a.place - b.place;
    if (one === other) return a.place - b.place;
    return one < other ? -sign : sign;
  };
  section.body.append(...[...section.rows].sort(compare).map((row) => row.line));
}

function sortBy(section, key) {
  const { sort } = section.state;
  change(section, { sort: sort === key ? `-${key}` : key });
}

// Every word must be there, and no word after a minus sign; n4096 is a length and no part of one.
function filterRows(section) {
  const words = section.state.filter.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
  for (const row of section.rows) {
    row.out = !words.every((word) => (word.startsWith("-") ? !holds(row, word.slice(1)) : holds(row, word)));
    row.line.classList.toggle("out", row.out);
  }
  const left = section.rows.filter((row) => !row.out).length;
  const all = section.rows.length;
  byId(`count-${section.id}`).textContent = left === all ? `${all} rows` : `${left} of ${all} rows`;
}

function holds(row, word) {
  return /^n\d+$/.test(word) ? row.n === Number(word.slice(1)) : row.text.includes(word);
}
