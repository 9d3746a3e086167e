"""`scaledot top`: the frame, its picture, and what the command prints."""

import json
import math
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaledot import cli
from scaledot.measure import BANDS, COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch import crash
from scaledot.watch.alarms import Alarm
from scaledot.watch.reading import Reading, RunAttributes, Scalar
from scaledot.watch.store import RunReader, Store
from scaledot.watch.top import curve, health, heat, newest, picture, words
from scaledot.watch.top.frame import Row, frame_of
from scaledot.watch.top.history import POINTS, History

HEALTHY = {
    "max_logit": 7.0,
    "logit_std": 1.0,
    "row_std": 1.0,
    "entropy": 3.0,
    "entropy_ratio": 0.6,
    "sum_p2": 0.2,
    "top_p": 0.3,
    "q_rms": 1.0,
    "k_rms": 1.0,
}


def _reading(
    step: int, layer: str, heads: int, time: float = 0.0, phase="train", rows=11, **given
) -> Reading:
    """Healthy heads, but for the given vitals: one number, or one a head."""
    numbers = {**dict.fromkeys((*FLOAT_FIELDS, *COUNT_FIELDS), 0.0), **HEALTHY, "rows": rows}
    numbers |= given
    floats = [np.broadcast_to(numbers[name], heads) for name in FLOAT_FIELDS]
    counts = [np.broadcast_to(numbers[name], heads) for name in COUNT_FIELDS]
    return Reading(step, phase, time or 1000.0 + step, layer, np.stack(floats), np.stack(counts))


def _run(path: Path, *steps: list[Reading], coverage: str = "all watched", scalars=()) -> Path:
    with Store(path, RunAttributes(command=("train.py",), more={"coverage": coverage})) as store:
        for readings in steps:
            store.write(readings)
        store.write(scalars=scalars)
    return path


def _model(layers: int, heads: int, step: int = 0, **ill) -> list[Reading]:
    """ill: the vitals of the last layer's last head."""
    healthy = {name: np.full(heads, HEALTHY.get(name, 0.0)) for name in ill}
    for name, number in ill.items():
        healthy[name][-1] = number
    return [
        _reading(step, f"model.h.{layer}.attn", heads, **(healthy if layer == layers - 1 else {}))
        for layer in range(layers)
    ]


def _lines(path: Path, vital: str, width: int, height: int | None, **options) -> list[str]:
    frame = frame_of(History(path), vital)
    return [line.plain for line in picture.draw(frame, width, height, **options)]


def test_a_frame_holds_every_head_of_layers_with_unequal_heads(tmp_path):
    readings = [
        _reading(5, "a", 3, max_logit=[1.0, 2.0, 3.0]),
        _reading(5, "b", 1, max_logit=4.0),
    ]
    frame = frame_of(History(_run(tmp_path / "r.vitals", readings)), "max_logit")
    assert [(row.layer, row.numbers.tolist()) for row in frame.rows] == [
        ("a", [1.0, 2.0, 3.0]),
        ("b", [4.0]),
    ]
    assert (frame.step, frame.heads, frame.ill_heads, frame.state) == (5, 4, 0, "ended")


def test_a_head_without_rows_is_neither_ill_nor_among_the_worst(tmp_path):
    reading = _reading(0, "a", 2, rows=[0, 11], max_logit=[-math.inf, 1.0], sum_p2=[0.0, 0.2])
    frame = frame_of(History(_run(tmp_path / "r.vitals", [reading])), "passes")
    assert math.isnan(frame.rows[0].numbers[0])
    assert [head.head for head in frame.worst] == [1]
    assert frame.ill == {}


