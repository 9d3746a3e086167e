"""Numbers, times and names as short as a terminal needs them."""

import math
from collections.abc import Sequence

LONGEST = 2000  # characters of one text of a store that a viewer shows
UNITS = ("", "k", "M", "G", "T")


def short(number: float) -> str:
    """At most four characters, five below zero: .04, 3.5, 12, 723, 1.7k; - where not measured."""
    if math.isnan(number):
        return "-"
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    sign, size = ("-" if number < 0 else ""), abs(number)
    if size < 0.995:
        hundredths = f"{size:.2f}"[1:]
        if hundredths != ".00":
            return sign + hundredths
        return "0" if size == 0 else sign + "~0"
    for unit in UNITS:
        if size < 9.95:
            return f"{sign}{size:.1f}{unit}"
        if size < 999.5:
            return f"{sign}{size:.0f}{unit}"
        size /= 1000
    return sign + "huge"


def ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_layers(layers: Sequence[str]) -> tuple[str, list[str]]:
    """What all names share, with * for the rest, and the rest of each.

    transformer.h.0.attn, transformer.h.1.attn -> transformer.h.*.attn and layer 0, layer 1
    """
    parts = [layer.split(".") for layer in layers]
    start = _shared(parts)
    end = _shared([path[start:][::-1] for path in parts])
    rests = [".".join(path[start : len(path) - end]) for path in parts]
    if len(layers) < 2 or not all(rests):
        return "", list(layers)
    if all(rest.isdecimal() for rest in rests):
        rests = [f"layer {rest}" for rest in rests]
    first = parts[0]
    pattern = ".".join([*first[:start], "*", *first[len(first) - end :]])
    return ("" if pattern == "*" else pattern), rests


def cut(text: str, width: int, keep_end: bool = False) -> str:
    """Shortened with … where it is too long; keep_end: the end of a path says more."""
    if len(text) <= width:
        return text
    if width < 2:
        return text[:width]
    return "…" + text[len(text) - width + 1 :] if keep_end else text[: width - 1] + "…"


def brief(text: str) -> str:
    """A text of the store, as much as anybody reads: a stranger's may have megabytes."""
    return cut(text, LONGEST)


def _shared(paths: list[list[str]]) -> int:
    number = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        number += 1
    return number
