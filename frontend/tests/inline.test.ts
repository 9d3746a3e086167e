import { describe, expect, it } from "vitest";
import { runs } from "../src/lib/inline";

describe("a text of the catalogue", () => {
  const set = (text: string) => runs(text).map((run) => [run.kind, run.text, run.below ?? ""].join(" ").trim());
  it("sets code, names with a subscript, and what is transposed", () => {
    expect(set("`x` and d_k")).toEqual(["code x", "text  and", "name d k"]);
    expect(set("Q Kᵀ of p pᵀ")).toEqual(["text Q K", "above T", "text  of p p", "above T"]);
    expect(set("Kᵀ = W_K")).toEqual(["text K", "above T", "text  =", "name W K"]);
  });
});
