"""Gradients of the portable kernels against float64 autograd through dense matrices."""

import math

import pytest
import torch
import triton
import triton.language as tl
from dense_rows import attend

import scaledot
from scaledot.backends.cuda.arguments import Dropout
from scaledot.backends.cuda.backward import Config, backward, config_for
from scaledot.backends.cuda.forward import Config as ForwardConfig
from scaledot.backends.cuda.forward import forward
from scaledot.backends.cuda.logits import keeps
from scaledot.backends.inputs import Inputs, Wanted
from scaledot.problem import Settings

SMALL = Config(16, 16, 16, 16, 4, 1)
INF = math.inf
Q, K, D, V = 19, 35, 13, 11
FLOATS = ("query", "key", "value", "mask", "head_scale", "sinks")


def make(device, dtype=torch.float64, batch=1, heads=1, groups=1, size=(Q, K, D, V), **extra):
    queries, keys, width, value_width = size
    query = torch.randn(batch, heads, queries, width).to(device, dtype)
    key = torch.randn(batch, groups, keys, width).to(device, dtype)
    value = torch.randn(batch, groups, keys, value_width).to(device, dtype)
    extra = {name: t.to(device) for name, t in extra.items()}
    return Inputs(query, key, value, *[None] * 8)._replace(**extra)


def settings(**changes):
    plain = Settings(D**-0.5, False, 0.0, 0.0, None, None, False)
    return plain._replace(**changes)


def gradients(inputs, setting, grad_out, config=SMALL):
    """Forward into memory full of NaN, then backward; everything that can be wanted."""
    out = inputs.query.new_full(grad_out.shape, math.nan)
    tiles = ForwardConfig(16, 16, 4, 1)
    lse, _ = forward(inputs, setting, out, False, config=tiles)
    wanted = Wanted(
        mask=inputs.mask is not None and inputs.mask.dtype != torch.bool,
        head_scale=inputs.head_scale is not None,
        sinks=inputs.sinks is not None,
        weight=False,
    )
    return backward(inputs, setting, grad_out, out, lse, wanted, config)


def assert_agrees(inputs, setting, grad_out=None, config=SMALL, keep=None):
    """Every gradient within the rounding of the type that computes it."""
    dtype = inputs.query.dtype
    shape = (*inputs.query.shape[:3], inputs.value.shape[-1])
    if grad_out is None:
        grad_out = torch.randn(shape).to(inputs.query)
    found = gradients(inputs, setting, grad_out, config)
    leaves = {
        name: tensor.detach().double().clone().requires_grad_()
        for name in FLOATS
        if (tensor := getattr(inputs, name)) is not None and tensor.dtype != torch.bool
    }
    want = attend(inputs._replace(**leaves), setting, keep).out
    exact = torch.autograd.grad(want, list(leaves.values()), grad_out.double())
    for name, gradient in zip(leaves, exact, strict=True):
        got, tensor = getattr(found, name), getattr(inputs, name)
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype), name
        terms = max(tensor.numel(), inputs.query.numel()) / max(tensor.numel(), 1)
        size = gradient.abs().max().item() + 1 if gradient.numel() else 1.0
        bound = 16 * torch.finfo(dtype).eps * size * max(math.sqrt(terms), 1)
        error = (got.double() - gradient).abs().max().item() if gradient.numel() else 0.0
        assert error <= bound, f"{name}: {error:.3g} is above {bound:.3g}"
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"right": 0}, {"left": 5, "right": 3, "bottom_right": True}, {"softcap": 1.5, "right": 2}],
    ids=str,
)
def test_query_key_and_value(device, changes):
    assert_agrees(make(device), settings(**changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type(device, dtype):
    assert_agrees(make(device, dtype), settings(left=5, right=3, bottom_right=True, softcap=1.5))


@pytest.mark.parametrize("queries", [1, 16, 17])
@pytest.mark.parametrize("keys", [1, 33])
def test_lengths_around_a_tile(device, queries, keys):
    inputs = make(device, size=(queries, keys, 16, 16))
    assert_agrees(inputs, settings(right=0, bottom_right=True))
    assert_agrees(inputs, settings(left=0))


def test_a_key_head_sums_over_its_query_heads(device):
    inputs = make(device, heads=6, groups=2, size=(5, 7, 8, 4))
    assert_agrees(inputs._replace(head_scale=torch.randn(1, 6).to(inputs.query)), settings())


@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_scales_that_are_not_positive(device, scale):
    assert_agrees(make(device), settings(scale=scale, right=0))


@pytest.mark.parametrize("shared", [True, False])
def test_scale_and_sinks_of_each_head(device, shared):
    entries = 1 if shared else 2
    head_scale, sinks = (torch.randn(2, entries, 2, dtype=torch.float64)).unbind()
    inputs = make(device, batch=2, heads=2, head_scale=head_scale, sinks=sinks)
    assert_agrees(inputs, settings(scale=0.6, right=0))


@pytest.mark.parametrize("masked", [False, True])
def test_log_n(device, masked):
    extra = {"mask": torch.rand(1, 1, Q, K) > 0.4} if masked else {}
    assert_agrees(make(device, **extra), settings(log_n=True, right=0))


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((2, 2, Q, K), {"right": 0}),
        ((1, 2, Q, 1), {"right": 0}),
        ((2, 1, 1, K), {"softcap": 2.0}),
        ((1, 1, 1, 1), {}),
    ],
    ids=str,
)
def test_a_bias_of_every_broadcast_shape(device, shape, changes):
    bias = torch.randn(shape, dtype=torch.float64)
    if shape[2] > 1 and shape[3] > 1:
        bias[..., 3] = -INF
        bias[:, :, 7] = -INF
    found = assert_agrees(make(device, batch=2, heads=2, mask=bias), settings(**changes))
    assert (found.mask[bias.to(device) == -INF] == 0).all()


