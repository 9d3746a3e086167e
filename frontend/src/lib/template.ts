// The catalogue's texts: placeholders such as {sd:.2f} or {rules.0.top:.1%} name a field of the
// result. The same small language is in scaledot.lab.catalogue, and writes the same digits.

import type { Json } from "./contract";
import { at, superscript } from "./numbers";

export interface Piece {
  text: string;
  field?: string; // the path, where this piece is a number of the result
  value?: Json;
}

const PLACEHOLDER = /\{\{|\}\}|\{([^{}:]+)(?::([^{}]*))?\}/g;

export function pieces(template: string, numbers: unknown): Piece[] {
  const found: Piece[] = [];
  let end = 0;
  const say = (text: string) => {
    const last = found.at(-1);
    if (last && last.field === undefined) last.text += text;
    else if (text !== "") found.push({ text });
  };
  for (const match of template.matchAll(PLACEHOLDER)) {
    say(template.slice(end, match.index));
    end = match.index + match[0].length;
    const path = match[1];
    if (path === undefined) {
      say(match[0][0] ?? "");
      continue;
    }
    const value = at(numbers, path);
    if (value === undefined) say("…");
    else found.push({ text: written(value, match[2] ?? ""), field: path, value });
  }
  say(template.slice(end));
  return found;
}

export function fill(template: string, numbers: unknown): string {
  return pieces(template, numbers)
    .map((piece) => piece.text)
    .join("");
}

export function written(value: Json, specification: string): string {
  if (Array.isArray(value)) {
    return `[${value.map((item) => written(item, specification)).join(", ")}]`;
  }
  if (value === null || typeof value === "object") return "–";
  if (typeof value === "string" || typeof value === "boolean") return String(value);
  const match = /^(,?)(?:\.(\d+)([fge%]))?$/.exec(specification);
  const kind = match?.[3] ?? "g";
  const places = match?.[2] === undefined ? 6 : Number(match[2]);
  const whole = Number.isInteger(value) && match?.[3] === undefined;
  const plain = whole ? String(value) : WRITERS[kind]!(value, places);
  const grouped = match?.[1] === "," ? thousands(plain) : plain;
  return pretty(grouped);
}

const WRITERS: Record<string, (value: number, places: number) => string> = {
  f: (value, places) => value.toFixed(places),
  e: (value, places) => exponent(value.toExponential(places)),
  "%": (value, places) => `${(100 * value).toFixed(places)}%`,
  g: general,
};

/** C's %g: significant digits, no trailing zeros, powers of ten below 1e-4 and from 1e digits. */
function general(value: number, digits: number): string {
  if (value === 0) return "0";
  const significant = Math.max(digits, 1);
  const power = Number(value.toExponential(significant - 1).split("e")[1]);
  if (power < -4 || power >= significant) {
    const [mantissa = "", rest = ""] = value.toExponential(significant - 1).split("e");
    return exponent(`${trim(mantissa)}e${rest}`);
  }
  return trim(value.toFixed(Math.max(0, significant - 1 - power)));
}

/** Python writes e-05 where JavaScript writes e-5. */
function exponent(written: string): string {
  return written.replace(/e([+-])(\d)$/, "e$10$2");
}

function trim(decimal: string): string {
  return decimal.includes(".") ? decimal.replace(/\.?0+$/, "") : decimal;
}

function thousands(plain: string): string {
  return plain.replace(/^(-?)(\d+)/, (_, sign: string, whole: string) => {
    return sign + whole.replace(/\B(?=(\d{3})+$)/g, ",");
  });
}

/** For the eye: 4.5×10⁻⁵ and a true minus sign. */
function pretty(plain: string): string {
  return plain
    .replace(/e([+-]\d+)/, (_, power: string) => `×10${superscript(Number(power))}`)
    .replace(/^-/, "−");
}
