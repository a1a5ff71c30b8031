// The page is whole without this script. With it rows filter and sort, lists choose figures, and marks tell their rows.

const byId = (id) => document.getElementById(id);
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const add = (parent, name, text = "") => parent.appendChild(Object.assign(document.createElement(name), { textContent: text }));
const [tip, TELLS] = [byId("tip"), "svg [data-r], .rows tbody th button"];
const UNITS = { ns: 1e-9, µs: 1e-6, ms: 1e-3, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, M: 1e6, G: 1e9, T: 1e12 };

function prepare(root) {
  const id = root.id.replace("machine-", "");
  const section = { id, root, table: byId(`table-${id}`), list: byId(`figure-${id}`), field: byId(`filter-${id}`), marks: all("svg [data-r]", root) };
  section.heads = Object.fromEntries(all("thead th", section.table).map((head) => [head.dataset.key, head]));
  section.first = section.list?.value ?? root.querySelector("[data-figure]")?.dataset.figure ?? "";
  section.rows = all("tbody tr", section.table).map((line, place) => {
    line.dataset.row = place;
    const text = (key) => [...(line.cells[section.heads[key]?.cellIndex]?.childNodes ?? [])].map((node) => node.textContent.trim()).filter(Boolean).join(", ");
    const told = ["label", "family", "about", "status", "verdict"].map(text).join(" ");
    return { line, place, text, words: told.toLowerCase(), label: text("label"), n: text("n") };
  });
  for (const mark of section.marks) mark.rows = mark.dataset.r.split(" ").map((place) => section.rows[place]);
  for (const button of all(".rows tbody th button", root)) button.rows = [section.rows[button.closest("tr").dataset.row]];
  for (const svg of all("svg", root)) rove(section, all(".m", svg));
  const sort = (key) => change(section, { sort: section.state.sort === key ? `-${key}` : key });
  for (const [key, head] of Object.entries(section.heads)) head.firstChild.addEventListener("click", () => sort(key));
  section.field.addEventListener("input", () => change(section, { filter: section.field.value }));
  section.list?.addEventListener("change", () => change(section, { figure: section.list.value }));
  return section;
}

// One stop for the tab key in each figure; arrows go from mark to mark.
function rove(section, marks) {
  const across = (mark) => Number(mark.querySelector("circle")?.getAttribute("cx") || 0);
  marks.sort((one, other) => across(one) - across(other)).forEach((mark, place) => {
    const [row] = mark.rows;
    const said = mark.rows.length > 1 ? [] : ["n", "time", "peak", "error", "score", "loss"].filter(row.text).map((key) => `${section.heads[key].textContent} ${row.text(key)}`);
    Object.assign(mark, { role: "button", tabIndex: place ? -1 : 0, ariaLabel: [row.label, ...said].join(", ") });
    mark.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, Home: -place, End: -1 - place }[event.key];
      const next = marks[(place + (step ?? 0) + marks.length) % marks.length];
      if (event.key === "Enter" || event.key === " ") choose(mark);
      else if (step === undefined) return;
      else next.focus({ preventScroll: true });
      event.preventDefault();
    });
    mark.addEventListener("focus", () => marks.forEach((one) => Object.assign(one, { tabIndex: one === mark ? 0 : -1 })));
  });
}

// Whatever the address says, a state that this section has.
function normal(section, { filter = "", sort = "", figure, row }) {
  const isKnown = [...(section.list?.options ?? [])].some((one) => one.value === figure);
  const isRow = /^\d+$/.test(row ?? "") && section.rows[row];
  const isSort = Object.hasOwn(section.heads, sort.replace(/^-/, ""));
  return { filter, sort: isSort ? sort : "", figure: isKnown ? figure : section.first, row: isRow ? Number(row) : null };
}

const keyOf = (section, name) => (section.id === "1" ? name : `${name}.${section.id}`);

