"""Blocks of keys merged by their lse: at 1e4, with empty ones, in any order."""

import math

import pytest
import torch

from scaledot.distributed.partial import Partial
from scaledot.measure import RowState


def measured(logits):
    """What a kernel says of a block [Q, keys]: out for random values, lse, five planes."""
    state = RowState.from_logits(logits)
    planes = [state.max, state.lse, state.entropy, state.top_p, state.sum_p2]
    return state, torch.stack(planes)


def merged(parts, values, sinks=None):
    rows = parts[0].shape[0]
    like = torch.empty(0, dtype=torch.float64)
    partial = Partial((rows,), values[0].shape[-1], like, measures=True)
    for logits, value in zip(parts, values, strict=True):
        state, planes = measured(logits)
        weights = torch.softmax(logits, -1) if logits.shape[-1] else logits
        partial.add(slice(None), weights @ value, state.lse, planes)
        partial.moments.add(slice(None), state.count, state.mean, state.m2)
    if sinks is not None:
        partial.add_sink(sinks)
    return partial


@pytest.mark.parametrize("level", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("apart", [0.0, 50.0, 2000.0])
def test_merged_blocks_are_the_whole(level, apart):
    torch.manual_seed(0)
    parts = [torch.randn(7, keys, dtype=torch.float64) * 3 + level for keys in (5, 0, 1, 11, 0)]
    parts[3] += apart
    values = [torch.randn(part.shape[-1], 4, dtype=torch.float64) for part in parts]
    whole, value = torch.cat(parts, -1), torch.cat(values)
    state = RowState.from_logits(whole)
    for order in ((0, 1, 2, 3, 4), (3, 4, 0, 1, 2), (1, 3, 2, 0, 4)):
        found = merged([parts[i] for i in order], [values[i] for i in order])
        rows = found.rows()
        expected = torch.softmax(whole, -1) @ value
        torch.testing.assert_close(found.out, expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(rows.lse, state.lse, rtol=1e-14, atol=1e-11)
        torch.testing.assert_close(rows.entropy, state.entropy, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(rows.sum_p2, state.sum_p2, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(rows.top_p, state.top_p, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(rows.m2, state.m2, rtol=1e-9, atol=1e-7)
        assert torch.equal(rows.max_logit, state.max)
        assert torch.equal(rows.count, state.count)
        assert not rows.broken.any()


def test_rows_that_met_no_key_stay_empty():
    nothing = [torch.empty(3, 0, dtype=torch.float64)] * 2
    values = [torch.empty(0, 4, dtype=torch.float64)] * 2
    found = merged(nothing, values, sinks=torch.zeros((), dtype=torch.float64))
    assert torch.equal(found.out, torch.zeros(3, 4, dtype=torch.float64))
    assert torch.equal(found.lse, torch.full((3,), -math.inf, dtype=torch.float64))
    rows = found.rows()
    for plane in (rows.entropy, rows.top_p, rows.sum_p2, rows.first_p, rows.off_p):
        assert torch.equal(plane, torch.zeros(3, dtype=torch.float64))
    assert not rows.broken.any()


@pytest.mark.parametrize("sink", [-1e4, 0.0, 1e4])
def test_a_sink_is_one_more_outcome(sink):
    torch.manual_seed(1)
    parts = [torch.randn(6, keys, dtype=torch.float64) for keys in (4, 3)]
    values = [torch.randn(part.shape[-1], 2, dtype=torch.float64) for part in parts]
    found = merged(parts, values, sinks=torch.tensor(sink, dtype=torch.float64))
    whole = torch.cat([*parts, torch.full((6, 1), sink, dtype=torch.float64)], -1)
    p = torch.softmax(whole, -1)
    rows = found.rows()
    torch.testing.assert_close(found.out, p[:, :-1] @ torch.cat(values), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(rows.entropy, torch.special.entr(p).sum(-1), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(rows.sum_p2, p.square().sum(-1), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(rows.top_p, p[:, :-1].amax(-1), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(rows.off_p, p[:, -1], rtol=1e-11, atol=1e-13)
