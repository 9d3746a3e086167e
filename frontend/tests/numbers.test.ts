import { describe, expect, it } from "vitest";
import { at, format, percent, superscript, toNumber } from "../src/lib/numbers";

describe("a number for the eye", () => {
  it.each([
    [0, "0"],
    [64, "64"],
    [-3, "−3"],
    [7.8321, "7.832"],
    [0.2197, "0.2197"],
    [0.5, "0.5"],
    [162754.79, "162\u202f755"],
    [12288, "12\u202f288"],
    [1024, "1024"],
    [4.53978e-5, "4.54×10⁻⁵"],
    [-1.5e-9, "−1.5×10⁻⁹"],
    [3.2e7 + 0.5, "3.2×10⁷"],
    [NaN, "NaN"],
    [-Infinity, "−∞"],
  ])("%d is written %s", (value, text) => expect(format(value)).toBe(text));

  it("does not round a weight up to all of it", () => {
    expect(format(0.9999523)).toBe("0.9999523");
    expect(format(1 - 1.03e-10)).toBe("1 − 1.03×10⁻¹⁰");
    expect(format(1)).toBe("1");
  });

  it("writes lists, words of JSON, and nothing", () => {
    expect(format([1.5, 0.25, -0.125])).toBe("[1.5, 0.25, −0.125]");
    expect(format("inf")).toBe("∞");
    expect(format("nan")).toBe("NaN");
    expect(format("over")).toBe("over");
    expect(format(null)).toBe("–");
  });

  it("never writes a share that is there as zero percent", () => {
    expect(percent(0.148)).toBe("14.8\u202f%");
    expect(percent(1)).toBe("100\u202f%");
    expect(percent(0)).toBe("0\u202f%");
    expect(percent(0.0000123)).toBe("0.0012\u202f%");
    expect(percent(-0.25)).toBe("−25\u202f%");
  });

  it("writes powers of ten", () => expect(superscript(-120)).toBe("⁻¹²⁰"));
});

describe("a path into a result", () => {
  const result = { rules: [{ top: 0.84 }], claims: [{ measured: [1, 2] }] };
  it("follows names and places", () => {
    expect(at(result, "rules.0.top")).toBe(0.84);
    expect(at(result, "claims.0.measured.1")).toBe(2);
  });
  it("finds nothing where there is nothing", () => {
    expect(at(result, "rules.7.top")).toBeUndefined();
    expect(at(undefined, "sd")).toBeUndefined();
  });
  it("reads numbers that JSON lacks", () => {
    expect(toNumber("-inf")).toBe(-Infinity);
    expect(toNumber("nan")).toBeNaN();
    expect(toNumber(2)).toBe(2);
  });
});