function readAddress(event) {
  if (event && location.hash && !location.hash.includes("=")) return; // a place in the page
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const section of sections) {
    const [filter, sort, figure, row] = ["filter", "sort", "figure", "row"].map((name) => given[keyOf(section, name)]);
    section.state = normal(section, { filter, sort, figure, row });
    show(section);
  }
}

function change(section, wanted) {
  section.state = normal(section, { ...section.state, ...wanted });
  show(section);
  const said = new URLSearchParams();
  for (const one of sections) {
    for (const [key, value] of Object.entries(one.state)) if (value !== normal(one, {})[key]) said.set(keyOf(one, key), value);
  }
  try {
    history.replaceState(null, "", said.size ? `#${said}` : location.href.split("#")[0]);
  } catch {} // a frame of a notebook has no address of its own
}

// A second time takes the choice away. A row brings its own figure into view, and a mark its row.
function choose(element) {
  const section = sections.find((one) => one.root.contains(element));
  const { place, line } = element.rows.at(-1);
  if (section.state.row === place) return change(section, { row: undefined });
  const isMark = element.matches("[data-r]");
  const own = section.marks.find((mark) => mark.rows[0].place === place && mark.closest("[data-figure]"));
  const figure = own && !isMark ? own.closest("figure").dataset.figure : section.state.figure;
  change(section, { row: place, figure, ...(isMark && line.classList.contains("out") && { filter: "" }) });
  const box = section.table.closest(".box");
  if (isMark) box.scrollTop = line.offsetTop - box.clientHeight / 2;
}

// Every word must be there, and no word after a minus sign; n4096 is a length and no part of one.
function show(section) {
  const { filter, sort, figure, row: chosen } = section.state;
  if (section.field.value !== filter) section.field.value = filter;
  const words = filter.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
  const holds = (row, word) => (/^n\d+$/.test(word) ? row.n === word.slice(1) : row.words.includes(word));
  for (const row of section.rows) {
    row.out = !words.every((word) => (word.startsWith("-") ? !holds(row, word.slice(1)) : holds(row, word)));
    row.line.classList.toggle("out", row.out);
    row.line.classList.toggle("on", row.place === chosen);
    row.line.ariaCurrent = row.place === chosen ? "true" : null;
  }
  const left = section.rows.filter((row) => !row.out).length;
  byId(`count-${section.id}`).textContent = `${left === section.rows.length ? "" : `${left} of `}${section.rows.length} rows`;
  if (sort !== section.sorted) order(section, sort);
  if (section.list) section.list.value = figure;
  for (const one of all("figure[data-view]", section.root)) {
    one.hidden = one.dataset.figure ? one.dataset.figure !== figure : one.dataset.view !== figure.split("-")[0];
  }
  for (const kind of all(".kind", section.root)) kind.hidden = all("figure", kind).every((one) => one.hidden);
  for (const mark of section.marks) {
    const isOn = mark.rows.some((row) => row.place === chosen);
    mark.classList.toggle("dim", mark.rows.every((row) => row.out) || (section.rows[chosen]?.label ?? mark.rows[0].label) !== mark.rows[0].label);
    mark.classList.toggle("on", isOn);
    if (mark.role) mark.ariaPressed = String(isOn);
  }
}

// "-time" is descending; rows without a value come last either way. The number in "118 ms, ±4%" is 0.118.
function order(section, sort) {
  section.sorted = sort;
  const [key, sign] = [sort.replace(/^-/, ""), sort.startsWith("-") ? -1 : 1];
  for (const [name, head] of Object.entries(section.heads)) head.setAttribute("aria-sort", name !== key ? "none" : sign > 0 ? "ascending" : "descending");
  const isNumber = section.heads[key]?.classList.contains("n");
  for (const row of section.rows) {
    const text = sort ? row.text(key) : "";
    const number = parseFloat(text) * (UNITS[(text.split(",")[0].match(/[a-zµ]+$/i) || [""])[0]] || 1);
    row.value = !sort ? row.place : !isNumber ? text.toLowerCase() || null : Number.isNaN(number) ? null : number;
  }
  const sorted = [...section.rows].sort((a, b) => {
    if (a.value === b.value) return a.place - b.place;
    return a.value === null ? 1 : b.value === null ? -1 : a.value < b.value ? -sign : sign;
  });
  section.table.tBodies[0].append(...sorted.map((row) => row.line));
}

