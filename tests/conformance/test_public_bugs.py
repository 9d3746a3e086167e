"""One test for each class of bug that trusted attention kernels have had in public.

The number in a docstring counts the classes; the threads named beside it tell the story.
Classes that need a GPU (side streams, second devices, address arithmetic of a kernel) are tested
with the GPU backends.
"""

import math

import oracle
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector

import scaledot
from conformance.agreement import assert_output_agrees, assert_vitals_agree
from conformance.calls import Call, call

HALF_TYPES = [torch.bfloat16, torch.float16]
TYPES = [torch.float32, *HALF_TYPES]


def outputs(c: Call):
    """The output of both functions that have one."""
    return [
        scaledot.attention(*c.tensors, **c.keywords),
        scaledot.attention_with_vitals(*c.tensors, **c.keywords)[0],
    ]


def gradients(c: Call, function=scaledot.attention):
    leaves = [t.detach().clone().requires_grad_() for t in c.tensors]
    function(*leaves, **c.keywords).sum().backward()
    return [leaf.grad for leaf in leaves]


# --- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_fully_masked_rows_are_zero_and_poison_no_gradient(dtype, kind):
    """1: pytorch#41508, #103749, #103963, PR #131060."""
    mask = torch.rand(2, 1, 13, 17) < 0.7
    mask[0, :, 3] = False
    mask[1] = False
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
    c = call(dtype=dtype, attn_mask=mask)
    for out in outputs(c):
        assert (out[0, :, 3] == 0).all()
        assert (out[1] == 0).all()
        assert_output_agrees(out, *c.tensors, **c.keywords)
    grad_query, grad_key, grad_value = gradients(c)
    assert all(g.isfinite().all() for g in (grad_query, grad_key, grad_value))
    assert (grad_query[0, :, 3] == 0).all()
    assert all((g[1] == 0).all() for g in (grad_query, grad_key, grad_value))
    assert (grad_value[0] != 0).any()


@pytest.mark.parametrize("how", ["window", "bool", "float"])
def test_rows_whose_first_key_tiles_are_masked(how):
    """2: pytorch#127055, PR #130014; 600 tokens, each seeing the last 20."""
    far = torch.arange(600)[:, None] - torch.arange(600)
    near = (far >= 0) & (far < 20)
    keywords = {
        "window": {"window": (19, 0)},
        "bool": {"attn_mask": near},
        "float": {"attn_mask": torch.zeros(600, 600).masked_fill(~near, -math.inf)},
    }[how]
    c = call(lead=(1, 2), queries=600, keys=600, **keywords)
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors, attn_mask=near)
    assert all(g.isfinite().all() for g in gradients(c))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_of_the_lowest_bias_is_uniform(dtype):
    """3: pytorch#110213, #109517."""
    mask = torch.zeros(13, 17, dtype=dtype)
    mask[5] = torch.finfo(dtype).min
    c = call(dtype=dtype, attn_mask=mask)
    for out in outputs(c):
        torch.testing.assert_close(
            out[:, :, 5].float(), c.value.float().mean(-2), atol=8e-3, rtol=8e-3
        )
    assert all(g.isfinite().all() for g in gradients(c))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["bool", "float", "lengths"])
