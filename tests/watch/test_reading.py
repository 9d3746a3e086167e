import sys

import numpy as np
import pytest
import torch
from watch.store_cases import reading

import scaledot
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Reading, RunAttributes, summary


def vitals(heads: int = 3) -> scaledot.Vitals:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, heads, 7, 5, generator=generator)
    return scaledot.vitals(query, key, is_causal=True)


def test_reading_gives_back_the_vitals_it_was_made_of():
    merged = vitals().over_batch()
    found = Reading.of(merged, step=11, layer="a.b", phase="eval", time=5.0)
    assert (found.step, found.layer, found.phase, found.time) == (11, "a.b", "eval", 5.0)
    assert found.heads == 3
    assert (found.floats.dtype, found.counts.dtype) == (np.float32, np.int64)
    for name in (*FLOAT_FIELDS, *COUNT_FIELDS, "passes"):
        torch.testing.assert_close(getattr(found.vitals(), name), getattr(merged, name))
        np.testing.assert_array_equal(found.value(name), getattr(merged, name).numpy())


def test_vitals_of_a_single_head_make_a_reading_of_one():
    found = Reading.of(scaledot.vitals(torch.ones(3, 2), torch.ones(5, 2)), step=0, layer="a")
    assert found.heads == 1
    assert found.value("rows").tolist() == [3]


def test_vitals_with_a_batch_are_refused():
    with pytest.raises(ValueError, match="over_batch"):
        Reading.of(vitals(), step=0, layer="a")


def test_reading_keeps_its_numbers_when_the_buffer_is_filled_again():
    floats = torch.ones(len(FLOAT_FIELDS), 2)
    counts = np.ones((len(COUNT_FIELDS), 2), np.int64)
    found = Reading(0, "train", 0.0, "a", floats, counts)
    floats.zero_()
    counts[:] = 0
    assert (found.floats == 1).all()
    assert (found.counts == 1).all()


def test_empty_heads_and_huge_float64_logits_survive():
    merged = scaledot.Vitals.empty((2,), torch.float64)
    merged.max_logit[0] = 1e300
    found = Reading.of(merged, step=0, layer="a")
    assert found.value("max_logit").tolist() == [float("inf"), float("-inf")]
    assert Reading(0, "train", 0.0, "a", np.full((13, 1), 1e300), np.zeros((6, 1))).heads == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"phase": "test"}, "train, eval"),
        ({"time": float("nan")}, "time"),
        ({"floats": np.zeros((4, 3))}, "floats"),
        ({"counts": np.zeros((len(COUNT_FIELDS), 2))}, "counts"),
    ],
)
def test_malformed_reading_is_refused(changed, words):
    right = {
        "step": 0,
        "phase": "train",
        "time": 0.0,
        "layer": "a",
        "floats": np.zeros((len(FLOAT_FIELDS), 3)),
        "counts": np.zeros((len(COUNT_FIELDS), 3)),
    }
    assert Reading(**right).heads == 3
    with pytest.raises(ValueError, match=words):
        Reading(**{**right, **changed})


def test_unknown_vital_is_named_with_the_known():
    with pytest.raises(ValueError, match="max_logit"):
        reading(0, "a", 2).value("maximum")


def test_merged_readings_equal_the_vitals_of_all_rows():
    both = vitals()
    first = Reading.of(both._map(lambda t: t[0]), step=3, layer="a")
    second = Reading.of(both._map(lambda t: t[1]), step=3, layer="a")
    merged, expected = first.merge(second), both.over_batch()
    for name in (*FLOAT_FIELDS, *COUNT_FIELDS):
        torch.testing.assert_close(getattr(merged.vitals(), name), getattr(expected, name))
    assert merged.time == first.time


def test_attributes_of_this_process_name_command_versions_and_model():
    model = torch.nn.Linear(1000, 1000)
    found = RunAttributes.here(model, every=10)
    assert found.command == tuple(sys.argv)
    assert found.versions["torch"] == torch.__version__
    assert found.versions["scaledot"] == scaledot.__version__
    assert found.model == "Linear, 1.0M parameters, float32"
    assert found.more == {"every": 10}


def test_summary_of_a_model_without_parameters():
    assert summary(torch.nn.ReLU()) == "ReLU, 0 parameters, no type"