def test_the_worst_head_comes_first_and_says_since_when_and_what_else(tmp_path):
    logits = [3.0, 150.0, 20.0, 120.0, 900.0]
    steps = [
        [
            _reading(10 * place, "a", 2, max_logit=[5.0, 6.0]),
            _reading(10 * place, "b", 2, max_logit=[logit, 8.0], sum_p2=[0.2 + 0.19 * place, 0.1]),
        ]
        for place, logit in enumerate(logits)
    ]
    frame = frame_of(History(_run(tmp_path / "r.vitals", *steps)), "max_logit")
    worst = frame.worst[0]
    assert (worst.layer, worst.head, worst.number) == ("b", 0, 900.0)
    assert worst.since == 30, "it was healthy again at step 20"
    assert worst.numbers == logits
    assert list(worst.others) == ["passes"]
    assert frame.ill == {"passes": 1, "max_logit": 1}
    assert frame.ill_heads == 1
    assert [(head.layer, head.head) for head in frame.worst[1:]] == [("b", 1), ("a", 1), ("a", 0)]


@pytest.mark.parametrize("vital", health.VITALS)
def test_every_vital_is_outside_exactly_beyond_its_band_and_then_worse_than_any_inside(vital):
    band = BANDS[vital]
    inside = [edge for edge in (band.low, band.high) if edge is not None]
    beyond = [band.low - 0.01] if band.low is not None else []
    beyond += [band.high + 0.01] if band.high is not None else []
    assert health.outside(np.array([*inside, np.nan]), vital).tolist() == [0] * (len(inside) + 1)
    assert all(health.outside(np.array(beyond), vital) != 0)
    if inside:
        scores = health.badness(np.array([*inside, *beyond]), vital)
        assert max(scores[: len(inside)]) <= 1 + 1e-9 < min(scores[len(inside) :])


def test_all_vitals_of_the_table_can_be_shown():
    assert set(health.VITALS) == set(BANDS)


@pytest.mark.parametrize("vital", health.VITALS)
def test_numbers_are_those_of_the_reading(vital):
    reading = _reading(0, "a", 3, nonfinite=[0, 2, 5], sum_p2=[0.1, 0.5, 1.0])
    np.testing.assert_allclose(health.values(reading, vital), reading.value(vital), rtol=1e-6)


