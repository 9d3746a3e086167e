"""What every visit asks first (the lessons, the words) goes with the document itself.

The page then draws as soon as its script runs, without two more rounds to the server.
"""

from typing import Any

from scaledot.lab import catalogue
from scaledot.lab.server import answers
from scaledot.lab.server.page import PageFile
from scaledot.lab.server.plain_json import dumps

START = "scaledot-start"  # the page looks for this id before it asks the server


def with_start(index: PageFile, lang: str, *, run: bool) -> PageFile:
    data = {"lessons": answers.listing(lang, run), "catalogue": {lang: catalogue.load(lang)}}
    # At the end: whoever reads the document has found its script and its style by then.
    before, end, after = index.content.decode().rpartition("</body>")
    return PageFile(f"{before}{block(START, data)}{end}{after}".encode(), index.type)


def block(name: str, data: dict[str, Any]) -> str:
    """An element that holds data. It is not run, and nothing in the data can end it."""
    json = dumps(data).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{json}</script>'
