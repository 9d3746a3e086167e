"""Everything a report says of one run, as plain records: terminal, page and JSON show them."""

import dataclasses
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaledot.fields import BANDS
from scaledot.watch import crash, evidence, reading, silence
from scaledot.watch.alarms.alarm import Alarm
from scaledot.watch.alarms.rules import RULES
from scaledot.watch.crash import Crash
from scaledot.watch.evidence import Evidence
from scaledot.watch.report import judged
from scaledot.watch.report.heads import Head, first_to_leave, head_of, outside, worst_heads
from scaledot.watch.report.history import History, Layer, read_history
from scaledot.watch.report.remedy import CLOSING, Remedy, remedies_for
from scaledot.watch.store import RunReader, Segment, Series
from scaledot.watch.store.records import replaced_from
from scaledot.watch.top import health
from scaledot.watch.top.opening import open_run
from scaledot.watch.top.words import brief

MOST_REMEDIES = 10  # that were at work and are named
MOST_CRASHES = 20
LATEST = 2**53  # a step beyond is none, and cannot be drawn
FINAL = 30  # losses whose mean is called the final loss; of a short run a tenth


@dataclass(frozen=True)
class Loss:
    steps: np.ndarray
    values: np.ndarray
    final: float | None  # mean of the last `averaged` finite losses
    averaged: int
    lowest: float | None
    not_finite: int | None  # the first step whose loss is no number
    calls: int = 1  # backward calls of a step, of which each loss is the mean


@dataclass(frozen=True)
class Most:
    """A step at which most of the model's heads were what healthy heads are not."""

    step: int
    share: float
    words: str  # what they had


@dataclass(frozen=True)
class Facts:
    path: str
    attributes: reading.RunAttributes
    state: str  # "ended", "running", "silent": no end was written and nobody writes
    started: float | None
    seconds: float  # from the first start to the last commit
    segments: int
    history: History
    first_step: int | None
    last_step: int | None
    every: float | None  # steps between two readings, as a rule
    evidence: Evidence
    alarms: list[Alarm]
    judged: str  # where the alarms come from, in words
    crashes: list[Crash]
    start: Head | None  # the first head that left its bands for good
    rate_at_start: float | None  # the learning rate then
    worst: list[Head]
    loss: Loss
    learning_rate: Series
    cost: float | None  # share of the step time, over the whole run
    steady_cost: float | None  # the same of the readings at the steady interval
    steady_every: int | None  # steps of that interval
    startup: float | None  # seconds that the watch took once, at the start
    step_time: float | None
    dropped: int
    cut_off: bool  # it ended while the disk refused to write
    disk: dict[str, Any] | None  # when it last refused, as reading.DISK keeps it
    replaced: int  # steps of earlier segments that later ones wrote again
    coverage: str
    watched: tuple[int, int] | None  # layers of layers; None: not known
    cadence: str
    high: int  # heads whose largest logit is above its band at the end
    closed: int  # heads whose softmax passes less than its band at the end
    outside: dict[str, int]  # by vital, heads outside its band at the last reading
    outside_heads: int  # heads outside any band
    most: Most | None  # None: most heads never were
    broken: int  # heads with rows that are no number at the end
    broken_since: int | None
    peak: Head | None  # the head with the largest logit read
    remedies: list[Remedy]  # that are advised
    at_work: list[dict[str, Any]]  # that were installed, as `remedies.Installed.note` tells

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def heads(self) -> int:
        return self.history.heads

    @property
    def readings(self) -> int:
        return self.history.readings

    @property
    def enough(self) -> bool:
        """Whether enough steps of enough layers were read to call the run healthy."""
        seen, layers = self.watched or (0, 0)
        return self.evidence.enough and evidence.enough_layers(seen, layers - seen)

    @property
    def above(self) -> bool:
        """Whether a number that was read stands above the level of a warning."""
        high = self.peak is not None and self.peak.peak > RULES["growth.warn"].threshold
        return high or self.most is not None

    def rate_at(self, step: int) -> float | None:
        return value_at(self.learning_rate, step)


