import { describe, expect, it } from "vitest";
import { fill, pieces, written } from "../src/lib/template";
import { runs } from "../src/lib/inline";

describe("a text of the catalogue", () => {
  it("is filled from the result", () => {
    const result = { sd: 7.8321, d_k: 64, rules: [{ top: 0.8444 }], weights: [0.67412, 0.19311] };
    expect(fill("sd {sd:.2f} at {d_k}: {rules.0.top:.1%}, {weights:.2f}", result)).toBe(
      "sd 7.83 at 64: 84.4%, [0.67, 0.19]",
    );
    expect(fill("{{{sd:.1f}}}", result)).toBe("{7.8}");
  });
  it("keeps the path and the full value of each number", () => {
    expect(pieces("a {sd:.1f} b", { sd: 7.8321 })).toEqual([
      { text: "a " },
      { text: "7.8", field: "sd", value: 7.8321 },
      { text: " b" },
    ]);
  });
  it("shows that a number is still to come", () => expect(fill("sd {sd:.2f}", {})).toBe("sd …"));
});

// Each line was written by Python's format(value, specification).
describe("a specification", () => {
  it.each([
    [2000, ",", "2,000"],
    [162754.79, ",.0f", "162,755"],
    [0.0000453978, ".3g", "4.54×10⁻⁵"],
    [0.00012345, ".3g", "0.000123"],
    [123456, ".3g", "1.23×10⁵"],
    [64.0, ".4g", "64"],
    [1234567.5, "", "1.23457×10⁶"],
    [0.1, "", "0.1"],
    [-0.5, ".1f", "−0.5"],
    [1.03e-10, ".1e", "1.0×10⁻¹⁰"],
    [0.417, ".0%", "42%"],
  ])("%d with %s is %s", (value, specification, text) => expect(written(value, specification)).toBe(text));
  it("leaves words alone", () => expect(written("nan", ".2f")).toBe("nan"));
});

describe("names in a text", () => {
  it("get their subscript", () => {
    expect(runs("why √d_k, not d_model?")).toEqual([
      { text: "why √", kind: "text" },
      { text: "d", kind: "name", below: "k" },
      { text: ", not ", kind: "text" },
      { text: "d", kind: "name", below: "model" },
      { text: "?", kind: "text" },
    ]);
  });
  it("leave names of the library alone", () => {
    for (const text of ["logit_std", "row_std", "sqrt_dk", "max_logit"]) {
      expect(runs(text)).toEqual([{ text, kind: "text" }]);
    }
    expect(runs("`d_k`")).toEqual([{ text: "", kind: "text" }, { text: "d_k", kind: "code" }, { text: "", kind: "text" }].filter((run) => run.text));
  });
});
