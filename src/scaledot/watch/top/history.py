"""A run as far as it is known: each layer's last reading, and curves of what is looked at."""

import os
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from scaledot.watch import evidence, reading
from scaledot.watch.alarms import Alarm
from scaledot.watch.reading import PHASES, Phase, Reading, Scalar
from scaledot.watch.silence import GAPS
from scaledot.watch.store import Segment, Series, Step
from scaledot.watch.store.records import replaced_from
from scaledot.watch.top import health
from scaledot.watch.top.opening import open_run

POINTS = 512  # of a curve: no terminal draws a finer one
MEMORY = 2**26  # bytes that the curves of one vital may take


class Gap(NamedTuple):
    """Between one reading and the next."""

    steps: int
    seconds: float


class Curve(NamedTuple):
    steps: list[int]
    numbers: np.ndarray  # float64 [steps, heads]


class Track:
    """One layer's last reading, and how long the last ones were apart."""

    def __init__(
        self,
        segment: int,
        latest: Reading,
        gaps: Iterable[Gap] = (),
        read: evidence.Read | None = None,
    ) -> None:
        self.segment, self.latest = segment, latest
        self.read = evidence.Read(np.array([latest.step])) if read is None else read
        self.gaps: deque[Gap] = deque(gaps, maxlen=GAPS)

    def add(self, segment: int, one: Reading) -> None:
        if segment == self.segment:
            if one.step <= self.latest.step:
                return  # known already
            self.gaps.append(Gap(one.step - self.latest.step, one.time - self.latest.time))
            self.read.add(one.step)
        elif segment < self.segment:
            return
        self.segment, self.latest = segment, one


class Line:
    """One vital of one layer's heads over the run; older points are thinned out when many."""

    def __init__(self, segment: int, steps: np.ndarray, numbers: np.ndarray) -> None:
        self.segment, self.steps, self.numbers = segment, steps, numbers

    def add(self, segment: int, step: int, numbers: np.ndarray, most: int) -> None:
        if len(numbers) != self.numbers.shape[1] or not len(self.steps):
            # A layer that changed its number of heads within the run is another from there on.
            self.steps, self.numbers = np.array([step]), numbers[None]
            self.segment = segment
            return
        if segment > self.segment:  # the run was continued, perhaps from an earlier step
            keep = self.steps < step
            self.steps, self.numbers = self.steps[keep], self.numbers[keep]
            self.segment = segment
        elif step <= self.steps[-1]:
            return  # known already
        self.steps = np.append(self.steps, step)
        self.numbers = np.append(self.numbers, numbers[None], axis=0)
        if len(self.steps) > most:
            keep = np.append(np.arange(0, len(self.steps) - 1, 2), len(self.steps) - 1)
            self.steps, self.numbers = self.steps[keep], self.numbers[keep]


