// The heat map of a run as far as the canvas and the SVG file agree: sizes, places, colours.

import { format } from "./numbers";
import { broken } from "./run";
import { css, type Rgb, sequential } from "./ramp";

export interface Row {
  name: string;
  count: number; // of heads
}

export interface Sizes {
  across: number;
  cell: number;
  tall: number;
}

export function sizes(width: number, rows: Row[]): Sizes {
  const across = Math.max(...rows.map((row) => row.count), 1);
  const cell = Math.max(Math.min(width / across, 46), 1);
  return { across, cell, tall: Math.max(Math.min(cell, 34), rows.length > 48 ? 5 : 9) };
}

/** Where each row begins among the values. */
export function starts(rows: Row[]): number[] {
  let sum = 0;
  return rows.map((row) => (sum += row.count) - row.count);
}

/** As many of the numbers from 0 as find room for a label. */
export function every(count: number, room: number): number[] {
  const step = [1, 2, 4, 8, 16, 32, 64].find((size) => size * room >= 22) ?? 128;
  return Array.from({ length: Math.ceil(count / step) }, (_, i) => i * step);
}

/** What stands beside the rows: the numbers in the layers' names, where each has one of its own. */
export function sides(rows: Row[]): string[] {
  const named = rows.map((row) => /\d+/.exec(row.name)?.[0] ?? "");
  const own = new Set(named);
  return own.size === rows.length && !own.has("") ? named : rows.map((_, row) => String(row));
}

export const SHADES: Rgb[] = Array.from({ length: 256 }, (_, i) => sequential(i / 255));

/** Which shade a value has. */
export function shade(value: number, low: number, high: number): number {
  return Math.min(Math.max(Math.round(((value - low) * 255) / (high - low || 1)), 0), 255);
}

export interface Heat {
  rows: Row[];
  values: Float32Array | null;
  low: number;
  high: number;
  marked: (value: number) => boolean;
  title: string;
  note: string;
  words: { layer: string; head: string };
  colours: { paper: string; ink: string; soft: string };
}

export const STRUCK = "#c8283c"; // legible on either paper
const WIDTH = 880; // of the cells, at most
const TOP = 92; // title, note, name of the axis, numbers of the heads
const FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif";

/** The map as a file of its own: the canvas's colours, and what the page says around it. */
export function heatSvg(heat: Heat): string {
  const { rows, colours } = heat;
  const { across, cell, tall } = sizes(WIDTH, rows);
  const named = every(rows.length, tall).map((row) => ({ row, name: rows[row]?.name ?? "" }));
  const left = Math.max(...named.map(({ name }) => name.length), heat.words.layer.length) * 7 + 24;
  const bottom = TOP + rows.length * tall;
  const width = Math.ceil(Math.max(left + across * cell, left + 320, heat.title.length * 9) + 20);
  const text = (x: number, y: number, said: string, more = "") =>
    `<text x="${place(x)}" y="${place(y)}" fill="${colours.soft}" font-size="12" ${more}>${escaped(said)}</text>`;
  return [
    `<?xml version="1.0" encoding="UTF-8"?>`,
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${bottom + 52}" font-family="${FONT}" role="img">`,
    `<title>${escaped(heat.title)}</title>`,
    `<rect width="100%" height="100%" fill="${colours.paper}"/>`,
    text(16, 26, heat.title, `style="fill:${colours.ink};font-size:15px;font-weight:600"`),
    text(16, 46, heat.note),
    text(left - 12, TOP - 8, heat.words.layer, `text-anchor="end" font-style="italic"`),
    text(left, TOP - 26, heat.words.head, `font-style="italic"`),
    ...every(across, cell).map((column) =>
      text(left + (column + 0.5) * cell, TOP - 8, String(column), `text-anchor="middle"`),
    ),
    ...named.map(({ row, name }) =>
      text(left - 12, TOP + (row + 0.5) * tall, name, `text-anchor="end" dominant-baseline="central"`),
    ),
    ...cells(heat, left, cell, tall),
    ...legend(left, bottom + 24, heat, text),
    "</svg>\n",
  ].join("\n");
}

function cells(heat: Heat, left: number, cell: number, tall: number): string[] {
  const begins = starts(heat.rows);
  const gap = cell < 8 ? 0 : 1;
  return heat.rows.flatMap((row, r) =>
    Array.from({ length: row.count }, (_, c) => {
      const value = heat.values?.[begins[r]! + c] ?? NaN;
      if (Number.isNaN(value)) return "";
      const [x, y] = [left + c * cell, TOP + r * tall];
      if (broken(value)) return struck(x, y, cell - gap, tall - gap);
      const whole = rect(x, y, cell - gap, tall - gap, css(SHADES[shade(value, heat.low, heat.high)]!));
      // As on the page: a corner is left out where a head is outside of its band.
      const corner = rect(x + (2 / 3) * cell, y, cell / 3, tall / 3, heat.colours.paper);
      return heat.marked(value) ? whole + corner : whole;
    }).filter((drawn) => drawn !== ""),
  );
}

function legend(
  left: number,
  y: number,
  heat: Heat,
  text: (x: number, y: number, said: string, more?: string) => string,
): string[] {
  const parts = 32;
  return [
    ...Array.from({ length: parts }, (_, i) =>
      rect(left + 60 + i * 5, y, 5.2, 10, css(SHADES[Math.round((i * 255) / (parts - 1))]!)),
    ),
    text(left + 52, y + 9, format(heat.low, 3), `text-anchor="end"`),
    text(left + 68 + parts * 5, y + 9, format(heat.high, 3)),
  ];
}

const place = (value: number) => Number(value.toFixed(2));

function rect(x: number, y: number, width: number, height: number, fill: string): string {
  return `<rect x="${place(x)}" y="${place(y)}" width="${place(width)}" height="${place(height)}" fill="${fill}"/>`;
}

/** A head of NaN or infinity has no colour. */
function struck(x: number, y: number, width: number, height: number): string {
  const d = `M${place(x)} ${place(y + height)}L${place(x + width)} ${place(y)}`;
  return `<path d="${d}" stroke="${STRUCK}" stroke-width="2"/>`;
}

function escaped(text: string): string {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
