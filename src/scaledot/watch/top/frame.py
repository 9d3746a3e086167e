"""One frame: everything that is shown at one moment, as plain data."""

import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from scaledot.fields import BANDS, Band
from scaledot.watch import crash, reading, silence
from scaledot.watch.alarms import GRADES, Alarm, as_json
from scaledot.watch.evidence import Evidence, least
from scaledot.watch.reading import Phase, Reading, RunAttributes
from scaledot.watch.top import health, words
from scaledot.watch.top.history import Curve, History

WORST = 20  # heads; a terminal shows as many of them as it has room for
MOST_REMEDIES = 10
MOST_STEPS = 2**53
BY_HAND = "hand (Ctrl-C)"


@dataclass(frozen=True)
class Row:
    layer: str
    numbers: np.ndarray  # float64 [heads]; NaN: not measured


@dataclass(frozen=True)
class Head:
    """A head among the worst: its curve, and since when it is outside the band."""

    layer: str
    head: int
    number: float
    steps: list[int]
    numbers: list[float]
    since: int | None  # step of the first reading of the stretch outside; None: inside
    others: dict[str, float]  # further vitals that are outside their bands


State = Literal["waiting", "running", "silent", "ended"]


@dataclass(frozen=True)
class Frame:
    path: str
    command: str
    phase: Phase
    vital: str
    band: Band
    state: State
    quiet_for: float | None  # seconds since the last reading
    cause: str  # why it ended, where that is known
    step: int | None
    rows: list[Row]
    ill: dict[str, int]  # vital -> heads outside its band; only those that have any
    ill_heads: int  # heads outside any band
    worst: list[Head]
    coverage: str
    cost: float | None  # share of the step time
    every: int | None  # steps between two readings
    evidence: Evidence
    steady_cost: float | None  # share of the step time at the steady interval
    dropped: int
    remedies: list[str] = field(default_factory=list)  # at work, in words
    scalars: dict[str, float] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)  # the gravest first, then the newest

    @property
    def heads(self) -> int:
        return sum(len(row.numbers) for row in self.rows)


def frame_of(
    history: History, vital: str, phase: Phase = "train", now: float | None = None
) -> Frame:
    now = time.time() if now is None else now
    tracks = history.tracks[phase]
    latest = {layer: track.latest for layer, track in tracks.items()}
    rows = [Row(layer, health.values(one, vital)) for layer, one in latest.items()]
    ill, ill_heads = health.ill(latest.values())
    state, quiet_for = _state(history, latest, now)
    segment = history.segment
    attributes = None if segment is None else segment.attributes
    scalars = {name: scalar.value for name, scalar in history.scalars.items()}
    steps = [one.step for one in latest.values()]
    if phase == "train" and steps:  # the last steps of a run may have no reading
        steps += [scalar.step for scalar in history.scalars.values()]
    elif phase == "eval":  # the loss is that of training
        scalars = {n: value for n, value in scalars.items() if n == reading.WATCH_COST}
    return Frame(
        path=str(history.path),
        command="" if attributes is None else words.brief(" ".join(attributes.command)),
        phase=phase,
        vital=vital,
        band=BANDS[vital],
        state=state,
        quiet_for=quiet_for,
        cause=_cause(attributes),
        step=max(steps, default=None),
        rows=rows,
        ill=ill,
        ill_heads=ill_heads,
        worst=_worst_heads(history, phase, vital, rows),
        coverage="" if attributes is None else _coverage(attributes),
        cost=scalars.pop(reading.WATCH_COST, None),
        every=_every(history),
        evidence=_evidence(history, max(steps, default=0)),
        steady_cost=None if attributes is None else _steady(attributes),
        dropped=sum(segment.dropped for segment in history.segments),
        remedies=[] if attributes is None else _remedies(attributes),
        scalars=scalars,
        alarms=_alarms(history.alarms),
    )


def as_data(frame: Frame) -> dict[str, Any]:
    """Ready for JSON: null where a number is not finite."""
    return {
        "run": frame.path,
        "command": frame.command,
        "state": frame.state,
        "cause": frame.cause or None,
        "seconds_since_last_reading": frame.quiet_for,
        "step": frame.step,
        "phase": frame.phase,
        "vital": frame.vital,
        "healthy": {"low": frame.band.low, "high": frame.band.high, "words": frame.band.words},
        "layers": [
            {"layer": row.layer, "heads": [_plain(n) for n in row.numbers.tolist()]}
            for row in frame.rows
        ],
        "heads": frame.heads,
        "heads_outside": frame.ill_heads,
        "heads_outside_by_vital": frame.ill,
        "worst": [
            {
                "layer": head.layer,
                "head": head.head,
                "value": _plain(head.number),
                "outside_since_step": head.since,
                "also_outside": {name: _plain(n) for name, n in head.others.items()},
                "steps": head.steps,
                "values": [_plain(number) for number in head.numbers],
            }
            for head in frame.worst
        ],
        "coverage": frame.coverage,
        "steps": frame.evidence.steps,
        "steps_read": frame.evidence.read,
        "largest_gap": frame.evidence.gap,
        "enough_was_read": frame.evidence.enough,
        "watch_cost": None if frame.cost is None else _plain(frame.cost),
        "watch_cost_steady": None if frame.steady_cost is None else frame.steady_cost,
        "steps_between_readings": frame.every,
        "dropped": frame.dropped,
        "remedies": frame.remedies,
        "alarms": [as_json(alarm) for alarm in frame.alarms],
        **{name: _plain(number) for name, number in frame.scalars.items()},
    }


