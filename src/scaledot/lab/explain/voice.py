"""One language on one kind of terminal: every sentence the verb says goes through here."""

import re
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from scaledot.lab import catalogue

# How a terminal without Unicode writes the signs of the catalogue; the rest is `STRAIGHT`.
ROOT_OF_WORD = re.compile(r"√(\w+)")
SPELLED = {
    "√(": "sqrt(",
    "√": "sqrt ",
    "‖v‖₁": "|v|_1",
    "Σ ": "sum ",
    "Σ": "sum ",
    "\u03c3": "sigma",
    "∂": "d",
    "ᵀ": "^T",
    "²": "^2",
    "±": "+-",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "×": "x",
    "→": "->",
    "…": "...",
    "½": "1/2",
    "¼": "1/4",
}
STRAIGHT = str.maketrans("“”·✓✗", '"".+x')


@dataclass(frozen=True)
class Voice:
    lang: str
    ascii_only: bool = False

    @classmethod
    def of(cls, lang: str, console: Console) -> "Voice":
        return cls(lang, console.options.ascii_only)

    def say(self, key: str, /, **numbers: Any) -> str:
        """A text of the catalogue, filled and fit for this terminal."""
        return self.write(catalogue.text(self.lang, key, **numbers))

    def has(self, key: str) -> bool:
        return key in catalogue.load(self.lang)

    def write(self, text: str) -> str:
        return spelled(text) if self.ascii_only else text


def spelled(text: str) -> str:
    """In ASCII: √d_k as sqrt(d_k), and so on; what has no spelling becomes a question mark."""
    text = ROOT_OF_WORD.sub(r"sqrt(\1)", text)
    for sign, letters in SPELLED.items():
        text = text.replace(sign, letters)
    return text.translate(STRAIGHT).encode("ascii", "replace").decode("ascii")
