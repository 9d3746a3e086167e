"""When do two results agree? The tolerances are measured, not chosen by taste.

Output: the error to float64 is at most twice the error of the plain formula in the same type,
plus rounding.  Statistics: the rounding of one logit, propagated.  A logit is a sum, so its
rounding is a few `eps` times the sum of its absolute terms (`reach`); every field of Vitals moves
by at most a small multiple of that when all logits move by it.
"""

import math

import oracle
import torch

LOGIT_ULPS = 4  # dot product, scale, bias and change of base each round once


def assert_output_agrees(out, query, key, value, **keywords):
    """One output, or several of the same call, against the oracle."""
    exact = oracle.attend(query, key, value, **keywords)
    eager = oracle.attend(query, key, value, compute=query.dtype, **keywords)
    reach = oracle.diagnose(query, key, **keywords).output_reach
    for each in [out] if isinstance(out, torch.Tensor) else out:
        assert each.dtype == query.dtype
        assert_close_to_exact(each, exact, eager, reach=reach, weight=_largest(value))


def assert_gradients_agree(out, leaves, attend, reach):
    """d out / d leaves against the oracle: `attend(leaves, compute)` is its output for them.

    Leaves are query, key, value and what else has a gradient. The rounding that is allowed: of the
    gradient in its own type; of the inputs, measured as the exact gradient a few ulps away; of a
    weight that is made again as exp(logit - lse); and of the sum dO.v that each score receives.
    """
    query, key, value = (_largest(x) for x in leaves[:3])
    weight = torch.randn(out.shape)
    dtype = leaves[0].dtype
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    near = [
        (x.detach().double() * (1 + eps * torch.randn(x.shape))).requires_grad_() for x in leaves
    ]

    def gradients(output, inputs):
        return torch.autograd.grad((output * weight.to(output.dtype)).sum(), inputs)

    found = gradients(out, leaves)
    exact = [g.double() for g in gradients(attend(leaves, torch.float64), leaves)]
    eager = gradients(attend(leaves, dtype), leaves)
    moved = gradients(attend(near, torch.float64), near)
    received = eps * _largest(weight.abs().sum(-1)) * value * max(query, key)
    for got, want, plain, shifted in zip(found, exact, eager, moved, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got.isfinite(), want.isfinite()), "other entries are finite"
        size = _largest(want) + _largest(weight)
        rounded = torch.finfo(dtype).eps * size + eps * (reach + 4) * size + received
        bound = 2 * (_error(plain, want) + rounded + 8 * _error(shifted, want))
        assert _error(got, want) <= bound, f"error {_error(got, want):.3g} is above {bound:.3g}"


def assert_close_to_exact(out, exact, eager, *, reach=1.0, weight=1.0):
    """|out - exact| <= 2 (|eager - exact| + rounding), and the same entries are not finite."""
    assert out.shape == exact.shape, f"shape {tuple(out.shape)}, expected {tuple(exact.shape)}"
    assert torch.equal(out.isfinite(), exact.isfinite()), (
        "not finite in other places than the oracle"
    )
    bound = 2 * (_error(eager, exact) + rounding(out.dtype, exact, reach, weight))
    error = _error(out, exact)
    assert error <= bound, f"error {error:.3g} is above {bound:.3g}"


def rounding(dtype, exact, reach, weight):
    """Rounding of the result in its own type, and of its logits in the type that computes them."""
    return torch.finfo(dtype).eps * _largest(exact) + 2 * logit_rounding(dtype, reach) * weight


