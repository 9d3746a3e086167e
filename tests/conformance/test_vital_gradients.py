"""Gradients of the vitals, for a loss that holds a head's entropy or its largest logit in bounds.

A vital is an observation without a graph, unless a call stands in `measure.differentiable()` or in
one of torch.func's transforms. What may not happen is a gradient that is silently 0 there.
"""

import copy
import gc
import math
import weakref

import oracle
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import scaledot
from conformance.calls import call
from conformance.test_gradients import ARGUMENTS, differentiable, small
from scaledot import measure

# Forward mode brings one of torch's own warnings with it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

FIELDS = [name for name in measure.FLOAT_FIELDS if name != "saturated"]
SMOOTH = {n: words for n, words in ARGUMENTS.items() if n != "scale_zero"}  # there deviations are 0


def numbers(vitals):
    """The sum of every field over its heads, and of those of rows; -inf of empty heads left out."""
    fields = [getattr(vitals, name) for name in (*FIELDS, "passes")]
    rows = [] if vitals.per_row is None else list(vitals.per_row)
    return torch.stack([x.where(x.isfinite(), 0).sum() for x in (*fields, *rows)])


@pytest.mark.parametrize("name", SMOOTH)
def test_every_vital_of_every_argument(name):
    leaves, rebuild = differentiable(small(**SMOOTH[name]))

    def run(*inputs):
        tensors, words = rebuild(*inputs)
        with measure.differentiable():
            vitals = scaledot.attention_with_vitals(*tensors, **words, per_row=True)[1]
        return numbers(vitals)

    assert gradcheck(run, leaves, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(run, leaves, fast_mode=True)


def test_scores_alone_merged_and_packed():
    query, key = (torch.randn(2, 2, n, 4).double().requires_grad_() for n in (3, 5))

    def scores(query, key):
        with measure.differentiable():
            vitals = scaledot.vitals(query, key, key_lengths=torch.tensor([0, 4]))
        merged = vitals.over_batch().merge(vitals.over_batch())
        return torch.cat([numbers(vitals), numbers(vitals.over_batch()), numbers(merged)])

    assert gradcheck(scores, (query, key), fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(scores, (query, key), fast_mode=True)
    ends = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 2, 4, 7])
    packed = [torch.randn(n, 2, 4).double().requires_grad_() for n in (5, 7)]

    def sequences(query, key):
        with measure.differentiable():
            vitals = scaledot.vitals_varlen(query, key, *ends, is_causal=True, per_row=True)
        return numbers(vitals)

    assert gradcheck(sequences, packed, fast_mode=True, check_forward_ad=True)


def test_additive_scores():
    leaves = [torch.randn(2, 2, n, 3).double().requires_grad_() for n in (3, 4, 4)]
    leaves.append(torch.randn(2, 3).double().requires_grad_())

    def run(*inputs):
        with measure.differentiable():
            return numbers(scaledot.additive_attention_with_vitals(*inputs, is_causal=True)[1])

    assert gradcheck(run, leaves, fast_mode=True, check_forward_ad=True)


def dense_entropy(query, key):
    """Mean entropy of causal rows, by the definition."""
    size = query.shape[-2]
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    hidden = ~torch.ones(size, size, dtype=torch.bool).tril()
    log_p = scores.masked_fill(hidden, -math.inf).log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(hidden, 0.0)).sum(-1).mean(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_penalty_beside_a_loss_is_not_forgotten(dtype):
    """More heads and rows than are differentiated at once."""
    tensors = call(lead=(3, 4), queries=67, keys=67, width=8, dtype=dtype).tensors

    def gradients(attend, leaves):
        out, entropy, largest = attend(*leaves)
        loss = out.square().mean() + 0.1 * entropy.mean() + 0.01 * (largest - 1).relu().sum()
        return torch.autograd.grad(loss, leaves)

    def ours(query, key, value):
        with measure.differentiable():
            out, vitals = scaledot.attention_with_vitals(query, key, value, is_causal=True)
        return out, vitals.entropy, vitals.over_batch().max_logit

    def exact(query, key, value):
        found = oracle.diagnose(query, key, is_causal=True)
        out = oracle.attend(query, key, value, is_causal=True)
        return out, dense_entropy(query, key), found.max_logit.amax(0)

    found = gradients(ours, [t.detach().requires_grad_() for t in tensors])
    wanted = gradients(exact, [t.detach().double().requires_grad_() for t in tensors])
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), want, rtol=16 * eps, atol=16 * eps)