def test_bad_numbers_in_masked_keys_do_not_leak(bad, kind):
    """4: pytorch#101967."""
    hidden = torch.zeros(17, dtype=torch.bool)
    hidden[14:] = True
    keywords = {
        "bool": {"attn_mask": ~hidden},
        "float": {"attn_mask": torch.zeros(17).masked_fill(hidden, -math.inf)},
        "lengths": {"key_lengths": torch.tensor([14, 14])},
    }[kind]
    c = call(**keywords)
    clean = Call(c.query, c.key[..., :14, :].clone(), c.value[..., :14, :].clone())
    c.key[..., 15, :], c.value[..., 16, :] = bad, bad
    for out in outputs(c):
        assert_output_agrees(out, *clean.tensors)
    with_bad, without = gradients(c), gradients(clean)
    torch.testing.assert_close(with_bad[0], without[0], atol=1e-5, rtol=1e-5)
    for got, want in zip(with_bad[1:], without[1:], strict=True):
        torch.testing.assert_close(got[..., :14, :], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keys", [1, 2, 3, 4, 7, 16, 17, 65])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_query_stays_visible(keys, is_causal):
    """5: pytorch#141128, and what is left of it: with few keys torch 2.13 gives zeros on a CPU."""
    c = call(queries=5, keys=keys, is_causal=is_causal)
    c.query[0, 1, 2] = math.nan
    for out in outputs(c):
        assert out[0, 1, 2].isnan().all()
        assert out[0, 0].isfinite().all()
        assert out[0, 1, 3:].isfinite().all()


CAUSAL_SHAPES = [
    (1, 1),
    (1, 5),
    (5, 1),
    (2, 3),
    (3, 2),
    (4, 4),
    (5, 7),
    (7, 5),
    (1, 129),
    (129, 1),
    (64, 65),
    (65, 64),
    (63, 128),
]


@pytest.mark.parametrize("shape", CAUSAL_SHAPES, ids=str)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_causal_mask_is_aligned_as_named(shape, align):
    """6: flash-attention#282, #402, #517, #1778; NVIDIA/cutlass#2336. Masks spelled out."""
    queries, keys = shape
    shift = keys - queries if align == "bottom_right" else 0
    mask = torch.tensor([[j <= i + shift for j in range(keys)] for i in range(queries)])
    c = call(queries=queries, keys=keys, is_causal=True, causal_align=align)
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors, attn_mask=mask)
    if align == "top_left":
        theirs = scaled_dot_product_attention(*(t.double() for t in c.tensors), is_causal=True)
        torch.testing.assert_close(
            scaledot.attention(*c.tensors, is_causal=True).double(), theirs, atol=1e-5, rtol=1e-5
        )


# --- sizes of numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 65), (65, 65), (17, 129)], ids=str)
def test_every_logsumexp_below_minus_88(dtype, shape):
    """7: pytorch#196678, huggingface/trl#7181, cudnn-frontend#1072: exp(0 - lse) of padding."""
    queries, keys = shape
    c = call(lead=(1, 2), queries=queries, keys=keys, width=4, dtype=dtype)
    c.query.fill_(16.0).add_(torch.randint(0, 2, c.query.shape))
    c.key.fill_(-16.0).sub_(torch.randint(0, 2, c.key.shape))
    assert (scaledot.vitals(c.query, c.key, per_row=True).per_row.lse < -88).all()
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors)
    assert all(g.isfinite().all() for g in gradients(c))
    assert all(g.isfinite().all() for g in gradients(c.with_keywords(is_causal=True)))


@pytest.mark.parametrize("level", [-6e4, -1e6, 6e4, 1e6])
def test_every_logit_huge(level):
    """8: flashinfer#4267: a running maximum that starts at -5e4."""
    c = call(lead=(1, 2), queries=65, keys=129).with_keywords(
        attn_mask=torch.full((65, 129), level)
    )
    plain = call(lead=(1, 2), queries=1, keys=1, width=1, scale=1.0)
    plain.query.fill_(1.0)
    plain.key.fill_(level)
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors, **c.keywords)
    for out in outputs(plain):
        assert torch.equal(out, plain.value)
    assert (scaledot.vitals(plain.query, plain.key, scale=1.0).max_logit == level).all()


def test_masked_keys_lose_even_to_huge_negative_logits():
    """8 too: a finite stand-in for minus infinity would win here."""
    mask = torch.full((65, 129), -1e30)
    mask[:, 64:] = -math.inf
    c = call(lead=(1, 2), queries=65, keys=129, attn_mask=mask)
    visible = c.value[..., :64, :].mean(-2, keepdim=True).expand(1, 2, 65, 5)
    for out in outputs(c):
        torch.testing.assert_close(out, visible, atol=1e-5, rtol=1e-5)


def test_bfloat16_133120():
    """9: pytorch#121558: multiply-add of scale and maximum."""
    c = call(lead=(1, 1), queries=7, keys=5, width=8, dtype=torch.bfloat16)
    c.query.fill_(133120.0)
    for out in outputs(c):
        assert out.isfinite().all()
    c.key.fill_(133120.0)
    for out in outputs(c):
        torch.testing.assert_close(
            out.float(),
            c.value.float().mean(-2, keepdim=True).expand(1, 1, 7, 5),
            atol=1e-2,
            rtol=1e-2,
        )


