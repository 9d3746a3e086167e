"""The public functions on the GPU backends, against the same oracle as the CPU.

Without a GPU the Triton backend runs interpreted, on few and small calls; the Hopper backend needs
a Hopper GPU.
"""

import math
import os
import random
from dataclasses import replace

import oracle
import pytest
import torch
from conformance import agreement
from conformance.calls import call, draw

import scaledot
from scaledot.backends.cuda import hopper, moments
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.problem import describe

ON_GPU = torch.cuda.is_available()
HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="no Hopper GPU here")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no GPU here")
BACKENDS = ["triton", pytest.param("hopper", marks=needs_hopper)]
DRAWN = int(os.environ.get("SCALEDOT_DRAWN", "20"))  # random calls; each compiles its own kernels
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _tensor_cores_round_more(monkeypatch):
    """Their sums keep fewer guard bits than a float32 adder; interpreted bfloat16 is cut off."""
    monkeypatch.setattr(agreement, "LOGIT_ULPS", 64)


def on(device, c):
    """The call with its tensors on the device."""

    def move(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    words = {name: move(x) for name, x in c.keywords.items()}
    return replace(c, query=move(c.query), key=move(c.key), value=move(c.value), keywords=words)


def on_cpu(vitals):
    moved = {name: getattr(vitals, name).cpu() for name in FLOAT_FIELDS}
    moved |= {name: getattr(vitals, name).cpu() for name in COUNT_FIELDS}
    rows = vitals.per_row
    if rows is not None:
        rows = type(rows)(*(plane.cpu() for plane in rows))
    return scaledot.Vitals(**moved, per_row=rows)


def assert_call_agrees(c, device, backend):
    """attention, attention_with_vitals and vitals of one backend, all against the oracle."""
    there = on(device, c)
    words = {**there.keywords, "backend": backend}
    expected = oracle.diagnose(c.query, c.key, **c.keywords)
    out, with_output = scaledot.attention_with_vitals(*there.tensors, **words, per_row=True)
    plain = scaledot.attention(*there.tensors, **words)
    agreement.assert_output_agrees([out.cpu(), plain.cpu()], *c.tensors, **c.keywords)
    agreement.assert_vitals_agree(on_cpu(with_output), expected, per_row=True)
    alone = scaledot.vitals(there.query, there.key, **words)
    agreement.assert_vitals_agree(on_cpu(alone), expected)


def hopper_call(seed):
    """A random call that the Hopper backend serves, vitals included."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    batch, groups, repeats = pick.choice([(2, 2, 1), (1, 1, 4), (3, 2, 2), (1, 5, 1)])
    c = call(
        lead=(batch, groups * repeats),
        key_heads=groups,
        queries=pick.choice([1, 3, 63, 64, 65, 127, 129, 191, 193, 257, 300]),
        keys=pick.choice([1, 2, 63, 64, 65, 127, 128, 129, 255, 300, 513, 1100]),
        width=pick.choice([8, 16, 64, 64, 72, 96, 128, 128, 192, 256]),
        value_width=pick.choice([8, 40, 64, 64, 96, 128, 128, 200, 256]),
        dtype=pick.choice(SIXTEEN_BITS),
    )
    c = replace(c, query=c.query * pick.choice([0.1, 1, 1, 3]))
    words = {
        "is_causal": pick.random() < 0.5,
        "causal_align": pick.choice(["top_left", "bottom_right"]),
        "window": pick.choice([None, None, (0, None), (7, 3), (100, None), (None, 5)]),
        "scale": pick.choice([None, None, 0.3, -0.4, 0.0, "log_n", torch.randn(groups * repeats)]),
    }
    if pick.random() < 0.3:
        words["sinks"] = torch.randn(groups * repeats)
    if pick.random() < 0.3:
        words["key_lengths"] = torch.randint(0, c.key.shape[2] + 1, (batch,))
    return c.with_keywords(**words)


@pytest.mark.parametrize("seed", range(DRAWN if ON_GPU else 8))
def test_any_call_on_triton(device, seed):
    if ON_GPU:
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        drawn = draw(seed, dtypes[seed % 4])
    else:
        drawn = draw(seed, torch.float32, sizes=(1, 3, 7, 17, 33))
    assert_call_agrees(drawn, device, "triton")


@needs_hopper
@pytest.mark.parametrize("seed", range(DRAWN))
def test_any_call_on_hopper(device, seed):
    assert_call_agrees(hopper_call(seed), device, "hopper")


@pytest.fixture
def _short_calls_count_as_long(monkeypatch):
    at_once = {64: (100, 100), 128: (100, 100), 256: (100, 100)}
    monkeypatch.setattr(hopper, "GRAM_WHOLE", at_once)
    monkeypatch.setattr(hopper, "GRAM_EDGES", at_once | {256: (None, None)})
    monkeypatch.setattr(hopper, "GRAM_FROM_QUERIES", 1)
    monkeypatch.setattr(moments, "block_for", lambda keys, width: 256)


@needs_hopper
@pytest.mark.usefixtures("_short_calls_count_as_long")
@pytest.mark.parametrize("seed", range(DRAWN))
def test_any_call_whose_moments_come_from_blocks(device, seed):
    c = hopper_call(seed)
    if seed % 2:  # blocks begin at the first key
        c = c.with_keywords(window=None)
    assert_call_agrees(c, device, "hopper")


@needs_hopper
@pytest.mark.usefixtures("_short_calls_count_as_long")
@pytest.mark.parametrize(
    ("width", "is_causal"), [(64, False), (128, False), (256, False), (64, True), (128, True)]
)
def test_moments_from_blocks_are_those_of_the_pass(device, width, is_causal, monkeypatch):
    torch.manual_seed(0)
    query, key = (
        torch.randn(2, 4, 1500, width, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    key += 5.0
    found = scaledot.vitals(query, key, is_causal=is_causal, backend="hopper")
    monkeypatch.setattr(hopper, "GRAM_FROM_QUERIES", 10**9)
    summed = scaledot.vitals(query, key, is_causal=is_causal, backend="hopper")
    moved = 0
    for name in ("logit_mean", "logit_std", "row_std"):
        a, b = getattr(found, name), getattr(summed, name)
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
        moved += int((a != b).sum())
    assert moved  # in the last digits: it is another way
    assert torch.equal(found.pairs, summed.pairs)
    torch.testing.assert_close(found.max_logit, summed.max_logit, rtol=1e-6, atol=1e-6)


def with_late_key(c, logit, head):
    """One key of a head, far from the end, has this logit in every row; rows meet it last."""
    width = c.query.shape[-1]
    query, key = c.query.clone(), c.key.clone()
    query[0, head, :, 0], key[0, head, :, 0] = 4.0, 0.0
    key[0, head, 40, 0] = logit * width**0.5 / 4
    c = replace(c, query=query, key=key)
    return c.with_keywords(is_causal=False, causal_align="bottom_right")


@needs_hopper
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("moments_apart", [False, True])
@pytest.mark.parametrize("logit", [30.0, 42.3, 70.1, 90.0, 101.0, 200.0, 5000.0])
def test_rows_outgrow_the_pivot_that_they_begin_with(
    device, width, is_causal, moments_apart, logit, request
):
    """In one head of many, so that few of a program's tiles are done again."""
    if moments_apart:
        request.getfixturevalue("_short_calls_count_as_long")
    shape = {"lead": (1, 70), "queries": 400, "keys": 527, "width": width, "value_width": width}
    c = with_late_key(call(**shape, dtype=torch.bfloat16), logit, head=33)
    assert_call_agrees(c.with_keywords(is_causal=is_causal), device, "hopper")


@needs_hopper
@pytest.mark.parametrize("logit", [41.0, 42.3, 58.9, 69.5, 100.8, 104.2])
@pytest.mark.parametrize("sink", [None, 60.0])
def test_many_keys_far_above_the_pivot(device, logit, sink):
    """Four threads share a row: what is finite in each of them need not be when they meet."""
    c = call(lead=(1, 2), queries=200, keys=1024, width=64, value_width=64, dtype=torch.bfloat16)
    query, key = c.query.clone(), c.key.clone()
    query[..., 0], key[..., 0] = 4.0, 0.0
    key[:, :, :128, 0] = logit * 8 / 4
    words = {} if sink is None else {"sinks": torch.tensor([sink, -sink])}
    assert_call_agrees(replace(c, query=query, key=key).with_keywords(**words), device, "hopper")


@needs_hopper
@pytest.mark.parametrize(
    ("width", "queries", "keys", "large", "logit"),
    [(256, 128, 128, (5, 80), 50.0), (64, 128, 192, (5, 150), 100.0), (64, 300, 300, (5, 250), 50)],
)
def test_rows_that_outgrow_their_pivot_in_the_first_tile_and_catch_up_in_the_next(
    device, width, queries, keys, large, logit
):
    """Then l is small at the end, or NaN, and what the first tile left infinite has to tell."""
    shape = {"lead": (1, 2), "queries": queries, "keys": keys}
    c = call(**shape, width=width, value_width=width, dtype=torch.bfloat16)
    query, key = c.query.clone(), c.key.clone()
    query[..., 0], key[..., 0] = 4.0, 0.0
    key[:, :, list(large), 0] = logit * width**0.5 / 4
    c = replace(c, query=query, key=key)
    c = c.with_keywords(is_causal=True, causal_align="bottom_right")
    assert_call_agrees(c, device, "hopper")


@needs_hopper
def test_no_value_behind_the_last_tile_shows_in_rows_done_again(device):
    """They begin anew with a tile in which all is hidden: it must not be that of later keys."""
    shape = {"lead": (1, 2), "queries": 384, "keys": 384}
    c = call(**shape, width=64, value_width=64, dtype=torch.bfloat16)
    c = with_late_key(c, 90.0, head=1).with_keywords(is_causal=True)
    value = c.value.clone()
    value[:, :, 128:] = math.nan
    c = replace(c, value=value)
    there = on(device, c)
    out = scaledot.attention(*there.tensors, **there.keywords, backend="hopper").cpu()
    expected = scaledot.attention(*(x[:, :, :128] for x in c.tensors), **c.keywords)
    torch.testing.assert_close(out[:, :, :128], expected, rtol=0.02, atol=0.02)


@needs_hopper
def test_rows_whose_first_scores_are_minus_infinity(device):
    """Eight of them give no pivot; the others have to."""
    shape = {"lead": (1, 2), "queries": 64, "keys": 300}
    c = call(**shape, width=64, value_width=64, dtype=torch.bfloat16)
    query, key = c.query.clone(), c.key.clone()
    query[..., 0], key[..., 0] = 1.0, 0.0
    key[:, :, 256:264, 0] = -math.inf
    there = on(device, replace(c, query=query, key=key))
    out = scaledot.attention(*there.tensors, backend="hopper").cpu().float()
    kept = [*range(256), *range(264, 300)]
    expected = scaledot.attention(query, key[:, :, kept], c.value[:, :, kept])
    torch.testing.assert_close(out, expected.float(), rtol=0.02, atol=0.02)


@needs_hopper
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_scores_close_together_far_above_the_pivot_keep_their_variance(device, noise):
    """The last key, which rows see first, is far below all others."""
    c = call(lead=(1, 2), queries=130, keys=2049, width=64, value_width=64, dtype=torch.bfloat16)
    query, key = c.query.clone(), c.key.clone()
    query[..., 0], key[..., 1:], key[..., 0] = 4.0, noise, 0.0
    key[:, :, -1, 0] = -29.0 * 8 / 4
    c = replace(c, query=query, key=key)
    assert_call_agrees(c, device, "hopper")
    there = on(device, c)
    found = scaledot.vitals(there.query, there.key, backend="hopper")
    expected = oracle.diagnose(c.query, c.key)
    torch.testing.assert_close(found.row_std.cpu().double(), expected.row_std, rtol=1e-4, atol=0)


@needs_hopper
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize(("width", "keys"), [(64, 1500), (64, 16383), (256, 16383)])
def test_many_equal_scores(device, backend, width, keys):
    """Rounding all goes one way then, in a sum that is one long chain."""
    query = torch.zeros(1, 2, 130, width, device=device, dtype=torch.bfloat16)
    key = torch.zeros_like(query[:, :, :1]).repeat(1, 1, keys, 1)
    query[..., 0] = 1.0
    key[:, :, -1, 0] = 3.0 * width**0.5
    value = torch.ones_like(key)
    _, vitals = scaledot.attention_with_vitals(query, key, value, backend=backend, per_row=True)
    lse = torch.tensor(keys - 1 + math.exp(3.0)).log().to(vitals.per_row.lse)
    torch.testing.assert_close(vitals.per_row.lse, lse.expand(1, 2, 130), rtol=0, atol=5e-6)
    row_std = 3.0 * ((1 - 1 / keys) / keys) ** 0.5
    torch.testing.assert_close(
        vitals.row_std, torch.full_like(vitals.row_std, row_std), rtol=0.08, atol=0
    )


@needs_hopper
def test_values_that_a_late_key_makes_too_large(device):
    """l is finite, and so are the values; P times the values is not."""
    c = call(lead=(1, 2), queries=200, keys=300, width=64, value_width=64, dtype=torch.bfloat16)
    c = with_late_key(replace(c, value=c.value * 1e30), 40.0, head=1)
    assert_call_agrees(c, device, "hopper")


@needs_hopper
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_hopper_bends_logits(device, width, dtype):
    c = call(lead=(1, 2), queries=200, keys=300, width=width, value_width=width, dtype=dtype)
    c = replace(c, query=c.query * 4).with_keywords(softcap=20.0, is_causal=True)
    there = on(device, c)
    out = scaledot.attention(*there.tensors, **there.keywords, backend="hopper")
    agreement.assert_output_agrees(out.cpu(), *c.tensors, **c.keywords)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("causal_align", ["top_left", "bottom_right"])
def test_packed_sequences(device, backend, is_causal, causal_align):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    lengths_q, lengths_k = [5, 0, 70, 129, 1, 33], [9, 4, 70, 200, 0, 31]
    groups = 2
    if not ON_GPU:  # the interpreter is slow
        lengths_q, lengths_k, groups = [5, 0, 70, 1], [9, 4, 73, 0], 1
    ends = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    query = torch.randn(int(ends[0][-1]), 2 * groups, 16).to(dtype)
    key, value = (torch.randn(int(ends[1][-1]), groups, 16).to(dtype) for _ in range(2))
    words = {"is_causal": is_causal, "causal_align": causal_align, "enable_gqa": True}
    there = [x.to(device) for x in (query, key, value, *ends)]
    out, vitals = scaledot.attention_varlen_with_vitals(*there, **words, backend=backend)
    alone = scaledot.vitals_varlen(*there[:2], *there[3:], **words, backend=backend)
    for i in range(len(lengths_q)):
        rows = slice(int(ends[0][i]), int(ends[0][i + 1]))
        keys = slice(int(ends[1][i]), int(ends[1][i + 1]))
        if not lengths_q[i]:
            continue
        one = [x.transpose(0, 1)[None] for x in (query[rows], key[keys], value[keys])]
        agreement.assert_output_agrees(out[rows].cpu().transpose(0, 1)[None], *one, **words)
        expected = oracle.diagnose(*one[:2], **words)
        for found in (vitals, alone):
            part = {n: getattr(on_cpu(found), n)[i : i + 1] for n in COUNT_FIELDS}
            part |= {n: getattr(on_cpu(found), n)[i : i + 1] for n in FLOAT_FIELDS}
            agreement.assert_vitals_agree(scaledot.Vitals(**part), expected)


def side_by_side(numbers, device):
    """The same integers, with others between them, and, where all are one, as a view of that."""
    plain = torch.tensor(numbers, device=device)
    apart = torch.tensor([n for each in numbers for n in (each, 99)], device=device)[::2]
    views = [plain, apart]
    if len(set(numbers)) == 1:
        views.append(plain[:1].expand(len(numbers)))
    return views


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[7, 0, 29], [13, 13, 13], [2**31, 5, 2**40]])
def test_lengths_however_they_lie_and_however_large(device, backend, lengths):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    query, key, value = (torch.randn(3, 1, 31, 16, dtype=dtype, device=device) for _ in range(3))
    words = {"key_lengths": torch.tensor(lengths).clamp(max=31)}
    tensors = query.cpu(), key.cpu(), value.cpu()
    expected = oracle.diagnose(*tensors[:2], **words)
    for view in side_by_side(lengths, device):
        out, vitals = scaledot.attention_with_vitals(
            query, key, value, key_lengths=view, backend=backend
        )
        agreement.assert_output_agrees(out.cpu(), *tensors, **words)
        agreement.assert_vitals_agree(on_cpu(vitals), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ends_of_sequences_however_they_lie(device, backend):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    query, key, value = (torch.randn(40, 1, 16, dtype=dtype, device=device) for _ in range(3))
    outs = [
        scaledot.attention_varlen(query, key, value, ends, ends, backend=backend)
        for ends in side_by_side([0, 9, 9, 31], device)
    ]
    assert torch.equal(*outs)
    assert (outs[0][31:] == 0.0).all()  # tokens of no sequence


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_sequence_begins_with_the_first_token(device, backend):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    query, key, value = (torch.randn(40, 1, 16, dtype=dtype, device=device) for _ in range(3))
    measured = []
    for start in (0, 5, -3):
        ends = torch.tensor([start, 9, 40], device=device)
        measured.append(
            scaledot.attention_varlen_with_vitals(query, key, value, ends, ends, backend=backend)
        )
    (out, vitals), *others = measured
    for other, found in others:
        assert torch.equal(other, out)
        assert torch.equal(found.entropy, vitals.entropy)
        assert torch.equal(found.q_entries, vitals.q_entries)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_without_any_sequence(device, backend):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    tokens = torch.randn(40, 1, 16, dtype=dtype, device=device)
    ends = torch.zeros(1, dtype=torch.int32, device=device)
    out = scaledot.attention_varlen(tokens, tokens, tokens, ends, ends, backend=backend)
    assert not out.any()


@needs_gpu
def test_the_backend_that_serves_plain_calls_has_no_say_under_vmap(device):
    """torch's own kernels serve such shapes, and ask for addresses that a sample does not have."""
    tensors = [torch.randn(3, 2, 2, 128, 64, dtype=torch.bfloat16, device=device) for _ in range(3)]
    found = torch.func.vmap(scaledot.attention)(*tensors)
    expected = scaledot.attention(*(each.flatten(0, 1) for each in tensors))
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_share_one_length(device, backend):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    tensors = [torch.randn(3, 1, 1, 21, 16, dtype=dtype, device=device) for _ in range(3)]
    words = {"key_lengths": torch.tensor([7], device=device), "backend": backend}
    found = torch.func.vmap(lambda *sample: scaledot.attention(*sample, **words))(*tensors)
    for i, sample in enumerate(zip(*tensors, strict=True)):
        assert torch.equal(found[i], scaledot.attention(*sample, **words))


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_have_gradients_beside_tokens_of_no_sequence(device, backend):
    dtype = torch.bfloat16
    query, key, value = (torch.randn(300, 2, 64, dtype=dtype, device=device) for _ in range(3))
    ends = torch.tensor([0, 100, 171], device=device, dtype=torch.int32)
    sinks = torch.randn(2, device=device, requires_grad=True)
    junk = torch.full((2, 1, 2, 300), -1e5, device=device)  # so that fresh memory is not zeros
    del junk
    out = scaledot.attention_varlen(query, key, value, ends, ends, sinks=sinks, backend=backend)
    out.float().square().sum().backward()
    assert sinks.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_overlap(device, backend):
    """A query of windows over one signal: nothing new may be laid out like it."""
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    signal = torch.randn(1, 1, 96, dtype=dtype, device=device)
    query = signal.unfold(-1, 64, 1)[:, :, :32]
    key, value = (torch.randn(1, 1, 40, 64, dtype=dtype, device=device) for _ in range(2))
    out = scaledot.attention(query, key, value, backend=backend)
    agreement.assert_output_agrees(out.cpu(), query.cpu(), key.cpu(), value.cpu())


def gradients(attend, tensors, weight):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attend(*leaves)
    return torch.autograd.grad((out * weight.to(out.dtype)).sum(), leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("queries", "keys", "width"), [(64, 96, 64), (33, 47, 64), (128, 128, 128)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(device, backend, queries, keys, width, is_causal):
    """Through torch's kernels and through our own, whichever serves."""
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    if not ON_GPU:
        queries, keys, width = queries // 2, keys // 2, 16
    c = call(
        lead=(1, 2), queries=queries, keys=keys, width=width, value_width=width, dtype=dtype
    ).with_keywords(is_causal=is_causal)
    weight = torch.randn(1, 2, queries, width)
    there = on(device, c)
    found = gradients(
        lambda *x: scaledot.attention(*x, is_causal=is_causal, backend=backend),
        there.tensors,
        weight.to(device),
    )
    exact = gradients(
        lambda *x: oracle.attend(*x, **c.keywords), [x.double() for x in c.tensors], weight
    )
    eager = gradients(lambda *x: oracle.attend(*x, compute=dtype, **c.keywords), c.tensors, weight)
    for got, want, plain in zip(found, exact, eager, strict=True):
        error = (got.cpu().double() - want).abs().max()
        honest = (plain.double() - want).abs().max()
        assert error <= 3 * honest + 8 * torch.finfo(dtype).eps * want.abs().max()


def test_gradients_of_everything_else(device):
    """Mask, scale, sinks: only our own backward has them."""
    c = call(lead=(1, 2), queries=9, keys=13, width=8, value_width=8)
    mask = torch.randn(1, 1, 9, 13)
    scale, sinks = torch.rand(2) + 0.3, torch.randn(2)
    weight = torch.randn(1, 2, 9, 8)

    def ours(q, k, v, m, s, z):
        return scaledot.attention(
            q, k, v, attn_mask=m, scale=s, sinks=z, softcap=3.0, backend="triton"
        )

    def truth(q, k, v, m, s, z):
        return oracle.attend(q, k, v, attn_mask=m, scale=s, sinks=z, softcap=3.0)

    tensors = [*c.tensors, mask, scale, sinks]
    found = gradients(ours, [x.to(device) for x in tensors], weight.to(device))
    exact = gradients(truth, [x.double() for x in tensors], weight)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_leaks_from_behind_the_keys(device, backend):
    """Padding past key_lengths may hold anything."""
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    query, key, value = (torch.randn(2, 2, 70, 16, dtype=dtype, device=device) for _ in range(3))
    lengths = torch.tensor([70, 37], device=device)
    clean = scaledot.attention(query, key, value, key_lengths=lengths, backend=backend)
    key[1, :, 37:], value[1, :, 37:] = float("nan"), float("inf")
    assert torch.equal(
        scaledot.attention(query, key, value, key_lengths=lengths, backend=backend), clean
    )


@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy, where it interprets
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_are_seen(device, backend):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    query, key, value = (torch.randn(1, 2, 70, 16, dtype=dtype, device=device) for _ in range(3))
    query[0, 1, 11] = float("nan")
    out, vitals = scaledot.attention_with_vitals(query, key, value, backend=backend, per_row=True)
    assert out[0, 1, 11].isnan().all()
    assert out[0, 1, :11].isfinite().all()
    assert vitals.nonfinite.tolist() == [[0, 1]]
    assert vitals.rows.tolist() == [[70, 69]]
    assert all(plane[0, 1, 11].isnan() for plane in vitals.per_row)


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_is_seen_through_a_cap(device, backend):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    query, key, value = (torch.randn(1, 2, 70, 16, dtype=dtype, device=device) for _ in range(3))
    query[0, 1, 11] = float("nan")
    out = scaledot.attention(query, key, value, softcap=3.0, backend=backend)
    assert out[0, 1, 11].isnan().all()
    assert out[0, 0].isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [float("nan"), float("inf")])
def test_a_broken_sink_breaks_its_rows(device, backend, sink):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    query, key, value = (torch.randn(1, 2, 6, 16, dtype=dtype, device=device) for _ in range(3))
    sinks = torch.tensor([0.5, sink], device=device)
    _, vitals = scaledot.attention_with_vitals(query, key, value, sinks=sinks, backend=backend)
    assert vitals.nonfinite.tolist() == [[0, 6]]
    assert vitals.rows.tolist() == [[6, 0]]


@needs_hopper
@pytest.mark.parametrize(
    ("backend", "width", "value_width", "tokens", "is_causal"),
    [
        ("hopper", 64, 64, 2048, False),
        ("hopper", 128, 128, 4096, False),
        ("hopper", 256, 256, 16384, False),
        ("hopper", 64, 64, 8192, True),
        ("hopper", 256, 256, 4096, True),
        ("triton", 64, 64, 2048, False),
        ("triton", 128, 128, 4096, False),
        ("triton", 128, 20, 4096, False),  # a copy as large as the matrices
    ],
)
def test_launches_beside_the_pass_take_nothing_from_it(
    device, backend, width, value_width, tokens, is_causal
):
    """What must be copied first: the copy is not needed any more, but the pass reads it.

    As long as moments come from matrices, which need as much memory.
    """
    torch.manual_seed(0)
    size = (16384 // tokens, 2048 // width, tokens, width)
    query, key, value = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(3))
    value = value[..., :value_width].contiguous()
    odd = key.new_empty(key.numel() + 4)[4:].view(key.shape).copy_(key)
    words = {"is_causal": is_causal, "backend": backend}
    wanted = scaledot.attention_with_vitals(query, key, value, **words)
    for _ in range(10):
        found = scaledot.attention_with_vitals(query, odd, value, **words)
        assert torch.equal(found[0], wanted[0])
        for name in FLOAT_FIELDS:
            a, b = getattr(found[1], name), getattr(wanted[1], name)
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_it_says_who_serves_and_why(device):
    query = torch.randn(1, 2, 70, 16, device=device)
    problem = describe(query, query, query)
    if not ON_GPU:
        assert "not on a GPU" in hopper.refuses(problem)
        return
    choice = scaledot.backend_for(query, query, query, vitals=True)
    assert choice.backend == "triton"
    assert "bfloat16" in choice.refused["hopper"] or "Hopper" in choice.refused["hopper"]


# --- only on a GPU -------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_repeats_are_bitwise_equal(device, backend, is_causal):
    query, key, value = (
        torch.randn(2, 4, 517, 128, dtype=torch.bfloat16, device=device) for _ in range(3)
    )

    def once():
        out, vitals = scaledot.attention_with_vitals(
            query, key, value, is_causal=is_causal, backend=backend, per_row=True
        )
        fields = [getattr(vitals, n) for n in FLOAT_FIELDS + COUNT_FIELDS]
        return [out, *fields, *vitals.per_row]

    first = once()
    for _ in range(250):
        assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))


