// What is chosen, its place in the address, and the first drawing.

const data = JSON.parse(byId("data").textContent);

function prepare(raw) {
  const section = { ...raw, state: null };
  section.rows = raw.rows.map((values, place) => {
    const row = Object.fromEntries(raw.columns.map((name, k) => [name, values[k] ?? null]));
    row.about = raw.abouts[row.about];
    row.label = row.label || "";
    row.place = place;
    row.out = false;
    row.text = [row.label, data.families[row.family], row.about, row.status, row.reason, row.verdict].join(" ").toLowerCase();
    return row;
  });
  section.state = normal(section, {});
  return section;
}

// Whatever the address says, a state that this section has.
function normal(section, wanted) {
  const view = Number(wanted.view) in section.views ? Number(wanted.view) : 0;
  const here = section.views[view];
  const n = here && Object.hasOwn(here.at, wanted.n) ? String(wanted.n) : here ? String(here.n) : "";
  const sort = TABLE.some(({ key }) => key === String(wanted.sort || "").replace(/^-/, "")) ? wanted.sort : "";
  const row = Number(wanted.row ?? -1) in section.rows ? Number(wanted.row) : null;
  return { filter: String(wanted.filter || ""), sort, view, n, row };
}

const suffix = (section) => (section.id === "1" ? "" : `.${section.id}`);

function readAddress(section) {
  const given = new URLSearchParams(location.hash.slice(1));
  const end = suffix(section);
  return Object.fromEntries(["filter", "sort", "view", "n", "row"].map((key) => [key, given.get(key + end) ?? undefined]));
}

function writeAddress() {
  const said = new URLSearchParams();
  for (const section of sections) {
    const usual = normal(section, { view: section.state.view });
    for (const key of ["filter", "sort", "view", "n", "row"]) {
      const value = section.state[key];
      const isUsual = key === "view" ? value === 0 : value === usual[key];
      if (!isUsual) said.set(key + suffix(section), value);
    }
  }
  const address = `#${said}`;
  if (address === (location.hash || "#")) return;
  try {
    history.replaceState(null, "", said.size ? address : location.href.split("#")[0]);
  } catch {
    // a frame of a notebook has no address of its own
  }
}

function change(section, wanted) {
  section.state = normal(section, { ...section.state, ...wanted });
  writeAddress();
  show(section, wanted);
}

// A point or a row was chosen: mark both, and bring the other one into view. A second time takes the mark away.
function choose(section, place, from) {
  if (section.state.row === place) {
    change(section, { row: undefined });
    return;
  }
  const wanted = { row: place };
  if (from === "row" && !inView(section, section.state.view, section.state.n, place)) {
    section.views.forEach((view, k) => {
      for (const n of Object.keys(view.at)) if (inView(section, k, n, place)) Object.assign(wanted, { view: k, n });
    });
  }
  if (from === "point" && section.rows[place].out) wanted.filter = "";
  change(section, wanted);
  if (from === "point") {
    const box = section.body.closest(".box");
    const line = section.rows[place].line;
    box.scrollTop = line.offsetTop - box.clientHeight / 2;
  }
}

const inView = (section, view, n, place) => Boolean(section.views[view] && section.views[view].at[n].points.some(([one]) => one === place));

function show(section, changed) {
  const has = (...keys) => keys.some((key) => key in changed);
  if (has("view", "n")) fillControls(section);
  if (has("filter")) {
    const field = byId(`filter-${section.id}`);
    if (field.value !== section.state.filter) field.value = section.state.filter;
    filterRows(section);
  }
  if (has("sort")) sortRows(section);
  for (const row of section.rows) {
    const on = row.place === section.state.row;
    row.line.classList.toggle("on", on);
    if (on) row.line.setAttribute("aria-current", "true");
    else row.line.removeAttribute("aria-current");
  }
  if (!section.views.length) return;
  if (has("view", "n")) drawTradeoff(section);
  if (has("view")) drawGrowth(section);
  if (has("filter", "row")) {
    dimFiltered(section);
    dimLines(section);
  }
}

function fillControls(section) {
  if (!section.views.length) return;
  const view = byId(`view-${section.id}`);
  const n = byId(`n-${section.id}`);
  view.replaceChildren(...section.views.map((one, k) => add(null, "option", { value: k }, one.name)));
  view.value = String(section.state.view);
  byId(`view-of-${section.id}`).hidden = section.views.length < 2;
  const lengths = Object.keys(section.views[section.state.view].at);
  n.replaceChildren(...lengths.map((one) => add(null, "option", { value: one }, one)));
  n.value = section.state.n;
  n.disabled = lengths.length < 2;
}

function bind(section) {
  byId(`filter-${section.id}`).addEventListener("input", (event) => change(section, { filter: event.target.value }));
  if (!section.views.length) return;
  byId(`view-${section.id}`).addEventListener("change", (event) => change(section, { view: event.target.value, n: section.state.n }));
  byId(`n-${section.id}`).addEventListener("change", (event) => change(section, { n: event.target.value }));
  let width = byId(`tradeoff-${section.id}`).clientWidth;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    drawTradeoff(section);
    drawGrowth(section);
  }).observe(byId(`tradeoff-${section.id}`));
}

const everything = { view: 0, n: 0, filter: "", sort: "", row: 0 };
const sections = data.sections.map(prepare);
for (const section of sections) {
  buildTable(section);
  drawTasks(section);
  bind(section);
  section.state = normal(section, readAddress(section));
  show(section, everything);
}
addEventListener("hashchange", () => {
  if (location.hash && !location.hash.includes("=")) return; // a place in the page
  for (const section of sections) {
    section.state = normal(section, readAddress(section));
    show(section, everything);
  }
});
addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
});