def test_a_bool_mask(device):
    mask = torch.rand(1, 1, Q, K) > 0.3
    mask[:, :, 5] = False
    found = assert_agrees(make(device, mask=mask), settings())
    assert (found.query[:, :, 5] == 0).all()


@pytest.mark.parametrize("changes", [{}, {"right": 0, "bottom_right": True}], ids=str)
def test_keys_past_their_length_are_never_read(device, changes):
    lengths = torch.tensor([0, K, 17])
    inputs = make(device, batch=3, key_lengths=lengths)
    grad_out = torch.randn(3, 1, Q, V).to(inputs.query)
    clean = assert_agrees(inputs, settings(**changes), grad_out)
    for b, length in enumerate(lengths.tolist()):
        inputs.key[b, :, length:] = math.nan
        inputs.value[b, :, length:] = math.nan
        assert (clean.key[b, :, length:] == 0).all()
        assert (clean.value[b, :, length:] == 0).all()
    again = gradients(inputs, settings(**changes), grad_out)
    for got, want in zip(again[:3], clean[:3], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("changes", [{"right": 0}, {"left": 7, "bottom_right": True}], ids=str)
def test_packed_sequences(device, changes):
    rows = torch.tensor([0, 2, 2, 19, 19, 19])
    keys = torch.tensor([0, 9, 12, 34, 34, K])
    inputs = make(device, cu_seqlens_q=rows, cu_seqlens_k=keys)
    assert_agrees(inputs, settings(**changes))


def test_a_bias_over_packed_sequences(device):
    rows, keys = torch.tensor([0, 2, 17, 19]), torch.tensor([0, 9, 18, K])
    for shape in ((1, 1, Q, K), (1, 1, 1, K)):
        bias = torch.randn(shape, dtype=torch.float64)
        assert_agrees(
            make(device, cu_seqlens_q=rows, cu_seqlens_k=keys, mask=bias), settings(right=0)
        )


def test_tokens_of_no_sequence_get_zero(device):
    ends = torch.tensor([0, 3, 12])
    found = assert_agrees(make(device, cu_seqlens_q=ends, cu_seqlens_k=ends), settings())
    for gradient in found[:3]:
        assert (gradient[:, :, 12:] == 0).all()
        assert (gradient[:, :, :12] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_that_see_nothing_poison_nobody(device, dtype):
    """NaN in such a row's query or in its incoming gradient goes nowhere."""
    inputs = make(device, dtype, size=(K, Q, D, V), sinks=torch.randn(1, 1, dtype=dtype))
    setting = settings(right=0, bottom_right=True)  # the first K - Q rows are blind
    grad_out = torch.randn(1, 1, K, V).to(inputs.query)
    clean = assert_agrees(inputs, setting, grad_out)
    inputs.query[:, :, : K - Q] = math.nan
    grad_out[:, :, : K - Q] = math.nan
    found = gradients(inputs, setting, grad_out)
    assert (found.query[:, :, : K - Q] == 0).all()
    for name in ("query", "key", "value", "sinks"):
        assert torch.equal(getattr(found, name), getattr(clean, name)), name


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, where it interprets tl.max
def test_a_broken_row_shows_in_the_keys_it_sees(device):
    inputs = make(device)
    inputs.query[0, 0, 17] = math.nan
    found = gradients(inputs, settings(right=0), torch.ones(1, 1, Q, V).to(inputs.query))
    assert found.query[0, 0, 17].isnan().all()
    assert found.key[0, 0, :18].isnan().all()
    assert (found.key[0, 0, 32:] == 0).all()  # tiles that hold no key the row sees


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_lse_far_below_zero(device, dtype):
    """pytorch#196678: a padded key that scores 0 has e^(0 - lse) = inf."""
    inputs = make(device, dtype, size=(9, 21, 16, 5))
    inputs.query.fill_(8.0)
    inputs.key.copy_(-8.0 - torch.rand(inputs.key.shape))
    found = gradients(inputs, settings(scale=2.0), torch.randn(1, 1, 9, 5).to(inputs.query))
    for gradient in found[:3]:
        assert gradient.isfinite().all()


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_layouts_of_the_inputs_and_of_what_comes_in(device, layout):
    inputs = make(device, batch=2, heads=2, groups=2, size=(5, 18, 8, 4))

    def lay(tensor):
        if layout == "transposed":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "strided":
            return torch.stack([tensor, tensor + 1], -1)[..., 0]
        return tensor[:1, :1, :1].expand_as(tensor)

    laid = inputs._replace(query=lay(inputs.query), key=lay(inputs.key), value=lay(inputs.value))
    laid = laid._replace(mask=lay(torch.randn(2, 2, 5, 18, dtype=torch.float64, device=device)))
    assert_agrees(laid, settings(), lay(torch.randn(2, 2, 5, 4).to(inputs.query)))


@pytest.mark.parametrize(
    "size", [(0, 5, 4, 3), (5, 0, 4, 3), (5, 7, 0, 3), (5, 7, 4, 0), (5, 1, 1, 1)], ids=str
)
def test_sizes_of_zero_and_one(device, size):
    inputs = make(device, size=size, sinks=torch.zeros(1, 1, dtype=torch.float64))
    assert_agrees(inputs, settings(left=2))


@pytest.mark.parametrize("widths", [(300, 40), (40, 300)])
def test_wide_heads_with_the_table_s_own_tiles(device, widths):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make(device, dtype, size=(5, 18, *widths))
        assert_agrees(inputs, settings(), config=config_for(inputs.query, max(widths)))


@pytest.mark.parametrize("widths", [(40, 11), (13, 40)])
def test_heads_too_wide_for_one_tile(device, widths, monkeypatch):
    """Three parts of sixteen columns, of which the narrower matrix has one."""
    monkeypatch.setattr("scaledot.backends.cuda.backward.WIDEST", {8: 16})
    bias = torch.randn(1, 1, 9, 1, dtype=torch.float64)
    scale = torch.randn(1, 2, dtype=torch.float64)
    inputs = make(device, heads=2, size=(9, 18, *widths), mask=bias, head_scale=scale)
    assert_agrees(inputs, settings(right=4))


@triton.jit
def _keep_kernel(out_ptr, seed_ptr, rate, queries, keys, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    head = tl.program_id(0)
    kept = keeps(Dropout(seed_ptr, rate, None), head, rows[:, None], rows[None, :])
    places = out_ptr + head * queries * keys + rows[:, None] * keys + rows[None, :]
    inside = (rows < queries)[:, None] & (rows < keys)[None, :]
    tl.store(places, kept.to(tl.float32), mask=inside)


@pytest.mark.parametrize("changes", [{}, {"right": 0, "left": 9}], ids=str)
def test_dropout_drops_the_same_pairs_again(device, changes):
    rate = 0.3
    inputs = make(device, batch=2, seed=torch.tensor(1234567890123))
    keep = torch.empty(2, 1, Q, K, device=device)
    _keep_kernel[(2,)](keep, inputs.seed, rate, Q, K, 64)
    assert 0 < keep.mean() < 1
    setting = settings(dropout_p=rate, **changes)
    assert_agrees(inputs, setting, keep=keep.double() / (1 - rate))


def test_the_same_bits_every_time(device):
    inputs = make(device, torch.float32, heads=2, mask=torch.randn(1, 1, 1, K))
    grad_out = torch.randn(1, 2, Q, V).to(inputs.query)
    one, two = (gradients(inputs, settings(right=3), grad_out) for _ in range(2))
    for name in ("query", "key", "value", "mask"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


def test_a_part_of_the_keys_has_its_share_of_gradients_far_from_zero(device):
    """Its rows' softmax is that of all keys, which nothing of the part may renew."""
    scales = torch.full((1, 4), 300.0, dtype=torch.float64)
    inputs = make(device, heads=4, groups=2, head_scale=scales)
    grad_out = torch.randn(*inputs.query.shape[:3], inputs.value.shape[-1]).to(inputs.query)
    out = torch.empty_like(grad_out)
    lse, _ = forward(inputs, settings(), out, False, config=ForwardConfig(16, 16, 4, 1))
    assert lse.abs().median() > 100.0
    wanted = Wanted(mask=False, head_scale=True, sinks=False, weight=False)

    def gradients_of(keys, **words):
        part = inputs._replace(key=inputs.key[:, :, keys], value=inputs.value[:, :, keys])
        return backward(part, settings(), grad_out, out, lse, wanted, SMALL, **words)

    whole = gradients_of(slice(None))
    left, right = (gradients_of(part, whole=False) for part in (slice(0, 7), slice(7, None)))
    torch.testing.assert_close(left.query + right.query, whole.query, rtol=1e-9, atol=1e-9)
    for name in ("key", "value"):
        parts = torch.cat([getattr(left, name), getattr(right, name)], 2)
        torch.testing.assert_close(parts, getattr(whole, name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [-1e9, torch.finfo(torch.float32).min])
def test_rows_whose_scores_a_bias_swallows(device, bias):
    """All their keys alike: of an lse of -1e9 float32 does not know how many those are."""
    sizes = ((8, 4), (8, 4), (8, 4))
    query, key, value = (torch.randn(1, 2, *size, device=device) for size in sizes)
    mask = torch.zeros(8, 8, device=device)
    mask[3:] = bias
    leaves = [x.requires_grad_() for x in (query, key, value, mask)]
    out = scaledot.attention(*leaves, backend="triton")
    found = torch.autograd.grad(out.square().sum(), leaves)
    plain = (query @ key.mT / 2 + mask).softmax(-1) @ value
    exact = torch.autograd.grad(plain.square().sum(), leaves)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("words", [{}, {"window": (2, 3)}], ids=str)
def test_scores_far_from_zero_leave_the_scale_s_gradient_alone(device, additive, words):
    """All values are alike, so no scale changes the output; what is left is rounding."""
    query, key = (torch.randn(1, 2, n, 6) for n in (9, 17))
    query[..., 0] = key[..., 0] = 5.0 if additive else 1000.0  # a score of 1e6, and some more
    value = torch.randn(1, 2, 1, 5).expand(1, 2, 17, 5)
    scale = torch.tensor([1.0, -0.7], device=device).requires_grad_()
    tensors = [t.to(device) for t in (query, key, value)]
    attend = scaledot.attention
    if additive:
        attend = scaledot.additive_attention
        tensors.append(torch.tensor([1e6, 1.0, 1.0, 1.0, 1.0, 1.0], device=device))
    out = attend(*tensors, scale=scale, backend="triton", **words)
    (grad,) = torch.autograd.grad(out.sum(), scale)
    assert grad.abs().max() < 1e-3
