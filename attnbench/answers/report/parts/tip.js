// One box that says what is under the pointer or has the focus.

const tip = byId("tip");
let described = null;

// lines: [[name, value], ...]
function showTip(element, title, lines) {
  hideTip();
  tip.replaceChildren();
  add(tip, "b", {}, title);
  const list = add(tip, "dl");
  for (const [name, value] of lines) {
    add(list, "dt", {}, name);
    add(list, "dd", {}, value);
  }
  tip.hidden = false;
  described = element;
  element.setAttribute("aria-describedby", "tip");
  placeTip(element);
}

function placeTip(element) {
  const at = element.getBoundingClientRect();
  const box = tip.getBoundingClientRect();
  const room = document.documentElement;
  const right = at.right + 12;
  const left = right + box.width <= room.clientWidth - 8 ? right : at.left - 12 - box.width;
  const top = at.top + at.height / 2 - box.height / 2;
  tip.style.left = `${Math.max(8, Math.min(left, room.clientWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(8, Math.min(top, room.clientHeight - box.height - 8))}px`;
}

function hideTip() {
  tip.hidden = true;
  if (described) described.removeAttribute("aria-describedby");
  described = null;
}

// say() gives the title and the lines.
function tells(element, say) {
  const show = () => showTip(element, ...say());
  element.addEventListener("pointerenter", show);
  element.addEventListener("pointerleave", hideTip);
  element.addEventListener("focus", show);
  element.addEventListener("blur", hideTip);
}

document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
// The focus itself scrolls its element into view: what has the focus keeps the box beside it.
const scrolled = () => (described && described === document.activeElement ? placeTip(described) : hideTip());
document.addEventListener("scroll", scrolled, { capture: true, passive: true });

function aboutRow(row) {
  const lines = [["n", String(row.n)]];
  if (row.about) lines.push(["measured", row.about]);
  if (row.time !== null) {
    lines.push(["time", [seconds(row.time), ends(row.time_low, row.time_high, seconds)].filter(Boolean).join(", ")]);
  }
  if (row.speed !== null) lines.push(["speed", `${plain(Number(row.speed.toPrecision(3)))} examples/s`]);
  if (row.ratio !== null) {
    const said = ends(row.ratio_low, row.ratio_high, speedup);
    lines.push(["beside softmax", `${speedup(row.ratio)} as fast${said && ` (${said})`}`]);
  }
  if (row.first_token !== null) lines.push(["first token", seconds(row.first_token)]);
  if (row.per_token !== null) lines.push(["per token", seconds(row.per_token)]);
  if (row.state !== null) lines.push(["cache or state", bytes(row.state)]);
  if (row.peak !== null) {
    const share = row.memory === null ? "" : `, ${plain(Number((100 * row.memory).toPrecision(2)))} % of softmax's`;
    lines.push(["peak memory", bytes(row.peak) + share]);
  }
  if (row.error !== null || row.error_kind === "learned") lines.push(["error", errorText(row)]);
  if (row.score !== null) lines.push(["score", scoreText(row)]);
  if (row.loss !== null) lines.push(["loss", lossText(row)]);
  if (row.features !== null) lines.push(["last features", `${plain(Number(row.features.toPrecision(2)))} relative error`]);
  if (row.change !== null) {
    const said = ends(row.change_low, row.change_high, speedup);
    lines.push(["older run", `${speedup(row.change)} its time${said && ` (${said})`}, ${row.verdict}`]);
  }
  if (row.status !== "ok") lines.push([row.status, row.reason || ""]);
  if (row.warnings) lines.push(["warning", row.warnings]);
  return lines;
}

const KIND_WORDS = { distance: " from softmax: another operator, no error", learned: "means nothing before fitting" };
function errorText(row) {
  if (row.error_kind === "learned") return KIND_WORDS.learned;
  const spread = row.error_std ? ` (standard deviation ${plain(Number(row.error_std.toPrecision(2)))})` : "";
  return `${plain(Number(row.error.toPrecision(2)))}${spread}${KIND_WORDS[row.error_kind] || ""}`;
}

const signed = (value) => (value < 0 ? "" : "+") + value.toFixed(3);

// In nats, with what it is above the loss of the untouched model.
function lossText(row) {
  const said = ends(row.loss_low, row.loss_high, signed);
  return `${row.loss.toFixed(3)}, ${signed(row.loss_delta)}${said && ` (${said})`} over the untouched model's`;
}

function scoreText(row) {
  const said = ends(row.score_low, row.score_high, (value) => value.toFixed(3));
  return row.score.toFixed(3) + (said && ` (${said})`);
}