def test_float16_scores_above_65504():
    """10: pytorch#119131, #160841: the product overflows before it is scaled."""
    c = call(lead=(1, 2), queries=7, keys=13, width=64, dtype=torch.float16)
    c.query.fill_(100.0)
    c.key.copy_(torch.randint(30, 50, c.key.shape))
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors)
    assert (scaledot.vitals(c.query, c.key, scale=1.0).max_logit > 65504).all()
    assert all(g.isfinite().all() for g in gradients(c))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("keys", [2047, 4096, 5003])
def test_equal_logits_of_a_long_row_share_evenly(dtype, keys):
    """11: huggingface/candle#3727, sonos/tract#2586: a sum of ones in 16 bits stops growing."""
    c = call(lead=(1, 1), queries=3, keys=keys, width=8, value_width=1, dtype=dtype)
    c.key.fill_(0.5)
    c.value.fill_(1.0)
    # Without the compiled kernel, torch's products of float32 add thousands of numbers in turn.
    allowed = 8 * torch.finfo(dtype).eps + keys**0.5 * torch.finfo(torch.float32).eps
    for out in outputs(c):
        assert (out.double() - 1).abs().max() <= allowed
    found = scaledot.vitals(c.query, c.key)
    assert found.top_p.item() == pytest.approx(1 / keys, rel=1e-5)
    assert found.entropy_ratio.item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("keys", [7, 129, 1301])
def test_probabilities_sum_to_one(dtype, keys):
    """12: flash-attention PR #2721: numerator and denominator rounded differently."""
    c = call(lead=(1, 2), queries=67, keys=keys, width=32, value_width=3, dtype=dtype)
    c.value.fill_(1.0)
    allowed = 4 * torch.finfo(dtype).eps + keys**0.5 * torch.finfo(torch.float32).eps
    for out in outputs(c):
        assert (out.double() - 1).abs().max() <= allowed
        assert (out.double() - 1).mean().abs() <= torch.finfo(dtype).eps


def test_key_blocks_merge_at_logits_of_ten_thousand():
    """13: TransformerEngine PR #716, NATTEN PR #202: exp(lse) overflows."""
    logits = torch.randn(5, 600).double() + torch.tensor(
        [1e4, -1e4, 9e3]
    ).double().repeat_interleave(200)
    whole = scaledot.RowState.from_logits(logits, torch.ones_like(logits, dtype=torch.bool))
    parts = [
        scaledot.RowState.from_logits(part, torch.ones_like(part, dtype=torch.bool))
        for part in logits.split(200, -1)
    ]
    for order in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]:
        merged = parts[order[0]].merge(parts[order[1]]).merge(parts[order[2]])
        for name in ("lse", "entropy", "sum_p2", "top_p", "max", "std"):
            torch.testing.assert_close(getattr(merged, name), getattr(whole, name), msg=name)
    torch.testing.assert_close(whole.lse, torch.logsumexp(logits, -1))


