// How a text of the catalogue is set: `code`, names such as d_k or W_Q with a true subscript, and
// the T of a transposed matrix, which many fonts lack as a letter above the line.

export interface Run {
  text: string;
  kind: "text" | "code" | "name" | "above";
  below?: string;
}

const NAME = /(?<![\w.])([A-Za-zσ])_(model|[A-Za-z]|\d)(?![\w(])/gu;

export function runs(text: string): Run[] {
  return text.split("`").flatMap((part, index): Run[] => (index % 2 ? [{ text: part, kind: "code" }] : plain(part)));
}

function plain(text: string): Run[] {
  return text
    .split("ᵀ")
    .flatMap((part, index): Run[] => [...(index ? [{ text: "T", kind: "above" } as const] : []), ...names(part)]);
}

function names(text: string): Run[] {
  const found: Run[] = [];
  let end = 0;
  for (const match of text.matchAll(NAME)) {
    if (match.index > end) found.push({ text: text.slice(end, match.index), kind: "text" });
    found.push({ text: match[1]!, kind: "name", below: match[2]! });
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push({ text: text.slice(end), kind: "text" });
  return found;
}