// All that one row says, or a line for each of several.
function told(section, element) {
  const { rows } = element;
  if (rows.length > 1) {
    const keys = (element.closest("figure").dataset.told ?? "time").split(" ");
    const apart = ["label", "n", "about"].find((key) => rows[0].text(key) !== rows[1].text(key)) ?? "n";
    return rows.slice(-12).map((row) => [(apart === "n" ? "n = " : "") + row.text(apart), keys.map(row.text).filter(Boolean).join("; ")]);
  }
  const said = (key, head) => [rows[0].text(key), rows[0].line.cells[head.cellIndex].title].filter(Boolean).join(", ");
  return Object.entries(section.heads).filter(([key]) => key !== "label" && rows[0].text(key)).map(([key, head]) => [head.textContent, said(key, head)]);
}

function showTip(element, at) {
  if (tip.of !== element) {
    hideTip();
    const section = sections.find((one) => one.root.contains(element));
    tip.replaceChildren();
    add(tip, "b", element.rows[0].label);
    const list = add(tip, "dl");
    for (const pair of told(section, element)) pair.forEach((text, place) => add(list, place ? "dd" : "dt", text));
    Object.assign(tip, { of: element, hidden: false });
    element.setAttribute("aria-describedby", "tip");
    if (element.rows.length > 1) element.closest("svg").classList.add("quiet");
    for (const mark of section.marks) mark.classList.toggle("lit", mark.rows[0].label === element.rows[0].label);
  }
  const [box, room] = [tip.getBoundingClientRect(), document.documentElement];
  const left = at.right + 12 + box.width <= room.clientWidth - 8 ? at.right + 12 : at.left - 12 - box.width;
  tip.style.left = `${Math.max(8, Math.min(left, room.clientWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(8, Math.min((at.top + at.bottom - box.height) / 2, room.clientHeight - box.height - 8))}px`;
}

function hideTip() {
  tip.of?.removeAttribute("aria-describedby");
  tip.of?.closest("svg")?.classList.remove("quiet");
  Object.assign(tip, { of: null, hidden: true });
}

function pointed({ clientX: x, clientY: y, target }) {
  const far = target.closest?.("figure svg") ? 5 : 0; // a line is thin
  return [[0, 0], [0, -far], [0, far], [-far, 0], [far, 0]].map(([right, down]) => document.elementFromPoint(x + right, y + down)?.closest(TELLS)).find(Boolean);
}

const sections = all(".machine").map(prepare);
readAddress();
addEventListener("hashchange", readAddress);
addEventListener("beforeprint", () => all("details").forEach((one) => one.toggleAttribute("open", true)));
document.addEventListener("pointermove", (event) => {
  const found = pointed(event);
  if (found) showTip(found, new DOMRect(event.clientX, event.clientY));
  else if (tip.of && tip.of !== document.activeElement) hideTip();
});
document.addEventListener("click", (event) => {
  const found = event.detail ? pointed(event) : event.target.closest(TELLS); // a key presses a button without a place
  if (found) choose(found);
});
document.addEventListener("focusin", ({ target }) => target.matches(TELLS) && showTip(target, target.getBoundingClientRect()));
document.addEventListener("focusout", hideTip);
document.addEventListener("keydown", ({ key }) => key === "Escape" && hideTip());
// The focus itself scrolls its element into view: what has the focus keeps the box beside it.
const scrolled = () => (tip.of && tip.of === document.activeElement ? showTip(tip.of, tip.of.getBoundingClientRect()) : hideTip());
document.addEventListener("scroll", scrolled, { capture: true, passive: true });