def _evidence(history: History, last: int) -> Evidence:
    """What was read of the training's steps, up to the last that is known of."""
    tracks = history.tracks["train"].values()
    if not tracks:
        return Evidence(0, 0, 0)
    segment = history.segment
    alive = None if segment is None else segment.attributes.more.get(reading.ALIVE)
    if isinstance(alive, int) and alive < MOST_STEPS:
        last = max(last, alive - 1)
    first = last if history.first is None else history.first
    return least(track.read.until(first, last) for track in tracks)


def _steady(attributes: RunAttributes) -> float | None:
    note = attributes.more.get(reading.STEADY)
    share = note.get("share") if isinstance(note, dict) else None
    return float(share) if isinstance(share, int | float) and math.isfinite(share) else None


def _alarms(alarms: list[Alarm]) -> list[Alarm]:
    """Of each kind and layer the last, which is the gravest: a grade only rises."""
    last = {(alarm.kind, alarm.layer): alarm for alarm in alarms}
    return sorted(last.values(), key=lambda one: (-GRADES.index(one.grade), -one.step))


def _plain(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _worst_heads(history: History, phase: Phase, vital: str, rows: list[Row]) -> list[Head]:
    places = _worst(rows, vital)
    curves = {layer: history.curve(phase, layer, vital) for layer, _ in places}
    latest = {layer: history.tracks[phase][layer].latest for layer, _ in places}
    return [_head(latest[layer], curves[layer], vital, head) for layer, head in places]


def _worst(rows: list[Row], vital: str) -> list[tuple[str, int]]:
    if not rows:
        return []
    places = [(row.layer, head) for row in rows for head in range(len(row.numbers))]
    scores = health.badness(np.concatenate([row.numbers for row in rows]), vital)
    known = np.flatnonzero(~np.isnan(scores))
    order = known[np.argsort(-scores[known], kind="stable")]
    return [places[position] for position in order[:WORST]]


def _head(latest: Reading, curve: Curve, vital: str, head: int) -> Head:
    numbers = curve.numbers[:, head]
    flags = health.outside(numbers, vital)
    inside = np.flatnonzero(flags == 0)
    first = int(inside[-1]) + 1 if inside.size else 0
    others = {}
    for name in health.COUNTED:
        number = health.values(latest, name)[head : head + 1]
        if name != vital and health.outside(number, name)[0]:
            others[name] = float(number[0])
    return Head(
        layer=latest.layer,
        head=head,
        number=float(numbers[-1]),
        steps=curve.steps,
        numbers=numbers.tolist(),
        since=curve.steps[first] if flags[-1] else None,
        others=others,
    )


def _state(history: History, latest: dict[str, Reading], now: float) -> tuple[State, float | None]:
    segment = history.segment
    if not latest or segment is None:
        return ("ended" if segment is not None and segment.ended else "waiting"), None
    last = max(one.time for one in latest.values())
    quiet_for = max(0.0, now - last)
    if segment.ended is not None:
        return "ended", quiet_for
    tracks = history.tracks[history.first_phase].values()
    gaps = ([gap.seconds for gap in track.gaps] for track in tracks)
    return ("silent" if silence.silent(segment, last, gaps, now) else "running"), quiet_for


def _coverage(attributes: RunAttributes) -> str:
    return words.brief(str(attributes.more.get("coverage", "")))


def _cause(attributes: RunAttributes | None) -> str:
    """Why the run ended, where it was kept; "" where nothing is known."""
    crashes = [] if attributes is None else crash.from_note(attributes.more.get(crash.NOTE))
    for one in reversed(crashes):
        if one.kind == "exception":
            return words.brief(one.words)
        if one.kind == "interrupt":
            return BY_HAND
        if one.kind == "signal":
            return one.signal
    return ""


def _remedies(attributes: RunAttributes) -> list[str]:
    return [
        f"{words.brief(note['spec'])}{_since(note['since'])}"
        f"{' (dry run)' if note['dry_run'] else ''}"
        for note in attributes.more.get(reading.REMEDIES, ())[:MOST_REMEDIES]
    ]


def _since(step: int | None) -> str:
    return ", nothing done so far" if step is None else f" since step {step:,}"


def _every(history: History) -> int | None:
    """The last gap. Of the first two steps nothing follows: they are always read. What lies between
    two evaluations is the script's matter."""
    gaps = [track.gaps for track in history.tracks["train"].values() if track.gaps]
    return min((gap[-1].steps for gap in gaps if len(gap) > 1 or gap[-1].steps > 1), default=None)
