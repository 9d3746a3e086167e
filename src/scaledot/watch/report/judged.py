"""The alarms of a run: those it raised itself, or the same rules applied to its store now."""

from collections.abc import Iterable, Iterator

import numpy as np

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.alarms import of_run
from scaledot.watch.alarms.alarm import GRADES, Alarm
from scaledot.watch.reading import Phase, Reading
from scaledot.watch.report.history import OTHERS, History, Layer
from scaledot.watch.store import RunReader, Step

# What is judged now: heads times readings, and layers times readings, a reading itself as much as
# some layers. Of a longer run evenly chosen readings are judged: a report takes seconds.
MOST = 2**17
MOST_LAYERS = 2**13
A_READING = 5
MOST_GROUPS = 40  # of alarms: there are nine kinds and three grades


def alarms_of(reader: RunReader, history: History) -> tuple[list[Alarm], str]:
    """In the order of steps, and where they come from."""
    if reader.judged:
        return reader.alarms(), "raised while the run was trained"
    if history.readings <= _most_readings(history):
        return of_run(reader), "judged now, from all readings in the store"
    some = _Some(history, reader)
    return of_run(some), (
        f"judged now, from {some.number:,} of {history.readings:,} readings: of a long run that "
        "was trained without alarms"
    )


def grouped(alarms: Iterable[Alarm]) -> list[list[Alarm]]:
    """By grade and kind, the gravest first, each group in the order of steps."""
    groups: dict[tuple[str, str], list[Alarm]] = {}
    in_order = sorted(alarms, key=lambda alarm: (-GRADES.index(alarm.grade), alarm.step))
    for alarm in in_order:
        groups.setdefault((alarm.grade, alarm.kind), []).append(alarm)
    return list(groups.values())[:MOST_GROUPS]


def _most_readings(history: History) -> int:
    by_layers = MOST_LAYERS // (A_READING + len(history.layers))
    return min(MOST // max(history.heads, 1), by_layers)


class _Some:
    """What `of_run` asks of a reader, for some of the readings."""

    def __init__(self, history: History, reader: RunReader) -> None:
        self.attributes, self.scalars = reader.attributes, reader.scalars
        self._layers = history.layers if history.phase == "train" else []
        every = np.unique(np.concatenate([x.series["passes"].steps for x in history.layers]))
        self.number = min(len(every), max(2, _most_readings(history)))
        self._chosen = every[np.linspace(0, len(every) - 1, self.number).round().astype(np.int64)]

    def starts(self) -> dict[int, int]:
        return {}  # what was replaced is not in the history

    def steps(self, phase: Phase) -> Iterator[Step]:
        every = {layer.name: _numbers(layer, self._chosen) for layer in self._layers}
        for step in self._chosen.tolist():
            readings = []
            for layer in self._layers:
                steps, floats, counts = every[layer.name]
                place = int(np.searchsorted(steps, step))
                if place < len(steps) and steps[place] == step:
                    readings.append(
                        Reading.trusted(
                            step, phase, 0.0, layer.name, floats[:, place], counts[:, place]
                        )
                    )
            yield Step(0, step, phase, 0.0, tuple(readings))


def _numbers(layer: Layer, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and [fields, steps, heads] of what the rules look at; the other fields stay 0."""
    places = np.flatnonzero(np.isin(layer.series["passes"].steps, chosen))
    series = {name: layer.series[name].at(places) for name in OTHERS}
    passes, peaks = series["passes"], layer.series["max_logit"]
    shape = (len(passes), layer.heads)
    floats = np.zeros((len(FLOAT_FIELDS), *shape), np.float32)
    counts = np.zeros((len(COUNT_FIELDS), *shape), np.int64)
    at = np.minimum(np.searchsorted(peaks.steps, passes.steps), len(peaks) - 1)
    named = {
        "max_logit": peaks.values[at],
        "sum_p2": 1 - passes.values,
        **{name: series[name].values for name in ("entropy_ratio", "sink", "off")},
    }
    for name, values in named.items():
        floats[FLOAT_FIELDS.index(name)] = values
    counts[COUNT_FIELDS.index("rows")] = ~np.isnan(passes.values)
    counts[COUNT_FIELDS.index("nonfinite")] = np.nan_to_num(series["nonfinite"].values)
    return passes.steps, floats, counts
