import contextlib
import json
import sqlite3
import threading
import zlib

import numpy as np
import pytest
from watch.store_cases import LAYERS, STARTED, assert_same, reading, readings, scalars

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import RunAttributes, Scalar
from scaledot.watch.store import RunReader, Store, StoreError, packing, tail
from scaledot.watch.store.tail import Tail

ATTRIBUTES = RunAttributes(
    command=("train.py", "--layers", "3"),
    versions={"torch": "2.13.0"},
    model="Tiny",
    started=12.5,
    more={"every": 10},
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a run? 100%.vitals"  # characters that mean something in a URI


def write(path, steps, phase="train", layers=LAYERS) -> None:
    with Store(path, ATTRIBUTES) as store:
        for step in steps:
            assert store.write(readings(step, layers, phase), scalars(step))


def test_what_is_written_is_read(path):
    write(path, range(23))
    steps = list(RunReader(path).steps())
    assert [step.step for step in steps] == list(range(23))
    for step in steps:
        for found, expected in zip(step.readings, readings(step.step), strict=True):
            assert_same(found, expected)


def test_a_finished_run_is_one_file_and_reading_it_leaves_none(path):
    write(path, range(3))
    list(RunReader(path).steps())
    assert list(path.parent.iterdir()) == [path]


def test_attributes_and_later_notes_are_kept(path):
    with Store(path, ATTRIBUTES) as store:
        store.note("coverage", {"watched": 36, "of": 36})
        store.note("every", 20)
    found = RunReader(path).attributes
    assert (found.command, found.versions) == (ATTRIBUTES.command, ATTRIBUTES.versions)
    assert (found.model, found.started) == ("Tiny", 12.5)
    assert found.more == {"every": 20, "coverage": {"watched": 36, "of": 36}}


def test_layers_keep_the_order_of_the_model(path):
    write(path, range(2))
    assert list(RunReader(path).layers().items()) == list(LAYERS)


@pytest.mark.parametrize("field", ["max_logit", "k_rms", "rows", "k_entries", "passes"])
def test_series_of_one_head(path, field):
    write(path, range(31))
    layer, heads = LAYERS[1]
    series = RunReader(path).series(layer, 4, field)
    expected = [reading(step, layer, heads).value(field)[4] for step in range(31)]
    assert series.steps.tolist() == list(range(31))
    assert series.values.tolist() == [float(value) for value in expected]


def test_series_of_what_is_not_there_names_what_is(path):
    write(path, range(2))
    reader = RunReader(path)
    with pytest.raises(ValueError, match=r"blocks\.0\.attention"):
        reader.series("blocks.9", 0, "entropy")
    with pytest.raises(ValueError, match="0 to 2"):
        reader.series(LAYERS[0][0], 3, "entropy")
    with pytest.raises(ValueError, match="entropy_ratio"):
        reader.series(LAYERS[0][0], 0, "entropie")
    with pytest.raises(ValueError, match="eval"):
        reader.series(LAYERS[0][0], 0, "entropy", phase="eval")


def test_scalars_are_exact_and_may_come_at_other_steps(path):
    with Store(path) as store:
        for step in range(7):
            store.write((), [Scalar(step, "loss", 0.1 + step)])
        store.write((), [Scalar(3, "learning_rate", 3e-4), Scalar(3, "loss", float("nan"))])
    reader = RunReader(path)
    assert reader.scalar_names() == ["loss", "learning_rate"]
    assert reader.scalars("learning_rate").values.tolist() == [3e-4]
    loss = reader.scalars("loss")
    assert loss.steps.tolist() == [0, 1, 2, 3, 3, 4, 5, 6]
    assert loss.values[:4].tolist() == [0.1 + step for step in range(4)]
    assert np.isnan(loss.values[4])
    assert len(reader.scalars("never written")) == 0


def test_phases_are_kept_apart(path):
    with Store(path) as store:
        for step in range(4):
            store.write(readings(step))
            if step % 2:
                store.write(readings(step, phase="eval"))
    reader = RunReader(path)
    order = [(step.step, step.phase) for step in reader.steps()]
    expected = [(0, "train"), (1, "train"), (1, "eval"), (2, "train"), (3, "train"), (3, "eval")]
    assert order == expected
    assert [step.step for step in reader.steps("eval")] == [1, 3]
    assert len(reader.series(LAYERS[0][0], 0, "entropy", "eval")) == 2


def test_latest_step_is_the_last_of_its_phase(path):
    with Store(path) as store:
        store.flush()
        assert RunReader(path).latest() is None
        store.write(readings(5, phase="eval"))
        for step in range(9):
            store.write(readings(step))
        store.flush()
        latest = RunReader(path).latest()
    assert latest is not None
    assert (latest.step, len(latest.readings)) == (8, 3)
    assert_same(latest.readings[2], readings(8)[2])
    evaluated = RunReader(path).latest("eval")
    assert evaluated is not None
    assert evaluated.step == 5
    assert evaluated.layer("decoder.cross") is not None
    assert evaluated.layer("elsewhere") is None


def test_resumed_run_is_a_new_segment_whose_steps_may_overlap(path):
    write(path, range(10))
    with Store(path, RunAttributes(command=("resumed",))) as store:
        for step in range(6, 13):
            store.write(readings(step, LAYERS[:1]))
    reader = RunReader(path)
    first, second = reader.segments()
    assert (first.attributes.command, second.attributes.command) == (
        ("train.py", "--layers", "3"),
        ("resumed",),
    )
    assert [(s.segment, s.step) for s in reader.steps()] == [
        *((first.id, step) for step in range(10)),
        *((second.id, step) for step in range(6, 13)),
    ]
    series = reader.series(LAYERS[0][0], 0, "entropy")
    assert len(series) == 17
    newest = series.newest()
    assert newest.steps.tolist() == list(range(13))
    assert newest.segments.tolist() == [first.id] * 6 + [second.id] * 7
    latest = reader.latest()
    assert latest is not None
    assert latest.step == 12


def test_resumed_run_with_fewer_heads_is_padded(path):
    write(path, [0], layers=[("a", 3)])
    write(path, [1], layers=[("a", 2)])
    values = RunReader(path).heads("a", "max_logit").values
    assert np.isnan(values).tolist() == [[False] * 3, [False, False, True]]


def test_segment_tells_whether_it_ended(path):
    store = Store(path)
    store.write(readings(0))
    assert store.flush()
    assert RunReader(path).segments()[0].ended is None
    store.close()
    assert RunReader(path).segments()[0].ended is not None


def test_two_readings_of_a_layer_in_a_step_are_merged(path):
    with Store(path) as store:
        store.write([reading(3, "a", 2), reading(3, "b", 2), reading(3, "a", 2)])
    (step,) = RunReader(path).steps()
    assert [found.layer for found in step.readings] == ["a", "b"]
    twice = 2 * reading(3, "a", 2).value("pairs")
    np.testing.assert_array_equal(step.readings[0].value("pairs"), twice)


def test_layers_that_differ_in_every_step_fall_back_to_streams_of_one(path, monkeypatch):
    monkeypatch.setattr(tail, "MOST_SETS", 4)
    every = [(f"layer.{number}", 2) for number in range(7)]
    generator = np.random.default_rng(0)
    chosen = [sorted(generator.choice(7, 3, replace=False)) for _ in range(40)]
    with Store(path) as store:
        for step, numbers in enumerate(chosen):
            store.write(readings(step, [every[number] for number in numbers]))
            store.write((), [Scalar(step, f"scalar {number}", number) for number in numbers])
    reader = RunReader(path)
    for step, numbers in zip(reader.steps(), chosen, strict=True):
        found = sorted(found.layer for found in step.readings)
        assert found == [f"layer.{number}" for number in numbers]
        for part in step.readings:
            assert_same(part, reading(step.step, part.layer, 2))
    latest = reader.latest()
    assert latest is not None
    assert len(latest.readings) == 3
    steps = [step for step, numbers in enumerate(chosen) if 2 in numbers]
    assert reader.scalars("scalar 2").steps.tolist() == steps
    with contextlib.closing(sqlite3.connect(path)) as database:
        (streams,) = database.execute("SELECT count(*) FROM stream").fetchone()
    assert streams <= 2 * (4 + 7)


def test_reader_sees_whole_steps_while_the_writer_writes(path):
    """On a busy machine it is slow: now and then the writer waits for a look begun and ended."""
    done, looked = threading.Event(), threading.Event()
    store = Store(path)

    def train() -> None:
        for step in range(400):
            store.write(readings(step), scalars(step))
            if step % 10 == 0:
                store.flush()
            for _ in range(2 if step % 100 == 50 else 0):
                looked.clear()
                looked.wait(10)
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    counts = []
    reader = RunReader(path)
    while not done.is_set():
        steps = list(reader.steps())
        assert [step.step for step in steps] == list(range(len(steps)))
        assert all(len(step.readings) == 3 for step in steps)
        counts.append(len(steps))
        looked.set()
    thread.join()
    store.close()
    assert len(set(counts)) > 2  # it was seen growing
    assert len(list(reader.steps())) == 400


def test_follower_gives_every_step_once(path):
    with Store(path) as store:
        follower = RunReader(path).follow()
        assert not follower.look()
        found, numbers = [], []
        for step in range(30):
            store.write(readings(step), scalars(step))
            if step % 4 == 3:
                store.flush()
                news = follower.look()
                assert news.segments[-1].dropped == 0
                found += [step.step for step in news.steps]
                numbers += [scalar for scalar in news.scalars if scalar.name == "loss"]
        assert not follower.look()
    last = follower.look()
    found += [step.step for step in last.steps]
    numbers += [scalar for scalar in last.scalars if scalar.name == "loss"]
    assert found == list(range(30))
    assert numbers == [scalars(step)[0] for step in range(30)]
    assert last.segments[-1].ended is not None


def test_follower_may_start_at_the_end_and_goes_on_into_the_next_segment(path):
    write(path, range(5))
    follower = RunReader(path).follow(from_start=False)
    assert not follower.look()
    write(path, range(3, 6))
    news = follower.look()
    assert [(step.segment, step.step) for step in news.steps] == [(2, 3), (2, 4), (2, 5)]
    assert len(news.segments) == 2


def test_follower_notices_another_run_in_the_same_place(path):
    write(path, range(5))
    follower = RunReader(path).follow()
    assert len(follower.look().steps) == 5
    path.unlink()
    with pytest.raises(StoreError, match="no run at"):
        follower.look()
    write(path, range(2))
    news = follower.look()
    assert news.replaced
    assert [step.step for step in news.steps] == [0, 1]


def test_file_says_itself_how_it_is_read(path):
    write(path, range(2))
    with contextlib.closing(sqlite3.connect(path)) as database:
        (about,) = database.execute("SELECT text FROM about WHERE name = 'format'").fetchone()
        (sql,) = database.execute("SELECT sql FROM sqlite_master WHERE name = 'chunk'").fetchone()
        (fields,) = database.execute("SELECT float_fields FROM segment").fetchone()
        (chunk, split) = database.execute(
            "SELECT chunk.id, split FROM chunk JOIN stream ON stream.id = stream"
            " WHERE kind = 'train'"
        ).fetchone()
        part = "SELECT packing, data FROM part WHERE id = ?"
        packing, data = database.execute(part, (chunk * 64,)).fetchone()
    assert "(float32)" in about
    assert "little-endian" in about
    assert "-- 1: each field is a part by itself" in sql
    # As `about` says: all float fields together, [fields, n, H], the bytes shuffled.
    assert (split, packing) == (0, "shuffled")
    names, heads = json.loads(fields), sum(heads for _, heads in LAYERS)
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(4, -1)
    floats = np.ascontiguousarray(planes.T).view("<f4").reshape(len(names), 2, heads)
    expected = reading(1, *LAYERS[0]).value("entropy")
    np.testing.assert_array_equal(floats[names.index("entropy"), 1, :3], expected)


def test_large_model_keeps_each_field_by_itself(path, monkeypatch):
    """Full chunks in the place of small ones: read while they are made, and by the field."""
    monkeypatch.setattr(tail, "CHUNK_BYTES", 4 * 70 * 8)
    monkeypatch.setattr(tail, "PIECE_BYTES", 1)
    large = [("a", 30), ("b", 40)]
    with Store(path, ATTRIBUTES) as store:
        follower, followed = RunReader(path).follow(), []
        for step in range(27):
            store.write(readings(step, large))
            assert store.flush()
            if step % 5 == 0:
                followed += [found.step for found in follower.look().steps]
    followed += [found.step for found in follower.look().steps]
    assert followed == list(range(27))
    reader = RunReader(path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        chunks = database.execute("SELECT first, records, split FROM chunk ORDER BY first")
        assert chunks.fetchall() == [
            (0, 8, 1),
            (8, 8, 1),
            (16, 8, 1),
            (24, 1, 0),
            (25, 1, 0),
            (26, 1, 0),
        ]
        parts = database.execute("SELECT count(*) FROM part").fetchone()[0]
    assert parts == 3 * (len(FLOAT_FIELDS) + len(COUNT_FIELDS)) + 3 * 2
    for step in reader.steps():
        for found, expected in zip(step.readings, readings(step.step, large), strict=True):
            assert_same(found, expected)
    for field in ("entropy", "rows", "passes"):
        values = reader.vital(field)["b"].values
        expected = [reading(step, "b", 40).value(field) for step in range(27)]
        np.testing.assert_array_equal(values, expected)


def test_steps_after_one_are_read_alone(path):
    write(path, range(40))
    reader = RunReader(path)
    since = reader.vital("entropy", since=31)["decoder.cross"]
    assert since.steps.tolist() == list(range(32, 40))
    np.testing.assert_array_equal(since.values[0], reading(32, "decoder.cross", 2).value("entropy"))
    assert reader.heads("decoder.cross", "rows", since=38).steps.tolist() == [39]
    assert reader.scalars("loss", since=37).steps.tolist() == [38, 39]
    assert len(reader.vital("entropy", since=39)["decoder.cross"]) == 0


def test_times_come_with_a_series(path):
    write(path, range(4))
    times = RunReader(path).heads("decoder.cross", "entropy").times
    assert times is not None
    assert times.tolist() == [STARTED + step / 8 for step in range(4)]


def test_latest_of_layers_that_do_not_run_in_every_step(path):
    with Store(path) as store:
        for step in range(6):
            store.write(readings(step, LAYERS[:2] if step % 2 else LAYERS[:1]))
    found = RunReader(path).latest_of_layers()
    store.close()
    assert {layer: one.step for layer, one in found.items()} == {LAYERS[0][0]: 5, LAYERS[1][0]: 5}
    write(path, [3], layers=LAYERS[2:])
    found = RunReader(path).latest_of_layers()
    assert [one.step for one in found.values()] == [5, 5, 3]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<i8"])
def test_what_is_packed_is_unpacked(dtype, small):
    generator = np.random.default_rng(0)
    shape = (3, 11, 5)
    noise = generator.normal(size=shape) * 1000
    strange = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0] if "f" in dtype else [0, -1, 2, 9, 4])
    cases = {
        "noise": noise,
        "same": np.broadcast_to(noise[:, :1], shape),
        "strange": np.broadcast_to(strange, shape),
        "one": noise[:, :1],
    }
    for name, values in cases.items():
        expected = values.astype(dtype)
        packing_, data = packing.pack(expected, small=small)
        found = packing.unpack(packing_, data, expected.shape, np.dtype(dtype))
        assert found.tobytes() == expected.tobytes()
        assert (packing_ == packing.SAME) == (name in ("same", "strange"))


