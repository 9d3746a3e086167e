"""Second derivatives and forward mode: finite differences in float64, and the dense formula.

Both come from a formula of plain operators, whichever kernel served the call: what the kernel hides
and drops, the formula has to hide and drop.
"""

import math

import oracle
import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import scaledot
from conformance.agreement import assert_output_agrees, assert_vitals_agree
from conformance.calls import SMALL_SIZES, call, draw
from conformance.test_gradients import ARGUMENTS, FUNCTIONS, differentiable, small

# Forward mode brings one of torch's own warnings with it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

ENDS = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 2, 4, 7])
PACKED = [
    {},
    {"is_causal": True},
    {"window": (1, 1), "causal_align": "bottom_right"},
    {"scale": "log_n"},
    {"softcap": 1.0},
]
ADDITIVE = [{}, {"is_causal": True}, {"softcap": 1.0}, {"key_lengths": torch.tensor([2, 4])}]


def assert_both_modes_pass_finite_differences(run, leaves):
    """In forward mode, and of the gradients: reverse over reverse, forward over reverse."""
    assert gradcheck(run, leaves, fast_mode=True, check_forward_ad=True, check_backward_ad=False)
    assert gradgradcheck(run, leaves, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.one_case
@FUNCTIONS
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument(function, name):
    leaves, rebuild = differentiable(small(**ARGUMENTS[name]))

    def run(*inputs):
        tensors, words = rebuild(*inputs)
        return function(*tensors, **words)

    assert_both_modes_pass_finite_differences(run, leaves)


@FUNCTIONS
@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 2)], ids=str)
def test_every_rank(function, lead):
    tensors = call(lead=lead, queries=3, keys=5, dtype=torch.float64).tensors
    leaves = [t.requires_grad_() for t in tensors]
    assert_both_modes_pass_finite_differences(lambda *x: function(*x, is_causal=True), leaves)


@FUNCTIONS
@pytest.mark.parametrize("keywords", [{}, {"window": (1, 1)}, {"attn_mask": torch.eye(3, 5) > 0}])
def test_dropout_drops_what_the_forward_pass_dropped(function, keywords):
    leaves = [t.requires_grad_() for t in small().tensors]

    def run(*inputs):
        torch.manual_seed(3)
        return function(*inputs, dropout_p=0.4, **keywords)

    assert_both_modes_pass_finite_differences(run, leaves)


@pytest.mark.parametrize(
    "keywords",
    [{}, {"is_causal": True}, {"softcap": 1.0}, {"key_lengths": torch.tensor([600, 77])}],
    ids=lambda k: next(iter(k), "plain"),
)
def test_dropout_over_many_tiles_is_that_of_the_kernel(keywords):
    c = call(lead=(2, 6), queries=67, keys=600, key_heads=2, **keywords)
    outs = []
    for mode in (torch.no_grad(), forward_ad.dual_level()):
        torch.manual_seed(3)
        with mode:
            outs.append(scaledot.attention(*c.tensors, dropout_p=0.3, **c.keywords))
    torch.testing.assert_close(*outs)


@FUNCTIONS
def test_grouped_heads(function):
    leaves = [t.requires_grad_() for t in small(key_heads=1).tensors]
    assert_both_modes_pass_finite_differences(lambda *x: function(*x, enable_gqa=True), leaves)


@pytest.mark.parametrize("keywords", PACKED, ids=lambda k: next(iter(k), "plain"))
def test_packed(keywords):
    leaves = [torch.randn(n, 2, 4).double().requires_grad_() for n in (5, 7, 7)]

    def run(*inputs):
        torch.manual_seed(1)
        return scaledot.attention_varlen(*inputs, *ENDS, **keywords)

    assert_both_modes_pass_finite_differences(run, leaves)


@pytest.mark.parametrize("keywords", ADDITIVE, ids=lambda k: next(iter(k), "plain"))
def test_additive(keywords):
    leaves = [torch.randn(2, 2, n, 3).double().requires_grad_() for n in (3, 4, 4)]
    leaves.append(torch.randn(2, 3).double().requires_grad_())
    assert_both_modes_pass_finite_differences(
        lambda *x: scaledot.additive_attention(*x, **keywords), leaves
    )