@needs_gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_repeat_where_determinism_is_asked_for(device, is_causal):
    query, key, value = (
        torch.randn(2, 4, 256, 64, dtype=torch.bfloat16, device=device) for _ in range(3)
    )
    weight = torch.randn_like(query)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            gradients(
                lambda *x: scaledot.attention(*x, is_causal=is_causal), (query, key, value), weight
            )
            for _ in range(51)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cuda_graph_replays_it(device, backend):
    query, key, value = (
        torch.randn(1, 2, 300, 64, dtype=torch.bfloat16, device=device) for _ in range(3)
    )

    def run():
        return scaledot.attention_with_vitals(query, key, value, is_causal=True, backend=backend)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, vitals = run()
    for tensor in (query, key, value):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    again, fresh = run()
    assert torch.equal(out, again)
    assert torch.equal(vitals.entropy, fresh.entropy)


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_waits_for_the_gpu(device, backend):
    query, key, value = (
        torch.randn(1, 2, 300, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(3)
    )
    lengths = torch.tensor([170], device=device)

    def step():
        out, _ = scaledot.attention_with_vitals(
            query, key, value, key_lengths=lengths, backend=backend
        )
        out.sum().backward()

    step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_side_stream_is_followed(device, backend):
    query = torch.randn(2, 4, 1024, 64, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        fresh = query * 2
        out = scaledot.attention(fresh, fresh, fresh, backend=backend)
    stream.synchronize()
    assert torch.equal(out, scaledot.attention(query * 2, query * 2, query * 2, backend=backend))


@needs_gpu
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_compile_keeps_one_graph(device, backend):
    def f(q, k, v):
        out, vitals = scaledot.attention_with_vitals(q, k, v, is_causal=True, backend=backend)
        return out * 2, vitals.entropy

    tensors = [
        torch.randn(1, 2, 200, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(3)
    ]
    out, entropy = torch.compile(f, fullgraph=True)(*tensors)
    expected, fresh = f(*tensors)
    torch.testing.assert_close(out, expected)
    assert torch.equal(entropy, fresh)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_heads_than_a_grid_has_rows(device, backend):
    query = torch.randn(70_001, 1, 3, 8, dtype=torch.bfloat16, device=device)
    out, vitals = scaledot.attention_with_vitals(query, query, query, backend=backend)
    some = query[69_998:].double()
    exact = torch.nn.functional.scaled_dot_product_attention(some, some, some)
    assert (out[69_998:].double() - exact).abs().max() < 0.05
    assert vitals.rows.sum() == 3 * 70_001


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_past_two_to_the_31(device, backend):
    """The last head of tensors of 2^31 elements and more."""
    tokens, width = 4096, 128
    heads = 2**31 // (tokens * width) + 3
    buffer = torch.empty(1, heads, tokens, width, dtype=torch.bfloat16, device=device)
    buffer[:, :2] = torch.randn_like(buffer[:, :2])
    buffer[:, 2:-1] = 0
    buffer[:, -1:] = buffer[:, :1]
    out, vitals = scaledot.attention_with_vitals(
        buffer, buffer, buffer, is_causal=True, backend=backend
    )
    assert torch.equal(out[:, -1], out[:, 0])
    assert vitals.entropy[0, -1] == vitals.entropy[0, 0]
    assert not torch.equal(out[:, 1], out[:, 0])
    del out, buffer
    torch.cuda.empty_cache()


@needs_gpu
def test_logsumexp_far_below_zero_keeps_gradients_finite(device):
    """cuDNN's backward is NaN there (pytorch#196678)."""
    for keys in (128, 130):
        query = torch.full((1, 1, keys, 64), 4.0, dtype=torch.bfloat16, device=device)
        key = -query
        value = torch.randn_like(query)
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        scaledot.attention(*leaves, backend=None).sum().backward()
        assert all(x.grad.isfinite().all() for x in leaves)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU here")
def test_a_second_gpu(device):
    query = torch.randn(1, 2, 100, 64, dtype=torch.bfloat16, device="cuda:1")
    out = scaledot.attention(query, query, query, backend="triton")
    assert out.device == query.device
    assert out.isfinite().all()
