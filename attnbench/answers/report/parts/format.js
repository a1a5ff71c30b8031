// Numbers with their units, as the command line writes them.

function threeDigits(value) {
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(3));
  return value.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded)))));
}

function seconds(value) {
  if (value === null) return "–";
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]) {
    if (Math.abs(value) >= 0.9995 * scale) return `${threeDigits(value / scale)} ${unit}`;
  }
  return value === 0 ? "0 s" : `${value.toPrecision(2)} s`;
}

function withPrefix(value, step, prefixes) {
  let power = 0;
  while (Math.abs(value) >= step - 0.5 && power < prefixes.length - 1) {
    value /= step;
    power += 1;
  }
  return [power === 0 && Number.isInteger(value) ? String(value) : threeDigits(value), prefixes[power]];
}

const bytes = (value) =>
  value === null ? "–" : withPrefix(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]).join(" ");

// 0.25, 1024, 2.1M: no exponents in the usual range.
function plain(value) {
  for (const [scale, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
    if (Math.abs(value) >= scale) return `${Number((value / scale).toPrecision(3))}${suffix}`;
  }
  if (Math.abs(value) >= 1000) return value.toFixed(0);
  if (value === 0 || Math.abs(value) >= 1e-4) return String(Number(value.toPrecision(3)));
  return value.toExponential(0);
}

// As plain, but 1/16 for powers of two below 1.
function halves(value) {
  const inverse = 1 / value;
  return inverse >= 2 && Number.isInteger(Math.log2(inverse)) ? `1/${inverse}` : plain(value);
}

// 512, 1k for 1024, 64k.
function tokens(n) {
  for (const [scale, suffix] of [[2 ** 20, "M"], [2 ** 10, "k"]]) {
    if (n >= scale && n % scale === 0) return `${n / scale}${suffix}`;
  }
  return String(n);
}

const trimmed = (text) => text.replace(/(\.\d*?)0+(?= )/, "$1").replace(/\.(?= )/, "");

// Two digits, near 1 three: 0.91, 1.03, 3.6, 12, 140.
function factor(value) {
  if (value >= 0.9 && value < 1.1) return value.toFixed(2);
  const rounded = Number(value.toPrecision(2));
  return rounded.toFixed(Math.max(0, 1 - Math.floor(Math.log10(rounded))));
}

const speedup = (value) => `${factor(value)}×`;
const ends = (low, high, text) => (low === null || high === null ? "" : `${text(low)} to ${text(high)}`);