@pytest.mark.parametrize("name", ARGUMENTS)
def test_hessians_agree_with_the_formula(name):
    leaves, rebuild = differentiable(small(**ARGUMENTS[name]))
    leaves = [t.detach() for t in leaves]

    def loss(attend):
        def run(*inputs):
            tensors, words = rebuild(*inputs)
            return attend(*tensors, **words).sin().sum()

        return run

    exact = torch.autograd.functional.hessian(loss(oracle.attend), tuple(leaves))[0][0]
    ours = loss(scaledot.attention)
    torch.testing.assert_close(torch.func.hessian(ours)(*leaves), exact)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(ours))(*leaves), exact)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(ours))(*leaves), exact)


def test_third_derivatives():
    query, key, value = torch.randn(3, 1, 1, 3, 2).double().unbind()

    def third(attend):
        def loss(x):
            return attend(x, key, value, is_causal=True).sin().sum()

        return torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(loss)))(query)

    torch.testing.assert_close(third(scaledot.attention), third(oracle.attend))


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
def test_bad_numbers_in_hidden_keys_stay_hidden(bad, keywords):
    c = small()  # three queries: in each of these calls nobody sees key 4
    dirty = [t.clone() for t in c.tensors]
    clean = [t.clone() for t in c.tensors]
    for tensors, number in ((dirty, bad), (clean, 0.0)):
        tensors[1][..., 4, :], tensors[2][..., 4, :] = number, number
    tangents = tuple(torch.randn_like(t) for t in clean)

    def both_modes(attend, tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        grads = torch.autograd.grad(
            attend(*leaves, **keywords).sin().sum(), leaves, create_graph=True
        )
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
        forward = torch.func.jvp(lambda *x: attend(*x, **keywords), tuple(tensors), tangents)
        return (*second, *forward)

    found, exact = both_modes(scaledot.attention, dirty), both_modes(oracle.attend, clean)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("where", ["key", "value"])
def test_a_visible_nan_shows_in_the_tangent_of_its_rows_alone(where):
    query, key, value = torch.randn(3, 1, 1, 7, 4).unbind()
    {"key": key, "value": value}[where][..., 5, :] = math.nan
    _, tangent = torch.func.jvp(
        lambda q: scaledot.attention(q, key, value, is_causal=True), (query,), (query,)
    )
    assert tangent[..., :5, :].isfinite().all()
    assert tangent[..., 5:, :].isnan().all()


@FUNCTIONS
def test_fully_masked_rows_are_zero_in_every_derivative(function):
    mask = torch.rand(3, 5) < 0.7
    mask[1] = False
    leaves = [t.requires_grad_() for t in small().tensors]
    grads = torch.autograd.grad(
        function(*leaves, attn_mask=mask).square().sum(), leaves, create_graph=True
    )
    second = torch.autograd.grad(sum(g.sin().sum() for g in grads), leaves)
    assert all(g.isfinite().all() for g in second)
    assert (second[0][:, :, 1] == 0).all()
    primals = tuple(t.detach() for t in leaves)
    out, tangent = torch.func.jvp(lambda *x: function(*x, attn_mask=mask), primals, primals)
    assert (out[:, :, 1] == 0).all()
    assert (tangent[:, :, 1] == 0).all()


@pytest.mark.parametrize("seed", range(40))
def test_calls_in_forward_mode_are_right_in_every_number(seed):
    """Output and vitals come from the formula then: from one source, by other sums."""
    c = draw(seed, dtype=(torch.float32, torch.float64)[seed % 2], sizes=SMALL_SIZES)
    with forward_ad.dual_level():
        out, vitals = scaledot.attention_with_vitals(*c.tensors, **c.keywords, per_row=True)
    assert_output_agrees(out, *c.tensors, **c.keywords)
    expected = oracle.diagnose(c.query, c.key, **c.keywords)
    assert_vitals_agree(vitals, expected, per_row=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_are_kept_and_16_bits_computed_in_32(dtype):
    leaves = [t.to(dtype).requires_grad_() for t in small().tensors]

    def second(attend, leaves):
        grads = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in grads), leaves)

    exact = second(oracle.attend, [t.detach().double().requires_grad_() for t in leaves])
    for got, want in zip(second(scaledot.attention, leaves), exact, strict=True):
        assert got.dtype == dtype
        # The first gradients are rounded to the type before the second ones are taken of them.
        assert (got.double() - want).abs().amax() <= 8 * torch.finfo(dtype).eps * want.abs().amax()


def test_autocast_does_not_coarsen_the_formula():
    query, key, value = (x.bfloat16() for x in torch.randn(3, 1, 2, 7, 8).unbind())

    def tangent():
        return torch.func.jvp(lambda q: scaledot.attention(q, key, value), (query,), (query,))[1]

    plain = tangent()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tangent(), plain)
