"""What only a GPU can show: right, repeatable and within its own memory, in odd layouts too.

Without a GPU nothing of this runs, and the reason of the skip says so. The same calls run small and
interpreted in the other files of this folder.
"""

import math

import oracle
import pytest
import torch

import scaledot

ON_GPU = torch.cuda.is_available()
HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not ON_GPU, reason="NOT TESTED: these need a GPU, there is none")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="NOT TESTED: these need a Hopper GPU")
BACKENDS = ["triton", pytest.param("hopper", marks=needs_hopper)]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def padded_rows(batch, heads, tokens, width, dtype, gap=5):
    """Of a buffer [batch, tokens, heads, width + gap]: strides that 16 bytes do not divide."""
    rows = torch.randn(batch, tokens, heads, width + gap, device="cuda").to(dtype)
    return rows[..., :width].transpose(1, 2)


def off_by_two_bytes(batch, heads, tokens, width, dtype):
    """Rows without gaps, the first of which begins one number behind an aligned address."""
    rows = torch.randn(batch * heads * tokens * width + 1, device="cuda").to(dtype)
    return rows[1:].view(batch, heads, tokens, width)


def plain_rows(batch, heads, tokens, width, dtype):
    return torch.randn(batch, heads, tokens, width, device="cuda").to(dtype)


LAYOUTS = [plain_rows, padded_rows, off_by_two_bytes]


def make(sizes, dtype, layout, seed=0):
    """query, key, value that ask for gradients, and a gradient of the output, none contiguous."""
    torch.manual_seed(seed)
    heads, groups, queries, keys, width, value_width = sizes
    tensors = (
        layout(1, heads, queries, width, dtype),
        layout(1, groups, keys, width, dtype),
        layout(1, groups, keys, value_width, dtype),
    )
    grad = layout(1, heads, queries, value_width, dtype)
    return [t.detach().requires_grad_() for t in tensors], grad


def exact_gradients(tensors, grad, **words):
    leaves = [t.detach().cpu().double().requires_grad_() for t in tensors]
    out = oracle.attend(*leaves, enable_gqa=True, **words)
    return out.detach(), torch.autograd.grad(out, leaves, grad.cpu().double())