@pytest.mark.parametrize("scale", [-1.0, -0.125, 0.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scale_may_be_negative_or_zero(scale, is_causal):
    """36: pytorch#105190; and torch 2.13 gives NaN for a causal call on a CPU."""
    for queries, keys in [(4, 4), (1, 2), (3, 6), (65, 129)]:
        c = call(queries=queries, keys=keys, scale=scale, is_causal=is_causal)
        for out in outputs(c):
            assert_output_agrees(out, *c.tensors, **c.keywords)
        assert all(g.isfinite().all() for g in gradients(c))


# --- layouts and addresses -----------------------------------------------------------------------


def test_strides_of_value_and_mask_are_honoured():
    """14: pytorch#112577, FlagGems#5896, torch-spyre#4331, pytorch PR #187506."""
    query, key = torch.randn(2, 13, 3, 8).transpose(1, 2), torch.randn(2, 3, 8, 17).transpose(2, 3)
    value = torch.randn(2, 3, 17, 10)[..., ::2]
    mask = torch.randn(17, 13).t()
    for out in outputs(Call(query, key, value, {"attn_mask": mask})):
        assert_output_agrees(out, query, key, value, attn_mask=mask)


def test_stride_of_a_single_entry_means_nothing():
    """15: pytorch#116333."""
    query = torch.randn(5 * 8).as_strided((1, 1, 5, 8), (99990001, 7, 8, 1))
    key = torch.randn(8).as_strided((1, 1, 1, 8), (3, 99990001, 5, 1))
    for tensors in [(query, key, key), (query, query, query), (key, query, query)]:
        for out in outputs(Call(*tensors)):
            assert_output_agrees(out, *tensors)


def test_expanded_tensors_are_read_as_expanded():
    """16: a stride of 0 in mask, key or value taken for contiguous memory."""
    query = torch.randn(2, 3, 5, 8)
    key, value = (
        torch.randn(1, 1, 7, 8).expand(2, 3, 7, 8),
        torch.randn(2, 3, 1, 4).expand(2, 3, 7, 4),
    )
    mask = torch.randn(1, 1, 1, 7).expand(2, 3, 5, 7)
    for out in outputs(Call(query, key, value, {"attn_mask": mask})):
        assert_output_agrees(out, query, key, value, attn_mask=mask)


def test_gradient_of_the_output_may_have_any_layout():
    """17: flash-attention's test_flash_attn_bwd_transpose."""
    c = call(queries=7, keys=5)
    leaves = [t.requires_grad_() for t in c.tensors]
    flat = torch.randn(2, 7, 5, 3)
    for grad in (flat.permute(0, 3, 1, 2), torch.ones(()).expand(2, 3, 7, 5)):
        got = torch.autograd.grad(scaledot.attention(*leaves), leaves, grad)
        want = torch.autograd.grad(scaledot.attention(*leaves), leaves, grad.contiguous())
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_offsets_past_two_to_the_31():
    """18, 19: SageAttention#386, fla#1080, NATTEN#347, vllm#50427, pytorch#162588: int32."""
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16)  # pages that nobody touches cost nothing
    small = torch.randn(1, 1, 3, 8).to(torch.bfloat16)
    view = far.as_strided((1, 1, 3, 8), (8, 8, 2**30, 1))
    view.copy_(small)
    for out in outputs(Call(view, view, view)):
        assert_output_agrees(out, small, small, small)


@pytest.mark.parametrize("lead", [(65537, 1), (1, 65537)], ids=str)
def test_batch_and_head_counts_past_65535(lead):
    """20: pytorch#142228, #146704; xformers#845; flash-attention#1812."""
    c = call(lead=lead, queries=1, keys=2, width=2, value_width=2)
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors)


@pytest.mark.parametrize("zero", ["batch", "heads", "queries", "keys", "width", "value_width"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_zero_sizes_neither_crash_nor_hang(zero, is_causal):
    """21: pytorch#174939, PR #195812; flash-attention PR #2568, #1537."""
    sizes = {"batch": 2, "heads": 3, "queries": 5, "keys": 7, "width": 4, "value_width": 3, zero: 0}
    c = call(lead=(sizes.pop("batch"), sizes.pop("heads")), **sizes, is_causal=is_causal)
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors, **c.keywords)
    assert all(g.isfinite().all() for g in gradients(c))


@pytest.mark.parametrize("keys", [0, 7])
@pytest.mark.parametrize("value_width", [0, 1, 11])
def test_output_has_the_width_of_the_value(keys, value_width):
    """22: pytorch#176767."""
    c = call(queries=5, keys=keys, width=8, value_width=value_width)
    for out in outputs(c):
        assert out.shape == (2, 3, 5, value_width)


# --- heads ---------------------------------------------------------------------------------------


def test_grouped_heads_are_interleaved_not_tiled():
    """23: onnx PR #7274: query heads 0 and 1 share key head 0."""
    query = torch.randn(1, 4, 3, 8)
    key, value = torch.randn(1, 2, 5, 8), torch.stack([torch.zeros(5, 2), torch.ones(5, 2)])[None]
    out = scaledot.attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([0.0, 0.0, 1.0, 1.0]))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_decoding_one_token_with_few_key_heads(key_heads, dtype):
    """24: pytorch#193893."""
    c = call(
        lead=(3, 8), key_heads=key_heads, queries=1, keys=517, width=64, value_width=64, dtype=dtype
    )
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors, **c.keywords)


