"""Strides: the numbers are what the view shows, wherever they lie in memory."""

import math

import oracle
import pytest
import torch

import scaledot
from conformance.agreement import assert_output_agrees, assert_vitals_agree


def _offset(b, h, n, d):
    return torch.randn(b * h * n * d + 7)[7:].view(b, h, n, d)


def _odd_single(b, h, n, d):
    """Strides of dimensions of size 1 are arbitrary numbers."""
    plain = torch.randn(b, h, n, d)
    strides = [
        99990001 if size == 1 else step
        for size, step in zip(plain.shape, plain.stride(), strict=True)
    ]
    return plain.as_strided(plain.shape, strides)


LAYOUTS = {
    "contiguous": lambda b, h, n, d: torch.randn(b, h, n, d),
    "tokens_first": lambda b, h, n, d: torch.randn(b, n, h, d).transpose(1, 2),
    "width_before_tokens": lambda b, h, n, d: torch.randn(b, h, d, n).transpose(2, 3),
    "width_outermost": lambda b, h, n, d: torch.randn(d, b, h, n).permute(1, 2, 3, 0),
    "reversed": lambda b, h, n, d: torch.randn(d, n, h, b).permute(3, 2, 1, 0),
    "heads_outside": lambda b, h, n, d: torch.randn(h, b, n, d).transpose(0, 1),
    "tokens_outside": lambda b, h, n, d: torch.randn(n, b, h, d).permute(1, 2, 0, 3),
    "packed_qkv": lambda b, h, n, d: torch.randn(b, n, 3, h, d)[:, :, 1].transpose(1, 2),
    "sliced_width": lambda b, h, n, d: torch.randn(b, h, n, d + 5)[..., 3 : d + 3],
    "sliced_tokens": lambda b, h, n, d: torch.randn(b, h, n + 5, d)[:, :, 2 : n + 2],
    "step_width": lambda b, h, n, d: torch.randn(b, h, n, 3 * d)[..., ::3],
    "step_tokens": lambda b, h, n, d: torch.randn(b, h, 2 * n, d)[:, :, ::2],
    "expanded_batch": lambda b, h, n, d: torch.randn(1, h, n, d).expand(b, h, n, d),
    "expanded_heads": lambda b, h, n, d: torch.randn(b, 1, n, d).expand(b, h, n, d),
    "expanded_tokens": lambda b, h, n, d: torch.randn(b, h, 1, d).expand(b, h, n, d),
    "expanded_width": lambda b, h, n, d: torch.randn(b, h, n, 1).expand(b, h, n, d),
    "one_number": lambda b, h, n, d: torch.randn(()).expand(b, h, n, d),
    "storage_offset": _offset,
    "overlapping": lambda b, h, n, d: torch.randn(b * h * (n + d)).as_strided(
        (b, h, n, d), (h * (n + d), n + d, 1, 1)
    ),
    "odd_single": _odd_single,
}

SHAPES = [(2, 3, 13, 17, 8, 5), (1, 1, 1, 1, 8, 8), (1, 3, 1, 67, 1, 1)]
KEYWORDS = [{}, {"is_causal": True}, {"softcap": 2.0, "window": (5, 1)}]


def assert_agrees(tensors, **keywords):
    out, vitals = scaledot.attention_with_vitals(*tensors, **keywords)
    expected = oracle.diagnose(*tensors[:2], **keywords)
    assert_output_agrees([out, scaledot.attention(*tensors, **keywords)], *tensors, **keywords)
    assert_vitals_agree(vitals, expected)
    assert_vitals_agree(scaledot.vitals(*tensors[:2], **keywords), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", ["query", "key", "value", "all"])
def test_layout_does_not_matter(role, layout):
    for b, h, queries, keys, width, value_width in SHAPES:
        sizes = {"query": (queries, width), "key": (keys, width), "value": (keys, value_width)}
        tensors = [
            LAYOUTS[layout if role in (name, "all") else "contiguous"](b, h, *size)
            for name, size in sizes.items()
        ]
        for keywords in KEYWORDS:
            assert_agrees(tensors, **keywords)


def gradients_at(function, tensors, grad, **keywords):
    """As a training step would ask for them: with respect to the views themselves."""
    views = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*views, **keywords), views, grad)


