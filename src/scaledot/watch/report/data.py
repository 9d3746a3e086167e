"""The report as plain data: what the page says, for programs."""

import dataclasses
import math
from typing import Any

from scaledot.watch import reading
from scaledot.watch.alarms.alarm import as_json
from scaledot.watch.report.facts import Facts
from scaledot.watch.report.figure import POINTS, thinned
from scaledot.watch.report.heads import Head
from scaledot.watch.report.verdict import Verdict

SCHEMA = 1  # raised when a name below changes its meaning


def as_data(facts: Facts, verdict: Verdict) -> dict[str, Any]:
    """Ready for json.dumps(allow_nan=False): null where a number is not finite or not known."""
    loss = facts.loss
    return plain(
        {
            "schema": SCHEMA,
            "run": facts.path,
            "verdict": {
                "state": verdict.state,
                "name": verdict.name,
                "enough_was_read": facts.enough,
                "since_step": verdict.since_step,
                "headline": verdict.headline,
                "sentences": verdict.sentences,
                "not_known": verdict.unknown,
            },
            "steps": {
                "first": facts.first_step,
                "last": facts.last_step,
                "number": facts.evidence.steps,
                "readings": facts.readings,
                "largest_gap": facts.evidence.gap,
                "every": facts.every,
                "phase": facts.history.phase,
            },
            "ended": {
                "state": facts.state,
                "crashes": [dataclasses.asdict(crash) for crash in facts.crashes],
            },
            "heads": {
                "layers": len(facts.history.layers),
                "all": facts.heads,
                "scores_above_band": facts.high,
                "closed": facts.closed,
                "outside_a_band": facts.outside_heads,
                "outside_by_vital": facts.outside,
                "broken": facts.broken,
                "broken_since": facts.broken_since,
            },
            "start": _start(facts),
            "largest_score": None if facts.peak is None else _head(facts.peak),
            "worst": [_head(head) for head in facts.worst],
            "alarms": {"origin": facts.judged, "list": [as_json(one) for one in facts.alarms]},
            "remedies": [dataclasses.asdict(one) for one in facts.remedies],
            "at_work": facts.at_work,
            "loss": {
                "final": loss.final,
                "mean_of_last": loss.averaged,
                "lowest": loss.lowest,
                "not_finite_at": loss.not_finite,
                "curve": _points(loss.steps, loss.values),
            },
            "learning_rate": _points(facts.learning_rate.steps, facts.learning_rate.values),
            "coverage": {
                "words": facts.coverage,
                "watched": None if facts.watched is None else facts.watched[0],
                "layers": None if facts.watched is None else facts.watched[1],
                "dropped": facts.dropped,
                "cut_off": facts.cut_off,
                "replaced": facts.replaced,
                "sample": facts.attributes.more.get(reading.SAMPLE),
            },
            "cost": {
                "share_of_step_time": facts.cost,
                "steady_share": facts.steady_cost,
                "steady_every": facts.steady_every,
                "startup_seconds": facts.startup,
                "step_seconds": facts.step_time,
                "cadence": facts.cadence,
            },
            "attributes": {
                "command": list(facts.attributes.command),
                "model": facts.attributes.model,
                "versions": dict(facts.attributes.versions),
                "started": facts.started,
                "seconds": facts.seconds,
                "segments": facts.segments,
            },
        }
    )


def plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _start(facts: Facts) -> dict[str, Any] | None:
    head = facts.start
    if head is None:
        return None
    return {
        "layer": head.layer,
        "head": head.head,
        "step": head.left,
        "by": head.left_by,
        "doubling_steps": head.doubling,
        "learning_rate": facts.rate_at_start,
    }


def _head(head: Head) -> dict[str, Any]:
    return {
        "layer": head.layer,
        "head": head.head,
        "first_score": head.first,
        "largest_score": head.peak,
        "largest_score_step": head.peak_step,
        "left_band_at": head.left,
        "left_by": head.left_by,
        "sink": head.sink,
        "last_step": head.last_step,
        "last": head.last,
        "curves": {
            vital: {"steps": curve.steps, "values": curve.numbers}
            for vital, curve in head.curves.items()
        },
    }


def _points(steps, values) -> dict[str, list]:
    kept = thinned(steps, values, POINTS)
    return {"steps": kept[0].tolist(), "values": kept[1].tolist()}
