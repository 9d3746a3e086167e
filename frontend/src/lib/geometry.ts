// Where marks lie in a chart.

import { format, superscript } from "./numbers";

export interface Axis {
  (value: number): number;
  ticks: { at: number; value: number; label: string }[];
  low: number;
  high: number;
}

/** Values from low to high on pixels from start to end. */
export function linear(
  low: number,
  high: number,
  start: number,
  end: number,
  count = 5,
): Axis {
  const span = high - low || 1;
  const place = (value: number) => start + ((value - low) / span) * (end - start);
  const marks = ticks(low, high, count);
  return Object.assign(place, {
    ticks: marks.map((value) => ({ at: place(value), value, label: format(value) })),
    low,
    high,
  });
}

/** The same on a logarithmic axis; whole powers of the base get a label. */
export function logarithmic(
  low: number,
  high: number,
  start: number,
  end: number,
  base: 2 | 10 = 10,
  most = 7,
): Axis {
  const from = Math.log(low);
  const span = Math.log(high) - from || 1;
  const place = (value: number) => start + ((Math.log(value) - from) / span) * (end - start);
  const first = Math.ceil(from / Math.log(base) - 1e-9);
  const last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
  const step = Math.max(1, Math.ceil((last - first + 1) / most));
  const marks: number[] = [];
  for (let power = first; power <= last; power += step) marks.push(power);
  return Object.assign(place, {
    ticks: marks.map((power) => {
      const value = base ** power;
      const plain = base === 2 || Math.abs(power) < 3;
      return { at: place(value), value, label: plain ? format(value) : `10${superscript(power)}` };
    }),
    low,
    high,
  });
}

/** Round values inside [low, high]: steps of 1, 2 or 5 times a power of ten. */
export function ticks(low: number, high: number, count = 5): number[] {
  if (!(high > low) || !Number.isFinite(high - low)) return Number.isFinite(low) ? [low] : [];
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough)!;
  const marks: number[] = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) {
    marks.push(Number((n * step).toPrecision(12)));
  }
  return marks;
}

export function path(points: { x: number; y: number }[]): string {
  let line = "";
  let pen = false;
  for (const { x, y } of points) {
    if (!Number.isFinite(x) || !Number.isFinite(y)) {
      pen = false; // a gap: NaN is not drawn as zero
      continue;
    }
    line += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = true;
  }
  return line;
}

/** The extent of all finite values, never empty. */
export function extent(values: number[], includeZero = false): [number, number] {
  let low = includeZero ? 0 : Infinity;
  let high = includeZero ? 0 : -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  return low === high ? [low - (includeZero && low > 0 ? low : 0.5), high + 0.5] : [low, high];
}
