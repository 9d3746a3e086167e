// The exported page has no server behind it: its numbers were computed when it was written.

import type { Answer, Arguments, Canned, Json } from "./contract";

/** Data that came inside the document: `scaledot-canned`, or a server's `scaledot-start`. */
export function carried<Data>(name: string): Data | null {
  const element = document.getElementById(name);
  return element?.textContent ? (JSON.parse(element.textContent) as Data) : null;
}

/** The stored answer whose arguments are nearest: equal ones first, then numbers close by. */
export function nearest<Stored extends { arguments: Arguments }>(
  stored: Stored[],
  wanted: Arguments,
): Stored | null {
  let best: Stored | null = null;
  let least = Infinity;
  for (const candidate of stored) {
    const away = distance(candidate.arguments, wanted);
    if (away < least) [best, least] = [candidate, away];
  }
  return best;
}

export function distance(a: Arguments, b: Arguments): number {
  let sum = 0;
  for (const name of Object.keys(a)) sum += apart(a[name] ?? null, b[name] ?? null);
  return sum;
}

function apart(a: Json, b: Json): number {
  if (JSON.stringify(a) === JSON.stringify(b)) return 0;
  if (typeof a === "number" && typeof b === "number") {
    // Steps of sliders mostly double: compare by ratio where both are positive.
    const ratio = a > 0 && b > 0 ? Math.abs(Math.log2(a / b)) / 10 : Math.abs(a - b);
    return ratio / (1 + ratio);
  }
  return 1;
}

export function answersOf(canned: Canned, lesson: string): Answer[] {
  return canned.answers.filter((answer) => answer.lesson === lesson);
}
