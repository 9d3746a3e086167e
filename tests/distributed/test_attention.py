"""Context-parallel attention against one process: output, gradients, every vital."""

import itertools
import math

import pytest
import torch
from ranks import spawn
from torch import distributed as dist

import scaledot
from scaledot import distributed
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS

# Sizes are prime, shards unequal. d_k 5, 4 query heads on 2 key heads where grouped.
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped": {"is_causal": True, "enable_gqa": True},
    "window": {"window": (7, 3)},
    "causal window": {"is_causal": True, "window": (9, 0)},
    "capped": {"is_causal": True, "softcap": 2.0},
    "sinks": {"is_causal": True, "sinks": True},
    "scale of each head": {"scale": True},
    "log_n": {"is_causal": True, "scale": "log_n"},
    "aligned to the end": {"is_causal": True, "causal_align": "bottom_right", "keys": 43},
    "more keys": {"keys": 53, "window": (None, 4)},
    "width of value": {"is_causal": True, "value_width": 3},
    "large": {"is_causal": True, "times": 300.0},
}
SPECIAL = ("keys", "times", "value_width")
TOKENS = 37


def problem_of(case, dtype=torch.float64, tokens=TOKENS, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    groups = 2 if case.get("enable_gqa") else 4
    keys = case.get("keys", tokens)
    query = draw(2, 4, tokens, 5) * case.get("times", 1.0)
    key = draw(2, groups, keys, 5) * case.get("times", 1.0)
    value = draw(2, groups, keys, case.get("value_width", 5))
    arguments = {name: given for name, given in case.items() if name not in SPECIAL}
    if arguments.get("sinks"):
        arguments["sinks"] = draw(4)
    if arguments.get("scale") is True:
        arguments["scale"] = draw(4).abs() + 0.1
    return query, key, value, draw(*query.shape[:-1], value.shape[-1]), arguments


def whole(case, dtype=torch.float64):
    """One process: the output, the gradients, the vitals."""
    query, key, value, grad, arguments = problem_of(case, dtype)
    tensors = _leaves(query, key, value, arguments)
    out, vitals = scaledot.attention_with_vitals(*tensors[:3], **arguments, per_row=True)
    out.backward(grad)
    return out.detach(), [tensor.grad for tensor in tensors], vitals


def _leaves(query, key, value, arguments):
    """With gradients, those of the arguments too."""
    for name in ("sinks", "scale"):
        if isinstance(arguments.get(name), torch.Tensor):
            arguments[name] = arguments[name].requires_grad_()
    more = [given for given in arguments.values() if isinstance(given, torch.Tensor)]
    return [query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), *more]


def uneven(tensor, rank, world):
    """Contiguous shards of unequal length: one is empty where there are four."""
    lengths = {2: (5, None), 4: (11, 2, 0, None)}[world]
    start = sum(length for length in lengths[:rank])
    end = tensor.shape[2] if lengths[rank] is None else start + lengths[rank]
    return tensor[:, :, start:end]


def over_ranks(rank, world, names, dtypes, cuts):
    """The same calls over ranks; what this rank got."""
    group, results = dist.group.WORLD, {}
    for name, dtype in itertools.product(names, dtypes):
        one = whole(CASES[name], dtype)
        for layout, method in cuts:
            query, key, value, grad, arguments = problem_of(CASES[name], dtype)

            def cut(tensor, layout=layout):
                if layout == "uneven":
                    return uneven(tensor, rank, world).clone()
                return distributed.shard(tensor, group, 2, layout).clone()

            tensors = _leaves(cut(query), cut(key), cut(value), arguments)
            where = {"layout": "contiguous" if layout == "uneven" else layout, "method": method}
            out, vitals = distributed.attention_with_vitals(
                *tensors[:3], group, **arguments, **where, per_row=True
            )
            out.backward(cut(grad))
            plain = distributed.attention(*tensors[:3], group, **arguments, **where).detach()
            alone = distributed.vitals(*tensors[:2], group, **arguments, **where)
            results[name, dtype, layout, method] = {
                "out": out.detach(),
                "plain": plain,
                "grads": [tensor.grad for tensor in tensors],
                "vitals": vitals,
                "alone": alone,
                "expected out": cut(one[0]),
                "expected": [cut(tensor) for tensor in one[1][:3]],
                "entropy": cut(one[2].per_row.entropy),
            }
    return results


CUTS = (
    ("contiguous", "ring"),
    ("zigzag", "ring"),
    ("uneven", "ring"),
    ("zigzag", "all_gather"),
    ("uneven", "all_gather"),
)


# Four ranks only where that is another matter than two: rounds that are passed on, empty shards.
FOUR = ("causal", "grouped", "causal window", "sinks", "aligned to the end", "large")
PLACES = [(2, name, cut) for name in CASES for cut in CUTS]
PLACES += [(4, name, cut) for name in FOUR for cut in CUTS[1:]]


@pytest.fixture(scope="module")
def two():
    return spawn(over_ranks, 2, tuple(CASES), (torch.float64,), CUTS)


@pytest.fixture(scope="module")
def four():
    return spawn(over_ranks, 4, FOUR, (torch.float64,), CUTS[1:])


