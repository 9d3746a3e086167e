"""What is hidden from a row does not reach it, even where it is NaN: outputs, vitals, gradients.

Matrix products multiply 0 and NaN to NaN, so the kernels have a second way for such tiles.
"""

import math

import pytest
import torch

import scaledot
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

forward = pytest.importorskip("scaledot.backends.cuda.forward").forward
repair = pytest.importorskip("scaledot.backends.cuda.repair").repair

QUERIES, KEYS, WIDTH, BAD = 5, 20, 8, 14
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def seen_by(kind):
    """[Q, K] and the arguments that hide the others."""
    i, j = torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None, :]
    if kind == "bool":
        seen = (j < BAD).expand(QUERIES, KEYS)
        return seen, {"attn_mask": seen}
    if kind == "bool by row":
        seen = (j < BAD) | (i % 2 == 0)
        return seen, {"attn_mask": seen}
    if kind == "float":
        seen = (j < BAD) | (i == 4)
        return seen, {"attn_mask": torch.zeros(QUERIES, KEYS).masked_fill(~seen, -math.inf)}
    if kind == "causal":
        seen = j <= i + KEYS - QUERIES
        return seen, {"is_causal": True, "causal_align": "bottom_right"}
    if kind == "window":
        seen = (j >= i + KEYS - QUERIES - 9) & (j <= i + KEYS - QUERIES)
        return seen, {"window": (9, 0), "causal_align": "bottom_right"}
    seen = (j < BAD).expand(QUERIES, KEYS)
    return seen, {"key_lengths": torch.tensor([BAD])}


def bad_keys(kind):
    """Some that not all rows see, some that none does, as the kind allows."""
    at = {"causal": [17, 18], "window": [0, 7, 19]}.get(kind, [BAD, 16, 19])
    return torch.tensor(at)


def tensors(dtype, value_width, seed=0):
    torch.manual_seed(seed)
    sizes = ((2, QUERIES, WIDTH), (1, KEYS, WIDTH), (1, KEYS, value_width))
    return [torch.randn(1, *size).to(dtype) for size in sizes]


def moved(device, words):
    return {name: w.to(device) if isinstance(w, torch.Tensor) else w for name, w in words.items()}


def run(device, query, key, value, words, rows, backend="triton"):
    """Output, vitals and gradients of a loss over some of the rows."""
    leaves = [t.to(device, copy=True).requires_grad_() for t in (query, key, value)]
    words = {**moved(device, words), "backend": backend, "enable_gqa": True}
    out, vitals = scaledot.attention_with_vitals(*leaves, **words, per_row=True)
    weight = torch.linspace(0.5, 1.5, out.shape[-1], device=device)
    loss = (out[:, :, rows] * weight).float().sum()
    return out, vitals, torch.autograd.grad(loss, leaves)


KINDS = ["bool", "bool by row", "float", "causal", "window", "lengths"]
CASES = [(torch.bfloat16, kind, math.nan) for kind in KINDS]
CASES += [(torch.float32, kind, math.inf) for kind in KINDS[1:5]]
CASES += [(torch.float16, kind, -math.inf) for kind in KINDS[3:5]]


