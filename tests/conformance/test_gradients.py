"""Gradients: finite differences in float64, and the plain formula in the same type."""

import math

import oracle
import pytest
import torch
from torch.autograd import gradcheck

import scaledot
from conformance.agreement import assert_gradients_agree
from conformance.calls import SMALL_SIZES, Call, call, draw


def with_vitals(*tensors, **keywords):
    return scaledot.attention_with_vitals(*tensors, **keywords)[0]


FUNCTIONS = pytest.mark.parametrize("function", [scaledot.attention, with_vitals])


def differentiable(c: Call):
    """Leaves of the call: query, key, value, and every float tensor among the keywords."""
    names = [
        n for n, x in c.keywords.items() if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]
    leaves = [
        t.detach().clone().requires_grad_() for t in (*c.tensors, *(c.keywords[n] for n in names))
    ]

    def rebuild(query, key, value, *rest):
        return (query, key, value), {**c.keywords, **dict(zip(names, rest, strict=True))}

    return leaves, rebuild


def assert_gradients_pass_finite_differences(function, c: Call, fast=True):
    leaves, rebuild = differentiable(c)

    def run(*inputs):
        tensors, keywords = rebuild(*inputs)
        return function(*tensors, **keywords)

    assert gradcheck(run, leaves, fast_mode=fast)


def small(**keywords):
    return call(
        lead=(2, 2), queries=3, keys=5, width=4, value_width=3, dtype=torch.float64, **keywords
    )


ARGUMENTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom_right": {"is_causal": True, "causal_align": "bottom_right"},
    "window": {"window": (1, 1)},
    "bool": {"attn_mask": torch.tensor([[True, False, True, True, False]] * 2 + [[False] * 5])},
    "float": {"attn_mask": torch.linspace(-1, 1, 15).double().reshape(3, 5)},
    "float_1d": {"attn_mask": torch.linspace(-1, 1, 5).double()},
    "float_4d": {"attn_mask": torch.linspace(-1, 1, 6).double().reshape(2, 1, 3, 1)},
    "minus_inf": {
        "attn_mask": torch.tensor(
            [[0.3, -math.inf, 0.1, 0.0, 1.0]] * 2 + [[-math.inf] * 5]
        ).double()
    },
    "scale": {"scale": torch.tensor([0.7, -0.4]).double()},
    "scale_zero": {"scale": torch.zeros(2).double()},
    "negative": {"scale": -0.8},
    "log_n": {"scale": "log_n", "is_causal": True},
    "softcap": {"softcap": 0.9},
    "sinks": {"sinks": torch.tensor([0.3, -1.0]).double()},
    "lengths": {"key_lengths": torch.tensor([2, 5])},
    "empty": {"key_lengths": torch.tensor([0, 3])},
    "several": {
        "softcap": 1.5,
        "sinks": torch.tensor([0.3, -1.0]).double(),
        "scale": torch.tensor([0.7, -0.4]).double(),
        "attn_mask": torch.linspace(-1, 1, 15).double().reshape(3, 5),
        "is_causal": True,
        "causal_align": "bottom_right",
        "key_lengths": torch.tensor([4, 5]),
    },
}


@FUNCTIONS
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_entry_of_the_jacobian(function, name):
    fast = function is with_vitals  # its backward is the same; the full table is slow
    assert_gradients_pass_finite_differences(function, small(**ARGUMENTS[name]), fast=fast)


@FUNCTIONS
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 2)], ids=str)
def test_gradients_in_every_rank(function, lead):
    c = call(
        lead=lead, queries=3, keys=5, width=4, value_width=3, dtype=torch.float64, is_causal=True
    )
    assert_gradients_pass_finite_differences(function, c)


@FUNCTIONS
@pytest.mark.parametrize("key_heads", [1, 2])
def test_gradients_of_grouped_heads_add_up(function, key_heads):
    for keywords in [{}, {"is_causal": True}, {"softcap": 1.0}]:
        c = call(
            lead=(2, 4),
            key_heads=key_heads,
            queries=3,
            keys=5,
            width=4,
            dtype=torch.float64,
            **keywords,
        )
        assert_gradients_pass_finite_differences(function, c)