# --- chance --------------------------------------------------------------------------------------


def test_dropout_follows_the_seed():
    """25: xformers#173: the address of the seed was the seed."""
    c = call(dropout_p=0.5)
    for function in (
        scaledot.attention,
        lambda *a, **k: scaledot.attention_with_vitals(*a, **k)[0],
    ):
        torch.manual_seed(5)
        first = function(*c.tensors, **c.keywords)
        second = function(*c.tensors, **c.keywords)
        torch.manual_seed(5)
        assert torch.equal(function(*c.tensors, **c.keywords), first)
        assert not torch.equal(first, second)


def test_dropout_of_zero_draws_nothing():
    """26: flash-attention#165, #379; pytorch PR #101280."""
    c = call()
    before = torch.get_rng_state()
    outputs(c)
    scaledot.vitals(c.query, c.key)
    gradients(c)
    assert torch.equal(torch.get_rng_state(), before)


def test_runs_are_bitwise_equal():
    """29: flash-attention#414, #429, #746, #2244."""
    c = call(lead=(2, 4), queries=131, keys=257, width=32)
    for keywords in [{}, {"is_causal": True}, {"softcap": 3.0}, {"window": (50, 3)}]:
        first = scaledot.attention_with_vitals(*c.tensors, **keywords, per_row=True)
        first_gradients = gradients(c.with_keywords(**keywords))
        for _ in range(10):
            again = scaledot.attention_with_vitals(*c.tensors, **keywords, per_row=True)
            assert torch.equal(first[0], again[0])
            for name in (*oracle.FLOAT_FIELDS, *oracle.COUNT_FIELDS):
                assert torch.equal(getattr(first[1], name), getattr(again[1], name)), name
            for a, b in zip(first_gradients, gradients(c.with_keywords(**keywords)), strict=True):
                assert torch.equal(a, b)


def test_deterministic_algorithms_flag_is_honoured():
    """29 too: the flag must be accepted and change nothing that was already deterministic."""
    c = call(is_causal=True)
    expected = parameters_to_vector(gradients(c))
    torch.use_deterministic_algorithms(True)
    try:
        found = parameters_to_vector(gradients(c))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, expected)


# --- the machinery around ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keywords", [{}, {"is_causal": True}, {"softcap": 2.0}, {"window": (2, 1)}], ids=str
)
def test_double_backward_is_right_or_refused(keywords):
    """31: pytorch#116350, #181177."""
    c = call(lead=(1, 2), queries=3, keys=5, width=4, value_width=3, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in c.tensors]

    def second(function):
        grads = torch.autograd.grad(
            function(*leaves, **keywords).sin().sum(), leaves, create_graph=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    try:
        found = second(scaledot.attention)
    except (RuntimeError, NotImplementedError):
        return
    for got, want in zip(found, second(oracle.attend), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", ["plain", "tokens_first"])
def test_fake_tensors_have_the_strides_of_real_ones(layout):
    """32: pytorch#146848, AMD Primus-Turbo PR #362. More layouts in test_transforms.py."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    c = call(queries=5, keys=5)
    tensors = [
        t.transpose(1, 2).contiguous().transpose(1, 2) if layout == "tokens_first" else t
        for t in c.tensors
    ]
    real = scaledot.attention(*tensors)
    with FakeTensorMode() as mode:
        fake = scaledot.attention(*(mode.from_tensor(t) for t in tensors))
    assert fake.shape == real.shape
    assert fake.stride() == real.stride()


@pytest.mark.compile
def test_second_compiled_call_with_another_shape_or_mask():
    """33: pytorch#109607, #139424, #148545."""
    torch._dynamo.reset()
    compiled = torch.compile(scaledot.attention, fullgraph=True, backend="aot_eager", dynamic=None)
    for queries, keys in [(5, 7), (13, 7), (13, 17), (7, 65)]:
        for mask in (
            torch.rand(queries, keys) < 0.7,
            torch.rand(1, keys).expand(queries, keys) < 0.7,
        ):
            c = call(queries=queries, keys=keys)
            assert_output_agrees(compiled(*c.tensors, attn_mask=mask), *c.tensors, attn_mask=mask)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_float32_mask_with_16_bit_inputs(dtype):
    """34: pytorch#99012, #111276, #161489; jax#32242."""
    mask = torch.randn(13, 17)
    mask[:, 3] = -math.inf
    c = call(dtype=dtype, attn_mask=mask)
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors, **c.keywords)
    full = call(attn_mask=mask)
    with torch.autocast("cpu", dtype=dtype):
        out = scaledot.attention(*full.tensors, attn_mask=mask)
    low = [t.to(dtype) for t in full.tensors]
    assert out.dtype == dtype
    assert_output_agrees(out, *low, attn_mask=mask)


@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0)], ids=str
)
def test_vmap_of_partly_batched_inputs(in_dims):
    """35: pytorch#110525, #102457, PR #133964."""
    c = call(lead=(2, 3), queries=5, keys=7)
    tensors = [t if dim == 0 else t[0] for t, dim in zip(c.tensors, in_dims, strict=True)]
    out = torch.vmap(scaledot.attention, in_dims)(*tensors)
    assert_output_agrees(out, *(t if t.dim() == 4 else t[None] for t in tensors))


