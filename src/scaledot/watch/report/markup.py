"""Make HTML that is well-formed: every text is escaped unless it is markup already.

Names of layers, commands and exceptions come out of a file that somebody else may have written.
"""

import html
from collections.abc import Iterable

from scaledot.printable import printable

EMPTY = ("meta", "br", "img", "line", "path", "image", "rect", "polyline", "circle")
SHAPES = ("line", "path", "image", "rect", "polyline", "circle")  # of SVG: closed in themselves


class Markup(str):
    """Text that is HTML."""


def element(name: str, /, *content, **attributes: object) -> Markup:
    """element("p", "a < b", id="x"). class_ is class, aria_label is aria-label; None leaves out."""
    written = "".join(
        f' {_attribute(key)}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in EMPTY:
        return Markup(f"<{name}{written}{'/' if name in SHAPES else ''}>")
    return Markup(f"<{name}{written}>{joined(*content)}</{name}>")


def joined(*content) -> Markup:
    return Markup("".join(map(_text, content)))


def _text(content) -> str:
    if content is None:
        return ""
    if isinstance(content, Markup):
        return content
    if isinstance(content, str):
        return _escaped(content)
    if isinstance(content, Iterable):
        return joined(*content)
    return _escaped(str(content))


def _escaped(text: str) -> str:
    """Without markup, and without characters that turn the direction of what is read."""
    return html.escape(printable(text))


def _attribute(key: str) -> str:
    key = key.rstrip("_")
    return key if key in ("viewBox", "preserveAspectRatio") else key.replace("_", "-")