@FUNCTIONS
def test_gradients_of_broadcast_inputs_add_up(function):
    tensors = torch.randn(2, 1, 3, 4), torch.randn(1, 3, 5, 4), torch.randn(3, 5, 2)
    assert_gradients_pass_finite_differences(function, Call(*(t.double() for t in tensors)))


@FUNCTIONS
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"window": (100, 5)},
        {"softcap": 1.0},
        {"sinks": torch.zeros(2).double()},
    ],
    ids=lambda k: next(iter(k), "plain"),
)
def test_gradients_over_many_key_tiles(function, keywords):
    c = call(lead=(1, 2), queries=67, keys=600, width=8, dtype=torch.float64, **keywords)
    assert_gradients_pass_finite_differences(function, c)


@pytest.mark.parametrize("seed", range(80))
def test_gradients_of_random_call(seed):
    c = draw(seed, torch.float64, sizes=(*SMALL_SIZES, 67))
    mask = c.keywords["attn_mask"]
    if (
        mask is not None and mask.is_floating_point()
    ):  # the lowest bias swallows a finite difference
        c = c.with_keywords(attn_mask=mask.masked_fill(mask < -1e30, -math.inf))
    assert_gradients_pass_finite_differences(with_vitals if seed % 2 else scaledot.attention, c)


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n in ARGUMENTS if n != "scale_zero"])
def test_gradients_are_as_good_as_the_formula_in_the_same_type(function, dtype, name):
    keywords = {
        n: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in ARGUMENTS[name].items()
    }
    c = call(lead=(2, 2), queries=3, keys=5, width=16, value_width=8, dtype=dtype, **keywords)
    leaves, rebuild = differentiable(c)
    tensors, words = rebuild(*leaves)

    def attend(inputs, compute):
        inner, inner_words = rebuild(*inputs)
        return oracle.attend(*inner, compute=compute, **inner_words)

    reach = oracle.diagnose(c.query, c.key, **c.keywords).output_reach
    assert_gradients_agree(function(*tensors, **words), leaves, attend, reach)


@FUNCTIONS
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"softcap": 1.0},
        {"attn_mask": torch.zeros(3, 5).double()},
        {"sinks": torch.zeros(2).double()},
        {"window": (1, 2)},
    ],
    ids=lambda k: next(iter(k), "plain"),
)
def test_dropout_gradient_uses_the_dropped_weights(function, keywords):
    def seeded(*tensors, **words):
        torch.manual_seed(3)
        return function(*tensors, dropout_p=0.4, **words)

    assert_gradients_pass_finite_differences(seeded, small(**keywords))


@FUNCTIONS
def test_dropout_gradient_over_many_key_tiles(function):
    def seeded(*tensors, **words):
        torch.manual_seed(3)
        return function(*tensors, dropout_p=0.3, **words)

    assert_gradients_pass_finite_differences(
        seeded, call(lead=(1, 2), queries=67, keys=600, dtype=torch.float64, is_causal=True)
    )


@FUNCTIONS
def test_dropout_of_one_gives_zeros_and_zero_gradients(function):
    c = small()
    leaves = [t.requires_grad_() for t in c.tensors]
    out = function(*leaves, dropout_p=1.0)
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves))