def test_heads_in_parts_add_up(monkeypatch):
    from scaledot.backends import vitals_gradient

    c = call(lead=(2, 6), queries=5, keys=7, key_heads=2, dtype=torch.float64)
    c = c.with_keywords(sinks=torch.randn(6).double(), attn_mask=torch.randn(6, 5, 7).double())
    leaves, rebuild = differentiable(c)

    def gradients():
        tensors, words = rebuild(*leaves)
        with measure.differentiable():
            vitals = scaledot.attention_with_vitals(*tensors, **words)[1]
        return torch.autograd.grad(numbers(vitals).sum(), leaves, allow_unused=True)

    whole = gradients()
    monkeypatch.setattr(vitals_gradient, "SCORES_AT_ONCE", 1)
    for part, all_at_once in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(part, all_at_once)


def test_transforms_differentiate_vitals_without_being_asked():
    query, key, value = torch.randn(3, 2, 3, 7, 5).double().unbind()

    def entropy(x):
        return scaledot.attention_with_vitals(x, key, value, is_causal=True)[1].entropy.sum()

    leaf = query.clone().requires_grad_()
    (exact,) = torch.autograd.grad(dense_entropy(leaf, key).sum(), leaf)
    torch.testing.assert_close(torch.func.grad(entropy)(query), exact)
    per_sample = torch.func.vmap(torch.func.grad(entropy))(query[:, None])
    assert per_sample.shape == (2, 1, 3, 7, 5)
    _, slope = torch.func.jvp(entropy, (query,), (query,))
    torch.testing.assert_close(slope, (exact * query).sum())
    alone = torch.func.grad(lambda x: scaledot.vitals(x, key, is_causal=True).entropy.sum())
    torch.testing.assert_close(alone(query), exact)


def test_transforms_of_a_loss_leave_vitals_beside_it_unused():
    query, key, value = torch.randn(3, 1, 2, 7, 5).unbind()

    def loss(x):
        out, vitals = scaledot.attention_with_vitals(x, key, value)
        return out.square().sum(), vitals

    grad, vitals = torch.func.grad(loss, has_aux=True)(query)
    assert not vitals.entropy.requires_grad
    exact = torch.func.grad(lambda x: scaledot.attention(x, key, value).square().sum())(query)
    torch.testing.assert_close(grad, exact)


def test_a_share_of_rows_says_that_it_has_no_gradient():
    query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 2, 7, 5).unbind())
    with measure.differentiable():
        _, vitals = scaledot.attention_with_vitals(query, key, value)
    with pytest.raises(RuntimeError, match="saturated counts rows"):
        vitals.saturated.sum().backward()
    vitals.over_batch().entropy.sum().backward()  # nothing of it comes from `saturated`


def test_values_are_those_of_the_same_call_without_a_graph():
    query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 2, 7, 5).unbind())
    plain = scaledot.attention_with_vitals(query, key, value, per_row=True)[1]
    assert plain.entropy.numpy() is not None
    with measure.differentiable():
        ours = scaledot.attention_with_vitals(query, key, value, per_row=True)[1]
    for name in (*oracle.FLOAT_FIELDS, *oracle.COUNT_FIELDS):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name
    assert ours.entropy.requires_grad
    assert ours.per_row.lse.requires_grad
    assert not ours.rows.requires_grad
    assert str(ours) == str(plain)
    assert not copy.deepcopy(ours).entropy.requires_grad
    assert not scaledot.attention_with_vitals(query, key, value)[1].entropy.requires_grad


def test_a_first_look_without_gradients_does_not_lose_the_graph():
    query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 2, 7, 5).unbind())
    with measure.differentiable():
        _, vitals = scaledot.attention_with_vitals(query, key, value)
    with torch.no_grad():
        vitals.entropy.mean()
    assert vitals.entropy.requires_grad


def test_a_graph_is_given_back_with_its_vitals():
    query, key, value = torch.randn(3, 1, 2, 7, 5).unbind()
    query = query * torch.ones((), requires_grad=True)
    with measure.differentiable():
        out, vitals = scaledot.attention_with_vitals(query, key, value)
    (out.sum() + vitals.entropy.sum()).backward()
    held = weakref.ref(query)
    del query, out
    gc.collect()
    assert held() is None  # backward has freed what the vitals held
    assert vitals.entropy.requires_grad


def test_modules_measure_with_a_graph_where_they_are_asked_to():
    layer = scaledot.nn.MultiHeadAttention(d_model=6, num_heads=2)
    tokens = torch.randn(2, 5, 6)
    layer(tokens)
    assert not layer.vitals.entropy.requires_grad
    with measure.differentiable():
        layer(tokens)
    layer.vitals.entropy.sum().backward()
    assert layer.q_proj.weight.grad.abs().sum() > 0
    assert copy.deepcopy(layer).vitals is None


@pytest.mark.compile
def test_a_compiled_step_with_a_penalty():
    torch._dynamo.reset()
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, 7, 5).unbind()]

    def step(query, key, value):
        with measure.differentiable():
            out, vitals = scaledot.attention_with_vitals(query, key, value)
        return out.square().mean() + 0.1 * vitals.entropy.mean()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    found, exact = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, step))
    torch.testing.assert_close(found, exact)
