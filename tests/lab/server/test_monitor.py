"""The monitor: what a page holds is what the store holds, while it is written and after."""

import json
import math
import time
from functools import partial

import numpy as np
import pytest
from served_lab import ORIGIN, PORT, TOKEN, Frames, connect, reading, serving, wait_for
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from websockets.sync.client import connect as connect_for_real

from scaledot.lab.server.app import make_app
from scaledot.lab.server.run_feed import FIELDS, RunFeed
from scaledot.measure import COUNT_FIELDS
from scaledot.watch.alarms import Alarm
from scaledot.watch.reading import Reading, RunAttributes, Scalar
from scaledot.watch.store import RunReader, Store
from scaledot.watch.top import health

LAYERS = {"blocks.0.attn": 3, "blocks.1.attn": 5}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.vitals"


@pytest.fixture
def store(path):
    with Store(path, RunAttributes(command=("train.py",), model="Tiny")) as store:
        yield store


@pytest.fixture
def viewer(page, path):
    """A real socket of a real server, read in the manner of the page."""
    with (
        serving(page, path) as address,
        connect_for_real(
            f"ws://{address}/api/monitor", origin=f"http://{address.partition('/')[0]}"
        ) as socket,
    ):
        yield Viewer(socket)


class Viewer(Frames):
    def __init__(self, socket) -> None:
        super().__init__()
        self.socket = socket

    def send(self, message: dict) -> None:
        self.socket.send(json.dumps(message))

    def until(self, true, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            self.take(self.socket.recv(timeout=max(0.01, end - time.monotonic())))

    def last(self, name: str) -> dict:
        self.until(lambda: any(name in one for one in self.texts))
        return [one for one in self.texts if name in one][-1]


def write(store: Store, *steps: int, layers=LAYERS, phase="train", offset: float = 0.0) -> None:
    for step in steps:
        readings = [
            reading(step, layer, heads, offset + step, phase) for layer, heads in layers.items()
        ]
        store.write(readings, [Scalar(step, "loss", 10 / (step + 1))])
    assert store.flush()


def stored(path, field: str, phase="train") -> tuple[list[int], np.ndarray]:
    """By another way: every reading of the store, one by one."""
    steps = [step for step in RunReader(path).steps(phase)]
    rows = [np.concatenate([health.values(one, field) for one in step.readings]) for step in steps]
    return [step.step for step in steps], np.array(rows, np.float32)


def test_the_header_says_what_the_columns_are(store, viewer):
    write(store, 0, 10)
    store.note("coverage", "2 of 2 attention layers watched")
    store.write([], [Scalar(10, "watch_cost", 0.004)])
    store.flush()
    viewer.until(lambda: len(viewer.steps) == 2)
    columns = [(one["layer"], one["head"]) for one in viewer.header["columns"]]
    assert columns == [(layer, head) for layer, heads in LAYERS.items() for head in range(heads)]
    assert viewer.header["fields"] == list(FIELDS)
    assert viewer.header["run"]["command"] == "train.py"
    assert set(viewer.header["bands"]) == set(FIELDS)
    wait = {"coverage": "2 of 2 attention layers watched", "cost": 0.004, "step": 10, "every": 10}
    viewer.until(lambda: wait.items() <= (viewer.texts[-1].get("status") or {}).items())


@pytest.mark.one_case
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_that_of_the_store(store, path, viewer, field):
    write(store, 0, 10, 20)
    viewer.send({"field": field})
    viewer.until(lambda: FIELDS[viewer.field] == field and len(viewer.steps) == 3)
    steps, numbers = stored(path, field)
    assert viewer.steps == steps
    np.testing.assert_array_equal(viewer.numbers, numbers)


def test_a_run_is_followed_while_it_is_written(store, path, viewer):
    for step in range(6):
        write(store, step)
        viewer.until(partial(lambda last: viewer.steps[-1:] == [last], step))
    assert sum("columns" in one for one in viewer.texts) <= 2  # one before the first reading
    steps, numbers = stored(path, FIELDS[0])
    assert viewer.steps == steps
    np.testing.assert_array_equal(viewer.numbers, numbers)


def test_alarms_are_in_the_header_and_follow(store, viewer):
    def alarm(step: int, grade: str) -> Alarm:
        heads = (0, 2)
        return Alarm(
            step, grade, "collapse", "blocks.0.attn", None, 0.5, 0.5, 1, 0.1, "w", "a", heads
        )

    def told() -> list[tuple[int, str]]:
        return [
            (one["step"], one["grade"]) for text in viewer.texts for one in text.get("alarms", ())
        ]

    store.write_alarms([alarm(3, "warn")])
    write(store, 0, 1)
    viewer.until(lambda: len(viewer.steps) == 2)
    viewer.until(lambda: told()[-1:] == [(3, "warn")])
    store.write_alarms([alarm(9, "act")])
    write(store, 2)
    viewer.until(lambda: told()[-1:] == [(9, "act")])
    assert told().count((9, "act")) == 1
    last = viewer.last("alarms")["alarms"][-1]
    assert (last["layer"], last["head"], last["threshold"]) == ("blocks.0.attn", None, 0.5)


def test_a_step_that_comes_while_the_page_is_begun_counts_as_the_last(store, path):
    """Between the look at the times and the look at the numbers."""
    write(store, 0)
    feed = RunFeed(path)
    write(store, 10)
    assert feed.table(FIELDS[0]).steps == [0, 10]
    assert not feed.look(FIELDS[0]).rows.steps
    assert feed.status()["step"] == 10
    assert feed.status()["every"] == 10


def test_losses_follow(store, viewer):
    write(store, 0, 1, 2)
    viewer.until(lambda: len(viewer.steps) == 3)
    write(store, 3)
    losses: dict[int, float] = {}

    def known() -> bool:
        losses.update(
            pair
            for one in viewer.texts
            if "losses" in one
            for pair in zip(one["losses"]["steps"], one["losses"]["values"], strict=True)
        )
        return len(losses) == 4

    viewer.until(known)
    assert losses == {step: 10 / (step + 1) for step in range(4)}


def test_the_end_of_a_run_is_told(store, viewer):
    write(store, 0)
    viewer.until(lambda: viewer.header.get("status", {}).get("state") == "running")
    store.close()
    viewer.until(lambda: viewer.texts[-1].get("status", {}).get("state") == "ended")


def test_a_file_that_comes_later_is_waited_for(path, viewer):
    assert "there is no run" in viewer.last("missing")["missing"]
    with Store(path) as store:
        write(store, 5)
        viewer.until(lambda: viewer.steps == [5])


def test_a_file_that_goes_and_comes_back_as_another_run(store, path, viewer):
    write(store, 0, 1, 2)
    viewer.until(lambda: len(viewer.steps) == 3)
    store.close()
    path.unlink()
    assert "there is no run" in viewer.last("missing")["missing"]
    with Store(path) as other:
        write(other, 7, layers={"only": 2}, offset=100)
        viewer.until(lambda: viewer.steps == [7])
        assert len(viewer.header["columns"]) == 2
        np.testing.assert_array_equal(viewer.numbers, stored(path, FIELDS[0])[1])


def test_a_run_put_in_the_place_of_another(store, path, tmp_path, viewer):
    write(store, 0, 1, 2)
    viewer.until(lambda: len(viewer.steps) == 3)
    with Store(tmp_path / "other.vitals") as other:
        write(other, 4, 5)
    store.close()
    (tmp_path / "other.vitals").replace(path)
    viewer.until(lambda: viewer.steps == [4, 5])


def test_a_file_that_is_damaged_is_told_and_survived(store, path, viewer):
    write(store, 0)
    viewer.until(lambda: len(viewer.steps) == 1)
    store.close()
    path.write_bytes(b"no database at all, and long enough to be taken for one" * 100)
    assert "missing" in viewer.last("missing")
    path.unlink()
    with Store(path) as other:
        write(other, 9)
        viewer.until(lambda: viewer.steps == [9])


def test_a_continued_run_forgets_what_it_repeats(store, path, viewer):
    write(store, 0, 1, 2, 3)
    viewer.until(lambda: len(viewer.steps) == 4)
    store.close()
    with Store(path) as continued:
        write(continued, 2, offset=50)
        viewer.until(lambda: viewer.steps == [0, 1, 2] and viewer.numbers[2, 0] < -40)


def test_a_layer_that_appears_later_gets_its_columns(store, viewer):
    write(store, 0, layers={"a": 2})
    viewer.until(lambda: viewer.steps == [0])
    write(store, 1, layers={"a": 2, "b": 3})
    # The writer may commit between the two layers: then the step is there before the layer is.
    viewer.until(lambda: viewer.steps == [0, 1] and len(viewer.header["columns"]) == 5)
    assert np.isnan(viewer.numbers[0, 2:]).all()
    assert not np.isnan(viewer.numbers[1]).any()


def test_a_head_without_rows_is_not_measured_and_one_of_nan_is_broken(store, viewer):
    one = reading(0, "a", 3, 0.0)
    counts = one.counts.copy()
    counts[COUNT_FIELDS.index("rows"), 1:] = 0
    counts[COUNT_FIELDS.index("nonfinite"), 1] = 0
    for step in (0, 1):  # the first in the table, the next as news
        store.write([Reading(step, "train", one.time, "a", one.floats, counts)])
        store.flush()
        viewer.until(lambda step=step: len(viewer.steps) == step + 1)
        assert np.isnan(viewer.numbers[step]).tolist() == [False, True, False]
        assert np.isinf(viewer.numbers[step]).tolist() == [False, False, True]  # NaN in its rows


def test_the_history_of_a_head_has_every_field(store, path, viewer):
    write(store, 0, 10, 20)
    viewer.until(lambda: len(viewer.steps) == 3)
    viewer.send({"history": {"layer": "blocks.1.attn", "head": 4}})
    found = viewer.last("history")["history"]
    assert (found["layer"], found["head"], found["steps"]) == ("blocks.1.attn", 4, [0, 10, 20])
    assert list(found["fields"]) == list(FIELDS)
    for field, values in found["fields"].items():
        np.testing.assert_array_equal(np.float32(values), stored(path, field)[1][:, 3 + 4])


def test_numbers_that_are_not_finite_are_null_in_json(store, viewer):
    one = reading(0, "a", 1, math.inf)
    store.write([one], [Scalar(0, "loss", math.nan)])
    store.flush()
    viewer.until(lambda: viewer.steps == [0])
    assert viewer.header["losses"] == {"steps": [0], "values": [None]}
    viewer.send({"history": {"layer": "a", "head": 0}})
    assert viewer.last("history")["history"]["fields"]["entropy"] == [None]


def test_another_phase_is_another_table(store, path, viewer):
    write(store, 0, 1)
    write(store, 1, phase="eval", offset=30)
    viewer.until(lambda: viewer.header.get("phases") == ["train", "eval"])
    viewer.send({"phase": "eval"})
    viewer.until(lambda: viewer.header["phase"] == "eval" and viewer.steps == [1])
    np.testing.assert_array_equal(viewer.numbers, stored(path, FIELDS[0], "eval")[1])


@pytest.mark.parametrize(
    "message",
    [
        {"field": "happiness"},
        {"field": ["entropy"]},
        {"phase": "test"},
        {"history": {}},
        {"history": {"layer": "blocks.0.attn", "head": 3}},
        {"history": {"layer": "blocks.0.attn", "head": "0"}},
        {"history": {"layer": "blocks.0.attn", "head": True}},
        {"history": {"layer": ["blocks.0.attn"], "head": 0}},
        {"history": 3},
        {"sql": "DROP TABLE chunk"},
        {"field": "entropy", "phase": "eval"},
        {},
    ],
    ids=str,
)
def test_a_wrong_command_is_refused_and_the_next_obeyed(store, viewer, message):
    write(store, 0)
    viewer.until(lambda: len(viewer.steps) == 1)
    viewer.send(message)
    assert len(viewer.last("error")["error"]) < 300
    viewer.send({"field": "entropy"})
    viewer.until(lambda: FIELDS[viewer.field] == "entropy")


def test_without_a_run_there_is_no_monitor(client):
    with pytest.raises(WebSocketDisconnect), connect(client, "/api/monitor"):
        pass


def test_a_foreign_page_may_not_watch(page, path):
    made = make_app(page, TOKEN, PORT, run=path)
    with (
        TestClient(made, base_url=ORIGIN) as client,
        pytest.raises(WebSocketDisconnect),
        connect(client, "/api/monitor", origin="http://evil.example"),
    ):
        pass


def test_a_long_run_is_thinned_and_stays_bounded(store, path, viewer, monkeypatch):
    monkeypatch.setattr("scaledot.lab.server.run_feed.FEWEST", 8)
    monkeypatch.setattr("scaledot.lab.server.run_feed.MOST", 8)
    write(store, *range(100))
    viewer.until(lambda: viewer.steps[-1:] == [99])
    assert len(viewer.steps) <= 16
    assert viewer.steps[0] == 0
    for step in range(100, 130):
        write(store, step)
    viewer.until(lambda: viewer.steps[-1:] == [129])
    assert len(viewer.steps) <= 16
    steps, numbers = stored(path, FIELDS[0])
    rows = [steps.index(step) for step in viewer.steps]
    np.testing.assert_array_equal(viewer.numbers, numbers[rows])


def test_96_layers_of_96_heads_fit(path):
    """The whole way to a table of 64 steps, and one more step, in little time and memory."""
    layers = {f"blocks.{number}": 96 for number in range(96)}
    with Store(path) as store:
        for step in range(64):
            write(store, step, layers=layers)
            wait_for(lambda: not store.dropped)
        begin = time.thread_time()  # of this thread alone: the machine may be busy with others
        feed = RunFeed(path)
        table = feed.table("row_std")
        opened = time.thread_time() - begin
        assert table.numbers.shape == (64, 9216)
        assert table.numbers.dtype == np.float32
        write(store, 64, layers=layers)
        begin = time.thread_time()
        change = feed.look("row_std")
        followed = time.thread_time() - begin
    assert change.rows.steps == [64]
    np.testing.assert_array_equal(change.rows.numbers, stored(path, "row_std")[1][-1:])
    assert opened < 5
    assert followed < 0.25  # the time between two looks
