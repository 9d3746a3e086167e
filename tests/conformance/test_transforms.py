"""What torch does to functions (compile, vmap, fake, export, autocast) and what stays untouched."""

import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import oracle
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import scaledot
from conformance.agreement import assert_output_agrees, assert_vitals_agree
from conformance.calls import Call, call
from scaledot import reference
from scaledot.backends.cpu import native


def with_vitals(*tensors, **keywords):
    return scaledot.attention_with_vitals(*tensors, **keywords)[0]


FUNCTIONS = pytest.mark.parametrize("function", [scaledot.attention, with_vitals])
# Forward mode brings one of torch's own warnings with it.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
SEEDED = torch.Generator().manual_seed(20_17)  # for the tensors in parametrize, made at import
KEYWORDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_align": "bottom_right"},
    "window": {"window": (3, 2)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.randn(3, generator=SEEDED)},
    "scale": {"scale": torch.randn(3, generator=SEEDED)},
    "log_n": {"scale": "log_n", "is_causal": True},
    "bool": {"attn_mask": torch.rand(13, 17, generator=SEEDED) < 0.6},
    "float": {"attn_mask": torch.randn(3, 13, 1, generator=SEEDED)},
    "lengths": {"key_lengths": torch.tensor([5, 17])},
}


# --- torch.compile -------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.one_case
@pytest.mark.compile
@pytest.mark.parametrize("name", KEYWORDS)
@FUNCTIONS
def test_compiled_call_equals_eager(function, name, fresh_dynamo):
    c = call(**KEYWORDS[name])
    leaves = [t.requires_grad_() for t in c.tensors]
    fast = compiled(function)
    out = fast(*leaves, **c.keywords)
    assert_output_agrees(out.detach(), *(t.detach() for t in c.tensors), **c.keywords)
    eager = function(*leaves, **c.keywords)
    weight = torch.randn(out.shape)
    for got, want in zip(
        torch.autograd.grad(out, leaves, weight),
        torch.autograd.grad(eager, leaves, weight),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.compile
@FUNCTIONS
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"softcap": 2.0}], ids=str)
def test_changing_shapes_do_not_recompile_for_ever(function, keywords, fresh_dynamo):
    counter = CompileCounterWithBackend("aot_eager")
    fast = compiled(function, counter)
    for queries, keys in [
        (3, 5),
        (7, 5),
        (7, 11),
        (13, 17),
        (31, 29),
        (64, 65),
        (65, 64),
        (2, 129),
        (127, 3),
        (5, 5),
        (19, 23),
        (37, 41),
    ]:
        c = call(queries=queries, keys=keys, **keywords)
        assert_output_agrees(fast(*c.tensors, **keywords), *c.tensors, **keywords)
    assert counter.frame_count <= 6


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.compile
@FUNCTIONS
def test_alternating_masks_stay_right(function, fresh_dynamo):
    fast = compiled(function)
    for queries, keys in [(5, 7), (13, 17)]:
        wide = torch.rand(queries, 2 * keys) < 0.7
        masks = [
            None,
            wide[:, ::2],
            wide[:1, :keys].expand(queries, keys),
            torch.randn(2, 1, queries, keys),
        ]
        for mask in masks:
            c = call(queries=queries, keys=keys, attn_mask=mask)
            assert_output_agrees(fast(*c.tensors, **c.keywords), *c.tensors, **c.keywords)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["plain", "causal", "float", "sinks", "lengths"])
