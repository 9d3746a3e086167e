"""The fused additive kernels against the float64 reference, which builds every tanh."""

import math

import pytest
import torch

from scaledot import reference
from scaledot.backends.inputs import Inputs, Wanted
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, ROW_FIELDS
from scaledot.problem import describe

additive = pytest.importorskip("scaledot.backends.cuda.additive.forward")
additive_backward = pytest.importorskip("scaledot.backends.cuda.additive.backward")
backward, BackwardConfig = additive_backward.backward, additive_backward.Config
summarise = pytest.importorskip("scaledot.backends.cuda.summary").summarise


@pytest.fixture(autouse=True)
def _two_splits(monkeypatch):
    monkeypatch.setattr(additive_backward, "MAX_SPLITS", 2)


SMALL = additive.Config(16, 16, 4)  # several tiles of keys at sizes an interpreter can bear


def draw(batch=1, heads=2, groups=2, queries=6, keys=18, width=3, value_width=2, **kwargs):
    """query, key, value, weight in float64, rounded to the type in question."""
    dtype = kwargs.get("dtype", torch.float32)
    shapes = [(batch, heads, queries, width), (batch, groups, keys, width)]
    shapes += [(batch, groups, keys, value_width), (heads, width)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def problem_of(tensors, device, **options):
    query, key, value, weight = (tensor.to(device) for tensor in tensors)
    options = {
        name: option.to(device) if isinstance(option, torch.Tensor) else option
        for name, option in options.items()
    }
    if "cu_seqlens" in options:
        options["cu_seqlens"] = tuple(ends.to(device) for ends in options["cu_seqlens"])
        query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    return describe(query, key, value, weight=weight, enable_gqa=True, **options)


def inputs_of(problem, seed=None):
    return Inputs(*problem[:10], seed=seed)


def run(problem, seed=None, config=SMALL):
    """out, lse and statistics; `out` starts as NaN, so that what is not written shows."""
    inputs = inputs_of(problem, seed)
    shape = (*inputs.query.shape[:-1], inputs.value.shape[-1])
    out = inputs.query.new_full(shape, math.nan)
    lse, statistics = additive.forward(inputs, problem.settings, out, True, config)
    return inputs, out, lse, statistics


def in_float64(tensors, **options):
    """Output and vitals of the reference."""
    query, key, value, weight = (tensor.double().cpu() for tensor in tensors)
    packed = "cu_seqlens" in options
    if packed:
        query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    out, vitals = reference.attention_with_vitals(
        query, key, value, weight=weight, enable_gqa=True, per_row=not packed, **options
    )
    return (out.transpose(0, 1)[None] if packed else out), vitals


ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_forward_right(device, tensors, **options):
    """Output, rows and vitals; returns the problem and what `run` gave."""
    dtype = tensors[0].dtype
    problem = problem_of(tensors, device, **options)
    inputs, out, lse, statistics = run(problem)
    wanted, vitals = in_float64(tensors, **options)
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=rounding, atol=rounding)
    # The statistics are computed in float32 whatever the inputs.
    rounding = min(rounding, 1e-4)
    floats, counts = (t.cpu() for t in summarise(statistics, inputs))
    for index, name in enumerate(FLOAT_FIELDS):
        torch.testing.assert_close(
            floats[index].double(),
            getattr(vitals, name).reshape(floats[index].shape),
            rtol=rounding,
            atol=rounding,
            msg=lambda m, name=name: f"{name}: {m}",
        )
    for index, name in enumerate(COUNT_FIELDS):
        assert torch.equal(counts[index], getattr(vitals, name).reshape(counts[index].shape)), name
    if vitals.per_row is not None:
        for index, name in enumerate(ROW_FIELDS):
            torch.testing.assert_close(
                statistics[index].double().cpu(),
                getattr(vitals.per_row, name),
                rtol=rounding,
                atol=rounding,
                equal_nan=True,
                msg=lambda m, name=name: f"row {name}: {m}",
            )
    return problem, inputs, out, lse


