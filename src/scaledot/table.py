"""A table of vitals as text and as HTML: name, values by head, healthy band."""

import html
from typing import NamedTuple


class Line(NamedTuple):
    name: str
    cells: list[str]
    flags: list[bool]  # True: outside the healthy band
    band: str


def as_text(title: str, columns: list[str], lines: list[Line], note: str) -> str:
    """Fixed-width; a value outside its band carries a «!»."""
    body = [
        [line.name, *(f"{cell}{'!' if flag else ' '}" for cell, flag in _cells(line)), line.band]
        for line in lines
    ]
    rows = [["", *(f"{column} " for column in columns), "healthy"], *body]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = [title]
    for row in rows:
        middle = "  ".join(cell.rjust(w) for cell, w in zip(row[1:-1], widths[1:-1], strict=True))
        text.append(f"{row[0].ljust(widths[0])}  {middle}  {row[-1]}".rstrip())
    return "\n".join([*text, note] if note else text)


def as_html(title: str, columns: list[str], lines: list[Line], note: str) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in ["", *columns, "healthy"])
    body = []
    for line in lines:
        cells = "".join(
            f"<td style='text-align:right{';color:#b00020;font-weight:bold' if flag else ''}'>"
            f"{html.escape(cell)}{'!' if flag else ''}</td>"
            for cell, flag in _cells(line)
        )
        body.append(
            f"<tr><th style='text-align:left'>{html.escape(line.name)}</th>{cells}"
            f"<td style='text-align:left'>{html.escape(line.band)}</td></tr>"
        )
    caption = html.escape(" ".join(part for part in (title, note) if part))
    return (
        f"<table><caption style='text-align:left'>{caption}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _cells(line: Line) -> list[tuple[str, bool]]:
    return list(zip(line.cells, line.flags, strict=True))
