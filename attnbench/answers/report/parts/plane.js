// Elements, scales and axes of the figures.

const SVG = "http://www.w3.org/2000/svg";

function put(parent, made, attributes, text) {
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

const draw = (parent, name, attributes, text) => put(parent, document.createElementNS(SVG, name), attributes, text);
const add = (parent, name, attributes, text) => put(parent, document.createElement(name), attributes, text);
const write = (element, text) => Object.assign(element, { textContent: text });
const byId = (id) => document.getElementById(id);

function colour(element, family) {
  element.classList.add("c");
  element.style.setProperty("--c", `var(--f${family})`);
  return element;
}

function logScale(low, high, from, to) {
  const span = Math.log(high / low);
  const scale = (value) => from + (Math.log(value / low) / span) * (to - from);
  return Object.assign(scale, { low, high, ticks: (base, most) => logTicks(low, high, base, most) });
}

function linearScale(low, high, from, to) {
  const scale = (value) => from + ((value - low) / (high - low)) * (to - from);
  return Object.assign(scale, { low, high, ticks: (_, most) => linearTicks(low, high, most) });
}

// Ends with some room around them, on a log scale.
function padded(values, share) {
  const good = values.filter((value) => value !== null && value > 0);
  if (!good.length) return [1, 10];
  const low = Math.min(...good);
  const high = Math.max(...good);
  const extra = Math.max(share * Math.log(high / low), 0.12);
  return [low * Math.exp(-extra), high * Math.exp(extra)];
}

// Powers of the base, thinned to what there is room for; steps between them where these are too few.
function logTicks(low, high, base, most) {
  const steps = base === 2 ? [[1], [1, 1.5], [1, 1.25, 1.5, 1.75]] : [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7]];
  const first = Math.floor(Math.log(low) / Math.log(base)) - 1;
  const last = Math.ceil(Math.log(high) / Math.log(base));
  let ticks = [];
  for (const choice of steps) {
    ticks = [];
    for (let power = first; power <= last; power += 1) {
      for (const step of choice) {
        const value = step * base ** power;
        if (value >= low * 0.999999 && value <= high * 1.000001) ticks.push(value);
      }
    }
    if (ticks.length >= 3) break;
  }
  const every = Math.ceil(ticks.length / Math.max(2, most));
  return ticks.filter((_, place) => place % every === 0);
}

function linearTicks(low, high, most) {
  const rough = (high - low) / Math.max(2, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9; k += 1) ticks.push(k * step);
  return ticks;
}

const pen = document.createElement("canvas").getContext("2d");
function widthOf(text, size, weight) {
  pen.font = `${weight || 400} ${size}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

// Cut in the middle: both the variant and its last option tell labels apart.
function shortened(text, size, room) {
  if (widthOf(text, size) <= room) return text;
  let keep = text.length - 1;
  while (keep > 4 && widthOf(middle(text, keep), size) > room) keep -= 1;
  return middle(text, keep);
}
const middle = (text, keep) => `${text.slice(0, Math.ceil(keep * 0.6))}…${text.slice(text.length - Math.floor(keep * 0.4))}`;

function canvas(holder, width, height, title) {
  holder.replaceChildren();
  const svg = draw(holder, "svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": title });
  svg.style.aspectRatio = `${width} / ${height}`;
  return svg;
}

// frame: left, right, top, bottom in pixels.
function axes(svg, frame, x, y, about) {
  const wide = frame.right - frame.left;
  for (const value of x.ticks(about.xBase, Math.floor(wide / 62))) {
    draw(svg, "line", { class: "grid", x1: x(value), x2: x(value), y1: frame.top, y2: frame.bottom });
    draw(svg, "text", { class: "soft", x: x(value), y: frame.bottom + 17, "text-anchor": "middle" }, about.xText(value));
  }
  for (const value of y.ticks(about.yBase, Math.floor((frame.bottom - frame.top) / 34))) {
    draw(svg, "line", { class: "grid", x1: frame.left, x2: frame.right, y1: y(value), y2: y(value) });
    draw(svg, "text", { class: "soft", x: frame.left - 8, y: y(value) + 4, "text-anchor": "end" }, about.yText(value));
  }
  draw(svg, "line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom });
  draw(svg, "text", { x: frame.right, y: frame.bottom + 37, "text-anchor": "end" }, about.xTitle);
}
