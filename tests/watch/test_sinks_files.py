"""JSON lines and Parquet, read back."""

import json
import shutil

import numpy as np
import pytest
from watch.sinks_cases import LAYERS, needs, reading, readings, with_a_head_without_rows

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Reading
from scaledot.watch.sinks import JsonLines, Parquet


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def lines_of(path):
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_json_lines_hold_every_number_to_the_bit(tmp_path):
    expected = with_a_head_without_rows(reading(3))
    with JsonLines(tmp_path / "deep" / "run.jsonl") as sink:
        sink.put(expected)
        sink.scalar(3, "loss", 2.5)
        sink.scalar(4, "loss", float("nan"))
    line, loss, broken = lines_of(sink.path)
    assert [line[name] for name in ("kind", "step", "phase", "time", "layer")] == [
        "reading",
        expected.step,
        expected.phase,
        expected.time,
        expected.layer,
    ]
    assert line["vitals"]["max_logit"][-1] == "-Infinity"  # JSON has no infinity
    for name in (*FLOAT_FIELDS, "passes"):
        found = np.array(line["vitals"][name], dtype=np.float32)
        np.testing.assert_array_equal(found, expected.value(name))
    for name in COUNT_FIELDS:
        np.testing.assert_array_equal(line["counts"][name], expected.value(name))
    assert loss == {"kind": "scalar", "step": 3, "name": "loss", "value": 2.5}
    assert broken["value"] == "NaN"


def test_a_line_torn_by_a_kill_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind":"scalar","step":1,"name":"loss","value":1.0}\n{"kind":"sca')
    with JsonLines(path) as sink:
        sink.scalar(2, "loss", 0.5)
    first, torn, last = path.read_text().splitlines()
    assert json.loads(first)["step"] == 1
    assert torn == '{"kind":"sca'
    assert json.loads(last)["step"] == 2


def test_json_lines_are_on_the_disk_without_a_flush(tmp_path, wait_for):
    with JsonLines(tmp_path / "run.jsonl") as sink:
        sink.put(reading(1))
        wait_for(lambda: sink.path.stat().st_size > 0)
        assert lines_of(sink.path)[0]["step"] == 1


@pytest.fixture
def wait_for():
    import time

    def wait(condition, seconds=60.0):
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)
        assert condition()

    return wait


def test_parquet_has_a_row_a_head(tmp_path):
    parquet = needs("pyarrow.parquet", "parquet")
    with Parquet(tmp_path / "run") as sink:
        for step in (0, 1):
            assert sink.write(readings(step))
            sink.scalar(step, "loss", 2.0 / (1 + step))
    table = parquet.read_table(tmp_path / "run" / "vitals")
    heads = sum(number for _, number in LAYERS)
    assert table.num_rows == 2 * heads
    expected = [one for step in (0, 1) for one in readings(step)]
    assert str(table.schema.field("max_logit").type) == "float"
    assert str(table.schema.field("rows").type) == "int64"
    for name in (*FLOAT_FIELDS, "passes", *COUNT_FIELDS):
        right = np.concatenate([one.value(name) for one in expected])
        np.testing.assert_array_equal(table[name].to_numpy(), right)
    rows = table.select(["step", "phase", "time", "layer", "head"]).to_pylist()
    assert rows == [
        {"step": one.step, "phase": "train", "time": one.time, "layer": one.layer, "head": head}
        for one in expected
        for head in range(one.heads)
    ]
    scalars = parquet.read_table(tmp_path / "run" / "scalars").to_pylist()
    assert scalars == [
        {"step": 0, "name": "loss", "value": 2.0},
        {"step": 1, "name": "loss", "value": 1.0},
    ]


def test_a_resumed_run_adds_parts_and_readers_never_see_half_of_one(tmp_path):
    parquet = needs("pyarrow.parquet", "parquet")
    with Parquet(tmp_path / "run") as sink:
        sink.put(reading(0))
        assert sink.flush()
        assert parquet.read_table(tmp_path / "run" / "vitals").num_rows == 3
        sink.put(reading(1))
    (tmp_path / "run" / "vitals" / ".part-000003.parquet").write_bytes(b"torn by a kill")
    with Parquet(tmp_path / "run") as sink:
        sink.put(reading(2))
        assert sink.flush()
        steps = parquet.read_table(tmp_path / "run" / "vitals")["step"].to_pylist()
        assert steps == [0] * 3 + [1] * 3 + [2] * 3
    names = sorted(path.name for path in (tmp_path / "run" / "vitals").iterdir())
    assert names == [f"part-{number:06d}.parquet" for number in (1, 2, 3)]


def test_parquet_writes_a_part_when_many_heads_wait(tmp_path, monkeypatch, wait_for):
    parquet = needs("pyarrow.parquet", "parquet")
    monkeypatch.setattr("scaledot.watch.sinks.parquet.PART_HEADS", 8)
    with Parquet(tmp_path / "run") as sink:
        sink.write(readings(0))  # eight heads
        wait_for(lambda: list((tmp_path / "run" / "vitals").glob("part-*")))
        assert parquet.read_table(tmp_path / "run" / "vitals").num_rows == 8


def test_parquet_wants_a_folder(tmp_path):
    needs("pyarrow.parquet", "parquet")
    (tmp_path / "run.parquet").write_text("something else")
    with pytest.raises(
        ValueError, match=r"run\.parquet is a file; Parquet\(folder\) wants a folder"
    ):
        Parquet(tmp_path / "run.parquet")


def test_a_folder_deleted_under_it_switches_parquet_off(tmp_path, caplog):
    needs("pyarrow.parquet", "parquet")
    with Parquet(tmp_path / "run") as sink:
        sink.put(reading(0))
        assert sink.flush()
        shutil.rmtree(tmp_path / "run")
        sink.put(reading(1))
        assert not sink.flush()
        assert not sink.write([reading(2)])
    assert "part-000002.parquet" in (sink.off or "")
    assert len(caplog.records) == 1


def test_readings_of_the_same_layer_with_other_head_counts_fit_one_table(tmp_path):
    parquet = needs("pyarrow.parquet", "parquet")
    one: Reading = reading(0)
    with Parquet(tmp_path / "run") as sink:
        sink.put(one)
        sink.put(with_a_head_without_rows(one))
    table = parquet.read_table(tmp_path / "run" / "vitals")
    assert table["head"].to_pylist() == [0, 1, 2, 0, 1, 2, 3]
    assert table["max_logit"].to_pylist()[-1] == -np.inf
