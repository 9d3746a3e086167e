import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";

// One script and one style sheet with relative addresses: the server puts a random token before
// them, and the exported page carries them inside itself.
export default defineConfig({
  base: "./",
  plugins: [svelte({ compilerOptions: { runes: true } })],
  build: {
    outDir: "../src/scaledot/lab/page",
    emptyOutDir: true,
    target: "es2022",
    cssCodeSplit: false,
    modulePreload: false,
    reportCompressedSize: false,
    assetsInlineLimit: 0, // data: addresses are outside of the page's content security policy
  },
  test: { include: ["tests/**/*.test.ts"], environment: "node" },
});
