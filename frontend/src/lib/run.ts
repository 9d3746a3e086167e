// A run as the monitor's socket tells it: a header, then tables of one vital, step by step.

import type { Json } from "./contract";

export interface Header {
  columns: { layer: string; head: number }[];
  layers: { name: string; heads: number }[];
  fields: string[];
  field: string;
  phase: string;
  phases: string[];
  steps: number[];
  bands: Record<string, { low: number | null; high: number | null; words: string }>;
  losses: Losses;
  alarms: Alarm[];
  run: { path: string; command: string; model: string };
  status: Status;
}

/** What the rules of the watch said, in words; head is null where it is about a whole layer. */
export interface Alarm {
  step: number;
  grade: "note" | "warn" | "act";
  kind: string;
  layer: string;
  head: number | null;
  words: string;
}

export interface Losses {
  steps: number[];
  values: (number | null)[];
}

export interface Status {
  state: "waiting" | "running" | "silent" | "ended";
  step: number | null;
  coverage: string;
  cost: number | null;
  every: number | null;
  dropped: number;
  quiet: number | null;
}

export interface History {
  layer: string;
  head: number;
  steps: number[];
  fields: Record<string, (number | null)[]>;
}

export interface Table {
  steps: number[];
  rows: Float32Array[];
}

/** A binary frame, read: four int32, N int32 steps, N x C float32, all little-endian. */
export function readFrame(buffer: ArrayBuffer): {
  field: number;
  start: number;
  steps: number[];
  rows: Float32Array[];
} {
  const view = new DataView(buffer);
  const [field, start, count, columns] = [0, 4, 8, 12].map((at) => view.getInt32(at, true)) as [
    number,
    number,
    number,
    number,
  ];
  const steps = Array.from({ length: count }, (_, i) => view.getInt32(16 + 4 * i, true));
  const from = 16 + 4 * count;
  const rows = steps.map((_, i) => floats(buffer, from + 4 * columns * i, columns));
  return { field, start, steps, rows };
}

function floats(buffer: ArrayBuffer, from: number, count: number): Float32Array {
  if (new Uint8Array(new Uint16Array([1]).buffer)[0] === 1) return new Float32Array(buffer, from, count);
  const view = new DataView(buffer);
  return Float32Array.from({ length: count }, (_, i) => view.getFloat32(from + 4 * i, true));
}

/** The rows take their places from start on; what stood there or after is void. */
export function placed(table: Table, start: number, steps: number[], rows: Float32Array[]): Table {
  return {
    steps: [...table.steps.slice(0, start), ...steps],
    rows: [...table.rows.slice(0, start), ...rows],
  };
}

/** A head whose rows hold NaN or infinity: the server sends infinity in place of its numbers. */
export const broken = (value: number): boolean => Math.abs(value) === Infinity;

export function outside(
  value: number,
  band: { low: number | null; high: number | null } | undefined,
): boolean {
  if (broken(value)) return true;
  if (!band || Number.isNaN(value)) return false;
  return (band.low !== null && value < band.low) || (band.high !== null && value > band.high);
}

export interface Beyond {
  row: number;
  column: number;
  value: number;
}

/** How many heads are outside of the band, and those farthest out. */
export function beyond(
  values: Float32Array | null,
  heads: number[], // of each layer
  band: { low: number | null; high: number | null } | undefined,
  most = 6,
): { count: number; worst: Beyond[] } {
  const found: { count: number; worst: (Beyond & { away: number })[] } = { count: 0, worst: [] };
  let at = 0;
  heads.forEach((count, row) => {
    for (let column = 0; column < count; column++, at++) {
      const value = values?.[at] ?? NaN;
      if (!outside(value, band)) continue;
      found.count++;
      const away = broken(value)
        ? Infinity
        : Math.max(value - (band?.high ?? Infinity), (band?.low ?? -Infinity) - value);
      if (found.worst.length === most && away <= found.worst[most - 1]!.away) continue;
      found.worst.push({ row, column, value, away });
      found.worst.sort((a, b) => b.away - a.away);
      found.worst.length = Math.min(found.worst.length, most);
    }
  });
  return found;
}

const SHARES = new Set(["entropy_ratio", "sum_p2", "passes", "top_p", "saturated", "sink", "off"]);

/** What the ends of the colour ramp mean: fixed for shares, else all that was seen. */
export function ends(field: string, rows: Float32Array[], high: number | null): [number, number] {
  if (SHARES.has(field)) return [0, 1];
  let [low, most] = [0, 0];
  for (const row of rows) {
    for (const value of row) {
      if (!Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > most) most = value;
    }
  }
  return [low, Math.max(most, high !== null && high > 0 && high < 20 ? high : 0, low + 1e-6)];
}

const SHAPE = [Math.SQRT2, Math.SQRT1_2, 0, -Math.SQRT1_2, -Math.SQRT2]; // of deviation 1

/** Five scores whose deviation is a head's row_std: what its softmax sees, in small. */
export function scoresOf(deviation: number): string {
  return SHAPE.map((place) => Number((place * deviation).toFixed(2))).join(",");
}

export type Message =
  | (Header & { missing?: undefined })
  | { status: Status; losses: Losses; columns?: undefined }
  | { missing: string }
  | { history: History }
  | { error: string };

export const isHeader = (message: unknown): message is Header =>
  typeof message === "object" && message !== null && "columns" in message;

export type Command = { field: string } | { phase: string } | { history: { layer: string; head: number } };

export const text = (command: Command): string => JSON.stringify(command as Json);