class History:
    """What is drawn is read when it is looked at: of a long run that is a small part of the file.

    Everything after that comes from `look`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises StoreError where there is no run."""
        self.reader = open_run(path)
        self.path = self.reader.path
        self._loaded = False  # all of it, so that what is new continues it
        self._load()

    def look(self) -> bool:
        """Take what is new; whether there was anything. Raises StoreError if the file is gone."""
        if not self._loaded:  # the file could not be read to its end when it was begun
            self._load()
            return True
        news = self._follower.look()
        if news.replaced or self._continued(news.steps):
            self._load()
            return True
        self._take_steps(news.steps)
        self.alarms += news.alarms
        self.scalars |= {
            scalar.name: scalar for scalar in news.scalars if scalar.name in reading.SERIES
        }
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
        if (phase, vital) not in self._lines:
            self._lines[phase, vital] = self._read_lines(phase, vital)
        line = self._lines[phase, vital][layer]
        return Curve(line.steps.tolist(), line.numbers)

    def _continued(self, steps: Iterable[Step]) -> bool:
        """Whether a segment has begun: what it writes again takes the place of older steps."""
        return any(one.phase == "train" and one.segment not in self._starts for one in steps)

    def _load(self) -> None:
        self._loaded = False
        self._lines: dict[tuple[Phase, str], dict[str, Line]] = {}
        # The follower first: what is written in between is seen twice rather than never.
        self._follower = self.reader.follow(from_start=False)
        self._starts = self.reader.starts()
        self.segments: list[Segment] = self.reader.segments()
        self.alarms: list[Alarm] = self.reader.alarms()
        self.tracks: dict[Phase, dict[str, Track]] = {p: self._read_tracks(p) for p in PHASES}
        self.scalars: dict[str, Scalar] = {}
        self.first: int | None = None  # of the steps of which a number is kept
        for name in reading.SERIES:
            series = self.reader.scalars(name).newest(self._starts)
            if len(series):
                earliest = int(series.steps[0])
                self.first = earliest if self.first is None else min(self.first, earliest)
                self.scalars[name] = Scalar(int(series.steps[-1]), name, float(series.values[-1]))
        self._loaded = True

    def _read_tracks(self, phase: Phase) -> dict[str, Track]:
        times = self.reader.timeline(phase)
        latest = self.reader.latest_of_layers(phase)
        tracks = {
            layer: Track(
                int(times[layer].segments[-1]),
                one,
                _gaps(times[layer]),
                evidence.Read(times[layer].newest(self._starts).steps),
            )
            for layer, one in latest.items()
            if layer in times
        }
        return {
            layer: track
            for layer, track in tracks.items()
            if track.latest.step < replaced_from(self._starts, track.segment)
        }

    def _read_lines(self, phase: Phase, vital: str) -> dict[str, Line]:
        most = self._most(phase)
        rows = self.reader.vital("rows", phase, most=most)
        found = rows if vital == "rows" else self.reader.vital(vital, phase, most=most)
        return {
            layer: _line(found[layer], rows[layer], track, vital, most, self._starts)
            for layer, track in self.tracks[phase].items()
        }

    def _take_steps(self, steps: Iterable[Step]) -> None:
        for step in steps:
            tracks = self.tracks[step.phase]
            for one in step.readings:
                if one.layer in tracks:
                    tracks[one.layer].add(step.segment, one)
                else:
                    tracks[one.layer] = Track(step.segment, one)
        for (phase, vital), lines in self._lines.items():
            most = self._most(phase)
            for step in steps:
                for one in step.readings if step.phase == phase else ():
                    numbers = health.values(one, vital)
                    line = lines.setdefault(one.layer, _empty(one.heads))
                    line.add(step.segment, one.step, numbers, most)

    def _most(self, phase: Phase) -> int:
        heads = sum(track.latest.heads for track in self.tracks[phase].values())
        return max(64, min(POINTS, MEMORY // (8 * max(heads, 1))))


def _empty(heads: int) -> Line:
    return Line(-1, np.empty(0, np.int64), np.empty((0, heads)))


def _gaps(times: Series) -> list[Gap]:
    """Of the newest segment: what happened between two segments is no gap."""
    mine = np.flatnonzero(times.segments == times.segments[-1])[-GAPS - 1 :]
    steps, seconds = np.diff(times.steps[mine]), np.diff(times.values[mine])
    return [Gap(*gap) for gap in zip(steps.tolist(), seconds.tolist(), strict=True)]


def _line(
    found: Series,
    rows: Series,
    track: Track,
    vital: str,
    most: int,
    starts: Mapping[int, int],
) -> Line:
    heads = track.latest.heads
    # Both were read at a moment of their own: the run may have grown in between.
    number = min(len(found), len(rows))
    counted = rows.values[:number].astype(np.float64)
    numbers = found.values[:number].astype(np.float64)
    if vital != "nonfinite":
        numbers = np.where(counted > 0, numbers, np.nan)
    # Where the layer had another number of heads, the reader has filled the row with NaN.
    alike = ~np.isnan(counted[:, heads - 1])
    if counted.shape[1] > heads:
        alike &= np.isnan(counted[:, heads])
    places = np.flatnonzero(alike)
    series = Series(found.segments[places], found.steps[places], numbers[places, :heads])
    kept = series.newest(starts).thinned(most)
    segment = int(kept.segments[-1]) if len(kept) else -1
    return Line(segment, kept.steps, kept.values)
