import { gzipSync } from "node:zlib";
import { build, type Rolldown } from "vite";
import { expect, it } from "vitest";

const BUDGET = 80_000; // bytes of script and style, compressed

it("stays within its budget, in one script and one style sheet", async () => {
  const built = (await build({ logLevel: "error", build: { write: false } })) as Rolldown.RolldownOutput;
  const files = built.output.filter((file) => /\.(js|css)$/.test(file.fileName));
  expect(files.map((file) => file.fileName.split(".").at(-1)).sort()).toEqual(["css", "js"]);
  const sizes = files.map((file) => gzipSync(file.type === "chunk" ? file.code : file.source).length);
  expect(sizes.reduce((a, b) => a + b)).toBeLessThan(BUDGET);
}, 60_000);

it("asks for nothing from elsewhere", async () => {
  const built = (await build({ logLevel: "error", build: { write: false } })) as Rolldown.RolldownOutput;
  const foreign = /(?:src|href|url\(|import\(|fetch\()\s*=?\s*["'(]*https?:/;
  for (const file of built.output) {
    const text = file.type === "chunk" ? file.code : String(file.source);
    expect(foreign.test(text), file.fileName).toBe(false);
  }
}, 60_000);