def with_vitals(*tensors, **keywords):
    return scaledot.attention_with_vitals(*tensors, **keywords)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", ["query", "key", "value", "all", "grad"])
@pytest.mark.parametrize("width", [5, 8])  # of the value: kernels may want that of the query
def test_layout_does_not_matter_for_gradients(width, role, layout):
    """A backward that reads memory instead of the view is wrong where the output is right."""
    make = {
        name: LAYOUTS[layout if role in (name, "all") else "contiguous"](2, 3, n, d)
        for name, n, d in [
            ("query", 13, 8),
            ("key", 17, 8),
            ("value", 17, width),
            ("grad", 13, width),
        ]
    }
    *tensors, grad = make.values()
    for keywords in [*KEYWORDS, {"attn_mask": torch.randn(13, 17)}]:
        plain = [t.detach().contiguous().double() for t in tensors]
        exact = gradients_at(oracle.attend, plain, grad.contiguous().double(), **keywords)
        for function in (scaledot.attention, with_vitals):
            found = gradients_at(function, tensors, grad, **keywords)
            for got, want in zip(found, exact, strict=True):
                torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layout_does_not_matter_in_16_bits(layout, dtype):
    tensors = []
    for n, d in [(13, 8), (17, 8), (17, 5)]:
        plain = LAYOUTS[layout](2, 3, n, d)
        # The same strides in the other type: convert the storage, not the view.
        storage = torch.empty(0).set_(plain.untyped_storage()).to(dtype)
        tensors.append(storage.as_strided(plain.shape, plain.stride(), plain.storage_offset()))
    for keywords in KEYWORDS:
        assert_agrees(tensors, **keywords)


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n not in ("overlapping",)])
def test_layout_does_not_matter_for_grouped_heads(layout):
    tensors = [torch.randn(2, 6, 13, 8), LAYOUTS[layout](2, 3, 17, 8), LAYOUTS[layout](2, 3, 17, 5)]
    for keywords in KEYWORDS:
        assert_agrees(tensors, enable_gqa=True, **keywords)