def assert_gradients_agree(tensors, grad, backend="triton", **words):
    out = scaledot.attention(*tensors, enable_gqa=True, backend=backend, **words)
    found = torch.autograd.grad(out, tensors, grad)
    want, exact = exact_gradients(tensors, grad, **words)
    rounding = ROUNDING[out.dtype]
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *found), (want, *exact), strict=True):
        bound = 16 * rounding * (b.abs().max().item() + 1)
        error = (a.cpu().double() - b).abs().max().item()
        assert error <= bound, f"{name}: {error:.3g} is above {bound:.3g}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_illegal_address_of_narrow_queries_and_odd_values(layout):
    tensors, grad = make((9, 3, 55, 80, 13, 59), torch.float16, layout)
    for _ in range(5):
        assert_gradients_agree(tensors, grad, scale=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_the_query_that_changed_with_each_call(layout):
    tensors, grad = make((9, 3, 51, 80, 11, 33), torch.bfloat16, layout)
    for _ in range(5):
        assert_gradients_agree(tensors, grad, is_causal=True)


def hidden_keys(kind):
    """[5, 70] pairs that are seen, and the arguments that hide the others."""
    i, j = torch.arange(5, device="cuda")[:, None], torch.arange(70, device="cuda")[None, :]
    if kind == "bool":
        seen = (j < 60).expand(5, 70)
        return seen, {"attn_mask": seen}
    if kind == "causal":
        return j <= i + 65, {"is_causal": True, "causal_align": "bottom_right"}
    seen = (j >= i + 56) & (j <= i + 65)
    return seen, {"window": (9, 0), "causal_align": "bottom_right"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["bool", "causal", "window"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_broken_keys_and_values_stay_hidden(dtype, bad, kind, backend):
    if backend == "hopper" and (kind == "bool" or dtype == torch.float32):
        return  # not its calls
    seen, words = hidden_keys(kind)
    at = torch.tensor([0, 57, 68, 69] if kind == "window" else [68, 69], device="cuda")
    blind = ~seen[:, at].any(1)
    assert blind.any()
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 8, device="cuda").to(dtype) for n in (5, 70, 70))

    def run(wants_vitals):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        if wants_vitals:
            out, vitals = scaledot.attention_with_vitals(
                *leaves, **words, backend=backend, per_row=True
            )
        else:
            out, vitals = scaledot.attention(*leaves, **words, backend=backend), None
        grad = torch.autograd.grad(out[:, :, blind].float().sum(), leaves)[0]
        return out[:, :, blind], grad[:, :, blind], vitals, out

    clean = [run(wants) for wants in (False, True)]
    key[:, :, at], value[:, :, at] = bad, bad
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for wants, before in zip((False, True), clean, strict=True):
        after = run(wants)
        torch.testing.assert_close(after[0], before[0], **tolerance)
        assert after[3][:, :, ~blind].isnan().all() or bad == math.inf
        if backend == "triton":  # the gradients of a causal call may be torch's
            torch.testing.assert_close(after[1], before[1], **tolerance)
        if wants:
            for name in ("max_logit", "lse", "entropy", "top_p", "sum_p2"):
                found, wanted = (getattr(vitals.per_row, name) for vitals in (after[2], before[2]))
                torch.testing.assert_close(
                    found[:, :, blind], wanted[:, :, blind], rtol=1e-5, atol=1e-5
                )


@needs_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_broken_value_reaches_no_earlier_row_of_a_long_call(dtype, width, causal):
    """Of many tiles: those before the broken key, its own, and those after it."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 700, width, device="cuda").to(dtype) for _ in range(3))
    words = {"is_causal": True} if causal else {"window": (100, 50)}
    clean = scaledot.attention(query, key, value, **words, backend="hopper")
    value[1, 2, 333, 5], key[0, 1, 471] = math.nan, math.nan
    out, vitals = scaledot.attention_with_vitals(
        query, key, value, **words, backend="hopper", per_row=True
    )
    i = torch.arange(700, device="cuda")
    if causal:
        sees_value, sees_key = i >= 333, i >= 471
    else:
        sees_value = (i >= 333 - 50) & (i <= 333 + 100)
        sees_key = (i >= 471 - 50) & (i <= 471 + 100)
    broken = torch.zeros_like(clean, dtype=torch.bool)
    broken[1, 2, sees_value, 5] = True
    broken[0, 1, sees_key] = True
    assert torch.equal(out.isnan(), broken)
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out[~broken], clean[~broken], **tolerance)
    assert vitals.nonfinite[0, 1] == sees_key.sum()
    assert vitals.nonfinite.sum() == sees_key.sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entry", [133120.0, 60000.0, 1e6, 1e9])
@pytest.mark.parametrize("keys", [1, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_entries_so_large_that_a_pivot_has_no_digits_left(dtype, keys, entry, backend, causal):
    """Every score is the same, so every output is the mean of the values: the entry itself."""
    if dtype == torch.float16 and entry > 65504:
        return
    for width in (8, 64, 128):
        query, key, value = (
            torch.full((1, 2, n, width), entry, device="cuda").to(dtype) for n in (5, keys, keys)
        )
        value = torch.randn_like(value)
        words = {"is_causal": causal, "causal_align": "bottom_right", "backend": backend}
        if causal and keys < 5:
            words["causal_align"] = "top_left"
        out, vitals = scaledot.attention_with_vitals(query, key, value, **words)
        plain = scaledot.attention(query, key, value, **words)
        seen = torch.ones(5, keys, device="cuda").tril(keys - 5 if keys >= 5 else 0)
        weights = (seen if causal else torch.ones_like(seen)).double()
        want = weights / weights.sum(1, keepdim=True) @ value.double()
        for found in (out, plain):
            error = (found.double() - want).abs().max().item()
            assert error <= 8 * ROUNDING[dtype], (width, error)
        assert (vitals.nonfinite == 0).all()
        rows = weights.sum(1)
        entropy = rows.log().mean().item()
        assert (vitals.entropy - entropy).abs().max() <= 1e-3


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("mask_type", ["own", torch.float32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(5, 70, 8), (33, 33, 64), (130, 300, 128), (3, 5, 16)])
def test_a_row_whose_bias_is_the_lowest_number_everywhere(sizes, dtype, mask_type, backend):
    """As on a CPU."""
    queries, keys, width = sizes
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, width).to(dtype) for n in (queries, keys, keys))
    kind = dtype if mask_type == "own" else mask_type
    for shape in ((queries, keys), (1, 2, queries, keys)):
        mask = torch.zeros(shape, dtype=kind)
        mask[..., 2, :] = torch.finfo(kind).min
        want = scaledot.attention(query, key, value, attn_mask=mask, backend="cpu")
        there = [t.cuda() for t in (query, key, value, mask)]
        out = scaledot.attention(*there[:3], attn_mask=there[3], backend=backend)
        error = (out.cpu().double() - want.double()).abs().amax((0, 1, 3))
        assert error.max() <= max(16 * ROUNDING.get(dtype, 1e-14), 4e-3), error


SHAPES = [  # heads, key heads, queries, keys, width, width of values, causal
    (9, 3, 55, 80, 13, 59, False),
    (9, 3, 51, 80, 11, 33, True),
    (4, 4, 128, 128, 64, 64, False),
    (4, 4, 129, 127, 64, 64, True),
    (8, 2, 300, 513, 128, 128, True),
    (2, 1, 1, 700, 128, 64, False),
    (3, 3, 257, 257, 40, 8, True),
    (3, 1, 200, 333, 17, 8, False),
    (2, 2, 190, 190, 256, 256, True),
    (1, 1, 64, 1000, 72, 72, False),
    (5, 5, 33, 65, 1, 1, True),
    (6, 3, 100, 100, 96, 96, False),
    (2, 2, 70, 70, 130, 20, True),
    (2, 1, 31, 31, 300, 40, False),
    (1, 1, 17, 17, 24, 520, True),
    (16, 16, 128, 512, 32, 32, True),
    (2, 2, 1030, 1030, 64, 64, True),
    (2, 2, 1030, 1030, 128, 128, False),
    (4, 1, 5, 3000, 8, 8, False),
    (7, 7, 77, 77, 80, 80, True),
]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_the_same_bits_in_every_repeat(number):
    """250 forward passes with vitals, 50 of our own backward; layouts by turns."""
    *sizes, causal = SHAPES[number]
    dtype = (torch.bfloat16, torch.float16, torch.float32)[number % 3]
    layout = LAYOUTS[number % len(LAYOUTS)]
    tensors, grad = make(sizes, dtype, layout, seed=number)
    backends = ["triton"]
    if HOPPER and dtype != torch.float32 and sizes[4] % 8 == 0 == sizes[5] % 8:
        backends += ["hopper"] if max(sizes[4:]) <= 256 else []
    words = {"enable_gqa": True, "is_causal": causal}
    assert_gradients_agree(tensors, grad, is_causal=causal)
    torch.use_deterministic_algorithms(True)  # our own backward, never torch's
    try:
        for backend in backends:
            with torch.no_grad():
                first = scaledot.attention_with_vitals(*tensors, **words, backend=backend)
                same = torch.ones((), dtype=torch.bool, device="cuda")
                for _ in range(249):
                    out, vitals = scaledot.attention_with_vitals(*tensors, **words, backend=backend)
                    same &= (out == first[0]).all()
                    for name in ("max_logit", "entropy", "logit_std", "sum_p2", "q_rms"):
                        same &= (getattr(vitals, name) == getattr(first[1], name)).all()
            assert same, backend
        out = scaledot.attention(*tensors, **words, backend="triton")
        once = torch.autograd.grad(out, tensors, grad, retain_graph=True)
        for _ in range(49):
            again = torch.autograd.grad(out, tensors, grad, retain_graph=True)
            for a, b in zip(once, again, strict=True):
                same &= (a == b).all()
        assert same
    finally:
        torch.use_deterministic_algorithms(False)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "causal"),
    [(96, 128, 64, False), (150, 128, 128, True), (70, 64, 256, False), (300, 128, 80, True)],
)
def test_the_first_key_s_share_where_one_full_tile_is_all(dtype, queries, keys, width, causal):
    """Some rows meet exactly one tile of keys and see all of it."""
    query = 3 * torch.randn(1, 2, queries, width, device="cuda").to(dtype)
    key = torch.randn(1, 2, keys, width, device="cuda").to(dtype)
    found = scaledot.vitals(query, key, is_causal=causal, backend="hopper")
    exact = oracle.diagnose(query.cpu(), key.cpu(), is_causal=causal)
    torch.testing.assert_close(found.sink.cpu().double(), exact.sink, rtol=1e-4, atol=1e-6)
    counts = queries, keys
    ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in counts]
    rows = [torch.cat([x[0].transpose(0, 1)] * 2) for x in (query, key)]
    packed = scaledot.vitals_varlen(*rows, *ends, is_causal=causal, backend="hopper")
    for sequence in range(2):
        sink = packed.sink[sequence].cpu().double()
        torch.testing.assert_close(sink, exact.sink[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"window": (9, 4)}], ids=str)
def test_a_row_whose_logits_are_all_minus_infinity_has_no_softmax(backend, dtype, words):
    query, key, value = (torch.rand(1, 2, 170, 64, device="cuda").to(dtype) for _ in range(3))
    query[:, 1, 40] = -math.inf
    broken = torch.zeros(1, 2, 170, dtype=torch.bool, device="cuda")
    broken[:, 1, 40] = True
    out = scaledot.attention(query, key, value, **words, backend=backend)
    again, vitals = scaledot.attention_with_vitals(
        query, key, value, **words, backend=backend, per_row=True
    )
    for found in (out, again):
        assert torch.equal(found.isnan().all(-1), broken)
        assert torch.equal(found.isnan().any(-1), broken)
    assert vitals.nonfinite.tolist() == [[0, 1]]
    assert torch.equal(vitals.per_row.lse.isnan(), broken)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("at", [9, 75, 140])
def test_a_value_that_no_row_sees_breaks_none(backend, at):
    query = torch.randn(1, 2, 8, 64, device="cuda").half()
    key, value = (torch.randn(1, 2, 150, 64, device="cuda").half() for _ in range(2))
    clean = scaledot.attention(query, key, value, is_causal=True, backend=backend)
    value[:, :, at] = -math.inf
    out = scaledot.attention(query, key, value, is_causal=True, backend=backend)
    torch.testing.assert_close(out, clean, rtol=2**-9, atol=2**-9)