@pytest.mark.one_case
@pytest.mark.parametrize(("dtype", "kind", "bad"), CASES)
def test_rows_that_cannot_see_a_broken_key_do_not_notice_it(device, dtype, kind, bad):
    seen, words = seen_by(kind)
    at = bad_keys(kind)
    blind = ~seen[:, at].any(1)
    assert blind.any()
    query, key, value = tensors(dtype, 6)
    clean_out, clean, clean_grads = run(device, query, key, value, words, blind)
    key[:, :, at], value[:, :, at, 1] = bad, bad
    out, vitals, grads = run(device, query, key, value, words, blind)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out[:, :, blind], clean_out[:, :, blind], **tolerance)
    assert not out[:, :, ~blind].isfinite().all(-1).any()
    torch.testing.assert_close(grads[0][:, :, blind], clean_grads[0][:, :, blind], **tolerance)
    for name in ("max_logit", "lse", "entropy", "top_p", "sum_p2"):
        found, wanted = getattr(vitals.per_row, name), getattr(clean.per_row, name)
        torch.testing.assert_close(found[:, :, blind], wanted[:, :, blind], rtol=1e-5, atol=1e-5)
    assert (vitals.nonfinite.cpu() == (~blind).sum()).all()
    if blind.all():  # no row sees it, so it is in no gradient
        torch.testing.assert_close(grads[1], clean_grads[1], **tolerance)
        torch.testing.assert_close(grads[2], clean_grads[2], **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_value_alone_shows_in_its_own_column(device, dtype):
    seen, words = seen_by("bool by row")
    query, key, value = tensors(dtype, 6)
    clean = run(device, query, key, value, words, seen.any(1))[0]
    value[0, 0, BAD, 2], value[0, 0, BAD + 1, 3] = math.nan, math.inf
    out = run(device, query, key, value, words, seen.any(1))[0]
    broken = torch.zeros(2, QUERIES, 6, dtype=torch.bool)
    broken[:, ::2, 2:4] = True
    assert torch.equal(~out[0].isfinite().cpu(), broken)
    assert (out[0, :, ::2, 3] == math.inf).all()
    tolerance = 4 * torch.finfo(dtype).eps
    assert (out - clean)[0].cpu()[~broken].abs().max() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_a_broken_row_cannot_see_get_clean_gradients(device, dtype):
    """The row's query and its incoming gradient are NaN."""
    seen, words = seen_by("causal")
    query, key, value = tensors(dtype, 6)

    def gradients(query, last):
        leaves = [t.to(device, copy=True).requires_grad_() for t in (query, key, value)]
        out = scaledot.attention(*leaves, **words, backend="triton", enable_gqa=True)
        grad = torch.ones_like(out)
        grad[:, :, 2] = last
        return torch.autograd.grad(out, leaves, grad)

    clean = gradients(query, 0.0)
    query[:, :, 2] = math.nan
    found = gradients(query, math.nan)
    hidden = ~seen[2]
    assert hidden.any()
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for a, b in zip(found[1:], clean[1:], strict=True):
        torch.testing.assert_close(a[:, :, hidden], b[:, :, hidden], **tolerance)
        assert a[:, :, ~hidden].isnan().all()
    rows = torch.arange(QUERIES) != 2
    torch.testing.assert_close(found[0][:, :, rows], clean[0][:, :, rows], **tolerance)


@pytest.mark.parametrize("kind", ["causal", "window"])
@pytest.mark.parametrize("extra", [{}, {"sinks": True, "softcap": 2.0, "log_n": True}])
def test_rows_that_another_kernel_left_broken_are_repaired(device, kind, extra):
    """As the Hopper pass leaves them: its lse is right, its output NaN in all of a tile."""
    seen, words = seen_by(kind)
    at = bad_keys(kind)
    query, key, value = tensors(torch.float32, 6)
    left = words["window"][0] if kind == "window" else None
    softcap, log_n = extra.get("softcap", 0.0), extra.get("log_n", False)
    setting = Settings(0.4, log_n, softcap, 0.0, left, 0, True)
    inputs = Inputs(query, key, value, *[None] * 8)
    if extra:
        inputs = inputs._replace(sinks=torch.randn(1, 2))
    inputs = Inputs._make(None if t is None else t.to(device) for t in inputs)
    clean = torch.empty(1, 2, QUERIES, 6, device=device)
    lse, _ = forward(inputs, setting, clean, False)
    value[:, :, at] = math.nan
    inputs = inputs._replace(value=value.to(device))
    out = clean.clone()
    out[:, :, 1:] = math.nan
    broken = out.isnan().any(-1).to(torch.int8)
    out[:, :, 0] = 7.0  # was not broken: stays
    repair(out, lse, broken, inputs, setting, soon=False)
    assert (out[:, :, 0] == 7.0).all()
    blind = ~seen[:, at].any(1)
    blind[0] = False
    assert blind.any()
    torch.testing.assert_close(out[:, :, blind], clean[:, :, blind], rtol=1e-5, atol=1e-5)
    sees = seen[:, at].any(1)
    sees[0] = False
    assert out[:, :, sees].isnan().all()


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["bool by row", "causal", "window"])
def test_additive_attention(device, kind):
    seen, words = seen_by(kind)
    at = bad_keys(kind)
    blind = ~seen[:, at].any(1)
    query, key, value = tensors(torch.float32, 6)
    weight = torch.randn(WIDTH)

    def attend(key, value):
        leaves = [
            t.to(device, copy=True).requires_grad_()
            for t in (query, key.expand(-1, 2, -1, -1), value.expand(-1, 2, -1, -1))
        ]
        there = moved(device, words)
        out = scaledot.additive_attention(*leaves, weight.to(device), backend="triton", **there)
        return out, torch.autograd.grad(out[:, :, blind].sum(), leaves[0])[0]

    clean, clean_grad = attend(key, value)
    key[:, :, at], value[:, :, at] = math.nan, math.nan
    out, grad = attend(key, value)
    torch.testing.assert_close(out[:, :, blind], clean[:, :, blind], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad[:, :, blind], clean_grad[:, :, blind], rtol=1e-6, atol=1e-6)
    assert out[:, :, ~blind].isnan().all()