@pytest.mark.parametrize("keys", [1, 127, 128, 129, 255, 383, 511])
def test_lengths_that_are_no_multiple_of_a_tile(keys):
    """37: pytorch#153799, #136232, #163588."""
    c = call(lead=(1, 2), queries=keys, keys=keys, is_causal=True)
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors, is_causal=True)


# --- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hide", ["lengths", "bool", "float", "lowest"])
def test_statistics_ignore_padding(hide):
    """38: TransformerEngine PR #2819: the maximum counted padding tokens."""
    lengths = torch.tensor([11, 5])
    seen = torch.arange(17) < lengths[:, None, None, None]
    keywords = {
        "lengths": {"key_lengths": lengths},
        "bool": {"attn_mask": seen},
        "float": {"attn_mask": torch.zeros(seen.shape).masked_fill(~seen, -math.inf)},
        "lowest": {
            "attn_mask": torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        },
    }[hide]
    c = call(**keywords)
    c.key[0, :, 11:] = 1e4
    c.key[1, :, 5:] = -1e4
    found = scaledot.vitals(c.query, c.key, **keywords)
    assert_vitals_agree(found, oracle.diagnose(c.query, c.key, **keywords))
    for row, length in enumerate(lengths.tolist()):
        alone = oracle.diagnose(c.query[row], c.key[row, :, :length])
        torch.testing.assert_close(
            found.max_logit[row].double(), alone.max_logit, atol=1e-5, rtol=1e-5
        )


def test_largest_logit_of_a_head_may_be_negative():
    """39: Megatron-LM PR #7382: a maximum at or below zero broke the clipping."""
    query, key = torch.full((1, 2, 5, 4), 1.0), torch.full((1, 2, 7, 4), -2.0)
    query[0, 1] = 0.0
    found = scaledot.vitals(query, key)
    assert found.max_logit.tolist() == [[-4.0, 0.0]]


# --- where torch 2.13 itself errs on a CPU -------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("shape", [(4, 4), (1, 2), (3, 6)], ids=str)
def test_causal_call_with_a_scale_of_zero_or_less_is_right(scale, shape):
    """Torch gives rows of NaN."""
    c = call(queries=shape[0], keys=shape[1], is_causal=True, scale=scale)
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors, **c.keywords)


