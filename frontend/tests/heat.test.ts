import { describe, expect, it } from "vitest";
import { every, heatSvg, shade, SHADES, sides, sizes, starts, STRUCK } from "../src/lib/heat";
import { css, sequential } from "../src/lib/ramp";

const rows = [
  { name: "blocks.0 <a&b>", count: 2 },
  { name: "blocks.1", count: 3 },
];
const heat = {
  rows,
  values: Float32Array.from([0, 0.5, 1, NaN, 2]),
  low: 0,
  high: 2,
  marked: (value: number) => value > 1.5,
  title: "row_std of every head at step 7",
  note: "healthy: ≤ 1.5",
  words: { layer: "layer", head: "head" },
  colours: { paper: "#fbfaf7", ink: "#1c1e22", soft: "#575c66" },
};
const fills = (svg: string) => [...svg.matchAll(/<rect [^>]*fill="(rgb[^"]*)"/g)].map((match) => match[1]);

describe("the heat map", () => {
  it("gives every value one of 256 shades, the ends at the ends", () => {
    expect([shade(0, 0, 2), shade(2, 0, 2), shade(-9, 0, 2), shade(9, 0, 2)]).toEqual([0, 255, 0, 255]);
    expect(shade(3, 3, 3)).toBe(0);
    expect(SHADES[255]).toEqual(sequential(1));
  });
  it("knows where the heads of a layer begin", () => {
    expect(starts(rows)).toEqual([0, 2]);
    expect(sizes(600, rows)).toEqual({ across: 3, cell: 46, tall: 34 });
    expect(sizes(96, [{ name: "wide", count: 96 }]).cell).toBe(1);
    expect(every(96, 5).slice(0, 3)).toEqual([0, 8, 16]);
  });
  it("numbers its rows as the layers are called, if they are", () => {
    const called = (...names: string[]) => sides(names.map((name) => ({ name, count: 1 })));
    expect(called("layer 1", "layer 2")).toEqual(["1", "2"]);
    expect(called("h2.0", "h2.1")).toEqual(["0", "1"]);
    expect(called("encoder", "decoder")).toEqual(["0", "1"]);
  });
});

describe("its SVG", () => {
  const svg = heatSvg(heat);
  it("has a cell in its colour for each head that was measured", () => {
    const wanted = [0, 0.5, 1, 2].map((value) => css(SHADES[shade(value, 0, 2)]!));
    expect(fills(svg).slice(0, 4)).toEqual(wanted);
    expect(fills(svg)).toHaveLength(4 + 32); // and the ramp
  });
  it("leaves out a corner where a head is outside of its band, and nowhere else", () => {
    expect([...svg.matchAll(/fill="#fbfaf7"/g)]).toHaveLength(1 + 1); // the paper itself
    expect([...heatSvg({ ...heat, marked: () => false }).matchAll(/fill="#fbfaf7"/g)]).toHaveLength(1);
  });
  it("strikes out a head of NaN", () => {
    const broken = heatSvg({ ...heat, values: Float32Array.from([0, 0.5, 1, NaN, Infinity]) });
    expect(fills(broken)).toHaveLength(3 + 32);
    expect([...broken.matchAll(new RegExp(`stroke="${STRUCK}"`, "g"))]).toHaveLength(1);
  });
  it("says what it shows: title, band, layers, heads, the ends of the ramp", () => {
    expect(svg).toContain("<title>row_std of every head at step 7</title>");
    const texts = [...svg.matchAll(/<text [^>]*>([^<]*)<\/text>/g)].map((match) => match[1]);
    expect(texts).toEqual([
      heat.title, heat.note, "layer", "head", "0", "1", "2", "blocks.0 &lt;a&amp;b&gt;", "blocks.1", "0", "2",
    ]);
  });
  it("is empty but whole before the first step", () => {
    const nothing = heatSvg({ ...heat, values: null });
    expect(fills(nothing)).toHaveLength(32);
    expect(nothing.trimEnd().endsWith("</svg>")).toBe(true);
  });
});
