"""The alarms of a run: those it raised itself, or the same rules applied to its store now."""

from collections.abc import Iterable, Iterator

import numpy as np

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.alarms import of_run
from scaledot.watch.alarms.alarm import GRADES, Alarm
from scaledot.watch.reading import Phase, Reading, RunAttributes
from scaledot.watch.report.history import History, Layer
from scaledot.watch.store import RunReader, Step

# Heads times readings that are judged now; a longer run is judged at evenly chosen readings, for
# nobody waits a minute for a report.
MOST = 2**17
MOST_GROUPS = 40  # of alarms: there are six kinds and three grades


def alarms_of(reader: RunReader, history: History) -> tuple[list[Alarm], str]:
    """In the order of steps, and where they come from."""
    if reader.judged:
        return reader.alarms(), "raised while the run was trained"
    if history.heads * history.readings <= MOST:
        return of_run(reader), "judged now, from all readings in the store"
    some = _Some(history, reader.attributes)
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


class _Some:
    """What `of_run` asks of a reader, for some of the readings."""

    def __init__(self, history: History, attributes: RunAttributes) -> None:
        self.attributes = attributes
        self._layers = history.layers if history.phase == "train" else []
        every = np.unique(np.concatenate([x.series["passes"].steps for x in history.layers]))
        self.number = min(len(every), max(2, MOST // history.heads))
        self._chosen = every[np.linspace(0, len(every) - 1, self.number).round().astype(np.int64)]

    def starts(self) -> dict[int, int]:
        return {}  # what was replaced is not in the history

    def steps(self, phase: Phase) -> Iterator[Step]:
        floats = {layer.name: _numbers(layer) for layer in self._layers}
        for step in self._chosen.tolist():
            readings = []
            for layer in self._layers:
                series = layer.series["passes"]
                place = int(np.searchsorted(series.steps, step))
                if place < len(series) and series.steps[place] == step:
                    found, counts = floats[layer.name]
                    readings.append(
                        Reading.trusted(
                            step, phase, 0.0, layer.name, found[:, place], counts[:, place]
                        )
                    )
            yield Step(0, step, phase, 0.0, tuple(readings))


def _numbers(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """[fields, readings, heads] of the vitals that the rules look at; the others stay 0."""
    series = layer.series
    passes, peaks = series["passes"], series["max_logit"]
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
    return floats, counts