def test_twelve_layers_of_twelve_heads_fit_a_small_terminal_with_every_number(tmp_path):
    path = _run(tmp_path / "r.vitals", _model(12, 12, sum_p2=0.96))
    lines = _lines(path, "passes", 80, 24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    shown = [line for line in lines if line.lstrip().startswith("layer ")]
    rows = [line for line in shown if " h" not in line]
    assert len(rows) == 12
    assert all(line.split()[2:] == [".80"] * 12 for line in rows[:-1])
    assert rows[-1].split()[2:] == [*[".80"] * 11, ".04▼"]
    assert any(line.startswith("layer 11 h11") for line in lines)
    assert "144 heads in 12 layers: 1 outside a band, too little seen: passes 1" in lines[1]
    assert "healthy: 0.1 or more" in lines[2]


@pytest.mark.parametrize("vital", ["max_logit", "entropy", "logit_std", "nonfinite"])
@pytest.mark.parametrize(
    ("layers", "heads", "width", "height"),
    [(1, 1, 80, 24), (12, 12, 40, 13), (32, 32, 80, 24), (80, 64, 80, 24), (3, 200, 100, 30)],
)
def test_any_model_fits_any_terminal(tmp_path, layers, heads, width, height, vital):
    path = _run(tmp_path / "r.vitals", _model(layers, heads))
    lines = _lines(path, vital, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_one_ill_head_among_five_thousand_is_seen_in_the_map():
    rows = [Row(f"h.{layer}", np.full(64, 7.0)) for layer in range(80)]
    rows[33].numbers[17] = 5000.0
    chart = heat.draw(rows, "max_logit", 80, 13)
    assert (chart.layers_a_cell, chart.heads_a_cell) == (7, 1)
    marked = [line.plain for line in chart.lines if heat.ABOVE in line.plain]
    (line,) = marked
    assert line.strip().startswith("layer 28 to 34")
    assert line.index(heat.ABOVE) - len(line[: line.index("34") + 3]) == 17


def test_layers_of_unequal_heads_end_where_their_heads_end():
    rows = [Row("a", np.array([1.0, 2.0, 3.0])), Row("b", np.array([4.0]))]
    lines = [line.plain for line in heat.draw(rows, "max_logit", 80, 24).lines]
    assert [line.split() for line in lines] == [
        ["h0", "h1", "h2"],
        ["a", "1.0", "2.0", "3.0"],
        ["b", "4.0"],
    ]


def test_cells_say_without_colour_what_they_say_with_it():
    numbers = np.array([1.0, 30.0, 60.0, 99.0, 101.0, np.nan])
    rows = [Row("a", numbers), Row("b", np.full(40, 1.0))]
    line = heat.draw(rows, "max_logit", 60, 24).lines[1]
    assert line.plain == "a ·░▒▓▲-"
    cells = [str(span.style) for span in line.spans if span.end - span.start == 1][-6:]
    assert len(set(cells)) == 6


def test_a_taller_terminal_shows_more_of_the_worst_heads(tmp_path):
    path = _run(tmp_path / "r.vitals", _model(12, 12))
    small, tall = (_lines(path, "passes", 80, height) for height in (24, 40))
    label = re.compile(r"layer \d+ h\d+ ")
    assert sum(bool(label.match(line)) for line in small) == 5
    assert sum(bool(label.match(line)) for line in tall) > 10


def test_ascii_terminals_get_ascii(tmp_path):
    path = _run(tmp_path / "r.vitals", _model(3, 30, sum_p2=0.96), _model(3, 30, 1, sum_p2=0.99))
    lines = _lines(path, "passes", 60, 24, ascii_only=True)
    assert "\n".join(lines).isascii()
    assert any(line.rstrip().endswith("v") for line in lines)


def test_heads_inside_their_band_are_not_called_worst(tmp_path):
    healthy = "\n".join(_lines(_run(tmp_path / "a.vitals", _model(2, 2)), "passes", 80, 24))
    assert "nearest edge" in healthy
    assert "worst heads" not in healthy
    ill = _run(tmp_path / "b.vitals", _model(2, 2, sum_p2=0.96))
    assert "worst heads" in "\n".join(_lines(ill, "passes", 80, 24))


def test_words_that_do_not_fit_whole_are_left_out(tmp_path):
    path = _run(tmp_path / "r.vitals", _model(2, 2))
    wide, narrow = (_lines(path, "passes", width, 24)[3] for width in (120, 80))
    assert wide.endswith("model.h.*.attn")
    assert narrow.endswith(BANDS["passes"].words)


def test_a_long_run_is_read_only_where_it_is_looked_at(tmp_path, monkeypatch):
    path = _run(tmp_path / "r.vitals", *(_model(2, 2, step) for step in range(9)))
    monkeypatch.setattr(RunReader, "steps", lambda *_: pytest.fail("all of the run was read"))
    assert len(frame_of(History(path), "passes").worst[0].steps) == 9


def test_a_run_is_running_then_silent_and_ended_when_it_says_so(tmp_path):
    with Store(tmp_path / "r.vitals", RunAttributes()) as store:
        history = History(store.path)
        assert frame_of(history, "passes").state == "waiting"
        assert "waiting for the first reading" in _lines(store.path, "passes", 80, 24)[0]
        for step in range(4):
            store.write([_reading(step, "a", 2, time=1e9 + step)])
        assert store.flush()
        assert history.look()
        now = history.segments[-1].seen
        assert frame_of(history, "passes", now=now + 2).state == "running"
        frame = frame_of(history, "passes", now=now + 60)
        assert frame.state == "silent"
        assert "SILENT for" in picture.draw(frame, 80, 24)[0].plain
    assert history.look()
    assert frame_of(history, "passes", now=now + 60).state == "ended"


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("exception", "ended 5 s ago by IndexError: list index out of range"),
        ("signal", "ended 5 s ago by SIGTERM"),
        ("interrupt", "ended 5 s ago by hand (Ctrl-C)"),
        ("loss", "ended 5 s ago"),  # training went on after it
    ],
)
def test_the_cause_of_an_end_is_told_where_it_is_known(tmp_path, kind, shown):
    words = "IndexError: list index out of range"
    with Store(tmp_path / "run.vitals", RunAttributes()) as store:
        store.write(_model(1, 2, 3))
        store.note(crash.NOTE, crash.as_note([crash.Crash(kind, 4, words, 1003.5)]))
    frame = frame_of(History(tmp_path / "run.vitals"), "max_logit", now=1008.0)
    assert frame.state == "ended"
    title = picture.draw(frame, 120, 30)[0].plain
    assert re.search(re.escape(shown) + r" +step 3", title), title


