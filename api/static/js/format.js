/** Numbers as text: three significant digits and a unit, GB of 1e9 bytes. A missing number is a dash. */

const MISSING = "\u2013";
const TIMES = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "µs"],
  [1e-9, "ns"],
];
const SIZES = [
  [1e15, "PB"],
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
  [1, "B"],
];
const WORKS = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1, ""],
];

/** Returns a number with three significant digits, such as `9,350` or `0.0720`. */
export function significant(value) {
  if (value == null || !Number.isFinite(value)) return MISSING;
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(3));
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded))));
  return rounded.toLocaleString("en-US", {
    minimumFractionDigits: Math.min(digits, 8),
    maximumFractionDigits: Math.min(digits, 8),
  });
}

/** Returns a whole number with thousands separated. */
export function whole(value) {
  return value == null ? MISSING : Math.round(value).toLocaleString("en-US");
}

/** Returns seconds as s, ms, µs or ns. */
export function seconds(value) {
  return scaled(value, TIMES, "s");
}

/** Returns bytes as B, kB, MB, GB, TB or PB. */
export function bytes(value) {
  return scaled(value, SIZES, "B");
}

/** Returns floating-point operations, such as `12.6 PFLOP`. */
export function flops(value, unit = "FLOP") {
  return scaled(
    value,
    WORKS.map(([size, prefix]) => [size, prefix + unit]),
    unit,
  );
}

/** Returns a fraction as a percentage. */
export function percent(value) {
  if (value == null) return MISSING;
  return `${Math.abs(value) >= 0.9995 ? whole(value * 100) : significant(Number((value * 100).toFixed(2)))} %`;
}

/** Returns a price in US dollars. */
export function dollars(value) {
  return value == null ? MISSING : `$${significant(value)}`;
}

/** Returns a point in time, given in seconds since 1970, as local date and time. */
export function moment(value) {
  return value == null
    ? MISSING
    : new Date(value * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

/** Returns a difference with its sign, such as `+0.31 s`. */
export function signed(value, format) {
  return value > 0 ? `+${format(value)}` : format(value);
}

/** Returns any JSON value as short text. */
export function anyText(value) {
  if (value == null) return MISSING;
  if (typeof value === "number") return Number.isInteger(value) ? whole(value) : significant(value);
  if (Array.isArray(value) && value.every((item) => typeof item !== "object")) return value.join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Returns the placements of a tensor, one per axis, such as `S(0), R`. */
export function placements(values) {
  return values == null ? MISSING : values.join(", ") || MISSING;
}

function scaled(value, units, zeroUnit) {
  if (value == null || !Number.isFinite(value)) return MISSING;
  if (value === 0) return `0 ${zeroUnit}`;
  const rounded = Math.abs(Number(value.toPrecision(3)));
  const [size, unit] = units.find(([least]) => rounded >= least * (1 - 1e-9)) ?? units.at(-1);
  return `${unit === "B" ? whole(value) : significant(value / size)} ${unit}`;
}