def test_file_with_other_vitals_is_read_by_name(path):
    """A later version adds a vital and drops another: steps show what both know."""
    write(path, range(3), layers=[("a", 2)])
    with contextlib.closing(sqlite3.connect(path)) as database:
        (fields,) = database.execute("SELECT float_fields FROM segment").fetchone()
        changed = fields.replace('"sink"', '"kurtosis"')
        database.execute("UPDATE segment SET float_fields = ?", (changed,))
        database.commit()
    reader = RunReader(path)
    found = reader.latest()
    assert found is not None
    assert np.isnan(found.readings[0].value("sink")).all()
    expected = reading(2, "a", 2)
    np.testing.assert_array_equal(found.readings[0].value("q_rms"), expected.value("q_rms"))
    assert reader.series("a", 1, "kurtosis").values[2] == expected.value("sink")[1]
    assert np.isnan(reader.series("a", 1, "sink").values).all()


def test_many_sets_of_layers_wait_in_little_memory(path, monkeypatch):
    """Random depth makes a stream of every set of layers: their open records are bounded."""
    monkeypatch.setattr(tail, "WAITING_BYTES", 20_000)
    chance = np.random.default_rng(0)
    waiting = Tail()
    expected = {}
    with Store(path) as store:
        for step in range(200):
            layers = [(f"layers.{n}", 4) for n in np.flatnonzero(chance.random(5) < 0.7)]
            if layers:
                expected[step] = readings(step, layers)
                store.write(expected[step])
                waiting.add_readings(expected[step])
                assert sum(len(one.open.data) for one in waiting._streams.values()) <= 20_000
    for step in RunReader(path).steps():
        for one, other in zip(step.readings, expected.pop(step.step), strict=True):
            assert_same(one, other)
    assert not expected
