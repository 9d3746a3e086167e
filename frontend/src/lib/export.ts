// Every figure as a file: SVG with its styles inside, PNG drawn on a canvas, CSV of its numbers.
//
// A browser can load an SVG as an image and paint that, but only from a blob: or data: address,
// which the page's content security policy forbids. The charts are a few kinds of marks: they are
// painted here one by one.

import type { Json } from "./contract";

const KEPT = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "stroke-opacity",
  "opacity",
  "font-family",
  "font-size",
  "font-weight",
  "font-style",
  "text-anchor",
  "dominant-baseline",
];

export function save(name: string, kind: string, content: string | Blob): void {
  const blob = content instanceof Blob ? content : new Blob([content], { type: kind });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function svgText(drawing: SVGSVGElement): string {
  const copy = drawing.cloneNode(true) as SVGSVGElement;
  const from = [drawing, ...drawing.querySelectorAll<SVGElement>("*")];
  const to = [copy, ...copy.querySelectorAll<SVGElement>("*")];
  from.forEach((element, index) => {
    const style = getComputedStyle(element);
    for (const property of KEPT) {
      to[index]?.setAttribute(property, style.getPropertyValue(property).replaceAll('"', "'"));
    }
    to[index]?.removeAttribute("class");
    to[index]?.removeAttribute("style");
  });
  const { width, height } = size(drawing);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  paper.setAttribute("width", "100%");
  paper.setAttribute("height", "100%");
  paper.setAttribute("fill", paperColour());
  copy.prepend(paper);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(copy)}`;
}

export async function png(drawing: SVGSVGElement | HTMLCanvasElement): Promise<Blob> {
  const canvas = drawing instanceof HTMLCanvasElement ? drawing : painted(drawing);
  return new Promise((resolve, reject) => {
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("no image"))), "image/png");
  });
}

function painted(drawing: SVGSVGElement): HTMLCanvasElement {
  const scale = 2;
  const { width, height } = size(drawing);
  const canvas = document.createElement("canvas");
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d")!;
  pen.fillStyle = paperColour();
  pen.fillRect(0, 0, canvas.width, canvas.height);
  for (const element of drawing.querySelectorAll<SVGGraphicsElement>("rect,line,path,circle,text")) {
    paint(pen, element, scale);
  }
  return canvas;
}

function paint(pen: CanvasRenderingContext2D, element: SVGGraphicsElement, scale: number): void {
  const style = getComputedStyle(element);
  const place = element.getCTM();
  if (!place || style.visibility === "hidden" || style.display === "none") return;
  pen.setTransform(scale * place.a, scale * place.b, scale * place.c, scale * place.d, scale * place.e, scale * place.f);
  pen.globalAlpha = opacity(element);
  if (element instanceof SVGTextElement) {
    pen.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    pen.fillStyle = style.fill;
    pen.textAlign = { middle: "center", end: "right" }[style.textAnchor] as CanvasTextAlign ?? "left";
    pen.textBaseline = style.dominantBaseline === "middle" || style.dominantBaseline === "central" ? "middle" : "alphabetic";
    pen.fillText(element.textContent ?? "", element.x.baseVal[0]?.value ?? 0, element.y.baseVal[0]?.value ?? 0);
    return;
  }
  const outline = shape(element);
  if (style.fill !== "none") {
    pen.fillStyle = style.fill;
    pen.fill(outline);
  }
  if (style.stroke !== "none") {
    pen.strokeStyle = style.stroke;
    pen.lineWidth = parseFloat(style.strokeWidth);
    pen.setLineDash(style.strokeDasharray === "none" ? [] : style.strokeDasharray.split(/[ ,]+/).map(parseFloat));
    pen.stroke(outline);
  }
}

function shape(element: SVGGraphicsElement): Path2D {
  if (element instanceof SVGPathElement) return new Path2D(element.getAttribute("d") ?? "");
  const outline = new Path2D();
  const get = (name: string) => Number(element.getAttribute(name) ?? 0);
  if (element instanceof SVGRectElement) {
    outline.roundRect(get("x"), get("y"), get("width"), get("height"), get("rx"));
  } else if (element instanceof SVGCircleElement) {
    outline.arc(get("cx"), get("cy"), get("r"), 0, 2 * Math.PI);
  } else {
    outline.moveTo(get("x1"), get("y1"));
    outline.lineTo(get("x2"), get("y2"));
  }
  return outline;
}

function opacity(element: Element): number {
  let product = 1;
  for (let up: Element | null = element; up && !(up instanceof SVGSVGElement); up = up.parentElement) {
    product *= Number(getComputedStyle(up).opacity);
  }
  return product;
}

function size(drawing: SVGSVGElement): { width: number; height: number } {
  const box = drawing.getBoundingClientRect();
  return { width: Math.ceil(box.width), height: Math.ceil(box.height) };
}

const paperColour = () => getComputedStyle(document.documentElement).getPropertyValue("--paper").trim() || "white";

export interface Sheet {
  columns: string[];
  rows: Json[][];
}

export function csv(sheet: Sheet): string {
  return [sheet.columns, ...sheet.rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

function cell(value: Json): string {
  const text = value === null ? "" : Array.isArray(value) ? value.join(" ") : String(value);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
