"""Writes the rows of the CSV, the tables of docs/scaling.md and docs/scaling.svg."""

import re
from pathlib import Path

from benchmarks.scaling import facts, picture, rows, study, tables
from benchmarks.scaling.facts import ROOT

PAGE, SVG = ROOT / "docs" / "scaling.md", ROOT / "docs" / "scaling.svg"


def main(csv: Path = rows.CSV, page: Path = PAGE, svg: Path = SVG) -> int:
    """Computed rows are made anew, measured ones stay. The tables are made from the file."""
    speeds = facts.measured()
    rows.write([*study.rows(speeds), *rows.measured(rows.read(csv))], csv)
    found = rows.read(csv)
    svg.write_text(picture.picture(found), encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    for name, table in tables.TABLES.items():
        text = filled(text, name, table(found, speeds))
    page.write_text(text, encoding="utf-8")
    return 0


def filled(text: str, name: str, table: str) -> str:
    """Between the marks of this name."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if start not in text or end not in text:
        raise ValueError(f"docs/scaling.md lacks the marks {start} and {end}")
    pattern = f"{re.escape(start)}.*?{re.escape(end)}"
    return re.sub(pattern, lambda _: f"{start}\n{table}\n{end}", text, flags=re.S)