def logit_rounding(dtype, reach):
    """How far a logit made of terms summing to `reach` may be off; 16-bit types use float32."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return LOGIT_ULPS * torch.finfo(compute).eps * (reach + 4)


def assert_vitals_agree(vitals, expected, per_row=False):
    """Every field of `vitals`, and of `vitals.per_row` where asked for."""
    for name in oracle.COUNT_FIELDS:
        got, want = getattr(vitals, name), getattr(expected, name)
        assert got.dtype == torch.int64, f"{name} is {got.dtype}"
        assert torch.equal(got, want), f"{name} is {got.tolist()}, expected {want.tolist()}"
    for name, tolerance in field_tolerances(vitals.entropy.dtype, expected).items():
        _assert_within(name, getattr(vitals, name), getattr(expected, name), tolerance)
    _assert_k_rms(vitals, expected)
    if not per_row:
        assert vitals.per_row is None
        return
    for name, tolerance in row_tolerances(vitals.entropy.dtype, expected).items():
        _assert_within(
            f"per_row.{name}",
            getattr(vitals.per_row, name),
            getattr(expected.per_row, name),
            tolerance,
        )


def field_tolerances(dtype, expected):
    """Largest honest difference of each per-head field, from the rounding of one logit."""
    logit, eps = logit_rounding(dtype, expected.reach), torch.finfo(dtype).eps
    entropy = logit * (2 + math.log(expected.keys + 1))
    return {
        "max_logit": logit,
        "logit_mean": logit,
        "logit_std": logit,  # a standard deviation moves no more than the numbers do
        "row_std": logit,
        "entropy": entropy,
        "entropy_ratio": entropy / math.log(2),
        "sum_p2": _of_p(4 * logit, expected.sum_p2),
        "passes": _of_p(4 * logit, expected.sum_p2) + 4 * eps,
        "top_p": _of_p(2 * logit, expected.top_p),
        "saturated": _undecided(2 * logit, expected) + 4 * eps,
        "sink": _of_p(2 * logit, expected.sink),
        "off": _of_p(2 * logit, expected.off),
        "q_rms": 16 * eps * expected.q_rms,
    }


def row_tolerances(dtype, expected):
    """The same for one row: p moves by at most 2 p delta, H by delta times the spread of -ln p."""
    logit = logit_rounding(dtype, expected.reach)
    return {
        "max_logit": logit,
        "lse": logit,
        "entropy": logit * (2 + math.log(expected.keys + 1)),
        "top_p": _of_p(2 * logit, expected.per_row.top_p),
        "sum_p2": _of_p(4 * logit, expected.per_row.sum_p2),
    }


def _of_p(relative, p):
    """Probabilities below float32's smallest number may vanish."""
    return relative * p + torch.finfo(torch.float32).tiny


def _undecided(relative, expected):
    """Share of rows so near to 0.99 that rounding decides whether they are saturated."""
    if hasattr(expected, "pieces"):  # packed: sequence by sequence
        return torch.stack(
            [_undecided(relative, piece) for piece in expected.pieces] or [expected.off]
        )
    top_p = expected.per_row.top_p
    return ((top_p - 0.99).abs() <= relative).sum(-1) / expected.rows.clamp(min=1)


def _assert_k_rms(vitals, expected):
    """The keys exist without rows too: a head with no row may say so or hold 0."""
    want = torch.where((expected.rows == 0) & (vitals.k_rms == 0), 0, expected.k_rms)
    _assert_within(
        "k_rms", vitals.k_rms, want, 16 * torch.finfo(vitals.k_rms.dtype).eps * expected.k_rms
    )


def _assert_within(name, got, want, tolerance):
    assert got.shape == want.shape, (
        f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    )
    assert got.dtype in (torch.float32, torch.float64), f"{name} is {got.dtype}"
    assert not got.requires_grad, f"{name} carries a graph"
    same = (got == want) | (got.isnan() & want.isnan())
    near = (got.double() - want).abs() <= tolerance
    assert (same | near).all(), _worst(name, got.double(), want, same | near, tolerance)


def _worst(name, got, want, fine, tolerance):
    at = (~fine).nonzero()[0].tolist()
    bound = (
        tolerance[tuple(at)]
        if isinstance(tolerance, torch.Tensor) and tolerance.dim()
        else tolerance
    )
    return (
        f"{name}{at} is {got[tuple(at)]:.9g}, expected {want[tuple(at)]:.9g} +- {float(bound):.2g}"
    )


def _error(x, exact):
    """Largest difference over the entries where both are finite."""
    difference = (x.detach().double() - exact.detach()).abs()
    return _largest(difference)


def _largest(x):
    finite = x.detach()[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
