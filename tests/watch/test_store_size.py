"""Ten thousand steps: no growth of memory, and a file little larger than its numbers."""

import time
import tracemalloc

import numpy as np
import pytest
from watch.store_cases import readings

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Reading, Scalar
from scaledot.watch.store import RunReader, Store, tail

SMALL = (("layers.0.attention", 2), ("layers.1.attention", 3))
GPT2 = tuple((f"transformer.h.{number}.attn", 12) for number in range(12))
FAST, BYTES = 0.5, 4 * len(FLOAT_FIELDS)  # seconds to read one vital; bytes of a packed head


def noisy(step: int, layers, generator) -> list[Reading]:
    """Vitals whose digits are noise: there is nothing in them to compress but their size."""
    time, counts = 1.7e9 + 0.1 * step + 1e-3 * generator.random(), [[4096]] * len(COUNT_FIELDS)
    return [
        Reading(
            step,
            "train",
            time,
            layer,
            generator.lognormal(size=(len(FLOAT_FIELDS), heads)),
            np.repeat(counts, heads, axis=1),
        )
        for layer, heads in layers
    ]


def numbers(step: int, generator) -> list[Scalar]:
    """What a watch keeps beside the vitals, its own numbers as float32."""
    loss, seconds, cost = (float(np.float32(x)) for x in generator.random(3))
    named = {"loss": loss, "learning_rate": 3e-4, "step_time": seconds, "watch_cost": cost}
    return [Scalar(step, name, value) for name, value in named.items()]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("layers", "steps", "commits"),
    [
        ((("attention", 1),), 10_000, 100),
        ((("a", 2), ("b", 2)), 6_000, 600),
        (GPT2, 300, 300),
        ((("a", 40),), 500, 500),
    ],
    ids=["one head", "two layers of two", "gpt2", "one large layer"],
)
def test_file_is_at_most_a_quarter_larger_than_its_floats(tmp_path, layers, steps, commits):
    path = tmp_path / "run.vitals"
    generator = np.random.default_rng(0)
    with Store(path) as store:
        for step in range(steps):
            assert store.write(noisy(step, layers, generator), numbers(step, generator))
            if step % (steps // commits) == 0:
                assert store.flush()
    per_step = path.stat().st_size / steps
    assert per_step <= 1.25 * BYTES * sum(heads for _, heads in layers)
    reader = RunReader(path)
    assert len(reader.series(layers[0][0], 0, "entropy")) == steps
    assert len(reader.scalars("loss")) == steps


def test_one_vital_of_a_long_run_is_read_without_the_others(tmp_path):
    """A sixteenth of ten thousand steps of 32 layers of 32 heads, in a sixteenth of the time."""
    layers = tuple((f"h.{number}.attn", 32) for number in range(32))
    path = tmp_path / "run.vitals"
    with Store(path) as store:
        for step in range(625):
            assert store.write(readings(step, layers))
            if step % 25 == 0:
                assert store.flush()
    reader = RunReader(path)
    assert fastest(lambda: reader.vital("max_logit")) < FAST / 16
    assert fastest(lambda: RunReader(path).latest()) < 0.05
    values = reader.vital("max_logit")["h.31.attn"].values
    assert values.shape == (625, 32)
    assert values[600].tolist() == readings(600, layers)[31].value("max_logit").tolist()
    thinned = reader.vital("max_logit", most=64)["h.31.attn"]
    assert (len(thinned), thinned.steps[0], thinned.steps[-1]) == (64, 0, 624)
    np.testing.assert_array_equal(thinned.values, values[thinned.steps])


def fastest(call) -> float:
    """Processor time: other work on the machine is not the reader's."""
    seconds = []
    for _ in range(5):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return min(seconds)


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