@FUNCTIONS
@pytest.mark.parametrize("hide", ["bool", "minus_inf", "lengths", "window"])
@pytest.mark.parametrize(
    "sinks", [None, torch.tensor([0.3, -1.0]).double()], ids=["plain", "sinks"]
)
def test_fully_masked_rows_have_zero_gradients(function, hide, sinks):
    hidden = torch.zeros(3, 5, dtype=torch.bool)
    hidden[1] = True
    keywords = {
        "bool": {"attn_mask": ~hidden},
        "minus_inf": {"attn_mask": torch.zeros(3, 5).double().masked_fill(hidden, -math.inf)},
        "lengths": {"key_lengths": torch.tensor([0, 0])},
        "window": {
            "window": (None, 0),
            "causal_align": "bottom_right",
            "key_lengths": torch.tensor([1, 1]),
        },
    }[hide]
    empty = {"bool": [1], "minus_inf": [1], "lengths": [0, 1, 2], "window": [0, 1]}[hide]
    c = small(sinks=sinks, **keywords)  # the mask, where there is one, is the last leaf
    leaves, rebuild = differentiable(c)
    tensors, words = rebuild(*leaves)
    grads = torch.autograd.grad(
        function(*tensors, **words).square().sum(), leaves, allow_unused=True
    )
    assert all(g is None or g.isfinite().all() for g in grads)
    assert (grads[0][:, :, empty] == 0).all()
    if hide == "minus_inf":
        assert (grads[-1][1] == 0).all()
    assert_gradients_pass_finite_differences(function, c)


@FUNCTIONS
@pytest.mark.parametrize(
    "keywords", [{}, {"is_causal": True}, {"softcap": 1.0}, {"window": (1, 1)}], ids=str
)
@pytest.mark.parametrize("layout", ["tokens_first", "expanded", "stepped", "zero_width_stride"])
def test_gradient_of_the_output_may_have_any_layout(function, layout, keywords):
    c = small(**keywords)
    grad = {
        "tokens_first": torch.randn(2, 3, 2, 3).double().transpose(1, 2),
        "expanded": torch.ones((), dtype=torch.float64).expand(2, 2, 3, 3),
        "stepped": torch.randn(2, 2, 3, 6).double()[..., ::2],
        "zero_width_stride": torch.randn(2, 2, 3, 1).double().expand(2, 2, 3, 3),
    }[layout]
    leaves = [t.requires_grad_() for t in c.tensors]
    found = torch.autograd.grad(function(*leaves, **keywords), leaves, grad)
    exact = torch.autograd.grad(oracle.attend(*leaves, **keywords), leaves, grad)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want)


@FUNCTIONS
@pytest.mark.parametrize("layout", ["tokens_first", "expanded", "stepped"])
def test_gradients_reach_inputs_of_any_layout(function, layout):
    base = {
        "tokens_first": torch.randn(2, 5, 2, 4),
        "expanded": torch.randn(2, 1, 5, 4),
        "stepped": torch.randn(2, 2, 5, 8),
    }[layout].double()
    view = {
        "tokens_first": lambda x: x.transpose(1, 2),
        "expanded": lambda x: x.expand(2, 2, 5, 4),
        "stepped": lambda x: x[..., ::2],
    }[layout]
    leaves = [base.clone().requires_grad_() for _ in range(3)]
    assert gradcheck(
        lambda *xs: function(*(view(x) for x in xs), is_causal=True), leaves, fast_mode=True
    )


@FUNCTIONS
@pytest.mark.parametrize(
    "wanted",
    [(True, False, False), (False, True, False), (False, False, True), (True, False, True)],
    ids=str,
)
def test_gradients_of_some_inputs_only(function, wanted):
    c = small(softcap=2.0)
    inputs = [t.clone().requires_grad_(w) for t, w in zip(c.tensors, wanted, strict=True)]
    leaves = [t for t in inputs if t.requires_grad]
    found = torch.autograd.grad(function(*inputs, softcap=2.0).square().sum(), leaves)
    exact = torch.autograd.grad(oracle.attend(*inputs, softcap=2.0).square().sum(), leaves)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want)