def test_the_last_step_is_the_runs_not_the_last_readings(tmp_path):
    scalars = [Scalar(57, "watch_cost", 0.01)]
    frame = frame_of(
        History(_run(tmp_path / "run.vitals", _model(1, 2, 3), scalars=scalars)), "top_p"
    )
    assert frame.step == 57
    assert frame.cost == pytest.approx(0.01)


def test_a_slow_run_is_not_called_silent_too_early(tmp_path):
    with Store(tmp_path / "r.vitals", RunAttributes()) as store:
        for step in range(4):
            store.write([_reading(step, "a", 2, time=1e9 + 60 * step)])
        assert store.flush()
        history = History(store.path)
        now = history.segments[-1].seen
        assert frame_of(history, "passes", now=now + 200).state == "running"
        assert frame_of(history, "passes", now=now + 400).state == "silent"


def test_the_first_two_steps_say_nothing_of_how_often_is_read(tmp_path):
    with Store(tmp_path / "r.vitals", RunAttributes()) as store:
        for step, every in ((0, None), (1, None), (2, 1), (52, 50)):
            store.write([_reading(step, "a", 2)])
            assert store.flush()
            assert frame_of(History(store.path), "passes").every == every


def test_new_readings_and_scalars_arrive(tmp_path):
    with Store(tmp_path / "r.vitals", RunAttributes()) as store:
        store.write([_reading(0, "a", 2, max_logit=1.0)], [Scalar(0, "loss", 4.0)])
        assert store.flush()
        history = History(store.path)
        assert not history.look()
        store.write([_reading(5, "a", 2, max_logit=9.0)], [Scalar(5, "loss", 3.0)])
        store.write([], [Scalar(5, "watch_cost", 0.004)])
        assert store.flush()
        assert history.look()
        frame = frame_of(history, "max_logit")
        assert (frame.step, frame.every, frame.cost) == (5, 5, 0.004)
        assert frame.worst[0].numbers == [1.0, 9.0]
        assert frame.scalars["loss"] == 3.0


def test_a_continued_run_shows_the_steps_of_the_continuation(tmp_path):
    path = tmp_path / "r.vitals"
    _run(path, *([_reading(step, "a", 1, max_logit=1.0)] for step in (0, 10, 20, 30)))
    _run(path, *([_reading(step, "a", 1, max_logit=2.0)] for step in (15, 25)))
    worst = frame_of(History(path), "max_logit").worst[0]
    assert (worst.steps, worst.numbers) == ([0, 10, 15, 25], [1.0, 1.0, 2.0, 2.0])


