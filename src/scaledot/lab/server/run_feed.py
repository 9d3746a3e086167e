"""A run as the monitor shows it: a table of one vital, a row a step and a column a head.

Read from the store when a page begins to look, in so many steps as a page can hold; after that only
what is new. Nothing of the web here.
"""

import functools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scaledot.printable import one_line
from scaledot.watch.reading import LOSS, PHASES, WATCH_COST, Phase
from scaledot.watch.store import News, Segment, Series, Step
from scaledot.watch.top import health
from scaledot.watch.top.opening import open_run

FIELDS = health.VITALS
NONFINITE = "nonfinite"
TABLE_BYTES = 16 * 2**20  # what a page is first sent of one vital, at most
FEWEST, MOST = 64, 1024  # steps of it, whatever the model's size
MOST_LOSSES = 2048
HISTORY_STEPS = 512
TRIES = 5  # to read several vitals of the same steps while the run is written
SILENT_AFTER = 10.0  # seconds without a commit, or five times the usual, if that is more


class Table(NamedTuple):
    steps: list[int]
    numbers: np.ndarray  # float32 [steps, columns]; NaN: not measured, inf: the head is broken


class Losses(NamedTuple):
    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Change:
    """What a look found. anew: read it all again, the rows do not continue what was shown."""

    anew: bool
    rows: Table
    losses: Losses = field(default_factory=lambda: Losses([], []))


