"""What a rank's numbers mean: which layers, which heads. Sent once, then known by its mark."""

import json
from hashlib import blake2b
from typing import NamedTuple

from scaledot.watch.reading import PHASES, Phase

MARK = 8  # bytes


class Slot(NamedTuple):
    """One reading of one layer."""

    layer: str
    phase: Phase
    heads: int  # that this rank holds
    first: int = 0  # the number of the first of them among the layer's heads


class Numbered(NamedTuple):
    """Modules of a rank that are told apart by a number: layers.0 to layers.11."""

    prefix: str  # "layers."
    lowest: int
    highest: int


class Layout(NamedTuple):
    slots: tuple[Slot, ...] = ()
    tensor: tuple[int, ...] = ()  # ranks that share each layer's heads, in order, where told
    pipeline: tuple[int, ...] = ()  # ranks that hold one layer after the other, in order
    numbered: tuple[Numbered, ...] = ()  # where the pipeline was told

    @property
    def heads(self) -> int:
        return sum(slot.heads for slot in self.slots)

    def encoded(self) -> bytes:
        return json.dumps(self, separators=(",", ":")).encode()

    @staticmethod
    def decoded(text: bytes) -> "Layout":
        """Raises ValueError where it is none."""
        try:
            slots, tensor, pipeline, numbered = json.loads(text)
            layout = Layout(
                tuple(Slot(str(a), b, int(c), int(d)) for a, b, c, d in slots),
                tuple(map(int, tensor)),
                tuple(map(int, pipeline)),
                tuple(Numbered(str(a), int(b), int(c)) for a, b, c in numbered),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"another rank's list of layers cannot be read: {error}") from None
        if any(slot.phase not in PHASES or slot.heads < 1 for slot in layout.slots):
            raise ValueError("another rank's list of layers holds a layer without heads")
        return layout


def mark_of(encoded: bytes) -> bytes:
    return blake2b(encoded, digest_size=MARK).digest()