@pytest.mark.parametrize(
    "shape",
    [
        {"queries": 1, "keys": 1, "width": 1, "value_width": 1},
        {"queries": 15, "keys": 16, "width": 2},
        {"queries": 17, "keys": 33, "width": 3, "heads": 4, "groups": 2},
        {"queries": 5, "keys": 17, "heads": 2, "groups": 1, "batch": 2},
    ],
)
def test_shapes(device, shape):
    assert_forward_right(device, draw(**shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiles_as_large_as_they_are_chosen(device, dtype):
    """More rows and keys than one tile of the configuration that a call gets by itself."""
    tensors = draw(heads=1, groups=1, queries=37, keys=131, width=5, dtype=dtype)
    problem = problem_of(tensors, device, is_causal=True, causal_align="bottom_right")
    _, out, _, _ = run(problem, config=None)
    wanted, _ = in_float64(tensors, is_causal=True, causal_align="bottom_right")
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=rounding, atol=rounding)


def bias(*shape):
    mask = torch.randn(shape)
    mask[..., 3] = -math.inf
    mask[..., 5] = torch.finfo(torch.float32).min
    return mask


OPTIONS = {
    "causal": {"is_causal": True},
    "causal at the end": {"is_causal": True, "causal_align": "bottom_right"},
    "window": {"window": (3, 2)},
    "window to the left": {"window": (4, None), "causal_align": "bottom_right"},
    "negative scale": {"scale": -0.7},
    "no scale": {"scale": 0.0},
    "scale per head": {"scale": torch.tensor([0.5, -2.0])},
    "log n": {"scale": "log_n", "is_causal": True},
    "log n and mask": {"scale": "log_n", "attn_mask": torch.rand(6, 18) > 0.4},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.3, -1.0])},
    "sinks far away": {"sinks": torch.tensor([50.0, -math.inf])},
    "sinks, cap, causal": {"sinks": torch.tensor([1.0, 0.0]), "softcap": 2.0, "is_causal": True},
    "mask": {"attn_mask": torch.rand(2, 1, 6, 18) > 0.5},
    "bias": {"attn_mask": bias(1, 2, 6, 18)},
    "bias of a key": {"attn_mask": bias(18), "softcap": 3.0},
    "lengths": {"key_lengths": torch.tensor([18, 17])},
    "no key": {"key_lengths": torch.tensor([0, 1]), "sinks": torch.zeros(2)},
    "rows without keys": {"attn_mask": (torch.arange(6) % 3 > 0)[:, None].expand(6, 18)},
}


def batch_of(name):
    return 2 if name in ("mask", "lengths", "no key") else 1


def assert_right(device, tensors, **options):
    """Forward, and the gradients of every tensor that takes part, by autograd through `dense`."""
    dtype = tensors[0].dtype
    names = [name for name in ("scale", "sinks", "attn_mask") if is_float(options.get(name))]
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    named = {name: options[name].detach().double().requires_grad_() for name in names}
    wanted_out = dense(*leaves, **{**options, **named})
    probe = torch.randn(wanted_out.shape, dtype=torch.float64).to(dtype)
    wanted = torch.autograd.grad(wanted_out, [*leaves, *named.values()], probe.double())

    problem, inputs, out, lse = assert_forward_right(device, tensors, **options)
    asked = Wanted("attn_mask" in named, "scale" in named, "sinks" in named, True)
    grads = backward(inputs, problem.settings, probe.to(device), out, lse, asked, SMALL_BACKWARD)
    found = [*grads[:3], grads.weight]
    found += [getattr(grads, FIELD[name]) for name in named]
    rounding = 5 * ROUNDING[dtype]
    for name, ours, theirs in zip(["q", "k", "v", "w", *named], found, wanted, strict=True):
        scale = max([1.0, *theirs.abs().flatten().tolist()])
        torch.testing.assert_close(
            ours.double().cpu().sum_to_size(theirs.shape)
            if name in named or name == "w"
            else ours.double().cpu(),
            theirs,
            rtol=rounding,
            atol=rounding * scale,
            msg=lambda m, name=name: f"d{name}: {m}",
        )


FIELD = {"scale": "head_scale", "sinks": "sinks", "attn_mask": "mask"}


def is_float(option):
    return isinstance(option, torch.Tensor) and option.dtype.is_floating_point


def dense(query, key, value, weight, **options):
    """Additive attention with everything after the score, differentiable, in float64."""
    problem = describe(query, key, value, weight=weight, enable_gqa=True, **options)
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    visible, _ = reference._visible(problem)
    blind = ~visible.any(-1, keepdim=True)
    scores = reference._scores(problem, query, key, visible.sum(-1, keepdim=True))
    cap = problem.settings.softcap
    arguments = cap * (scores / cap).tanh() if cap else scores
    if is_float(options.get("attn_mask")):
        arguments = arguments + problem.mask.masked_fill(~visible, 0.0)
    arguments = arguments.masked_fill(~visible, -math.inf)
    if problem.sinks is not None:
        sink = problem.sinks[:, :, None, None].expand(*scores.shape[:-1], 1)
        arguments = torch.cat([arguments, sink], -1)
    probability = arguments.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return probability[..., : scores.shape[-1]] @ value


SMALL_BACKWARD = BackwardConfig(32, 16, 4)


@pytest.mark.parametrize("dtype", sorted(ROUNDING, key=str))
def test_every_type(device, dtype):
    assert_right(device, draw(dtype=dtype, width=6))


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_everything_after_the_score(device, name):
    assert_right(device, draw(batch=batch_of(name)), **OPTIONS[name])


