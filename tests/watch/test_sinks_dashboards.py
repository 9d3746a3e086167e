"""Weights & Biases and trackio, offline, read back from what they wrote."""

import json
import struct

import numpy as np
import pytest
from watch.sinks_cases import needs, readings, run_python

from scaledot.watch.sinks.aggregate import Aggregates
from scaledot.watch.sinks.heat_map import heat_map
from scaledot.watch.sinks.picture import VITALS
from scaledot.watch.sinks.whole import WholeStep

BLOCK = 32768  # a .wandb file is a log of LevelDB's format behind a header of seven bytes


def whole(step):
    right = WholeStep(step, "train")
    for one in readings(step):
        right.add(one)
    return right


def aggregates_of(step):
    return Aggregates(VITALS).of(whole(step))


def pixels_of(path):
    return np.asarray(needs("PIL.Image", "wandb").open(path).convert("RGB"))


def records_of(path):
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def history_of(path):
    needs("wandb", "wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for data in records_of(path):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items
            }


@pytest.mark.nightly
@pytest.mark.slow
def test_weights_and_biases_offline_holds_pictures_and_aggregates(tmp_path):
    needs("wandb", "wandb")
    code = """
import wandb
from watch.sinks_cases import readings
from scaledot.watch.sinks import WeightsAndBiases
with WeightsAndBiases(project="heads", folder="ours") as sink:
    assert sink.run.offline
    for step in (0, 3):
        assert sink.write(readings(step))
        sink.scalar(step, "loss", 2.5 - step)
assert sink.off is None, sink.off
users = wandb.init(mode="offline", dir=".", project="users", settings=wandb.Settings(silent=True))
users.log({"mine": 1}, step=17)
with WeightsAndBiases() as sink:
    assert sink.run is users
    sink.write(readings(5))
assert sink.off is None, sink.off
users.log({"mine": 2}, step=18)
users.finish()
"""
    run_python(code, tmp_path)
    (ours,) = tmp_path.glob("ours/wandb/offline-run-*/run-*.wandb")
    rows = list(history_of(ours))
    steps = {row["scaledot/step"]: row for row in rows if "scaledot_passes/all/min" in row}
    assert set(steps) == {0, 3}
    for step, row in steps.items():
        right = aggregates_of(step)
        assert {name: row[name] for name in right} == pytest.approx(right)
        for vital in VITALS:
            assert row[f"scaledot/{vital}/caption"].startswith(vital)
            picture = ours.parent / "files" / row[f"scaledot/{vital}/path"]
            np.testing.assert_array_equal(pixels_of(picture), heat_map(whole(step), vital))
    losses = [(r["scaledot/step"], r["scaledot/loss"]) for r in rows if "scaledot/loss" in r]
    assert losses == [(0, 2.5), (3, -0.5)]
    (users,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = list(history_of(users))
    assert [row["mine"] for row in rows if "mine" in row] == [1, 2]  # still open, still theirs
    (shared,) = [row for row in rows if "scaledot_passes/all/min" in row]
    assert shared["scaledot/step"] == 5


@pytest.mark.nightly
@pytest.mark.slow
def test_trackio_holds_pictures_and_aggregates_without_a_network(tmp_path):
    needs("trackio", "trackio")
    code = """
import json, socket
asked = []
def no_network(*where):
    asked.append(where)
    raise OSError("no network")
socket.getaddrinfo = no_network
from watch.sinks_cases import readings
from scaledot.watch.sinks import Trackio
with Trackio(project="heads", name="one") as sink:
    for step in (0, 3):
        assert sink.write(readings(step))
        sink.scalar(step, "loss", 2.5 - step)
assert sink.off is None, sink.off
assert not asked, asked  # HF_TOKEN is set, and trackio alone would ask the Hub whose it is
import trackio
users = trackio.init(project="users", name="mine", embed=False)
with Trackio() as sink:
    assert sink.run is users
    sink.write(readings(5))
trackio.log({"mine": 1}, step=6)
trackio.finish()
from trackio.sqlite_storage import SQLiteStorage
print("READ", json.dumps({
    "ours": SQLiteStorage.get_logs("heads", "one"),
    "users": SQLiteStorage.get_logs("users", "mine"),
}))
"""
    home = {"TRACKIO_DIR": str(tmp_path / "home"), "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_none"}
    output = run_python(code, tmp_path, **home)
    (line,) = [line for line in output.splitlines() if line.startswith("READ ")]
    found = json.loads(line.removeprefix("READ "))
    steps = {row["step"]: row for row in found["ours"] if "scaledot_passes/all/min" in row}
    assert set(steps) == {0, 3}
    for step, row in steps.items():
        right = aggregates_of(step)
        assert {name: row[name] for name in right} == pytest.approx(right)
        for vital in VITALS:
            picture = tmp_path / "home" / "media" / row[f"scaledot/{vital}"]["file_path"]
            np.testing.assert_array_equal(pixels_of(picture), heat_map(whole(step), vital))
    losses = [(r["step"], r["scaledot/loss"]) for r in found["ours"] if "scaledot/loss" in r]
    assert losses == [(0, 2.5), (3, -0.5)]
    assert [row["step"] for row in found["users"] if "scaledot_passes/all/min" in row] == [5]
    assert [row["step"] for row in found["users"] if "mine" in row] == [6]


def test_trackio_that_would_send_is_refused(monkeypatch, tmp_path):
    needs("trackio", "trackio")
    from scaledot.watch.sinks import Trackio

    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/somewhere")
    with pytest.raises(ValueError, match="TRACKIO_SPACE_ID is set, so trackio would send"):
        Trackio()