MASK_LAYOUTS = {
    "contiguous": lambda q, k: torch.randn(q, k),
    "transposed": lambda q, k: torch.randn(k, q).t(),
    "sliced": lambda q, k: torch.randn(q + 3, k + 9)[2 : q + 2, 5 : k + 5],
    "step_keys": lambda q, k: torch.randn(q, 2 * k)[:, ::2],
    "step_rows": lambda q, k: torch.randn(3 * q, k)[::3],
    "expanded_rows": lambda q, k: torch.randn(1, k).expand(q, k),
    "expanded_keys": lambda q, k: torch.randn(q, 1).expand(q, k),
    "one_number": lambda q, k: torch.randn(()).expand(q, k),
    "from_4d": lambda q, k: torch.randn(2, 3, q, k)[1, 2],
    "expanded_4d": lambda q, k: torch.randn(1, 1, q, k).expand(2, 3, q, k),
    "per_batch": lambda q, k: torch.randn(2, 1, 1, k).expand(2, 3, q, k),
    "per_head": lambda q, k: torch.randn(3, q, 1).expand(2, 3, q, k),
    "heads_last": lambda q, k: torch.randn(2, q, k, 3).permute(0, 3, 1, 2),
    "offset": lambda q, k: torch.randn(q * k + 3)[3:].view(q, k),
    "odd_single": lambda q, k: torch.randn(q * k).as_strided((1, 1, q, k), (99990001, 7, k, 1)),
    "relative": lambda q, k: torch.randn(q + k).as_strided((q, k), (1, 1)),
}


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("kind", ["bool", "float", "minus_inf"])
def test_layout_of_the_mask_does_not_matter(kind, layout):
    for queries, keys in [(13, 17), (1, 7), (65, 67)]:
        mask = MASK_LAYOUTS[layout](queries, keys)
        tensors = (
            torch.randn(2, 3, queries, 8),
            torch.randn(2, 3, keys, 8),
            torch.randn(2, 3, keys, 5),
        )
        if kind != "float":
            storage = torch.empty(0).set_(mask.untyped_storage())
            changed = (
                storage > -0.5 if kind == "bool" else storage.masked_fill(storage < -0.5, -math.inf)
            )
            mask = changed.as_strided(mask.shape, mask.stride(), mask.storage_offset())
        assert_agrees(tensors, attn_mask=mask)
        assert_agrees(tensors, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("name", ["scale", "sinks", "key_lengths"])
def test_layout_of_small_arguments_does_not_matter(name):
    tensors = torch.randn(2, 3, 13, 8), torch.randn(2, 3, 17, 8), torch.randn(2, 3, 17, 5)
    views = {
        "scale": [
            torch.randn(6)[::2],
            torch.randn(1).expand(3),
            torch.randn(5)[2:],
            torch.randn(3, 2)[:, 1],
        ],
        "sinks": [
            torch.randn(6)[::2],
            torch.randn(1).expand(3),
            torch.randn(5)[2:],
            torch.randn(3, 2)[:, 1],
        ],
        "key_lengths": [
            torch.tensor([3, 0, 17, 0])[::2],
            torch.tensor([9]).expand(2),
            torch.tensor([0, 4, 17])[1:],
        ],
    }[name]
    for view in views:
        assert_agrees(tensors, **{name: view})
        assert_agrees(tensors, **{name: view}, is_causal=True)


def test_packed_layout_does_not_matter():
    ends = torch.tensor([0, 5, 6, 13])
    packed = torch.randn(13, 3, 2, 8)
    query, key, value = packed.unbind(1)
    want = oracle.attend_packed(query, key, value, ends, ends, is_causal=True)
    torch.testing.assert_close(
        scaledot.attention_varlen(query, key, value, ends, ends, is_causal=True).double(),
        want,
        atol=1e-5,
        rtol=1e-5,
    )
    out, vitals = scaledot.attention_varlen_with_vitals(
        query, key, value, ends, ends, is_causal=True
    )
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    assert_vitals_agree(vitals, oracle.diagnose_packed(query, key, ends, ends, is_causal=True))


def test_reads_stay_inside_the_views():
    """The tensors lie in a sea of NaN: one number read beside them would show."""
    shapes = (2, 3, 63, 8), (2, 3, 65, 8), (2, 3, 65, 5)
    dry = [torch.randn(*shape) for shape in shapes]
    wet = []
    for t in dry:
        sea = torch.full([n + 4 for n in t.shape], math.nan)
        island = sea[tuple(slice(2, n + 2) for n in t.shape)]
        wet.append(island.copy_(t))
    mask = torch.randn(63, 65)
    wet_mask = torch.full((70, 70), math.nan)[4:67, 3:68].copy_(mask)
    for keywords in [{}, {"is_causal": True}, {"softcap": 2.0}, {"window": (7, 7)}]:
        assert torch.equal(
            scaledot.attention(*wet, **keywords).isfinite(), torch.ones(2, 3, 63, 5).bool()
        )
        assert_agrees(wet, **keywords)
    assert_agrees(wet, attn_mask=wet_mask)


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_gradients_lie_as_their_tensors_do(traced):
    """Heads that are views of [B, T, 3, H, D]: what made them takes the gradient without a copy."""
    fused = torch.randn(2, 9, 3, 4, 8)
    tensors = [part.transpose(1, 2).requires_grad_() for part in fused.unbind(2)]
    attend = scaledot.attention_with_vitals
    if traced:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out, _ = attend(*tensors, is_causal=True)
    for grad in torch.autograd.grad(out, tensors, torch.randn(out.shape)):
        assert grad.transpose(1, 2).is_contiguous()