def test_gradients_of_shared_keys_and_broadcast_biases(device):
    tensors = draw(heads=2, batch=2, queries=3, keys=5, width=2)
    tensors[1], tensors[2] = tensors[1][:, :1], tensors[2][:, :1]
    for shape in ((2, 1, 3, 1), (1, 2, 1, 5)):
        assert_right(device, tensors, attn_mask=torch.randn(shape))


PACKED = {
    "cu_seqlens": (
        torch.tensor([0, 3, 3, 21, 23], dtype=torch.int32),
        torch.tensor([0, 18, 19, 19, 24], dtype=torch.int32),
    )
}


@pytest.mark.parametrize("causal", [{}, {"is_causal": True, "causal_align": "bottom_right"}])
def test_packed_sequences(device, causal):
    tensors = draw(queries=23, keys=24, heads=2, groups=1, width=2)
    assert_forward_right(device, tensors, **PACKED, **causal)
    problem = problem_of(tensors, device, **PACKED, **causal)
    inputs, out, lse, _ = run(problem)
    probe = torch.randn_like(out)
    nothing = Wanted(False, False, False, True)
    grads = backward(inputs, problem.settings, probe, out, lse, nothing, SMALL_BACKWARD)
    ends = [tensor.tolist() for tensor in PACKED["cu_seqlens"]]
    weight_sum = torch.zeros_like(tensors[3], dtype=torch.float64)
    for index in range(4):
        rows = slice(ends[0][index], ends[0][index + 1])
        keys = slice(ends[1][index], ends[1][index + 1])
        leaves = [tensors[0][:, :, rows], tensors[1][:, :, keys], tensors[2][:, :, keys]]
        leaves = [t.double().requires_grad_() for t in (*leaves, tensors[3])]
        own = dense(*leaves, **causal)
        wanted = torch.autograd.grad(own, leaves, probe[:, :, rows].double().cpu())
        found = (grads.query[:, :, rows], grads.key[:, :, keys], grads.value[:, :, keys])
        for ours, theirs in zip(found, wanted[:3], strict=True):
            torch.testing.assert_close(ours.double().cpu(), theirs, rtol=1e-4, atol=1e-4)
        weight_sum += wanted[3]
    torch.testing.assert_close(grads.weight[0].double().cpu(), weight_sum, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [9.0, 30.0, 300.0])
def test_entries_far_from_zero(device, size):
    """Sums of large entries that nearly cancel, where e^(2q) e^(2k) cannot be multiplied."""
    tensors = draw(queries=7, keys=9)
    tensors[0][..., 1] += size
    tensors[1][..., 1] -= size
    tensors[0][..., :2, 2] = -size
    assert_right(device, tensors)


@pytest.mark.parametrize("size", [5.39, 5.41, 10.89, 10.91])
def test_products_at_the_end_of_reach(device, size):
    """Four units, or two, as far as their product goes; and one step beyond, where fewer share."""
    tensors = draw(queries=4, keys=6, width=7)
    tensors[0][:, :, :2] = size
    tensors[0][:, :, 2] = -size
    tensors[1][:, :, :3] = size
    tensors[1][:, :, 3] = -size
    assert_right(device, tensors)


def test_small_entries_keep_their_scores(device):
    tensors = draw()
    tensors[0], tensors[1] = tensors[0] * 1e-3, tensors[1] * 1e-3
    assert_forward_right(device, tensors)


def test_infinite_entries_saturate_and_nan_shows(device):
    tensors = draw(queries=4, keys=6)
    tensors[0][0, 0, 1, 2] = math.inf
    tensors[1][0, 1, 3, 0] = -math.inf
    assert_forward_right(device, tensors)
    tensors[0][0, 0, 2, 1] = math.nan
    _, out, _, statistics = run(problem_of(tensors, device))
    assert out[0, 0, 2].isnan().all()
    assert statistics[0, 0, 0, 2].isnan()
    assert out[0, 0, :2].isfinite().all()
    assert out[0, 1].isfinite().all()


def test_padding_is_never_seen(device):
    """Past the lengths: neither keys nor values, neither forward nor backward."""
    tensors = draw(batch=2)
    lengths = torch.tensor([7, 18])
    grads = []
    for garbage in (0.0, math.nan):
        for entry, length in enumerate(lengths.tolist()):
            tensors[1][entry, :, length:] = garbage
            tensors[2][entry, :, length:] = garbage
        problem = problem_of(tensors, device, key_lengths=lengths)
        inputs, out, lse, _ = run(problem)
        wanted = Wanted(False, False, False, True)
        grad = backward(inputs, problem.settings, out, out, lse, wanted, SMALL_BACKWARD)
        grads.append([out, lse, grad.query, grad.key, grad.value, grad.weight])
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


