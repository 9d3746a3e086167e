"""What every sink promises: it never blocks or stops the training, and loses nothing in silence."""

import json
import logging
import os
import sys
import threading

import pytest
import torch
from watch.sinks_cases import reading, readings, run_python

from scaledot.watch import sinks
from scaledot.watch.reading import Scalar
from scaledot.watch.sinks import BackgroundSink, JsonLines, background
from scaledot.watch.sinks.whole import Steps
from scaledot.watch.watch import Watch


class Kept(BackgroundSink):
    """Keeps what it takes; raises or stalls when it is told to."""

    def __init__(self, fails_at=None, gate=None):
        self.readings, self.scalars, self.closed = [], [], False
        self.fails_at, self.gate = fails_at, gate
        self.taking = threading.Event()
        super().__init__()

    def _take(self, readings, scalars):
        self.taking.set()
        if self.gate is not None:
            self.gate.wait(30)
        if self.fails_at in [reading.step for reading in readings]:
            raise OSError("no space left")
        self.readings += readings
        self.scalars += scalars

    def _flush(self):
        pass

    def _close(self):
        self.closed = True


def test_what_is_put_arrives_in_order():
    with Kept() as sink:
        expected = [one for step in range(5) for one in readings(step)]
        for one in expected:
            sink.put(one)
            sink.scalar(one.step, "loss", 0.5 * one.step)
        assert sink.flush()
        assert sink.readings == expected
        assert sink.scalars == [Scalar(one.step, "loss", 0.5 * one.step) for one in expected]
        assert not sink.closed
    assert sink.closed
    assert not sink.write(readings(9))
    assert sink.dropped == 2


def test_a_sink_that_raises_is_switched_off_with_one_warning(caplog):
    bad, good = Kept(fails_at=1), Kept()
    attention = torch.nn.MultiheadAttention(8, 2)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "scaledot"):
        with Watch(attention, every=1, sinks=[bad, good]):
            for _ in range(4):
                tokens = torch.randn(5, 3, 8)
                attention(tokens, tokens, tokens)[0].sum().backward()
                optimizer.step()
                bad.flush()
        good.close()
        bad.close()
    assert [one.step for one in bad.readings] == [0]
    assert [one.step for one in good.readings] == [0, 1, 2, 3]
    assert bad.off == "no space left"
    assert good.off is None
    assert bad.closed
    assert bad.dropped > 0
    (warning,) = caplog.records
    assert "sink Kept is switched off: no space left" in warning.getMessage()


def test_a_sink_that_hangs_does_not_hold_up_the_training():
    gate = threading.Event()
    sink = Kept(gate=gate)
    one = reading(0)
    sink.put(one)
    assert not sink.flush(timeout=0.01)
    assert sink.taking.wait(30)  # from here on it hangs, whatever the machine does besides
    for _ in range(background.MOST_WAITING + 500):
        sink.put(one)  # were it to wait for the gate, this would take 30 s a reading
    assert sink.dropped == 500
    gate.set()
    sink.close()
    assert len(sink.readings) == 1 + background.MOST_WAITING


def test_a_closed_sink_says_once_that_it_takes_nothing_more(tmp_path, caplog):
    sink = JsonLines(tmp_path / "run.jsonl")
    sink.put(reading(0))
    sink.close()
    with caplog.at_level(logging.WARNING, "scaledot"):
        assert not sink.write([reading(1)])
        assert not sink.write([reading(2)])
    assert sink.dropped == 2
    (warning,) = caplog.records
    assert "close_sinks=False" in warning.getMessage()
    assert len(sink.path.read_text().splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_copy_does_nothing(tmp_path):
    one = reading(1)  # here: OpenMP's threads do not follow into the child, torch waits for them
    with JsonLines(tmp_path / "run.jsonl") as sink:
        sink.put(reading(0))
        child = os.fork()
        if child == 0:
            taken = sink.write([one]) or sink.flush()
            sink.close()
            os._exit(int(taken))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        sink.put(reading(2))
    lines = [json.loads(line) for line in sink.path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2]


@pytest.mark.slow
def test_nothing_is_lost_at_exit_and_no_library_is_loaded_before_its_sink_is_made(tmp_path):
    code = """
import sys
from watch.sinks_cases import readings
from scaledot.watch.sinks import JsonLines
JsonLines("run.jsonl").write(readings(3))
extras = {"tensorboard", "pyarrow", "wandb", "trackio", "transformers", "lightning", "PIL"}
assert not extras & set(sys.modules), extras & set(sys.modules)
"""
    run_python(code, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["layer"] for line in lines] == ["blocks.0.attention", "blocks.1.attention"]


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: sinks.TensorBoard("x"), "torch.utils.tensorboard", "tensorboard"),
        (lambda: sinks.TensorBoard("x"), "PIL", "tensorboard"),
        (lambda: sinks.Parquet("x"), "pyarrow", "parquet"),
        (lambda: sinks.WeightsAndBiases(), "wandb", "wandb"),
        (lambda: sinks.Trackio(), "trackio", "trackio"),
        (lambda: sinks.TrainerCallback, "transformers", "hf"),
        (lambda: sinks.LightningCallback, "lightning.pytorch", "lightning"),
    ],
)
def test_a_missing_library_is_named_with_what_to_type(make, module, extra, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("hugging_face", "lightning"):
        monkeypatch.delitem(sys.modules, f"scaledot.watch.sinks.{name}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs .*type: pip install 'scaledot\[{extra}\]'"):
        make()
    assert not list(tmp_path.iterdir())


def test_a_step_is_whole_when_the_next_begins():
    steps = Steps()
    first, second = readings(4)
    assert steps.add(first) == []
    assert steps.add(second) == []
    assert steps.add(reading(4, phase="eval")) == []
    train, evaluation = steps.add(reading(5))
    assert (train.step, train.phase, list(train.layers)) == (
        4,
        "train",
        [first.layer, second.layer],
    )
    assert (evaluation.step, evaluation.phase) == (4, "eval")
    (rest,) = steps.rest()
    assert rest.step == 5
    assert steps.rest() == []


def test_a_layer_that_comes_twice_in_a_step_is_merged():
    steps = Steps()
    parts = [reading(1), reading(1, heads=3, layer="blocks.0.attention")]
    for part in parts:
        steps.add(part)
    (whole,) = steps.rest()
    rows = whole.layers["blocks.0.attention"].value("rows")
    assert rows.tolist() == (parts[0].value("rows") + parts[1].value("rows")).tolist()


@pytest.mark.parametrize("close_sinks", [True, False])
def test_a_watch_closes_the_sinks_it_was_given_unless_told_otherwise(tmp_path, close_sinks):
    attention = torch.nn.MultiheadAttention(8, 2)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    sink = JsonLines(tmp_path / "run.jsonl")
    with Watch(attention, every=1, sinks=[sink], close_sinks=close_sinks):
        tokens = torch.randn(5, 3, 8)
        attention(tokens, tokens, tokens)[0].sum().backward()
        optimizer.step()
    assert sink.write([reading(7)]) is not close_sinks
    sink.close()
    steps = [json.loads(line)["step"] for line in sink.path.read_text().splitlines()]
    assert (7 in steps) is not close_sinks
    assert 0 in steps
