import { describe, expect, it } from "vitest";
import type { Control } from "../src/lib/contract";
import { argumentsOf, changed, format, parse, read, readNumbers } from "../src/lib/hash";

const D_K: Control = { name: "d_k", kind: "steps", default: 64, values: [1, 2, 4, 64, 512] };
const SCALED: Control = { name: "scaled", kind: "toggle", default: false };
const SCORES: Control = { name: "scores", kind: "numbers", default: [12, 2, -1], length: 4 };
const RULE: Control = { name: "rule", kind: "choice", default: "none", values: ["none", "dk"] };
const SIZE: Control = { name: "size", kind: "range", default: 1, low: 0, high: 10, step: 0.5 };
const TEXT: Control = { name: "sentence", kind: "text", default: "Love", length: 12 };
const ALL = [D_K, SCALED, SCORES, RULE, SIZE, TEXT];

describe("the address", () => {
  it("says everything and is read back", () => {
    const given = { d_k: "512", scores: "1,2,-3", sentence: "a & b = c?" };
    const route = { lesson: "variance", lang: "hi", theme: "dark" as const, given };
    expect(parse(format(route))).toEqual(route);
    expect(format(route)).toContain("scores=1,2,-3");
  });
  it("is the home when it is empty or of another version", () => {
    expect(parse("").lesson).toBe("flow");
    expect(parse("#v=9&lesson=race&lang=hi")).toEqual({ lesson: "flow", lang: null, theme: null, given: {} });
  });
  it("ignores a theme it does not know", () => expect(parse("#theme=pink").theme).toBeNull());
});

describe("the values of controls", () => {
  it("come from the address, else from the defaults", () => {
    expect(argumentsOf(ALL, { d_k: "512", scaled: "true", scores: "7,3", rule: "dk", size: "2.5", sentence: "hi" })).toEqual({
      d_k: 512,
      scaled: true,
      scores: [7, 3],
      rule: "dk",
      size: 2.5,
      sentence: "hi",
    });
    expect(argumentsOf(ALL, {})).toEqual({ d_k: 64, scaled: false, scores: [12, 2, -1], rule: "none", size: 1, sentence: "Love" });
  });
  it("fall back where the address is nonsense", () => {
    const nonsense = { d_k: "many", scaled: "perhaps", scores: "1,x", rule: "magic", size: "" };
    expect(argumentsOf(ALL.slice(0, 5), nonsense)).toEqual({ d_k: 64, scaled: false, scores: [12, 2, -1], rule: "none", size: 1 });
  });
  it("are the nearest step, and inside the range", () => {
    expect(read(D_K, "300")).toBe(512);
    expect(read(D_K, "3.2")).toBe(4);
    expect(read(SIZE, "99")).toBe(10);
    expect(read(TEXT, "much too long a text")).toBe("much too lon");
  });
  it("stand in the address only where they differ from the defaults", () => {
    expect(changed(ALL, argumentsOf(ALL, {}))).toEqual({});
    expect(changed(ALL, { ...argumentsOf(ALL, {}), d_k: 2, scores: [1] })).toEqual({ d_k: "2", scores: "1" });
  });
});

describe("typed numbers", () => {
  it("may have commas, spaces, brackets and a true minus", () => {
    expect(readNumbers("[1, −2;3.5]", 4)).toEqual([1, -2, 3.5]);
    expect(readNumbers("1 2", 4)).toEqual([1, 2]);
  });
  it("are refused when there are none, too many, or something else", () => {
    expect(readNumbers("", 4)).toBeNull();
    expect(readNumbers("1,2,3,4,5", 4)).toBeNull();
    expect(readNumbers("1,two", 4)).toBeNull();
    expect(readNumbers("1,Infinity", 4)).toBeNull();
  });
});