@FUNCTIONS
@pytest.mark.parametrize("name", ["float", "scale", "sinks"])
def test_gradient_of_one_extra_argument_alone(function, name):
    c = small(**ARGUMENTS[name])
    ((word, tensor),) = c.keywords.items()

    def run(x):
        return function(*c.tensors, **{word: x})

    assert gradcheck(run, [tensor.clone().requires_grad_()])


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"window": (1, 1)},
        {"softcap": 1.0},
        {"sinks": torch.zeros(2).double()},
        {"scale": torch.ones(2).double()},
    ],
    ids=lambda k: next(iter(k), "plain"),
)
def test_packed_gradients(keywords):
    ends_q, ends_k = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 2, 4, 7])
    leaves = [torch.randn(n, 2, 4).double().requires_grad_() for n in (5, 7, 7)]
    extra = {n: x for n, x in keywords.items() if isinstance(x, torch.Tensor)}
    for function in (
        scaledot.attention_varlen,
        lambda *a, **k: scaledot.attention_varlen_with_vitals(*a, **k)[0],
    ):

        def run(query, key, value, *rest, function=function):
            words = {**keywords, **dict(zip(extra, rest, strict=True))}
            return function(query, key, value, ends_q, ends_k, **words)

        assert gradcheck(
            run, [*leaves, *(x.clone().requires_grad_() for x in extra.values())], fast_mode=True
        )


def test_saturated_rows_have_finite_gradients():
    c = small(scale=1e4)
    leaves = [t.requires_grad_() for t in c.tensors]
    for function in (scaledot.attention, with_vitals):
        assert all(
            g.isfinite().all()
            for g in torch.autograd.grad(function(*leaves, scale=1e4).sum(), leaves)
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "keywords",
    [
        {"is_causal": True},
        {"window": (None, 0), "softcap": 2.0},
        {"key_lengths": torch.tensor([4, 4])},
        {"attn_mask": torch.arange(5) < 4},
    ],
    ids=lambda k: next(iter(k)),
)
def test_bad_numbers_in_hidden_keys_leave_the_gradients_of_others_clean(bad, keywords):
    c = small(**keywords)  # three queries: in each of these calls nobody sees key 4
    c.key[..., 4, :], c.value[..., 4, :] = bad, bad
    clean = [
        c.query,
        *(
            torch.cat([t[..., :4, :], torch.zeros_like(t[..., 4:, :])], -2)
            for t in (c.key, c.value)
        ),
    ]
    for function in (scaledot.attention, with_vitals):
        dirty_leaves, clean_leaves = (
            [t.detach().clone().requires_grad_() for t in ts] for ts in (c.tensors, clean)
        )
        found = torch.autograd.grad(
            function(*dirty_leaves, **keywords).square().sum(), dirty_leaves
        )
        exact = torch.autograd.grad(
            oracle.attend(*clean_leaves, **keywords).square().sum(), clean_leaves
        )
        for got, want in zip(found, exact, strict=True):
            torch.testing.assert_close(got, want)


@FUNCTIONS
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_batched_gradients_are_those_of_each(name, create_graph, function):
    c = small(**ARGUMENTS[name])
    leaves, rebuild = differentiable(c)
    tensors, words = rebuild(*leaves)
    assert_batched_gradients_agree(function(*tensors, **words), leaves, create_graph)


@FUNCTIONS
@pytest.mark.parametrize("create_graph", [False, True])
def test_batched_gradients_are_of_one_draw_of_dropout(create_graph, function):
    leaves = [t.requires_grad_() for t in small().tensors]
    assert_batched_gradients_agree(function(*leaves, dropout_p=0.4), leaves, create_graph)


def assert_batched_gradients_agree(out, leaves, create_graph):
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(
        out, leaves, grads, is_grads_batched=True, retain_graph=True, create_graph=create_graph
    )
    each = [
        torch.autograd.grad(out, leaves, grad, retain_graph=True, create_graph=create_graph)
        for grad in grads
    ]
    exact = [torch.stack(parts) for parts in zip(*each, strict=True)]
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want)
    if create_graph:
        second, right = (
            torch.autograd.grad(sum(g.square().sum() for g in gs), leaves, retain_graph=True)
            for gs in (found, exact)
        )
        for got, want in zip(second, right, strict=True):
            torch.testing.assert_close(got, want)
