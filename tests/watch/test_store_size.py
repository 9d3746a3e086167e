"""Ten thousand steps: no growth of memory, and a file little larger than its numbers."""

import tracemalloc

import pytest
from watch.store_cases import readings, scalars

from scaledot.measure import FLOAT_FIELDS
from scaledot.watch.store import RunReader, Store, tail

SMALL = (("layers.0.attention", 2), ("layers.1.attention", 3))
GPT2 = tuple((f"transformer.h.{number}.attn", 12) for number in range(12))


def packed_floats(layers) -> int:
    return 4 * len(FLOAT_FIELDS) * sum(heads for _, heads in layers)


@pytest.mark.parametrize(
    ("layers", "steps", "commits"),
    [(SMALL, 10_000, 50), (GPT2, 300, 300), ((("a", 40),), 500, 500)],
    ids=["small", "gpt2", "one large layer"],
)
def test_file_is_at_most_a_quarter_larger_than_its_floats(tmp_path, layers, steps, commits):
    path = tmp_path / "run.vitals"
    with Store(path) as store:
        for step in range(steps):
            assert store.write(readings(step, layers), scalars(step))
            if step % (steps // commits) == 0:
                assert store.flush()
    per_step = path.stat().st_size / steps
    assert per_step <= 1.25 * packed_floats(layers)
    reader = RunReader(path)
    assert len(reader.series(layers[0][0], 1, "entropy")) == steps
    assert len(reader.scalars("loss")) == steps


def test_memory_does_not_grow_with_the_run(tmp_path):
    held = []
    tracemalloc.start()
    try:
        with Store(tmp_path / "run.vitals") as store:
            for step in range(10_000):
                store.write(readings(step, SMALL[:1]))
                if step % 2_000 == 1_999:
                    assert store.flush()
                    held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # What is open at a time is one chunk, packed floats and unpacked counts.
    assert max(held) - held[0] < 4 * tail.CHUNK_BYTES