def test_vitals_come_out_of_a_compiled_function(name, fresh_dynamo):
    c = call(**KEYWORDS[name])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def entropy_and_maximum(query, key, value, **keywords):
        out, vitals = scaledot.attention_with_vitals(query, key, value, **keywords)
        alone = scaledot.vitals(query, key, **keywords)
        return out + 1, vitals.entropy, alone.max_logit

    out, entropy, maximum = entropy_and_maximum(*c.tensors, **c.keywords)
    expected = oracle.diagnose(c.query, c.key, **c.keywords)
    assert_output_agrees(out - 1, *c.tensors, **c.keywords)
    torch.testing.assert_close(entropy.double(), expected.entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(maximum.double(), expected.max_logit, atol=1e-5, rtol=1e-5)


@pytest.mark.compile
def test_compiled_tokens_first_layout_is_right_downstream(fresh_dynamo):
    """If the fake kernel promised other strides, the reshape below would scramble the numbers."""
    tensors = [torch.randn(2, 5, 3, 8).transpose(1, 2) for _ in range(3)]
    for function in (scaledot.attention, with_vitals):

        def joined(query, key, value, function=function):
            return function(query, key, value).transpose(1, 2).reshape(2, 5, 24) * 2

        torch.testing.assert_close(compiled(joined)(*tensors), joined(*tensors))


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
def test_inductor_equals_eager(fresh_dynamo):
    def block(query, key, value):
        return with_vitals(query * 0.5, key + 1, value, is_causal=True, softcap=3.0).relu()

    c = call(queries=13, keys=17)
    leaves = [t.requires_grad_() for t in c.tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own
        out = compiled(block, "inductor")(*leaves)
        found = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(out, block(*leaves))
    for got, want in zip(found, torch.autograd.grad(block(*leaves).sum(), leaves), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.compile
@FUNCTIONS
def test_compiled_dropout_drops_and_keeps_the_mean(function, fresh_dynamo):
    c = call(lead=(1, 1), queries=64, keys=127, value_width=1)
    out = compiled(function)(c.query, c.key, torch.ones_like(c.value), dropout_p=0.5)
    assert out.mean().item() == pytest.approx(1, abs=0.1)
    assert out.std() > 0.01


@pytest.mark.one_case
@pytest.mark.compile
@FORWARD_MODE
@FUNCTIONS
@pytest.mark.parametrize("keywords", [{}, {"softcap": 2.0}, {"is_causal": True}], ids=str)
def test_a_compiler_follows_the_transforms_of_torch_func(function, keywords, fresh_dynamo):
    query, key, value = torch.randn(3, 1, 2, 7, 5).unbind()

    def attend(x):
        return function(x, key, value, **keywords)

    for transform in (
        lambda x: torch.func.jvp(attend, (x,), (x,)),
        torch.func.grad(lambda x: attend(x).sin().sum()),
        lambda x: torch.func.vmap(torch.func.grad(lambda y: attend(y).sin().sum()))(x[None]),
    ):
        compiled = torch.compile(transform, backend="aot_eager")
        torch.testing.assert_close(compiled(query), transform(query))


@pytest.mark.compile
@FORWARD_MODE
def test_a_compiled_call_carries_tangents_it_was_not_compiled_with(fresh_dynamo):
    query, key, value = torch.randn(3, 1, 2, 7, 5).unbind()

    def attend(x):
        return scaledot.attention(x, key, value, softcap=2.0)

    compiled = torch.compile(attend, backend="aot_eager")
    compiled(query)
    found, exact = (torch.func.jvp(f, (query,), (query,)) for f in (compiled, attend))
    torch.testing.assert_close(found, exact)


# --- torch.func ----------------------------------------------------------------------------------


@FUNCTIONS
@pytest.mark.parametrize(
    "in_dims",
    [
        (0, 0, 0),
        (0, None, None),
        (None, 0, 0),
        (0, 0, None),
        (None, None, 0),
        (1, 0, 2),
        (-1, 1, 0),
        (2, None, -1),
    ],
    ids=str,
)
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"softcap": 2.0}], ids=str)
def test_vmap_equals_a_loop(function, in_dims, keywords):
    c = call(lead=(5, 2, 3), queries=7, keys=11, **keywords)
    tensors = [
        t[0] if d is None else t.movedim(0, d) for t, d in zip(c.tensors, in_dims, strict=True)
    ]

    def at(i):
        return [t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True)]

    found = torch.vmap(lambda q, k, v: function(q, k, v, **keywords), in_dims)(*tensors)
    assert torch.allclose(
        found, torch.stack([function(*at(i), **keywords) for i in range(5)]), atol=1e-5
    )