def test_a_run_that_begins_again_is_not_shown_with_the_steps_and_alarms_of_the_last(tmp_path):
    path = tmp_path / "r.vitals"
    with Store(path, RunAttributes()) as store:
        for step in range(0, 100, 10):
            store.write([_reading(step, "old", 1)], [Scalar(step, "watch_cost", 0.25)])
        store.write_alarms([_alarm(90)])
    history = History(path)
    assert [one.step for one in frame_of(history, "passes").alarms] == [90]
    with Store(path, RunAttributes()) as store:
        store.write([_reading(0, "a", 1)], [Scalar(0, "loss", 4.0)])
        assert store.flush()
        assert history.look()
        for one in (history, History(path)):
            frame = frame_of(one, "passes")
            assert (frame.step, frame.alarms, frame.cost) == (0, [], None)
            assert [row.layer for row in frame.rows] == ["a"]
        store.write([_reading(1, "a", 1)])
        store.write_alarms([_alarm(1)])
        assert store.flush()
        assert history.look()
        assert [one.step for one in frame_of(history, "passes").alarms] == [1]


def _alarm(step):
    words = dict(value=1e3, threshold=1e3, rate=None, words="a head closes", advice="")
    return Alarm(step=step, grade="act", kind="collapse", layer="old", head=0, since=step, **words)


def test_a_long_run_is_thinned_but_keeps_its_ends(tmp_path):
    steps = [[_reading(step, "a", 1, max_logit=step)] for step in range(3 * POINTS)]
    head = frame_of(History(_run(tmp_path / "r.vitals", *steps)), "max_logit").worst[0]
    assert POINTS / 2 <= len(head.steps) <= POINTS
    assert (head.steps[0], head.steps[-1]) == (0, 3 * POINTS - 1)
    assert head.numbers == head.steps


def test_a_curve_rises_with_its_numbers_and_is_flat_for_noise():
    assert curve.draw(range(8), range(100, 900, 100), "q_rms", 8).plain == curve.BARS
    flat = curve.draw(range(4), [0.711, 0.712, 0.711, 0.712], "passes", 8).plain
    assert len(set(flat)) <= 2
    assert set(flat) <= set("▄▅")
    assert curve.draw([0, 90, 100], [1.0, 5.0, 5.0], "q_rms", 3).plain == "▁▁█"


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_short_number_fits_its_cell_and_keeps_its_size(number):
    text = words.short(number)
    assert len(text.removeprefix("-")) <= 4
    if math.isfinite(number) and 0.01 <= abs(number) < 9e14:
        digits, unit = text.rstrip("kMGT"), text.lstrip("-.0123456789")
        back = float(digits) * 1000 ** words.UNITS.index(unit)
        assert abs(back - number) <= max(0.051 * abs(number), 0.00501)


def test_names_are_cut_to_what_differs():
    assert words.short_layers(["h.0.attn", "h.1.attn"]) == ("h.*.attn", ["layer 0", "layer 1"])
    names = ["encoder.0.attn", "decoder.0.attn", "decoder.0.cross"]
    assert words.short_layers(names) == ("", names)
    assert words.short_layers(["attn"]) == ("", ["attn"])
    assert words.short_layers(["a", "a.b"]) == ("", ["a", "a.b"])


def test_json_holds_the_frame_and_only_numbers_that_json_knows(tmp_path, capsys):
    reading = _reading(7, "a", 2, rows=[0, 11], max_logit=[-math.inf, 300.0])
    path = _run(tmp_path / "r.vitals", [reading], scalars=[Scalar(7, "loss", math.nan)])
    assert cli.main(["top", str(path), "--json", "--vital", "max_logit"]) == 0
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["layers"] == [{"layer": "a", "heads": [None, 300.0]}]
    assert (data["step"], data["state"], data["coverage"]) == (7, "ended", "all watched")
    assert data["healthy"]["high"] == 100.0
    (worst,) = data["worst"]
    assert (worst["head"], worst["value"], worst["outside_since_step"]) == (1, 300.0, 7)
    assert data["loss"] is None


