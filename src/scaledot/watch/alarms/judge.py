"""`Judge`: reads vital signs as they come and raises alarms. Pure: no clock, no file, no torch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from scaledot.watch.alarms import words
from scaledot.watch.alarms.alarm import GRADES, Alarm
from scaledot.watch.alarms.findings import EVERY, Finding
from scaledot.watch.alarms.heads import Heads, Scale
from scaledot.watch.alarms.rules import OFF, RULES, Rule
from scaledot.watch.reading import LOSS, Phase, Reading
from scaledot.watch.store.records import replaced_from

# Readings of a layer without it until an alarm has ended and may come again; fewer suffice where
# they lie so many steps apart.
RESTS, RESTS_APART, APART = 20, 5, 64
LOSS_RESTS = 100  # steps without a loss that is no number until it is news again
SCALES = "scales"  # the attribute of a segment: [scale, d_k] of each layer
MOST_SCALES = 1024  # layers whose scale is kept


@dataclass
class _Standing:
    alarm: Alarm
    seen: int  # the last step it held in
    missed: int = 0  # readings since

    def rests(self, step: int) -> bool:
        apart = self.missed >= RESTS_APART and step - self.seen >= APART
        return self.missed > RESTS or apart


class Judge:
    """Feed it every reading in the order of steps; each alarm comes out once.

    rules: the table of thresholds, see `rules.overridden`. command: what started the run, so that
    the advice can be typed as it stands. Readings of the other phase are passed over.
    """

    def __init__(
        self,
        rules: Mapping[str, Rule] = RULES,
        command: Sequence[str] = (),
        phase: Phase = "train",
    ) -> None:
        self._limit = {name: rule.threshold for name, rule in rules.items()}
        self._command, self._phase = tuple(command), phase
        self._heads = Heads(self._limit)
        self._standing: dict[tuple[str, str], _Standing] = {}  # by kind and layer
        self._lost: int | None = None  # the last step whose loss was no number

    @property
    def standing(self) -> list[Alarm]:
        """What has been raised and has not ended."""
        return [one.alarm for one in self._standing.values()]

    @property
    def scales(self) -> dict[str, Scale]:
        """By layer, what its calls multiply their scores by: to be set before the first reading."""
        return self._heads.scales

    def read(self, reading: Reading) -> list[Alarm]:
        """One layer of one step."""
        return self.read_step([reading])

    def read_all(self, readings: Iterable[Reading]) -> list[Alarm]:
        """Of one step or of many, in order."""
        steps = groupby(readings, key=lambda one: one.step)
        return [alarm for _, together in steps for alarm in self.read_step(list(together))]

    def read_step(self, readings: Sequence[Reading]) -> list[Alarm]:
        """Layers of one step together: the same as one by one, for fewer operations."""
        mine = [one for one in readings if one.phase == self._phase]
        if not mine:
            return []
        step, read = mine[0].step, {one.layer for one in mine}
        self._heads.add(mine)
        for key, one in self._standing.items():
            one.missed += key[1] in read
        raised = [
            alarm
            for finding in self._findings(step)
            if finding.where.layer in read and (alarm := self._raised(finding, step)) is not None
        ]
        self._standing = {k: one for k, one in self._standing.items() if not one.rests(step)}
        return raised

    def read_loss(self, step: int, value: float) -> list[Alarm]:
        """The loss of one step: an alarm where it is no number, and again after a long rest."""
        if math.isfinite(value) or self._limit["loss"] == OFF:
            return []
        before, self._lost = self._lost, step
        if before is not None and step - before < LOSS_RESTS:
            return []
        return [words.tell_loss(step, value)]

    def _findings(self, step: int) -> Iterator[Finding]:
        for rule in EVERY:
            yield from rule(self._heads, self._limit, step)

    def _raised(self, finding: Finding, step: int) -> Alarm | None:
        """Once for each grade; a grade that falls says nothing."""
        key = finding.kind, finding.where.layer
        before = self._standing.get(key)
        if before is not None:
            before.missed, before.seen = 0, step
            if finding.grade <= GRADES.index(before.alarm.grade):
                return None
        alarm = words.tell(finding, step, self._heads, self._command)
        self._standing[key] = _Standing(alarm, step)
        return alarm


def of_run(reader: Any, rules: Mapping[str, Rule] = RULES) -> list[Alarm]:
    """The alarms that a run's store gives when it is read again, perhaps with other thresholds.

    reader: a `store.RunReader`. A continued run is judged anew from where it was continued, and the
    steps that came again by the last of them. The advice names no script: the store's own words are
    no command to type.
    """
    starts = reader.starts()
    alarms: list[Alarm] = []
    scales = scales_from(reader.attributes.more.get(SCALES))
    for segment, steps in groupby(reader.steps("train"), key=lambda step: step.segment):
        judge, end = Judge(rules), replaced_from(starts, segment)
        judge.scales.update(scales)
        for step in steps:
            if step.step < end:
                alarms += judge.read_step(step.readings)
    losses, judge = reader.scalars(LOSS).newest(starts), Judge(rules)
    for place in np.flatnonzero(~np.isfinite(losses.values)).tolist():
        alarms += judge.read_loss(int(losses.steps[place]), float(losses.values[place]))
    return sorted(alarms, key=lambda alarm: alarm.step)


def scales_from(note: Any) -> dict[str, Scale]:
    """Read what a segment keeps under SCALES; a foreign value gives none."""
    found: dict[str, Scale] = {}
    for layer, pair in note.items() if isinstance(note, dict) else ():
        try:
            factor, d_k = float(pair[0]), int(pair[1])
        except (TypeError, ValueError, LookupError, OverflowError):
            continue
        if math.isfinite(factor) and factor > 0 and 0 < d_k < 2**20:
            found[str(layer)] = Scale(factor, d_k)
    return found