@FUNCTIONS
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
def test_vmap_of_lower_ranks(function, lead):
    c = call(lead=(5, *lead), queries=7, keys=11)
    found = torch.vmap(function)(*c.tensors)
    assert torch.allclose(
        found, torch.stack([function(*(t[i] for t in c.tensors)) for i in range(5)]), atol=1e-5
    )


@FUNCTIONS
@pytest.mark.parametrize("name", ["attn_mask", "scale", "sinks", "key_lengths"])
def test_vmap_over_an_extra_argument(function, name):
    c = call(lead=(2, 3))
    many = {
        "attn_mask": torch.randn(5, 13, 17),
        "scale": torch.randn(5, 3),
        "sinks": torch.randn(5, 3),
        "key_lengths": torch.randint(1, 18, (5, 2)),
    }[name]
    found = torch.vmap(lambda x: function(*c.tensors, **{name: x}))(many)
    assert torch.allclose(
        found, torch.stack([function(*c.tensors, **{name: x}) for x in many]), atol=1e-5
    )


@FUNCTIONS
def test_vmap_inside_vmap(function):
    c = call(lead=(2, 5, 3), queries=7, keys=11)
    assert torch.allclose(
        torch.vmap(torch.vmap(function))(*c.tensors), function(*c.tensors), atol=1e-5
    )


@pytest.mark.parametrize("name", ["plain", "causal", "window", "softcap", "log_n", "bool"])
def test_vmap_carries_the_vitals(name):
    keywords = KEYWORDS[name]
    c = call(lead=(5, 2, 3), **keywords)
    found = torch.vmap(lambda q, k: scaledot.vitals(q, k, **keywords).entropy)(c.query, c.key)
    expected = oracle.diagnose(c.query, c.key, **keywords)
    torch.testing.assert_close(found.double(), expected.entropy, atol=1e-5, rtol=1e-5)
    maximum = torch.vmap(lambda *ts: scaledot.attention_with_vitals(*ts, **keywords)[1].max_logit)(
        *c.tensors
    )
    torch.testing.assert_close(maximum.double(), expected.max_logit, atol=1e-5, rtol=1e-5)


@FUNCTIONS
@pytest.mark.parametrize("name", ["plain", "causal", "window", "softcap", "sinks", "float"])
def test_vmap_of_grad_gives_gradients_per_sample(function, name):
    keywords = KEYWORDS[name]
    c = call(lead=(5, 2, 3), **keywords)

    def loss(query, key, value):
        return function(query, key, value, **keywords).square().sum()

    per_sample = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*c.tensors)
    for i in range(5):
        leaves = [t[i].clone().requires_grad_() for t in c.tensors]
        for got, want in zip(per_sample, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(got[i], want, atol=1e-4, rtol=1e-4)


@FUNCTIONS
def test_vmap_of_grad_with_a_shared_key(function):
    c = call(lead=(5, 2, 3))
    key, value = c.key[0], c.value[0]
    gradient = torch.func.grad(
        lambda q, k, v: function(q, k, v, is_causal=True).square().sum(), (0, 1, 2)
    )
    found = torch.vmap(gradient, (0, None, None))(c.query, key, value)
    for i in range(5):
        for got, want in zip(found, gradient(c.query[i], key, value), strict=True):
            torch.testing.assert_close(got[i], want, atol=1e-4, rtol=1e-4)


@FUNCTIONS
@pytest.mark.parametrize("keywords", [{}, {"softcap": 2.0}], ids=str)
def test_jacobian_by_reverse_mode(function, keywords):
    c = call(
        lead=(1, 2), queries=2, keys=3, width=4, value_width=2, dtype=torch.float64, **keywords
    )
    found = torch.func.jacrev(lambda *ts: function(*ts, **keywords), (0, 1, 2))(*c.tensors)
    exact = torch.func.jacrev(lambda *ts: oracle.attend(*ts, **keywords), (0, 1, 2))(*c.tensors)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want)