class RunFeed:
    """One phase and one vital of a run. Raises StoreError whenever there is no run to read."""

    def __init__(self, path: Path, phase: Phase | None = None) -> None:
        self._reader = open_run(path)
        # The follower first: what is written in between is seen twice rather than never.
        self._follower = self._reader.follow(from_start=False)
        self.path = self._reader.path
        self.segments: list[Segment] = self._reader.segments()
        self.phases = [name for name in PHASES if self._reader.layers(name)]
        # Training, unless there are readings of evaluations alone.
        only_eval: bool = self.phases == ["eval"]
        self.phase: Phase = phase or ("eval" if only_eval else "train")
        self.layers = self._reader.layers(self.phase)
        self.shown = {one_line(name): name for name in self.layers}  # as a page is sent them
        cost = self._reader.scalars(WATCH_COST).newest()
        self.cost = float(cost.values[-1]) if len(cost) else None
        self._times: deque[tuple[int, float]] = deque(maxlen=9)  # the last steps and when
        for times in self._reader.timeline(self.phase).values():
            last = times.newest().at(slice(-9, None))
            self._note_times(zip(last.steps.tolist(), last.values.tolist(), strict=True))
        self._last = -1  # the step up to which the table has been handed out
        self._segment = max((segment.id for segment in self.segments), default=-1)

    @property
    def columns(self) -> list[dict[str, Any]]:
        return [
            {"layer": layer, "head": head}
            for layer, heads in self.layers.items()
            for head in range(heads)
        ]

    def has(self, layer: Any, head: Any) -> bool:
        return (
            isinstance(layer, str) and type(head) is int and 0 <= head < self.layers.get(layer, 0)
        )

    @property
    def most_steps(self) -> int:
        heads = sum(self.layers.values())
        return max(FEWEST, min(MOST, TABLE_BYTES // (4 * max(heads, 1))))

    def table(self, vital: str) -> Table:
        """The whole run, thinned out evenly where it is long."""
        most = self.most_steps
        found = {
            layer: _shown(_masked(read, most), vital)
            for layer, read in self._read([vital, NONFINITE], most).items()
        }
        steps = sorted({step for own, _ in found.values() for step in own.tolist()})
        place = {step: row for row, step in enumerate(steps)}
        numbers = np.full((len(steps), sum(self.layers.values())), np.nan, np.float32)
        start = 0
        for layer, heads in self.layers.items():
            if layer in found:
                own, values = found[layer]
                rows = [place[step] for step in own.tolist()]
                numbers[rows, start : start + heads] = values[:, :heads]
            start += heads
        self._last = steps[-1] if steps else self._last
        return Table(steps, numbers)

    def look(self, vital: str) -> Change:
        """What was written since the last look."""
        news = self._follower.look()
        self.segments = news.segments
        steps = [step for step in news.steps if step.phase == self.phase]
        cost = [scalar.value for scalar in news.scalars if scalar.name == WATCH_COST]
        self.cost = cost[-1] if cost else self.cost
        losses = [scalar for scalar in news.scalars if scalar.name == LOSS]
        told = Losses([one.step for one in losses], [one.value for one in losses])
        if self._is_another(news, steps):
            return Change(True, self._rows([], vital), told)
        self._note_times((step.step, step.time) for step in steps)
        steps = [step for step in steps if step.step > self._last]
        self._last = steps[-1].step if steps else self._last
        return Change(False, self._rows(steps, vital), told)

    def losses(self) -> Losses:
        series = self._reader.scalars(LOSS).newest().thinned(MOST_LOSSES)
        return Losses(series.steps.tolist(), series.values.tolist())

    def history(self, layer: str, head: int) -> dict[str, Any]:
        """Every vital of one head: `steps`, and under `fields` a list for each."""
        found = _masked(self._read(FIELDS, HISTORY_STEPS, [layer])[layer], HISTORY_STEPS)
        return {
            "layer": layer,
            "head": head,
            "phase": self.phase,
            "steps": found[FIELDS[0]].steps.tolist(),
            "fields": {vital: found[vital].values[:, head].tolist() for vital in FIELDS},
        }

    def status(self, now: float | None = None) -> dict[str, Any]:
        """What changes while the run goes on."""
        now = time.time() if now is None else now
        last, newest = list(self._times)[-2:], self.segments[-1] if self.segments else None
        coverage = "" if newest is None else newest.attributes.more.get("coverage", "")
        return {
            "state": self._state(newest, now),
            "step": last[-1][0] if last else None,
            "coverage": str(coverage),
            "cost": self.cost,
            "every": last[1][0] - last[0][0] if len(last) == 2 else None,
            "dropped": sum(segment.dropped for segment in self.segments),
            "quiet": max(0.0, now - last[-1][1]) if last else None,
        }

    def _read(
        self, vitals: Sequence[str], most: int, layers: Sequence[str] | None = None
    ) -> dict[str, dict[str, Series]]:
        """By layer and vital, [n, heads], as it is stored."""
        for _ in range(TRIES):
            # Each is read at a moment of its own: the run may have grown in between.
            every: dict[str, dict[str, Series]] = {}  # what the last try has read is let go
            for vital in dict.fromkeys(("rows", *vitals)):
                every[vital] = self._read_one(vital, most, layers)
            names = [
                name for name in layers or self.layers if all(name in e for e in every.values())
            ]
            read = {name: {vital: every[vital][name] for vital in every} for name in names}
            if all(_same_steps(one.values()) for one in read.values()):
                break
        return read

    def _read_one(self, vital: str, most: int, layers: Sequence[str] | None) -> dict[str, Series]:
        """As few bytes a number as are shown of it: one for rows, which are there or not."""
        dtype = bool if vital == "rows" else np.float32
        found = self._reader.vital(vital, self.phase, most=most)
        return {name: _copy(found[name], dtype) for name in layers or found if name in found}

    def _is_another(self, news: News, steps: list[Step]) -> bool:
        """Another run, a continuation from an earlier step, or other layers than before."""
        return (
            news.replaced
            or any(step.segment > self._segment for step in news.steps)
            or any(
                self.layers.get(one.layer) != one.heads for step in steps for one in step.readings
            )
            or any(step.phase not in self.phases for step in news.steps)
        )

    def _rows(self, steps: Iterable[Step], vital: str) -> Table:
        starts, total = {}, 0
        for layer, heads in self.layers.items():
            starts[layer], total = total, total + heads
        rows = []
        for step in steps:
            row = np.full(total, np.nan, np.float32)
            for one in step.readings:
                start = starts[one.layer]
                row[start : start + one.heads] = _told(
                    health.values(one, vital), health.values(one, NONFINITE)
                )
            rows.append(row)
        numbers = np.stack(rows) if rows else np.empty((0, total), np.float32)
        return Table([step.step for step in steps], numbers)

    def _note_times(self, times: Iterable[tuple[int, float]]) -> None:
        """Keep steps and when they were, in seconds since 1970; what is known already stays."""
        for step, at in times:
            if not self._times or step > self._times[-1][0]:
                self._times.append((step, at))

    def _state(self, newest: Segment | None, now: float) -> str:
        if newest is not None and newest.ended is not None:
            return "ended"
        if newest is None or not self._times:
            return "waiting"
        times = [at for _, at in self._times]
        usual = float(np.median(np.diff(times))) if len(times) > 1 else SILENT_AFTER
        silent = now - max(newest.seen, times[-1]) > max(SILENT_AFTER, 5 * usual)
        return "silent" if silent else "running"


def _copy(series: Series, dtype: type) -> Series:
    """Cut it out of the table of all layers, which is let go then."""
    return Series(series.segments, series.steps, series.values.astype(dtype), series.times)


def _told(values: np.ndarray, nonfinite: np.ndarray) -> np.ndarray:
    """A head none of whose rows is finite has no numbers either, but it was measured: inf."""
    return np.where(np.isnan(values) & (nonfinite > 0), np.inf, values)


def _shown(measured: dict[str, Series], vital: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and numbers of one vital, float32 [steps, heads]."""
    told = _told(measured[vital].values, measured[NONFINITE].values)
    return measured[vital].steps, told.astype(np.float32)


def _same_steps(read: Iterable[Series]) -> bool:
    first, *rest = read
    return all(np.array_equal(first.steps, other.steps) for other in rest)


def _masked(read: dict[str, Series], most: int) -> dict[str, Series]:
    """Without what a continuation repeats, in the steps that all have; NaN: a head had no row."""
    newest = {vital: series.newest() for vital, series in read.items()}
    common = functools.reduce(np.intersect1d, [series.steps for series in newest.values()])
    kept = {
        vital: series.at(np.flatnonzero(np.isin(series.steps, common))).thinned(most)
        for vital, series in newest.items()
    }
    counted = kept["rows"].values
    return {
        vital: Series(
            series.segments,
            series.steps,
            series.values if vital == NONFINITE else np.where(counted, series.values, np.nan),
            series.times,
        )
        for vital, series in kept.items()
    }
