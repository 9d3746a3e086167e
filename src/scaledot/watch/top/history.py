"""A run as far as it is known: the readings of every layer, kept up to date from the store."""

import os
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from scaledot.watch import reading
from scaledot.watch.reading import PHASES, Phase, Reading, Scalar
from scaledot.watch.store import RunReader, Segment, Step
from scaledot.watch.top import health

POINTS = 512  # readings kept of a layer: no terminal draws a finer curve
MEMORY = 2**26  # bytes that the readings of all layers may take
BYTES_A_HEAD = 128  # of one reading: 13 float32, 6 int64 and what holds them
SHOWN = (reading.LOSS, reading.LEARNING_RATE, reading.STEP_TIME, reading.WATCH_COST)


class Gap(NamedTuple):
    """Between one reading and the next."""

    steps: int
    seconds: float


class Curve(NamedTuple):
    steps: list[int]
    numbers: np.ndarray  # float64 [steps, heads]


class Track:
    """One layer's readings, oldest first; the older ones thinned out when there are many."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.gaps: deque[Gap] = deque(maxlen=8)
        self._segment = -1

    def add(self, segment: int, one: Reading, most: int) -> None:
        if segment > self._segment:  # the run was continued, perhaps from an earlier step
            self.readings = [old for old in self.readings if old.step < one.step]
            self._segment = segment
        elif self.readings and one.step <= self.readings[-1].step:
            return  # known already
        elif self.readings:
            last = self.readings[-1]
            self.gaps.append(Gap(one.step - last.step, one.time - last.time))
        self.readings.append(one)
        if len(self.readings) > most:
            self.readings = [*self.readings[:-1:2], self.readings[-1]]


class History:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises StoreError where there is no run."""
        self.reader = RunReader(path)
        self.path = self.reader.path
        self._load()

    def look(self) -> bool:
        """Take what is new; whether there was anything. Raises StoreError if the file is gone."""
        news = self._follower.look()
        if news.replaced:
            self._load()
            return True
        self._take_steps(news.steps)
        self._take_scalars(news.scalars)
        ended = self.segments[-1:] != news.segments[-1:]
        self.segments = news.segments
        return bool(news) or ended

    @property
    def first_phase(self) -> Phase:
        """What to show first: training, unless there are readings of evaluations alone."""
        return "eval" if self.tracks["eval"] and not self.tracks["train"] else "train"

    @property
    def segment(self) -> Segment | None:
        return self.segments[-1] if self.segments else None

    def curve(self, phase: Phase, layer: str, vital: str) -> Curve:
        readings = self.tracks[phase][layer].readings
        # A layer that changed its number of heads within the run is another from there on.
        alike = [one for one in readings if one.heads == readings[-1].heads]
        floats = np.stack([one.floats for one in alike], axis=1)
        numbers = health.numbers(floats, np.stack([one.counts for one in alike], axis=1), vital)
        return Curve([one.step for one in alike], numbers)

    def _load(self) -> None:
        self.tracks: dict[Phase, dict[str, Track]] = {phase: {} for phase in PHASES}
        self.scalars: dict[str, Scalar] = {}
        self._heads: dict[str, int] = {}
        # The follower first: what is written in between is seen twice rather than never.
        self._follower = self.reader.follow(from_start=False)
        self.segments: list[Segment] = self.reader.segments()
        self._take_steps(self.reader.steps())
        for name in SHOWN:
            series = self.reader.scalars(name).newest()
            if len(series):
                self.scalars[name] = Scalar(int(series.steps[-1]), name, float(series.values[-1]))

    def _take_steps(self, steps: Iterable[Step]) -> None:
        for step in steps:
            for one in step.readings:
                self._heads[one.layer] = one.heads
                track = self.tracks[step.phase].setdefault(one.layer, Track())
                track.add(step.segment, one, self._most)

    @property
    def _most(self) -> int:
        heads = sum(self._heads.values())
        return max(64, min(POINTS, MEMORY // (heads * BYTES_A_HEAD)))

    def _take_scalars(self, scalars: Iterable[Scalar]) -> None:
        self.scalars |= {scalar.name: scalar for scalar in scalars if scalar.name in SHOWN}