@FUNCTIONS
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"sinks": torch.zeros(3)}], ids=str)
def test_vmap_with_the_same_randomness_drops_the_same_weights(function, keywords):
    c = call(lead=(4, 2, 3), **keywords)

    def attend(*tensors):
        return function(*tensors, dropout_p=0.5, **keywords)

    torch.manual_seed(3)
    found = torch.vmap(attend, randomness="same")(*c.tensors)
    for i in range(4):
        torch.manual_seed(3)
        torch.testing.assert_close(found[i], attend(*(t[i] for t in c.tensors)))


def seeded_dropout(*tensors):
    torch.manual_seed(3)
    return scaledot.attention(*tensors, dropout_p=0.5)


def test_jacobian_drops_what_the_forward_pass_dropped():
    c = call(lead=(2, 2), queries=2, keys=9, width=4, value_width=2, dtype=torch.float64)
    found = torch.func.jacrev(seeded_dropout, (0, 1, 2))(*c.tensors)
    exact = torch.autograd.functional.jacobian(seeded_dropout, c.tensors)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_of_grad_drops_what_the_forward_pass_dropped(randomness):
    """Linear in the value: the output is its own gradient's."""
    c = call(lead=(3, 2, 2), dtype=torch.float64)

    def attend(value, query, key):
        out = scaledot.attention(query, key, value, dropout_p=0.5)
        return out.sum(), out.detach()

    gradient = torch.func.grad(attend, has_aux=True)
    grad, out = torch.vmap(gradient, randomness=randomness)(c.value, c.query, c.key)
    torch.testing.assert_close((grad * c.value).sum((1, 2, 3, 4)), out.sum((1, 2, 3, 4)))


@FUNCTIONS
def test_checkpoint_recomputes_the_same_dropout(function):
    c = call()
    leaves = [t.requires_grad_() for t in c.tensors]
    grads = []
    for run in (
        lambda *ts: function(*ts, dropout_p=0.5),
        lambda *ts: checkpoint(lambda *xs: function(*xs, dropout_p=0.5), *ts, use_reentrant=False),
    ):
        torch.manual_seed(5)
        grads.append(torch.autograd.grad(run(*leaves).sum(), leaves))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


# --- fake and meta tensors -----------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda *shape: torch.randn(*shape),
    "tokens_first": lambda b, h, n, d: torch.randn(b, n, h, d).transpose(1, 2),
    "width_before_tokens": lambda b, h, n, d: torch.randn(b, h, d, n).transpose(2, 3),
    "heads_outside": lambda b, h, n, d: torch.randn(h, b, n, d).transpose(0, 1),
    "tokens_outside": lambda b, h, n, d: torch.randn(n, b, h, d).permute(1, 2, 0, 3),
    "stepped": lambda b, h, n, d: torch.randn(b, h, n, 2 * d)[..., ::2],
    "packed_qkv": lambda b, h, n, d: torch.randn(b, n, 3, h, d)[:, :, 1].transpose(1, 2),
    "expanded": lambda b, h, n, d: torch.randn(1, 1, n, d).expand(b, h, n, d),
    "expanded_tokens": lambda b, h, n, d: torch.randn(b, h, 1, d).expand(b, h, n, d),
}


def described(x):
    return tuple(x.shape), x.stride(), x.dtype