@pytest.mark.one_case
@pytest.mark.parametrize(("ranks", "name", "cut"), PLACES)
def test_every_rank_gets_what_one_process_gets(request, ranks, name, cut):
    found = request.getfixturevalue({2: "two", 4: "four"}[ranks])
    _, grads, vitals = whole(CASES[name])
    # A logit of 1e5 is rounded at 1e-11, and a gradient is multiplied by keys of 300.
    tolerance = 1e-8 if name == "large" else 1e-11
    for each in found:
        mine = each[name, torch.float64, *cut]
        close(mine["out"], mine["expected out"], tolerance)
        close(mine["plain"], mine["expected out"], tolerance)
        for grad, expected in zip(mine["grads"], mine["expected"], strict=False):
            close(grad, expected, tolerance)
        close(mine["vitals"].per_row.entropy, mine["entropy"])
        for measured in (mine["vitals"], mine["alone"]):
            same_vitals(measured, vitals)
    # What every rank holds a copy of: its gradients are summed over the ranks.
    for place in range(3, len(grads)):
        summed = sum(each[name, torch.float64, *cut]["grads"][place] for each in found)
        close(summed, grads[place])


TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.nightly
def test_types():
    names, cuts = ("causal", "grouped", "sinks"), (("zigzag", "ring"), ("uneven", "all_gather"))
    for each in spawn(over_ranks, 2, names, tuple(TOLERANCES), cuts):
        for (name, dtype, *_), mine in each.items():
            tolerance = TOLERANCES[dtype]
            assert mine["out"].dtype == dtype
            close(mine["out"], mine["expected out"], tolerance)
            for grad, expected in zip(mine["grads"], mine["expected"], strict=False):
                assert grad.dtype == dtype
                close(grad, expected, 4 * tolerance)
            same_vitals(mine["vitals"], whole(CASES[name], dtype)[2], 2e-6)


def close(found, expected, tolerance=1e-11):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def same_vitals(found, expected, tolerance=1e-9):
    for name in COUNT_FIELDS:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in FLOAT_FIELDS:
        one, two = getattr(found, name), getattr(expected, name)
        if name == "max_logit":
            assert torch.equal(one.isinf(), two.isinf())
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def broken_rows(rank, world):
    """NaN in a key, inf in a query; keys hidden from some rows, of other ranks too."""
    query, key, value, _, _ = problem_of({})
    key[0, 0, 30, 2] = math.nan
    query[1, 1, 3] = math.inf
    group = dist.group.WORLD
    q, k, v = (distributed.shard(tensor, group, 2) for tensor in (query, key, value))
    out, vitals = distributed.attention_with_vitals(q, k, v, group, is_causal=True)
    expected, whole_vitals = scaledot.attention_with_vitals(query, key, value, is_causal=True)
    torch.testing.assert_close(
        out, distributed.shard(expected, group, 2), equal_nan=True, rtol=1e-11, atol=1e-11
    )
    same_vitals(vitals, whole_vitals)
    assert int(vitals.nonfinite.sum()) == 7 + 1
    # Two ranks may hold different batches of the same heads, too.
    halves = scaledot.vitals(query[rank : rank + 1], key[rank : rank + 1], is_causal=True)
    merged = distributed.merge_vitals(halves.over_batch(), group)
    same_vitals(merged, whole_vitals.over_batch())


def mistakes(rank, world):
    group = dist.group.WORLD
    query, key, value, _, _ = problem_of({})

    def refused(kind, match, *tensors, mesh=group, **arguments):
        with pytest.raises(kind, match=match):
            distributed.attention(*tensors, mesh, **arguments)

    own = [distributed.shard(tensor, group, 2) for tensor in (query, key, value)]
    refused(ValueError, "layout='ring'; use 'contiguous' or 'zigzag'", *own, layout="ring")
    refused(ValueError, "method='tree'; use 'ring' or 'all_gather'", *own, method="tree")
    refused(TypeError, "mesh is a int; give a 1-D DeviceMesh", *own, mesh=3)
    fewer = [tensor[:, :, 2 * rank :] for tensor in own]
    refused(ValueError, "zigzag of .* cut the sequence", *fewer, layout="zigzag")
    other = [tensor[: 1 + rank] for tensor in own]
    refused(ValueError, r"do not agree on the batch: \[1, 2\]", *other)
    refused(ValueError, "do not agree on causality", *own, is_causal=rank == 0)
    refused(ValueError, r"lengths has 3 numbers for 2 ranks", *own, lengths=[1, 2, 3])
    refused(ValueError, "lengths says that rank", *own, lengths=[7, 30])
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    refused(ValueError, r"2 dimensions; give the one to use: mesh\['cp'\]", *own, mesh=mesh)
    lengths = [19, 18]
    known = distributed.attention(*own, mesh["cp"], is_causal=True, lengths=lengths)
    asked = distributed.attention(*own, group, is_causal=True)
    assert torch.equal(known, asked)
    again = distributed.unshard(distributed.shard(query, group, 2, "zigzag"), group, 2, "zigzag")
    assert torch.equal(again, query)


def broken_and_mistaken(rank, world):
    broken_rows(rank, world)
    mistakes(rank, world)


def test_broken_rows_are_counted_once_and_mistakes_named_on_every_rank():
    spawn(broken_and_mistaken, 2)


def test_without_a_group_it_says_how_to_make_one():
    query, key, value, _, _ = problem_of({})
    with pytest.raises(RuntimeError, match=r"init_process_group.* torchrun"):
        distributed.attention(query, key, value, None)


def test_vitals_of_a_shard_say_that_they_have_no_gradients():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        query = torch.randn(1, 2, 5, 4, requires_grad=True)
        with scaledot.measure.differentiable():
            with pytest.raises(NotImplementedError, match="over ranks have no gradients"):
                distributed.attention_with_vitals(query, query, query, dist.group.WORLD)
            distributed.attention(query, query, query, dist.group.WORLD).sum().backward()
        distributed.attention_with_vitals(query, query, query, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
