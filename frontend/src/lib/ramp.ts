// Colour-blind safe ramps: cividis for sizes, blue - paper - orange for signed values.

export type Rgb = [number, number, number];

const CIVIDIS: Rgb[] = [
  [0, 34, 78],
  [32, 56, 111],
  [74, 82, 107],
  [111, 110, 115],
  [145, 139, 119],
  [184, 171, 108],
  [223, 204, 84],
  [254, 232, 56],
];
const SIGNED_LIGHT: Rgb[] = [
  [21, 84, 156],
  [120, 165, 212],
  [244, 242, 236],
  [236, 163, 95],
  [176, 82, 10],
];
const SIGNED_DARK: Rgb[] = [
  [125, 180, 250],
  [50, 92, 145],
  [33, 36, 42],
  [140, 78, 28],
  [245, 160, 82],
];

/** share: 0 to 1. */
export function sequential(share: number): Rgb {
  return along(CIVIDIS, share);
}

const INK_LIGHT: Rgb[] = [
  [244, 242, 236],
  [158, 190, 230],
  [29, 91, 184],
];
const INK_DARK: Rgb[] = [
  [33, 36, 42],
  [52, 92, 155],
  [150, 192, 255],
];

/** For weights: the more, the more ink. share: 0 to 1. */
export function inked(share: number, dark: boolean): Rgb {
  return along(dark ? INK_DARK : INK_LIGHT, share);
}

/** share: -1 to 1. */
export function signed(share: number, dark: boolean): Rgb {
  return along(dark ? SIGNED_DARK : SIGNED_LIGHT, (share + 1) / 2);
}

function along(stops: Rgb[], share: number): Rgb {
  const clean = Number.isFinite(share) ? Math.min(Math.max(share, 0), 1) : 0;
  const place = clean * (stops.length - 1);
  const index = Math.min(Math.floor(place), stops.length - 2);
  const rest = place - index;
  const from = stops[index]!;
  const to = stops[index + 1]!;
  return [0, 1, 2].map((c) => Math.round(from[c]! + rest * (to[c]! - from[c]!))) as Rgb;
}

export const css = ([r, g, b]: Rgb): string => `rgb(${r},${g},${b})`;

/** Black or white, whichever is read better on a colour. */
export function ink(colour: Rgb): string {
  const [r, g, b] = colour.map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  }) as Rgb;
  const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return luminance > 0.179 ? "#000000" : "#ffffff";
}