def assert_shadow_agrees(convert, function, tensors, keywords):
    real = function(*tensors, **keywords)
    shadow = function(
        *(convert(t) for t in tensors),
        **{n: convert(x) if isinstance(x, torch.Tensor) else x for n, x in keywords.items()},
    )
    assert described(shadow) == described(real)


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize("query_layout", LAYOUTS)
@pytest.mark.parametrize("value_layout", ["contiguous", "tokens_first", "stepped", "expanded"])
@pytest.mark.parametrize("how", ["fake", "meta"])
@FUNCTIONS
def test_shadow_tensors_have_shape_and_stride_of_real_ones(
    function, how, query_layout, value_layout
):
    for b, h, queries, keys, width in [
        (2, 3, 5, 7, 8),
        (1, 3, 5, 5, 8),
        (2, 1, 1, 7, 1),
        (1, 1, 1, 1, 8),
        (2, 3, 65, 65, 16),
    ]:
        tensors = [
            LAYOUTS[query_layout](b, h, queries, width),
            LAYOUTS[value_layout](b, h, keys, width),
            LAYOUTS[value_layout](b, h, keys, 4),
        ]
        for keywords in [
            {},
            {"is_causal": True},
            {"softcap": 2.0},
            {"attn_mask": torch.rand(queries, keys) < 0.7},
        ]:
            _assert_with(how, function, tensors, keywords)


@pytest.mark.parametrize("how", ["fake", "meta"])
@FUNCTIONS
def test_shadow_tensors_agree_for_every_argument(function, how):
    for keywords in KEYWORDS.values():
        for dtype in (torch.float32, torch.bfloat16):
            _assert_with(how, function, call(dtype=dtype).tensors, keywords)
    for lead in [(), (3,), (2, 2, 3)]:
        _assert_with(how, function, call(lead=lead).tensors, {"is_causal": True})
    for sizes in [{"queries": 0}, {"keys": 0}, {"lead": (0, 3)}, {"value_width": 0}, {"width": 0}]:
        _assert_with(how, function, call(**sizes).tensors, {})
    grouped = call(lead=(2, 6), key_heads=2)
    _assert_with(how, function, grouped.tensors, grouped.keywords)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _assert_with(how, function, call().tensors, {})


def _assert_with(how, function, tensors, keywords):
    if how == "meta":
        assert_shadow_agrees(
            lambda t: t.to("meta") if t.dim() < 2 else _to_meta(t), function, tensors, keywords
        )
        return
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shadow = function(
            *(mode.from_tensor(t) for t in tensors),
            **{
                n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
                for n, x in keywords.items()
            },
        )
    assert described(shadow) == described(function(*tensors, **keywords))


