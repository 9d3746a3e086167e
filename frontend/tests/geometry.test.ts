import { describe, expect, it } from "vitest";
import { extent, linear, logarithmic, path, ticks } from "../src/lib/geometry";
import { ink, inked, sequential, signed } from "../src/lib/ramp";

describe("axes", () => {
  it("place the ends at the ends", () => {
    const axis = linear(-2, 6, 10, 90);
    expect([axis(-2), axis(2), axis(6)]).toEqual([10, 50, 90]);
    const up = logarithmic(1, 100, 200, 0);
    expect(up(1)).toBeCloseTo(200);
    expect(up(10)).toBeCloseTo(100);
    expect(up(100)).toBeCloseTo(0);
  });
  it("have round marks inside", () => {
    expect(ticks(0, 1, 5)).toEqual([0, 0.2, 0.4, 0.6, 0.8, 1]);
    expect(ticks(-23, 23, 5)).toEqual([-20, -10, 0, 10, 20]);
    expect(ticks(3, 3)).toEqual([3]);
    expect(ticks(NaN, 1)).toEqual([]);
  });
  it("mark powers of two and of ten", () => {
    expect(logarithmic(1, 1024, 0, 1, 2, 11).ticks.map((tick) => tick.label)).toEqual(
      ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024"],
    );
    expect(logarithmic(1e-6, 1, 0, 1, 10, 4).ticks.map((tick) => tick.label)).toEqual(["10⁻⁶", "10⁻⁴", "0.01", "1"]);
  });
  it("have an extent even of nothing or of one value", () => {
    expect(extent([])).toEqual([0, 1]);
    expect(extent([3, NaN, Infinity, -1])).toEqual([-1, 3]);
    const [low, high] = extent([5, 5]);
    expect(low).toBeLessThan(high);
  });
});

describe("a line", () => {
  it("has a gap where there is no number", () => {
    const points = [0, 1, NaN, 3].map((y, x) => ({ x, y }));
    expect(path(points)).toBe("M0.0 0.0L1.0 1.0M3.0 3.0");
  });
});

describe("ramps", () => {
  it("grow lighter step by step", () => {
    const light = (c: number[]) => 0.2126 * c[0]! + 0.7152 * c[1]! + 0.0722 * c[2]!;
    const steps = Array.from({ length: 21 }, (_, i) => light(sequential(i / 20)));
    steps.slice(1).forEach((value, i) => expect(value).toBeGreaterThan(steps[i]!));
  });
  it("have their paper in the middle, and ends that differ", () => {
    expect(signed(0, false)).toEqual([244, 242, 236]);
    expect(signed(-1, true)).not.toEqual(signed(1, true));
    expect(inked(2, false)).toEqual(inked(1, false));
    expect(sequential(NaN)).toEqual(sequential(0));
  });
  it("keep digits readable: contrast of at least 4.5", () => {
    const luminance = ([r, g, b]: number[]) => {
      const part = (value: number) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
      return 0.2126 * part(r!) + 0.7152 * part(g!) + 0.0722 * part(b!);
    };
    const inks: Record<string, number> = { "#000000": 0, "#ffffff": 1 };
    for (let i = -20; i <= 20; i++) {
      for (const dark of [false, true]) {
        for (const colour of [signed(i / 20, dark), inked(Math.abs(i) / 20, dark)]) {
          const [a, b] = [luminance(colour), inks[ink(colour)]!].sort((x, y) => y - x) as [number, number];
          expect((a + 0.05) / (b + 0.05)).toBeGreaterThanOrEqual(4.5);
        }
      }
    }
  });
});
