"""Open the console that every command draws on, and print data as JSON.

All text on its way to the terminal passes one filter here (`printable`); only the codes that rich
makes itself, for colours and for redrawing, reach the terminal as they are.
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from scaledot.printable import printable


class Console(RichConsole):
    """A console of rich that prints text as text: without markup, emoji codes or escapes."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Filter before the layout, so that widths are right, and once more what comes out."""
        if isinstance(renderable, str):
            renderable = printable(renderable)
        elif isinstance(renderable, Text):
            shown = printable(renderable.plain)
            if shown != renderable.plain:
                renderable = renderable.copy()
                renderable.plain = shown  # of the same length: the styles stay in place
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def print_json(data: Any) -> None:
    """Print data on standard output; raises ValueError for a number that JSON does not have."""
    text = json.dumps(data, indent=2, allow_nan=False)
    print(text.replace("\x7f", "\\u007f"), file=sys.stdout)  # json escapes every other control