def _to_meta(tensor):
    """With the very same strides: `.to` may choose others."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@pytest.mark.parametrize("how", ["fake", "meta"])
@pytest.mark.parametrize("name", KEYWORDS)
def test_shadow_vitals_have_shape_and_type_of_real_ones(how, name):
    c = call(**KEYWORDS[name])
    real = scaledot.vitals(c.query, c.key, **c.keywords, per_row=True)
    if how == "meta":
        keywords = {
            n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in c.keywords.items()
        }
        shadow = scaledot.vitals(c.query.to("meta"), c.key.to("meta"), **keywords, per_row=True)
    else:
        with FakeTensorMode() as mode:
            keywords = {
                n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
                for n, x in c.keywords.items()
            }
            shadow = scaledot.vitals(
                mode.from_tensor(c.query), mode.from_tensor(c.key), **keywords, per_row=True
            )
    for field in (*oracle.FLOAT_FIELDS, *oracle.COUNT_FIELDS):
        assert described(getattr(shadow, field)) == described(getattr(real, field)), field
    for field in oracle.ROW_FIELDS:
        assert described(getattr(shadow.per_row, field)) == described(
            getattr(real.per_row, field)
        ), field


# --- torch.export --------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, **keywords):
        super().__init__()
        self.project = torch.nn.Linear(24, 72)
        self.keywords = keywords

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        out = scaledot.attention(query, key, value, **self.keywords)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.compile
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "softcap": 2.0},
        {"window": (3, 0)},
        {"scale": "log_n"},
    ],
    ids=str,
)
def test_exported_module_runs_at_other_lengths(keywords, strict):
    torch._dynamo.reset()
    module = Block(**keywords)
    tokens = torch.export.Dim("tokens", min=2, max=512)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's own
        program = torch.export.export(
            module, (torch.randn(2, 11, 24),), dynamic_shapes=({1: tokens},), strict=strict
        )
    for length in (5, 11, 67):
        x = torch.randn(2, length, 24)
        torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.compile
def test_exported_module_survives_a_file(tmp_path):
    torch._dynamo.reset()
    module = Block(is_causal=True, softcap=2.0)
    x = torch.randn(2, 11, 24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, (x,)), tmp_path / "block.pt2")
        loaded = torch.export.load(tmp_path / "block.pt2")
    torch.testing.assert_close(loaded.module()(x), module(x))


class Vital(torch.nn.Module):
    def __init__(self, per_row):
        super().__init__()
        self.per_row = per_row

    def forward(self, x):
        return scaledot.attention_with_vitals(x, x, x, is_causal=True, per_row=self.per_row)


@pytest.mark.compile
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_exported_vitals_survive_a_file(per_row, strict, tmp_path):
    torch._dynamo.reset()
    x = torch.randn(2, 3, 11, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Vital(per_row), (x,), strict=strict)
        torch.export.save(program, tmp_path / "vitals.pt2")
        loaded = torch.export.load(tmp_path / "vitals.pt2")
    out, vitals = loaded.module()(x)
    expected_out, expected = Vital(per_row)(x)
    torch.testing.assert_close(out, expected_out)
    assert isinstance(vitals, scaledot.Vitals)
    torch.testing.assert_close(vitals.entropy, expected.entropy)
    assert (vitals.per_row is not None) == per_row
    if per_row:
        assert isinstance(vitals.per_row, type(expected.per_row))
        torch.testing.assert_close(vitals.per_row, expected.per_row)


# --- autocast ------------------------------------------------------------------------------------


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"softcap": 2.0},
        {"attn_mask": torch.randn(13, 17, generator=SEEDED)},
    ],
    ids=lambda k: next(iter(k), "plain"),
)
def test_autocast_gives_the_type_that_torch_gives(function, dtype, keywords):
    c = call(**keywords)
    leaves = [t.requires_grad_() for t in c.tensors]
    with torch.autocast("cpu", dtype=dtype):
        out = function(*leaves, **keywords)
        theirs = scaled_dot_product_attention(*c.tensors)
    assert out.dtype == theirs.dtype
    low = [t.detach().to(out.dtype) for t in c.tensors]
    assert_output_agrees(out.detach(), *low, **keywords)
    out.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)
    assert all(t.grad.isfinite().all() for t in leaves)


@FUNCTIONS
def test_autocast_accepts_mixed_types(function):
    c = call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(c.query.to(torch.bfloat16), c.key, c.value.to(torch.bfloat16))
    assert_output_agrees(out, *(t.to(torch.bfloat16) for t in c.tensors))


@pytest.mark.parametrize(
    "keywords",
    [{}, {"is_causal": True}, {"attn_mask": torch.rand(65, 67, generator=SEEDED) < 0.7}],
    ids=lambda k: next(iter(k), "plain"),
)
def test_autocast_does_not_coarsen_the_statistics(keywords):
    c = call(queries=65, keys=67, width=32, dtype=torch.bfloat16, **keywords)
    expected = oracle.diagnose(c.query, c.key, **keywords)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = scaledot.vitals(c.query, c.key, **keywords, per_row=True)
        beside = scaledot.attention_with_vitals(*c.tensors, **keywords, per_row=True)[1]
    assert_vitals_agree(alone, expected, per_row=True)
    assert_vitals_agree(beside, expected, per_row=True)


# --- threads, state, chance ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "keywords", [{}, {"is_causal": True}, {"softcap": 2.0}, {"window": (9, 9)}], ids=str
)
def test_threads_get_the_same_bits(keywords):
    calls = [call(lead=(1, 2), queries=65, keys=131, **keywords) for _ in range(8)]

    def run(c: Call):
        out, vitals = scaledot.attention_with_vitals(*c.tensors, **keywords)
        return torch.cat(
            [
                out.flatten(),
                scaledot.attention(*c.tensors, **keywords).flatten(),
                vitals.entropy.flatten(),
            ]
        )

    alone = [run(c) for c in calls]
    with ThreadPoolExecutor(8) as pool:
        for together in pool.map(lambda _: [run(c) for c in calls], range(8)):
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_threads_may_differentiate_at_the_same_time():
    calls = [call(lead=(1, 2), queries=65, keys=131, softcap=2.0) for _ in range(6)]

    def run(c: Call):
        leaves = [t.clone().requires_grad_() for t in c.tensors]
        return torch.autograd.grad(with_vitals(*leaves, **c.keywords).sum(), leaves)

    alone = [run(c) for c in calls]
    with ThreadPoolExecutor(6) as pool:
        for one, other in zip(alone, pool.map(run, calls), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def global_state():
    """What a library must give back as it found it."""
    return {
        "random": torch.get_rng_state().tolist(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "type": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "denormals": (torch.tensor([1e-310]).double() * 1).item(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "autocast": torch.is_autocast_enabled("cpu"),
        "filters": list(warnings.filters),
    }


def test_no_global_state_is_touched():
    c = call(queries=65, keys=131)
    calls = [
        {},
        {"is_causal": True},
        {"softcap": 2.0},
        {"window": (1, 1)},
        {"attn_mask": torch.rand(65, 131) < 0.5},
        {"scale": -1.0},
    ]
    before = global_state()
    for keywords in calls:
        leaves = [t.clone().requires_grad_() for t in c.tensors]
        scaledot.attention(*leaves, **keywords).sum().backward()
        with_vitals(*leaves, **keywords).sum().backward()
        scaledot.vitals(c.query, c.key, **keywords)
        assert global_state() == before, keywords
    with pytest.raises(ValueError, match="dropout_p"):
        scaledot.attention(*c.tensors, dropout_p=2.0)
    assert global_state() == before


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_default_type_changes_nothing(default):
    c = call(is_causal=True)
    expected, out = (
        oracle.diagnose(c.query, c.key, is_causal=True),
        scaledot.attention(*c.tensors, is_causal=True),
    )
    torch.set_default_dtype(default)
    try:
        again, vitals = scaledot.attention_with_vitals(*c.tensors, is_causal=True)
        plain = scaledot.attention(*c.tensors, is_causal=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(plain, out)
    assert_vitals_agree(vitals, expected)
    torch.testing.assert_close(again, out)


@pytest.mark.parametrize("engine", ["compiled", "tiles"])
@pytest.mark.parametrize("name", KEYWORDS)
def test_default_device_changes_nothing(name, engine, monkeypatch):
    if engine == "tiles":
        monkeypatch.setattr(native, "library", lambda: None)
    c = call(**KEYWORDS[name])
    leaves = [t.requires_grad_() for t in c.tensors]

    def run():
        out, vitals = scaledot.attention_with_vitals(*leaves, **c.keywords, per_row=True)
        exact, _ = reference.attention_with_vitals(*c.tensors, **c.keywords)
        grads = torch.autograd.grad(out.sum(), leaves)
        return [out, exact, *grads, vitals.passes, *vitals.packed(), *vitals.per_row]

    expected = run()
    with torch.device("meta"):
        found = run()
    assert all(map(torch.equal, found, expected))


@FUNCTIONS
def test_no_grad_and_inference_mode_work(function):
    c = call()
    want = function(*c.tensors)
    parameters = [torch.nn.Parameter(t) for t in c.tensors]
    with torch.no_grad():
        out = function(*parameters)
        assert not out.requires_grad
        torch.testing.assert_close(out, want)
    with torch.inference_mode():
        torch.testing.assert_close(function(*parameters), want)


@FUNCTIONS
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"softcap": 2.0},
        {"sinks": torch.zeros(3)},
        {"attn_mask": torch.zeros(13, 17)},
    ],
    ids=lambda k: next(iter(k), "plain"),
)
def test_dropout_is_reproducible_by_the_seed(function, keywords):
    c = call()

    def seeded(seed):
        torch.manual_seed(seed)
        return function(*c.tensors, dropout_p=0.3, **keywords)

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"softcap": 2.0}], ids=str)
def test_dropout_is_the_same_with_and_without_vitals(keywords):
    c = call(queries=65, keys=131, **keywords)
    torch.manual_seed(1)
    plain = scaledot.attention(*c.tensors, dropout_p=0.3, **keywords)
    torch.manual_seed(1)
    watched = with_vitals(*c.tensors, dropout_p=0.3, **keywords)
    torch.testing.assert_close(plain, watched, atol=1e-5, rtol=1e-5)


@FUNCTIONS
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(function, dropout_p):
    """Equal weights over the rows of a unit matrix: the output is the mask."""
    query, key, value = (
        torch.zeros(2, 2, 101, 4),
        torch.zeros(2, 2, 500, 4),
        torch.eye(500).expand(2, 2, 500, 500),
    )
    weights = function(query, key, value, dropout_p=dropout_p) * 500
    kept = weights > 0
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / (1 - dropout_p)))
    spread = (dropout_p * (1 - dropout_p) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - dropout_p)) < 5 * spread
    by_key = kept.double().mean((0, 1, 2))
    assert (by_key - (1 - dropout_p)).abs().max() < 6 * spread * 500**0.5
    first, second = kept[0, 0], kept[1, 1]
    assert not torch.equal(first, second)


@FUNCTIONS
def test_dropout_zero_draws_no_random_number(function):
    for keywords in KEYWORDS.values():
        c = call(**keywords)
        before = torch.get_rng_state()
        leaves = [t.requires_grad_() for t in c.tensors]
        function(*leaves, dropout_p=0.0, **keywords).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", KEYWORDS)
def test_forward_is_bitwise_repeatable(name):
    c = call(queries=13, keys=17, **KEYWORDS[name])
    first = scaledot.attention(*c.tensors, **c.keywords)
    out, vitals = scaledot.attention_with_vitals(*c.tensors, **c.keywords)
    for _ in range(20):
        assert torch.equal(scaledot.attention(*c.tensors, **c.keywords), first)
        again, more = scaledot.attention_with_vitals(*c.tensors, **c.keywords)
        assert torch.equal(again, out)
        for field in (*oracle.FLOAT_FIELDS, *oracle.COUNT_FIELDS):
            assert torch.equal(getattr(more, field), getattr(vitals, field)), field


@pytest.mark.parametrize("backend", ["cpu", None])
@pytest.mark.parametrize("position", range(3))
def test_tensors_that_are_negated_on_paper(position, backend):
    """torch notes the sign of a conjugate's imaginary part, and changes no number."""
    tensors = [torch.randn(1, 2, 20, 8) for _ in range(3)]
    negated = [torch._neg_view(x) if i == position else x for i, x in enumerate(tensors)]
    assert negated[position].is_neg()
    plain = [x.resolve_neg() for x in negated]
    found = scaledot.attention_with_vitals(*negated, window=(3, 3), backend=backend)
    expected = scaledot.attention_with_vitals(*plain, window=(3, 3), backend=backend)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].max_logit, expected[1].max_logit)


def test_a_gradient_that_is_negated_on_paper():
    leaves = [torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3)]
    out = scaledot.attention(*leaves, window=(3, 3))
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, torch._neg_view(grad), retain_graph=True)
    expected = torch.autograd.grad(out, leaves, -grad)
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_computes_anew():
    first, second = torch.randn(2, 1, 2, 20, 8)

    def attend(x):
        return scaledot.attention(x, x, x, window=(3, 3))

    assert torch.equal(torch.jit.trace(attend, first)(second), attend(second))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_fields_of_vitals_in_a_graph_are_computed_anew(mode):
    first, second = torch.randn(2, 1, 2, 20, 8)

    def entropy(x):
        return scaledot.attention_with_vitals(x, x, x)[1].entropy

    graph = make_fx(entropy, tracing_mode=mode)(first)
    torch.testing.assert_close(graph(second), entropy(second))
