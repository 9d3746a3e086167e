// The whole state of the page is its address: #v=1&lesson=variance&lang=hi&theme=dark&d_k=512.

import type { Arguments, Control, Json } from "./contract";

export const VERSION = "1";
export const HOME = "flow";

export interface Route {
  lesson: string;
  lang: string | null;
  theme: "light" | "dark" | null;
  given: Record<string, string>; // arguments and what a panel remembers, as written
}

const RESERVED = new Set(["v", "lesson", "lang", "theme"]);

export function parse(hash: string): Route {
  const route: Route = { lesson: HOME, lang: null, theme: null, given: {} };
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  if (fields.has("v") && fields.get("v") !== VERSION) return route; // of another page: start anew
  route.lesson = fields.get("lesson") || HOME;
  route.lang = fields.get("lang");
  const theme = fields.get("theme");
  if (theme === "light" || theme === "dark") route.theme = theme;
  for (const [name, value] of fields) if (!RESERVED.has(name)) route.given[name] = value;
  return route;
}

export function format(route: Route): string {
  const fields = new URLSearchParams({ v: VERSION, lesson: route.lesson });
  if (route.lang) fields.set("lang", route.lang);
  if (route.theme) fields.set("theme", route.theme);
  for (const [name, value] of Object.entries(route.given)) fields.set(name, value);
  // Commas are legal in a fragment, and lists of numbers stay readable.
  return `#${fields.toString().replaceAll("%2C", ",")}`;
}

export function write(value: Json): string {
  if (Array.isArray(value)) return value.map(write).join(",");
  return String(value);
}

/** What an address says for a control; null where it says nothing a control could take. */
export function read(control: Control, written: string | undefined): Json | null {
  if (written === undefined) return null;
  switch (control.kind) {
    case "toggle":
      return written === "true" ? true : written === "false" ? false : null;
    case "choice":
    case "steps":
      return control.values?.find((value) => write(value) === written) ?? nearest(control, written);
    case "numbers":
      return readNumbers(written, control.length ?? 64);
    case "text":
      return written.slice(0, control.length ?? 200);
    default: {
      const number = Number(written);
      if (written.trim() === "" || !Number.isFinite(number)) return null;
      return clamp(number, control.low ?? null, control.high ?? null);
    }
  }
}

/** A slider over a list takes the step nearest to a number in between. */
function nearest(control: Control, written: string): Json | null {
  const number = Number(written);
  if (control.kind !== "steps" || written.trim() === "" || !Number.isFinite(number)) return null;
  const steps = (control.values ?? []).filter((value) => typeof value === "number");
  if (steps.length === 0) return null;
  return steps.reduce((best, step) =>
    Math.abs(step - number) < Math.abs(best - number) ? step : best,
  );
}

export function readNumbers(written: string, most: number): number[] | null {
  const parts = written.replace(/[[\]()]/g, " ").replaceAll("−", "-").split(/[\s,;]+/);
  const numbers = parts.filter((part) => part !== "").map(Number);
  if (numbers.length === 0 || numbers.length > most) return null;
  return numbers.every(Number.isFinite) ? numbers : null;
}

/** Every control's value: from the address where it says one, else the default. */
export function argumentsOf(controls: Control[], given: Record<string, string>): Arguments {
  const values: Arguments = {};
  for (const control of controls) {
    values[control.name] = read(control, given[control.name]) ?? control.default;
  }
  return values;
}

/** What belongs into the address: only what differs from the defaults. */
export function changed(controls: Control[], values: Arguments): Record<string, string> {
  const given: Record<string, string> = {};
  for (const control of controls) {
    const value = values[control.name];
    if (value !== undefined && write(value) !== write(control.default)) {
      given[control.name] = write(value);
    }
  }
  return given;
}

function clamp(number: number, low: number | null, high: number | null): number {
  return Math.min(Math.max(number, low ?? -Infinity), high ?? Infinity);
}