def test_weights_of_each_batch_entry(device):
    tensors = draw(batch=2, queries=5, keys=9)
    problem = problem_of(tensors, device)
    weight = torch.randn(2, 2, 3, device=device)
    whole = inputs_of(problem)._replace(weight=weight)
    out = torch.full_like(whole.query[..., :2], math.nan)
    lse, _ = additive.forward(whole, problem.settings, out, False, SMALL)
    wanted = Wanted(False, False, False, True)
    grads = backward(whole, problem.settings, out, out, lse, wanted, SMALL_BACKWARD)
    assert grads.weight.shape == weight.shape
    for entry in range(2):
        part = [tensor[entry : entry + 1] for tensor in tensors[:3]] + [weight[entry].cpu()]
        problem = problem_of(part, device)
        inputs, own, lse, _ = run(problem)
        torch.testing.assert_close(out[entry : entry + 1], own)
        alone = backward(inputs, problem.settings, own, own, lse, wanted, SMALL_BACKWARD)
        torch.testing.assert_close(grads.weight[entry], alone.weight[0])


def test_dropout_drops_the_same_pairs_in_both_passes(device):
    query, key, value, weight = draw(queries=17, keys=18, width=2, value_width=18)
    value[:] = torch.eye(18)  # the output is then the matrix of weights
    seed = torch.tensor(7, device=device)
    _, whole, _, _ = run(problem_of((query, key, value, weight), device))
    problem = problem_of((query, key, value, weight), device, dropout_p=0.25)
    _, thinned, _, _ = run(problem, seed)
    kept = (thinned != 0).cpu()
    assert 0.6 < kept.float().mean().item() < 0.9
    torch.testing.assert_close(thinned.cpu(), torch.where(kept, whole.cpu() / 0.75, 0.0))

    value = torch.randn(1, 2, 18, 18)
    problem = problem_of((query, key, value, weight), device, dropout_p=0.25)
    inputs, out, lse, _ = run(problem, seed)
    probe = torch.randn_like(out)
    wanted = Wanted(False, False, False, True)
    found = backward(inputs, problem.settings, probe, out, lse, wanted, SMALL_BACKWARD)
    leaves = [t.double().requires_grad_() for t in (query, key, value, weight)]
    scores = dense(*leaves[:2], torch.eye(18).double().expand(1, 2, 18, 18), leaves[3])
    by_hand = (scores * kept / 0.75) @ leaves[2]
    theirs = torch.autograd.grad(by_hand, leaves, probe.double().cpu())
    for ours, other in zip((*found[:3], found.weight[0]), theirs, strict=True):
        torch.testing.assert_close(ours.double().cpu(), other, rtol=1e-4, atol=1e-4)


def test_two_runs_give_the_same_bits(device):
    problem = problem_of(draw(), device)
    found = []
    for _ in range(2):
        inputs, out, lse, statistics = run(problem)
        wanted = Wanted(False, False, False, True)
        grads = backward(inputs, problem.settings, out, out, lse, wanted, SMALL_BACKWARD)
        found.append([out, lse, statistics, *grads[:3], grads.weight])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_scores_alone_and_empty_calls(device):
    problem = problem_of(draw(), device)
    inputs, _, lse, statistics = run(problem)
    alone = additive.forward(inputs._replace(value=None), problem.settings, None, True, SMALL)
    assert torch.equal(alone[0], lse)
    assert torch.equal(alone[1], statistics)
    for shape in ({"batch": 0}, {"queries": 0}, {"keys": 0}):
        problem = problem_of(draw(**shape), device)
        inputs, out, lse, _ = run(problem)
        wanted = Wanted(False, False, False, True)
        grads = backward(inputs, problem.settings, out, out, lse, wanted, SMALL_BACKWARD)
        assert (out == 0).all()
        assert [g.shape for g in grads[:3]] == [t.shape for t in inputs[:3]]
        assert all((g == 0).all() for g in (*grads[:3], grads.weight))


def test_no_value_width(device):
    assert_right(device, draw(queries=3, keys=5, value_width=0))


def test_a_sequence_is_not_disturbed_by_one_whose_entries_lie_farther_off(device):
    """Its last tile of rows ends within the other: what is there must not reach its gradients."""
    first, second = 10, 22
    tensors = draw(queries=first + second, keys=first + second, heads=1, groups=1, width=8)
    tensors[0][:, :, :first], tensors[1][:, :, :first] = -4.7, 5.0
    tensors[0][:, :, first:], tensors[1][:, :, first:] = 10.6, -10.4
    ends = torch.tensor([0, first, first + second], dtype=torch.int32)
    problem = problem_of(tensors, device, cu_seqlens=(ends, ends))
    inputs, out, lse, _ = run(problem)
    wanted = Wanted(False, False, False, True)
    grads = backward(inputs, problem.settings, torch.ones_like(out), out, lse, wanted)
    for grad in (grads.query, grads.key, grads.value, grads.weight):
        assert grad.isfinite().all()
