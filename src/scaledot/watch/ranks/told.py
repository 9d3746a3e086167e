"""Which layer and which heads a rank's numbers are, where ranks share a model out.

Ranks that hold the same heads of the same layer have different rows of it. Where the user says that
ranks share a layer's heads (tensor_parallel) or hold one layer after the other (pipeline_parallel),
heads and layers are numbered through.
"""

import gc
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.ranks.layout import Layout, Numbered
from scaledot.watch.ranks.parcel import Contents

NUMBER = re.compile(r"^((?:[^.]*\.)*?)(\d+)(?=\.|#|$)")  # the first part of a path that is a number
ROWS, Q_RMS = COUNT_FIELDS.index("rows"), FLOAT_FIELDS.index("q_rms")


def ranks_in(mesh: Any) -> tuple[int, ...]:
    """The ranks of a 1-D DeviceMesh or a process group, as the whole job counts them."""
    if mesh is None:
        return ()
    from torch.distributed import get_process_group_ranks

    # Only here: its package brings torch's compiler, which reads the environment as it is loaded.
    from scaledot.distributed.group import ranks_of

    return tuple(get_process_group_ranks(ranks_of(mesh).group))


def ranks_along(name: str) -> tuple[int, ...]:
    """Find the ranks of the DeviceMesh that the user has made with a dimension of this name.

    (): there is none, or there are several that say different things.
    """
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is None:
        return ()
    found = set()
    for thing in gc.get_objects():  # a mesh is known to nobody but its maker
        if type(thing) is module.DeviceMesh and name in (thing.mesh_dim_names or ()):
            try:
                found.add(ranks_in(thing.get_group(name)))
            except (RuntimeError, ValueError):  # a mesh of a group that has gone, or of other ranks
                continue
    return found.pop() if len(found) == 1 else ()


def numbered(names: Iterable[str]) -> tuple[Numbered, ...]:
    """Of all modules' names: from which to which number each list of layers goes."""
    found: dict[str, list[int]] = {}
    for name in names:
        if match := NUMBER.match(name):
            found.setdefault(match[1], []).append(int(match[2]))
    return tuple(Numbered(prefix, min(all_), max(all_)) for prefix, all_ in sorted(found.items()))


class Part(NamedTuple):
    """One slot of one rank, placed in the whole."""

    rank: int
    layer: str
    phase: Any
    step: int
    time: float
    first: int  # head
    columns: slice  # of the rank's numbers


class Placing:
    """Remembers what it found out of a layer: a reading in doubt must not rename its heads."""

    def __init__(self) -> None:
        self._copied: dict[str, bool] = {}  # layers whose heads a tensor-parallel group all holds

    def parts(self, contents: Sequence[Contents]) -> list[Part]:
        """What counts, rank by rank."""
        shifts = [_shifts(rank, contents) for rank in range(len(contents))]
        placed = [list(_placed(rank, one, shifts[rank])) for rank, one in enumerate(contents)]
        if any(one.layout.tensor for one in contents):
            return list(self._shared_out(contents, placed))
        return [part for parts in placed for part in parts]

    def _shared_out(self, contents: Sequence[Contents], placed: list[list[Part]]) -> Iterable[Part]:
        alike = {
            (rank, part.layer, part.phase, part.step): part for rank, parts in enumerate(placed)
            for part in parts
        }  # fmt: skip
        self._look(contents, alike)
        for rank, parts in enumerate(placed):
            group = contents[rank].layout.tensor
            for part in parts:
                key = part.layer, part.phase, part.step
                before = [
                    alike[other, *key]
                    for other in group[: group.index(rank) if rank in group else 0]
                    if (other, *key) in alike
                ]
                if part.first or not before:
                    yield part  # its weights have said which heads, or it is the first
                elif not self._copied.get(part.layer, False):
                    heads = sum(one.columns.stop - one.columns.start for one in before)
                    yield part._replace(first=heads)

    def _look(self, contents: Sequence[Contents], alike: dict[Any, Part]) -> None:
        """The same numbers to the bit on every rank of the group: the same heads, the same rows."""
        found: dict[str, bool] = {}
        for (rank, layer, phase, step), part in alike.items():
            group = contents[rank].layout.tensor
            if layer in self._copied or phase != "train" or rank not in group or rank == group[0]:
                continue
            first = alike.get((group[0], layer, phase, step))
            if first is None or not _tells(contents[rank], part):
                continue
            same = _same(contents[group[0]], first, contents[rank], part)
            found[layer] = found.get(layer, True) and same
        self._copied |= found


def _placed(rank: int, one: Contents, shifts: dict[str, int]) -> Iterable[Part]:
    place = 0
    for slot, step, time in zip(one.layout.slots, one.steps, one.times, strict=True):
        columns = slice(place, place + slot.heads)
        place += slot.heads
        layer = _shifted(slot.layer, shifts)
        yield Part(rank, layer, slot.phase, step, time, slot.first, columns)


def _shifts(rank: int, contents: Sequence[Contents]) -> dict[str, int]:
    """How far the numbers of a stage's layers move: only where stages use the same numbers."""
    stages = contents[rank].layout.pipeline
    if rank not in stages:
        return {}
    own = stages.index(rank)
    shifts = {}
    for one in contents[rank].layout.numbered:
        spans = [_span(contents[stage].layout, one.prefix) for stage in stages]
        if _overlap([span for span in spans if span is not None]):
            shifts[one.prefix] = sum(span.highest + 1 for span in spans[:own] if span is not None)
    return shifts


def _span(layout: Layout, prefix: str) -> Numbered | None:
    return next((one for one in layout.numbered if one.prefix == prefix), None)


def _overlap(spans: Sequence[Numbered]) -> bool:
    return any(
        one.lowest <= other.highest and other.lowest <= one.highest
        for place, one in enumerate(spans)
        for other in spans[place + 1 :]
    )


def _shifted(layer: str, shifts: dict[str, int]) -> str:
    match = NUMBER.match(layer)
    if match is None or not shifts.get(match[1]):
        return layer
    return f"{match[1]}{int(match[2]) + shifts[match[1]]}{layer[match.end() :]}"


def _tells(one: Contents, part: Part) -> bool:
    """Queries that are all zero are the same on every rank and say nothing."""
    rows, q_rms = one.counts[ROWS, part.columns], one.floats[Q_RMS, part.columns]
    return bool((rows > 0).any() and (q_rms > 0).any())


def _same(one: Contents, part: Part, other: Contents, its: Part) -> bool:
    counts = one.counts[:, part.columns], other.counts[:, its.columns]
    floats = one.floats[:, part.columns], other.floats[:, its.columns]
    return np.array_equal(*counts) and np.array_equal(*floats, equal_nan=True)
