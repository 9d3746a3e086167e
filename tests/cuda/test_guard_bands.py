"""Kernels read and write their own tensors only, whatever the lengths say.

Each tensor of a call lies between bands. With NaN in the bands and with zeros the call must give
the same bits, and the bands must stay as they were.
"""

import math

import pytest
import torch

import scaledot

ON_GPU = torch.cuda.is_available()
HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
BAND = 4096  # numbers; interpreted tiles reach no farther


def between_bands(tensor, device, fill):
    """The same tensor, as a view of a buffer with bands, and that buffer."""
    buffer = torch.full((tensor.numel() + 2 * BAND,), fill, dtype=tensor.dtype, device=device)
    inside = buffer[BAND:-BAND].view(tensor.shape)
    inside.copy_(tensor)
    return inside, buffer


def make(dtype, heads=2, groups=1, queries=19, keys=37, width=13, value_width=11):
    torch.manual_seed(0)
    sizes = (heads, queries, width), (groups, keys, width), (groups, keys, value_width)
    return [torch.randn(1, *size).to(dtype) for size in sizes]


def all_of(result):
    """The tensors of what a call gave."""
    out, vitals = result
    rows = vitals.per_row
    return [out, *rows, vitals.max_logit, vitals.entropy, vitals.logit_std, vitals.rows]


def call(device, fill, tensors, function, words, mask=None):
    placed = [between_bands(t, device, fill) for t in tensors]
    leaves = [t.detach().requires_grad_() for t, _ in placed]
    buffers = [buffer for _, buffer in placed]
    words = {n: w.to(device) if isinstance(w, torch.Tensor) else w for n, w in words.items()}
    if mask is not None:
        words["attn_mask"], buffer = between_bands(mask, device, fill)
        buffers.append(buffer)
    result = function(*leaves, **words, per_row=True)
    out = result[0]
    grad, buffer = between_bands(torch.linspace(-1, 1, out.numel()).view(out.shape), device, fill)
    grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    if ON_GPU:
        torch.cuda.synchronize()
    for buffer in buffers:
        for band in (buffer[:BAND], buffer[-BAND:]):
            assert (band.isnan() if math.isnan(fill) else band == fill).all()
    return [*all_of(result), *grads]


def assert_reads_its_own_only(device, tensors, function, words, mask=None):
    clean = call(device, 0.0, tensors, function, words, mask)
    found = call(device, math.nan, tensors, function, words, mask)
    for one, other in zip(clean, found, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    return clean


CALLS = {
    "plain": {},
    "causal": {"is_causal": True, "causal_align": "bottom_right"},
    "window": {"window": (5, 3)},
    "cap and sinks": {"softcap": 2.0, "sinks": torch.tensor([0.3, -0.2])},
    "lengths": {"key_lengths": torch.tensor([17])},
}
BACKENDS = ["triton", *(["hopper"] if HOPPER else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.bfloat16]
)
def test_odd_widths_and_every_kind_of_call(device, dtype, name, backend):
    words = {**CALLS[name], "backend": backend, "enable_gqa": True}
    tensors = make(dtype)
    if backend == "hopper":
        if dtype == torch.float32 or "softcap" in words:
            return  # not its calls
        tensors = make(dtype, width=24, value_width=40)
    assert_reads_its_own_only(device, tensors, scaledot.attention_with_vitals, words)


@pytest.mark.parametrize("shape", [(19, 37), (1, 37), (19, 1)])
def test_masks(device, shape):
    words = {"backend": "triton", "enable_gqa": True}
    tensors = make(torch.float32)
    mask = torch.randn(shape)
    assert_reads_its_own_only(device, tensors, scaledot.attention_with_vitals, words, mask)


@pytest.mark.one_case
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [-5, 0, 38, 2**31 - 1])
def test_a_wrong_key_length_gives_what_the_nearest_right_one_does(device, length, backend):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    tensors = make(dtype, width=16, value_width=8)
    words = {"backend": backend, "enable_gqa": True, "key_lengths": torch.tensor([length])}
    found = assert_reads_its_own_only(device, tensors, scaledot.attention_with_vitals, words)
    words["key_lengths"] = torch.tensor([min(max(length, 0), 37)])
    for one, other in zip(
        found, call(device, 0.0, tensors, scaledot.attention_with_vitals, words), strict=True
    ):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


HOSTILE = {
    "falling": [0, 15, 4, 19],
    "negative": [-7, -3, 10, 19],
    "past the end": [0, 12, 40, 1000],
    "far past the end": [0, 2**31 - 1, 5, 2**31 - 1],
    "short": [0, 2, 3, 4],
    "not from zero": [6, 9, 9, 19],
}


@pytest.mark.one_case
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_ends_of_packed_sequences_reach_nothing_else(device, name, causal, backend):
    """What they give is not checked: part of it is never written."""
    ends = torch.tensor(HOSTILE[name])
    others = torch.tensor(list(HOSTILE.values())[-2])
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    width = 16 if backend == "hopper" else 13
    torch.manual_seed(0)
    tensors = [torch.randn(19, 2, width).to(dtype) for _ in range(3)]
    pairs = ((ends, others), (ends, ends), (others, ends))
    for ends_q, ends_k in pairs[: 3 if ON_GPU else 1]:
        for fill in (0.0, math.nan)[: 2 if ON_GPU else 1]:
            words = {
                "cu_seqlens_q": ends_q,
                "cu_seqlens_k": ends_k,
                "is_causal": causal,
                "backend": backend,
            }
            call(device, fill, tensors, scaledot.attention_varlen_with_vitals, words)