def read(path: str | os.PathLike[str], now: float | None = None) -> Facts:
    """Raises StoreError where there is no run, or none that this version understands."""
    reader = open_run(path)
    segments = reader.segments()
    history = read_history(reader)
    steps = history.steps
    starts = reader.starts()
    alarms, origin = judged.alarms_of(reader, history)
    attributes = segments[-1].attributes if segments else reading.RunAttributes()
    start = _start(history, alarms)
    numbers = {name: reader.scalars(name).newest(starts) for name in reading.SERIES}
    outside_by_vital, outside_heads = health.ill(_latest(reader, history))
    steady = attributes.more.get(reading.STEADY)
    steady = steady if isinstance(steady, dict) else {}
    rates = numbers[reading.LEARNING_RATE]
    coverage = brief(str(attributes.more.get("coverage", "")))
    return Facts(
        path=str(reader.path),
        attributes=attributes,
        state=_state(segments, history, time.time() if now is None else now),
        started=segments[0].started if segments else None,
        seconds=segments[-1].seen - segments[0].started if segments else 0.0,
        segments=len(segments),
        history=history,
        first_step=int(steps[0]) if len(steps) else None,
        last_step=int(steps[-1]) if len(steps) else None,
        every=float(np.median(np.diff(steps))) if len(steps) > 1 else None,
        evidence=_evidence_of(reader, history, numbers.values(), attributes),
        alarms=alarms,
        judged=origin,
        crashes=_crashes(segments, starts),
        start=start,
        rate_at_start=None if start is None or start.left is None else value_at(rates, start.left),
        worst=worst_heads(history, alarms),
        loss=_loss(numbers[reading.LOSS], attributes),
        learning_rate=rates,
        cost=_last(numbers[reading.WATCH_COST]),
        steady_cost=_number(steady.get("share")),
        steady_every=None if (every := _number(steady.get("every"))) is None else int(every),
        startup=_number(steady.get("startup")),
        step_time=_last(numbers[reading.STEP_TIME]),
        dropped=sum(segment.dropped for segment in segments),
        cut_off=bool(segments) and segments[-1].cut_off,
        disk=_disk(segments),
        replaced=_replaced(reader, starts),
        coverage=coverage,
        watched=watched_in(coverage),
        cadence=brief(str(attributes.more.get("cadence", ""))),
        high=int(outside(history.last("max_logit"), "max_logit").sum()),
        closed=int(outside(history.last("passes"), "passes").sum()),
        outside=outside_by_vital,
        outside_heads=outside_heads,
        most=_most(history),
        broken=int((history.last("nonfinite") > 0).sum()),
        broken_since=_broken_since(history),
        peak=_peak(history),
        remedies=remedies_for(alarms),
        at_work=list(attributes.more.get(reading.REMEDIES, ())[:MOST_REMEDIES]),
    )


def _crashes(segments: list[Segment], starts: Mapping[int, int]) -> list[Crash]:
    """How the last segment ended, and losses that were no number and still count."""
    found = [
        dataclasses.replace(found, words=brief(found.words))
        for segment in segments
        for found in crash.from_note(segment.attributes.more.get(crash.NOTE))
        if abs(found.step) < LATEST
        and (
            segment is segments[-1]
            or (found.kind == "loss" and found.step < replaced_from(starts, segment.id))
        )
    ]
    return found[-MOST_CRASHES:]


def _disk(segments: list[Segment]) -> dict[str, Any] | None:
    """Find the last note of a disk that refused to write; at a refused end that end's alone."""
    asked = segments[-1:] if segments and segments[-1].cut_off else segments
    notes = [one.attributes.more.get(reading.DISK) for one in asked]
    return next(filter(None, reversed(notes)), None)


def _replaced(reader: RunReader, starts: Mapping[int, int]) -> int:
    series = [reader.scalars(name) for name in (reading.LOSS, reading.STEP_TIME)]
    return max(len(one) - len(one.newest(starts)) for one in series)


def value_at(series: Series, step: int) -> float | None:
    """The last number at or before the step."""
    place = int(np.searchsorted(series.steps, step, side="right")) - 1
    return float(series.values[place]) if place >= 0 else None


def watched_in(coverage: str) -> tuple[int, int] | None:
    """`7 of 9 attention layers watched; ...` as numbers."""
    found = re.match(r"(\d+) of (\d+) attention layers? watched", coverage)
    return None if found is None else (int(found[1]), int(found[2]))


def _start(history: History, alarms: list[Alarm]) -> Head | None:
    grave = [alarm for alarm in alarms if alarm.grade == "act" and alarm.kind in CLOSING]
    grave = grave or [alarm for alarm in alarms if alarm.grade == "warn" and alarm.kind in CLOSING]
    return first_to_leave(history, grave)


def _latest(reader: RunReader, history: History) -> list[reading.Reading]:
    """The last reading of every layer that the report is about."""
    names = {layer.name for layer in history.layers}
    found = reader.latest_of_layers(history.phase)
    return [one for name, one in found.items() if name in names]


def _evidence_of(
    reader: RunReader,
    history: History,
    numbers: Iterable[Series],
    attributes: reading.RunAttributes,
) -> Evidence:
    """Held against the steps that the run has had, as far as the store knows of them."""
    if history.phase != "train" or not history.layers:
        return Evidence(0, 0, 0)
    starts = reader.starts()
    times = reader.timeline(history.phase)
    layers = [times[one.name].newest(starts).steps for one in history.layers if one.name in times]
    layers = [steps for steps in layers if len(steps)]
    kept = [one.steps for one in numbers if len(one)]
    ended = _number(attributes.more.get(reading.ALIVE))
    last = 0 if ended is None or ended > LATEST else int(ended) - 1
    first = min(int(one[0]) for one in (*kept, *layers))
    last = max(last, *(int(one[-1]) for one in (*kept, *layers)))
    return evidence.least(evidence.Read(steps).until(first, last) for steps in layers)