@pytest.mark.parametrize("keys", [3, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_nan_query_with_few_keys_is_not_hidden_as_zeros(keys, dtype):
    """Torch gives [0, 0, 0]."""
    c = call(queries=3, keys=keys, dtype=dtype)
    c.query[1, 2, 0, 3] = math.nan
    for out in outputs(c):
        assert out[1, 2, 0].isnan().all()


@pytest.mark.parametrize("value_keys", [6, 8])
@pytest.mark.parametrize("lead", [(3,), (2, 3)], ids=str)
def test_key_and_value_of_unequal_length_are_refused(value_keys, lead):
    """Torch reads past the end of `key`, or drops keys."""
    query, key, value = (
        torch.randn(*lead, 5, 8),
        torch.randn(*lead, 7, 8),
        torch.randn(*lead, value_keys, 8),
    )
    for function in (scaledot.attention, scaledot.attention_with_vitals):
        with pytest.raises(ValueError, match="value"):
            function(query, key, value)


@pytest.mark.parametrize("lead", [(3,), (2, 3)], ids=str)
def test_mask_with_causality_means_the_same_in_every_rank(lead):
    """Torch applies both in 4-D and raises in 3-D, against its own documentation."""
    mask = torch.rand(13, 17) < 0.7
    c = call(lead=lead, attn_mask=mask, is_causal=True)
    both = mask & torch.ones(13, 17, dtype=torch.bool).tril()
    for out in outputs(c):
        assert_output_agrees(out, *c.tensors, attn_mask=both)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_mask_of_one_dimension_broadcasts(lead):
    """Torch raises IndexError."""
    for mask in (torch.rand(17) < 0.7, torch.randn(17), torch.tensor([True])):
        c = call(lead=lead, attn_mask=mask)
        for out in outputs(c):
            assert_output_agrees(out, *c.tensors, **c.keywords)


def test_grouped_key_and_value_of_unequal_heads_are_right_or_refused():
    """Torch's documentation forbids it, its code computes it."""
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 2, 7, 4)
    for function in (
        scaledot.attention,
        lambda *a, **k: scaledot.attention_with_vitals(*a, **k)[0],
    ):
        try:
            out = function(query, key, value, enable_gqa=True)
        except ValueError as refusal:
            assert "value" in str(refusal)  # noqa: PT017 (refusing is a right answer too)
            continue
        assert_output_agrees(out, query, key, value, enable_gqa=True)


def test_meta_tensors_have_the_strides_of_real_ones():
    """Torch's meta device ignores tokens-first layouts."""
    tensors = [torch.randn(2, 5, 3, 8).transpose(1, 2) for _ in range(3)]
    real = scaledot.attention(*tensors)
    meta = scaledot.attention(*(t.to("meta") for t in tensors))
    assert meta.shape == real.shape
    assert meta.stride() == real.stride()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch.func.jvp's own
def test_forward_mode_is_right_or_refused():
    """Torch has no forward-mode derivative for 4-D inputs."""
    c = call(lead=(1, 2), queries=3, keys=5, width=4, value_width=3, dtype=torch.float64)
    tangents = tuple(torch.randn_like(t) for t in c.tensors)
    try:
        found = torch.func.jvp(scaledot.attention, c.tensors, tangents)[1]
    except (RuntimeError, NotImplementedError):
        return
    torch.testing.assert_close(found, torch.func.jvp(oracle.attend, c.tensors, tangents)[1])


@pytest.mark.parametrize("keys", [3, 65])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_of_minus_infinity_is_visible(dtype, width, causal, keys):
    """torch's kernel takes logits that are all -inf for hidden ones, and gives zeros."""
    query, key, value = (torch.rand(1, 2, keys, width).to(dtype) for _ in range(3))
    query[:, 1, keys // 2] = -math.inf
    out = scaledot.attention(query, key, value, is_causal=causal)
    again, vitals = scaledot.attention_with_vitals(query, key, value, is_causal=causal)
    broken = torch.zeros_like(out, dtype=torch.bool)
    broken[:, 1, keys // 2] = True
    assert torch.equal(out.isnan(), broken)
    assert torch.equal(again.isnan(), broken)
    assert vitals.nonfinite.tolist() == [[0, 1]]


@pytest.mark.parametrize("keys", [3, 95])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_with_an_infinite_logit_is_visible(dtype, causal, keys):
    """Infinity minus infinity is NaN; torch's kernel gives zeros."""
    query, key, value = (torch.rand(1, 2, keys, 4).to(dtype) + 0.1 for _ in range(3))
    key[:, 1, 0] = math.inf
    out = scaledot.attention(query, key, value, is_causal=causal)
    again = scaledot.attention_with_vitals(query, key, value, is_causal=causal)[0]
    assert out[:, 1].isnan().all()
    assert again[:, 1].isnan().all()
    assert out[:, 0].isfinite().all()
