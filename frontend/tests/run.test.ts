import { describe, expect, it } from "vitest";
import { csv } from "../src/lib/export";
import { nearest } from "../src/lib/canned";
import { beyond, ends, outside, placed, readFrame, scoresOf } from "../src/lib/run";

function frame(field: number, start: number, steps: number[], rows: number[][]): ArrayBuffer {
  const columns = rows[0]?.length ?? 0;
  const view = new DataView(new ArrayBuffer(16 + 4 * steps.length * (1 + columns)));
  [field, start, steps.length, columns, ...steps].forEach((value, i) => view.setInt32(4 * i, value, true));
  rows.flat().forEach((value, i) => view.setFloat32(16 + 4 * (steps.length + i), value, true));
  return view.buffer;
}

describe("a frame of the monitor", () => {
  it("is read as the server packs it", () => {
    const found = readFrame(frame(2, 5, [100, 110], [[0.5, NaN, 2], [1, 2, 3]]));
    expect(found.field).toBe(2);
    expect(found.start).toBe(5);
    expect(found.steps).toEqual([100, 110]);
    expect([...found.rows[1]!]).toEqual([1, 2, 3]);
    expect(found.rows[0]![1]).toBeNaN();
  });
  it("takes its places and voids what stood there or after", () => {
    const row = (value: number) => Float32Array.of(value);
    const table = { steps: [0, 10, 20], rows: [row(0), row(1), row(2)] };
    const next = placed(table, 1, [15], [row(9)]);
    expect(next.steps).toEqual([0, 15]);
    expect(next.rows.map((one) => one[0])).toEqual([0, 9]);
  });
});

describe("a vital", () => {
  it("is outside its band or not", () => {
    expect(outside(0.05, { low: 0.1, high: 0.98 })).toBe(true);
    expect(outside(0.5, { low: 0.1, high: 0.98 })).toBe(false);
    expect(outside(101, { low: null, high: 100 })).toBe(true);
    expect(outside(NaN, { low: 0.1, high: null })).toBe(false);
    expect(outside(Infinity, { low: 0.1, high: null })).toBe(true); // NaN in its rows
    expect(outside(Infinity, undefined)).toBe(true);
  });
  it("has fixed ends where it is a share, else what was seen", () => {
    expect(ends("entropy_ratio", [Float32Array.of(0.4)], 0.98)).toEqual([0, 1]);
    expect(ends("row_std", [Float32Array.of(1, 9, NaN)], 3.5)).toEqual([0, 9]);
    expect(ends("max_logit", [Float32Array.of(-4, 2)], 100)).toEqual([-4, 2]);
  });
  it("raises an alarm for every head outside, the farthest first", () => {
    const values = Float32Array.of(0.5, 9, NaN, 4, 0.01, 30);
    const found = beyond(values, [2, 4], { low: 0.1, high: 3.5 }, 2);
    expect(found.count).toBe(4);
    expect(found.worst.map(({ row, column }) => [row, column])).toEqual([[1, 3], [0, 1]]);
    expect(beyond(null, [2], undefined).count).toBe(0);
    const dead = beyond(Float32Array.of(0.05, Infinity, 0.5), [3], { low: 0.1, high: null });
    expect([dead.count, dead.worst[0]?.column]).toEqual([2, 1]);
  });
  it("gives five scores of its deviation", () => {
    const scores = scoresOf(9.1).split(",").map(Number);
    const mean = scores.reduce((a, b) => a + b) / 5;
    const deviation = Math.sqrt(scores.reduce((sum, s) => sum + (s - mean) ** 2, 0) / 5);
    expect(deviation).toBeCloseTo(9.1, 2);
  });
});

describe("the exported page", () => {
  it("takes the nearest of its canned answers", () => {
    const stored = [64, 512].map((d_k) => ({ arguments: { d_k, scaled: false } }));
    expect(nearest(stored, { d_k: 400, scaled: false })?.arguments.d_k).toBe(512);
    expect(nearest(stored, { d_k: 100, scaled: false })?.arguments.d_k).toBe(64);
    expect(nearest([], {})).toBeNull();
  });
  it("prefers the right switch to the right number", () => {
    const stored = [
      { arguments: { d_k: 64, scaled: false } },
      { arguments: { d_k: 512, scaled: true } },
    ];
    expect(nearest(stored, { d_k: 64, scaled: true })?.arguments.scaled).toBe(true);
  });
});

describe("CSV", () => {
  it("quotes what must be quoted and keeps every digit", () => {
    const text = csv({ columns: ["a", 'b "c"'], rows: [[0.1234567890123, "x, y"], [null, [1, 2]]] });
    expect(text).toBe('a,"b ""c"""\n0.1234567890123,"x, y"\n,1 2\n');
  });
});