def sample_in(facts: Facts) -> str:
    """Say how much of its batch a reading looks at, where that is not all of it."""
    sample = facts.attributes.more.get(reading.SAMPLE)
    if not isinstance(sample, dict):
        return ""
    read, there = _number(sample.get("read")), _number(sample.get("there"))
    if read is None or there is None or not 0 < read < there:
        return ""
    return f"readings are samples of the batch: {read:,.0f} of {there:,.0f} rows"


def _number(value: Any) -> float | None:
    """What a file holds may be anything."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _most(history: History) -> Most | None:
    """Look for the step at which the largest share of heads was ill, where that is most of them.

    The shares are those of the alarms, whether or not it lasted or grew.
    """
    if not history.layers:
        return None
    steps = history.looked_at_steps
    passes, logits, sink, off, row_std, std = (
        history.held(vital, steps)
        for vital in ("passes", "max_logit", "sink", "off", "row_std", "logit_std")
    )
    known = ~np.isnan(passes)
    chosen = known & (np.fmax(sink, off) <= _level("sink"))  # a sink is sharp by right
    closed = (passes < edge("passes")) & (logits > edge("max_logit"))
    cases = (
        (closed & chosen, chosen, "collapse.act", "closed"),
        ((passes < _level("saturation.passes")) & chosen, chosen, "saturation.warn", "closed"),
        (
            np.fmin(row_std, std) > _level("start.later"),
            known,
            "start.heads",
            f"logits that are far too large (row_std above {_level('start.later'):g})",
        ),
    )
    found: list[Most] = []
    for flags, counted, level, words in cases:
        number = flags.sum(axis=1)
        shares = number / np.maximum(counted.sum(axis=1), 1)
        shares[number < min(2, history.heads)] = 0
        place = int(np.argmax(shares))
        if shares[place] >= _level(level):
            found.append(Most(int(steps[place]), float(shares[place]), words))
    return found[0] if found else None


def _level(rule: str) -> float:
    return RULES[rule].threshold


def _broken_since(history: History) -> int | None:
    found = [
        int(series.steps[rows[0]])
        for layer in history.layers
        for series in (layer.series["nonfinite"],)
        if (rows := np.flatnonzero((series.values > 0).any(axis=1))).size
    ]
    return min(found, default=None)


def _peak(history: History) -> Head | None:
    best: tuple[float, Layer, int] | None = None
    for layer in history.layers:
        values = layer.series["max_logit"].values
        if np.isnan(values).all():
            continue
        place = int(np.nanargmax(values))
        found = float(values.flat[place])
        if best is None or found > best[0]:
            best = found, layer, place % layer.heads
    return None if best is None else head_of(best[1], best[2])


def _loss(series: Series, attributes: reading.RunAttributes) -> Loss:
    finite = np.isfinite(series.values)
    number = min(FINAL, max(1, len(series) // 10)) if len(series) else 0
    last = series.values[finite][-number:] if number else series.values[:0]
    broken = np.flatnonzero(~finite)
    return Loss(
        steps=series.steps,
        values=series.values,
        final=float(last.mean()) if last.size else None,
        averaged=int(last.size),
        lowest=float(series.values[finite].min()) if finite.any() else None,
        not_finite=int(series.steps[broken[0]]) if broken.size else None,
        calls=int(attributes.more.get(reading.LOSS_CALLS, 1)),
    )


def _last(series: Series) -> float | None:
    known = series.values[np.isfinite(series.values)]
    return float(known[-1]) if known.size else None


def _state(segments: list[Segment], history: History, now: float) -> str:
    if not segments or segments[-1].ended is not None:
        return "ended"
    newest = segments[-1]
    times = [_times(layer.series["max_logit"], newest) for layer in history.layers]
    last = max((float(one[-1]) for one in times if len(one)), default=0.0)
    gaps = (np.diff(one[-silence.GAPS - 1 :]).tolist() for one in times)
    return "silent" if silence.silent(newest, last, gaps, now) else "running"


def _times(series: Series, segment: Segment) -> np.ndarray:
    """When the segment's readings were taken."""
    return np.empty(0) if series.times is None else series.times[series.segments == segment.id]


def edge(vital: str) -> float:
    """The edge of the band on the side on which attention closes."""
    band = BANDS[vital]
    found = band.high if vital == "max_logit" else band.low
    assert found is not None, f"the band of {vital} has lost its edge"
    return found
