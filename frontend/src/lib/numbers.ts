// How every number of the page is written: four significant digits, a true minus sign, powers of
// ten for what is very large or very small.

import type { Json } from "./contract";

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const MINUS = "−";

export function format(value: Json | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return special(value);
  if (Array.isArray(value)) return `[${value.map((item) => format(item, digits)).join(", ")}]`;
  if (typeof value === "object") return "";
  return number(value, digits);
}

/** JSON knows no nan and no infinity: the server writes them as words. */
function special(value: string): string {
  return { nan: "NaN", inf: "∞", "-inf": `${MINUS}∞` }[value] ?? value;
}

function number(value: number, digits: number): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : `${MINUS}∞`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  const sign = value < 0 ? MINUS : "";
  if (Number.isInteger(value) && size < 1e9) return sign + group(String(size));
  if (size < 1 && Number(size.toPrecision(digits)) === 1) return sign + nearOne(size);
  if (size >= 1e6 || size < 1e-3) return sign + scientific(size, Math.min(digits, 3));
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return sign + group(trim(size.toFixed(Math.min(places, 6))));
}

/** A weight that is almost all of it: what is missing is the message. */
function nearOne(size: number): string {
  const rest = 1 - size;
  return rest < 1e-7 ? `1 ${MINUS} ${scientific(rest, 3)}` : trim(size.toFixed(7));
}

function scientific(size: number, digits: number): string {
  const [mantissa = "", exponent = "0"] = size.toExponential(digits - 1).split("e");
  return `${trim(mantissa)}×10${superscript(Number(exponent))}`;
}

export function superscript(exponent: number): string {
  const digits = [...String(Math.abs(exponent))].map((digit) => SUPERSCRIPTS[Number(digit)]);
  return (exponent < 0 ? "⁻" : "") + digits.join("");
}

function trim(decimal: string): string {
  return decimal.includes(".") ? decimal.replace(/\.?0+$/, "") : decimal;
}

/** Thousands apart by a narrow space, from five digits on. */
function group(decimal: string): string {
  const [whole = "", fraction] = decimal.split(".");
  const apart = whole.length > 4 ? whole.replace(/\B(?=(\d{3})+$)/g, "\u202f") : whole;
  return fraction === undefined ? apart : `${apart}.${fraction}`;
}

export function percent(value: number, places = 1): string {
  const share = 100 * value;
  const little = share !== 0 && Math.abs(share) < 0.5 * 10 ** -places;
  return `${little ? format(share, 2) : trim(share.toFixed(places)).replace("-", MINUS)}\u202f%`;
}

/** The value behind a path such as "claims.0.measured"; undefined where there is none. */
export function at(result: unknown, path: string): Json | undefined {
  let found: unknown = result;
  for (const step of path.split(".")) {
    if (found === null || typeof found !== "object") return undefined;
    found = (found as Record<string, unknown>)[step];
  }
  return found as Json | undefined;
}

/** For SVG text, which has no subscripts. */
export const plain = (text: string): string => text.replaceAll("d_k", "dₖ");

/** A float of a result that may be written as a word. */
export function toNumber(value: Json | undefined): number {
  if (typeof value === "number") return value;
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return NaN;
}
