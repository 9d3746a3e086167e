"""Which rows of a shard see which keys of another: rectangles that a kernel can be called on.

Positions are those of the whole sequences: row i sees key j where i + offset - left <= j <=
i + offset + right. Inside a rectangle the same is said with a diagonal that starts in its corner.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from scaledot.distributed.layout import Segment, Shard, tokens_of
from scaledot.problem import Settings


class Sight(NamedTuple):
    """What a row may see."""

    left: int | None
    right: int | None
    offset: int  # of the diagonal: keys minus queries where it is aligned bottom right

    @staticmethod
    def of(settings: Settings, queries: int, keys: int) -> "Sight":
        offset = keys - queries if settings.bottom_right else 0
        return Sight(settings.left, settings.right, offset)

    def settings(self, settings: Settings) -> Settings:
        """The settings of a rectangle with this sight."""
        bottom_right = self.right == 0 and self.offset != 0
        return settings._replace(left=self.left, right=self.right, bottom_right=bottom_right)


EVERYTHING = Sight(None, None, 0)


class Block(NamedTuple):
    """Rows of the one shard against keys of the other, as positions in the shards."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    sight: Sight

    @property
    def full(self) -> bool:
        return self.sight == EVERYTHING


def blocks(queries: Shard, keys: Shard, sight: Sight) -> list[Block]:
    """All rectangles of the shards in which something is seen, as few as possible."""
    rows, columns = tokens_of(queries), tokens_of(keys)
    if not rows or not columns:
        return []
    if sight.left is None and sight.right is None:
        return [Block((0, rows), (0, columns), EVERYTHING)]
    if queries == keys and sight == Sight(None, 0, 0) and _rises(queries):
        return [Block((0, rows), (0, columns), Sight(None, 0, 0))]
    found: list[Block] = []
    for row, query_segment in _placed(queries):
        line: list[Block] = []
        for key, key_segment in _placed(keys):
            block = _block(query_segment, key_segment, sight)
            if block is not None:
                _append(line, _moved(block, row, key))
        for block in line:
            _append(found, block)
    return found


def _rises(shard: Shard) -> bool:
    """Whether later in the shard is later in the sequence."""
    return all(a.start + a.length <= b.start for a, b in itertools.pairwise(shard))


def _placed(shard: Shard) -> Iterator[tuple[int, Segment]]:
    place = 0
    for segment in shard:
        if segment.length:
            yield place, segment
        place += segment.length


def _moved(block: Block, row: int, key: int) -> Block:
    (top, bottom), (first, last), sight = block
    return Block((row + top, row + bottom), (key + first, key + last), sight)


def _append(found: list[Block], block: Block) -> None:
    """As part of the last one where both are full and together a rectangle."""
    if found and found[-1].full and block.full:
        last = found[-1]
        if last.rows == block.rows and last.keys[1] == block.keys[0]:
            found[-1] = last._replace(keys=(last.keys[0], block.keys[1]))
            return
        if last.keys == block.keys and last.rows[1] == block.rows[0]:
            found[-1] = last._replace(rows=(last.rows[0], block.rows[1]))
            return
    found.append(block)


def _block(queries: Segment, keys: Segment, sight: Sight) -> Block | None:
    """The part of two stretches in which something is seen; None: nothing is."""
    left, right = sight.left, sight.right
    shift = queries.start + sight.offset - keys.start  # the diagonal goes through (i, i + shift)
    top, bottom = 0, queries.length
    if right is not None:  # the first rows may see no key yet
        top = max(top, -(shift + right))
    if left is not None:  # the last ones none any more
        bottom = min(bottom, keys.length - shift + left)
    if top >= bottom:
        return None
    first, last = 0, keys.length
    if left is not None:
        first = max(first, top + shift - left)
    if right is not None:
        last = min(last, bottom + shift + right)
    if first >= last:
        return None
    rows, columns = bottom - top, last - first
    shift += top - first
    left = None if left is None or left - shift >= rows - 1 else left - shift
    right = None if right is None or right + shift >= columns - 1 else right + shift
    offset = 0
    if left is None and right is not None and right == columns - rows:
        right, offset = 0, right  # the kernels know the diagonal that ends in the last key
    return Block((top, bottom), (first, last), Sight(left, right, offset))