def test_without_a_terminal_one_whole_frame_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    coverage = "40 of 42 attention layers watched; 2 layers use unhooked matmuls: x.attn, y.attn"
    _run(tmp_path / "r.vitals", _model(40, 4, max_logit=777.0), coverage=coverage)
    assert cli.main(["top"]) == 0
    printed = capsys.readouterr().out
    assert sum(line.lstrip().startswith("layer ") for line in printed.splitlines()) == 50
    assert "\x1b" not in printed
    assert coverage in " ".join(printed.split())


def test_evaluation_is_shown_where_there_is_no_training(tmp_path, capsys):
    path = _run(tmp_path / "r.vitals", [_reading(0, "a", 2, phase="eval", max_logit=33.0)])
    assert cli.main(["top", str(path), "--once", "--vital", "max_logit"]) == 0
    printed = capsys.readouterr().out
    assert "evaluation" in printed
    assert " 33" in printed
    assert cli.main(["top", str(path), "--once", "--phase", "train"]) == 0
    assert "no training step was read" in capsys.readouterr().out


def test_evaluation_is_shown_without_the_loss_and_the_cadence_of_something_else(tmp_path):
    steps = [[_reading(step, "a", 2)] for step in range(41)]
    evaluations = [[_reading(step, "a", 2, phase="eval")] for step in (0, 20, 40)]
    scalars = [Scalar(40, "loss", 3.0), Scalar(40, "watch_cost", 0.01)]
    path = _run(tmp_path / "r.vitals", *steps, *evaluations, scalars=scalars)
    frame = frame_of(History(path), "passes", "eval")
    assert (frame.every, frame.scalars, frame.cost) == (1, {}, 0.01)
    shown = [line.plain for line in picture.draw(frame, 120, 24)]
    assert "loss" not in shown[0]
    assert any("reads every step" in line for line in shown)


def test_the_newest_run_is_found_and_of_its_ranks_the_first(tmp_path):
    for name, age in (("old", 100), ("new", 1), ("new.rank1", 0), ("new.rank10", 0)):
        path = tmp_path / f"{name}.vitals"
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    assert newest(tmp_path).name == "new.vitals"
    log = tmp_path / "old.vitals-wal"
    log.touch()
    os.utime(log, (1e9 + 50, 1e9 + 50))
    assert newest(tmp_path).name == "old.vitals"


def test_of_two_runs_a_second_apart_the_last_is_the_newest(tmp_path):
    for name, age in (("train-1", 1.0), ("train-2", 0.0), ("train-2.process7", 0.5)):
        path = tmp_path / f"{name}.vitals"
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    assert newest(tmp_path).name == "train-2.vitals"
    (tmp_path / "train-2.vitals").unlink()
    assert newest(tmp_path).name == "train-2.process7.vitals"


def test_what_is_no_run_is_refused_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["top"]) == 1
    assert "type: scaledot run SCRIPT" in capsys.readouterr().err
    assert cli.main(["top", "gone.vitals"]) == 1
    assert "there is no run at" in capsys.readouterr().err
    Path("notes.vitals").write_text("no database, but rather long for a note of this kind" * 20)
    assert cli.main(["top"]) == 1
    assert "notes.vitals is not a run of scaledot" in capsys.readouterr().err


def test_a_run_whose_next_reading_is_due_later_is_not_silent(tmp_path):
    """Steps go on, and say so; only then has it stopped."""
    import scaledot

    with scaledot.Watch(every=1000, store=tmp_path / "run.vitals") as watch:
        watch.cadence.clock = clock = Clock(watch.cadence.clock())
        query = torch.ones(1, 2, 3, 4)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        watch.step()
        watch._store.flush()
        read = time.time()
        history = History(tmp_path / "run.vitals")
        for _ in range(3):
            clock.now += 5.0
            watch.step()
        watch._store.flush()
        segment = RunReader(tmp_path / "run.vitals").segments()[-1]
        assert segment.attributes.more["alive"] == 4
        history.look()
        beaten = history.segment.seen
        assert beaten > read
        assert frame_of(history, "passes", now=beaten + 50).state == "running"


class Clock:
    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now