def test_rows_broken_by_a_value_beyond_their_own_keys_are_repaired(device):
    """A tile of the pass has more rows than a block of the repair: a later row's value is in it."""
    torch.manual_seed(5)
    query, key, value = (torch.randn(1, 1, 200, 8, device=device) for _ in range(3))
    setting = Settings(0.4, False, 0.0, 0.0, None, 0, False)
    inputs = Inputs(query, key, value, *[None] * 8)
    clean = torch.empty_like(query)
    lse, _ = forward(inputs, setting, clean, False)
    value[0, 0, 133, 3] = math.nan
    inputs = inputs._replace(value=value)
    out = clean.clone()
    out[:, :, 128:133] = math.nan  # of its own block
    out[:, :, 64:128] = math.nan  # of the block before, in one tile of the pass
    out[:, :, 133:, 3] = math.nan
    repair(out, lse, out.isnan().any(-1).to(torch.int8), inputs, setting, soon=False)
    torch.testing.assert_close(out[:, :, :133], clean[:, :, :133], rtol=1e-5, atol=1e-5)
    assert out[:, :, 133:, 3].isnan().all()
    assert not out[:, :, 133:, :3].isnan().any()


def test_rows_broken_by_a_value_that_no_row_sees_are_repaired(device):
    """A tile of the pass has more keys than one of the repair, which ends where the rows do."""
    query = torch.randn(1, 1, 8, 8, device=device)
    key, value = (torch.randn(1, 1, 300, 8, device=device) for _ in range(2))
    for setting, at in [
        (Settings(0.4, False, 0.0, 0.0, None, 0, False), 75),
        (Settings(0.4, False, 0.0, 0.0, 2, 0, True), 257),
    ]:
        inputs = Inputs(query, key, value.clone(), *[None] * 8)
        clean = torch.empty_like(query)
        lse, _ = forward(inputs, setting, clean, False)
        inputs.value[0, 0, at] = -math.inf
        out = torch.full_like(query, math.nan)
        repair(out, lse, out.isnan().any(-1).to(torch.int8), inputs, setting, soon=False)
        torch.testing.assert_close(out, clean, rtol=1e-5, atol=1e-5)


def test_a_row_without_a_softmax_stays_broken(device):
    """All logits of row 3 are -inf, and a value hidden from it is NaN."""
    query, key, value = (torch.rand(1, 1, 8, 4, device=device) for _ in range(3))
    query[:, :, 3] = -math.inf
    value[:, :, 6] = math.nan
    setting = Settings(0.4, False, 0.0, 0.0, None, 0, False)
    inputs = Inputs(query, key, value, *[None] * 8)
    out = torch.empty_like(query)
    lse, _ = forward(inputs, setting, out, False)
    sound = torch.tensor([0, 1, 2, 4, 5], device=device)
    for result in (out, torch.full_like(out, math.nan)):
        broken = result.isnan().any(-1).to(torch.int8)
        repair(result, lse, broken, inputs, setting, soon=False)
        assert result[:, :, sound].isfinite().all()
        assert result[:, :, [3, 6, 7]].isnan().all()


@pytest.mark.parametrize("words", [{"is_causal": True}, {"window": (None, 3)}, {"window": (2, 1)}])
def test_keys_behind_the_last_row_s_reach_get_no_gradient(device, words):
    """A tile has room for more rows: those past the last would see them, and see nothing."""
    query, key, value = tensors(torch.float32, 6)
    key[:, :, 12:], value[:, :, 13] = math.nan, math.inf
    _, _, grads = run(device, query, key, value, words, torch.arange(QUERIES) >= 0)
    for grad in grads:
        assert grad.isfinite().all()
    assert (grads[1][:, :, 12:] == 0.0).all()
    assert (grads[2][:, :, 12:] == 0.0).all()
