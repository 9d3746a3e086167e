"""Compare everything that one call returns with the oracle.

A result may be off by FACTOR times the largest error of the same formula in the same precision, of
one head's matrix, plus the rounding of the result to its own type. That error is measured twice:
the plain formula is computed in the type of our sums, for 16-bit types with products rounded as a
tensor core rounds them; and in float64 with noise of the size of rounding errors (oracle.attend).
Such a look may be right by chance, so a result that fails is held against MORE_LOOKS more of them:
with noise, and for 16-bit types with products off at random by as much as their rounding. Where all
keys are alike, the gradient of a query is one sum of dS that should be 0, and one look says little.
Vitals have the bounds of conformance/agreement.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import oracle
import torch
from conformance import agreement

import scaledot
from fuzz import engines, formula
from fuzz.cases import FLOAT_MASKS, Case
from fuzz.tensors import Call, grad_of, make
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS

FACTOR = 4.0
MORE_LOOKS = 12
# Up to this lse a backward pass may make weights again as e^(logit - lse). torch's CPU kernel takes
# no farther calls (backends/logit_bound.py), and ours renew the lse there. torch's GPU kernels take
# all. Beyond 1e7, a lowest bias.
FAR, FAR_BY_LSE = 64.0, 1e7
MOST = 0.9  # of a type's largest number: beyond, a result may overflow


@dataclass
class Outcome:
    """What a case's checks found."""

    engine: str = ""
    compared: int = 0  # numbers
    faults: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)  # error / bound of each result

    def note(self, name: str, message: str) -> None:
        self.faults.append(f"{name}: {message}")


def check(case: Case, engine: str) -> Outcome:
    """Run the case on the engine and compare all it returns."""
    outcome = Outcome(engine)
    call = make(case, engines.device_of(engine))
    with engines.forced(engine) as backend:
        try:
            if engine == "hopper" and not engines.serves(call, engine):
                backend = None
            _check(call, backend, outcome)
        except Exception as error:  # a crash is a finding like another
            outcome.note("raised", f"{type(error).__name__}: {error}")
    return outcome


def _check(call: Call, backend: str | None, outcome: Outcome) -> None:
    case = call.case
    before = {name: x.detach().clone() for name, x in call.tensors.items()}
    keep = None
    if case.dropout:
        weights = engines.attention(
            call, backend, value=formula.identity(call, _dtype(case)).to(call.tensors["key"].device)
        )
        keep = formula.dropped(weights, case.dropout)
        _check_share(outcome, call, keep)
    out = engines.attention(call, backend)
    with_vitals, found = engines.attention_with_vitals(call, backend)
    alone = engines.vitals(call, backend)
    expected = formula.vitals(call)
    tensors = formula.on_cpu(call.tensors)
    exact = formula.output(call, tensors, keep=keep)
    looks = _Looks(
        call, 2, outcome.engine, lambda **rounding: formula.output(call, tensors, keep, **rounding)
    )
    for name, each in (("output", out), ("output with vitals", with_vitals)):
        claim = torch.ones(exact.shape, dtype=torch.bool)
        if case.bad is not None:  # logits that are all -inf by themselves: zeros in torch, or NaN
            lost = each.detach().cpu().isnan() & (exact == 0)
            claim = ~(lost & formula.broken_rows(call)[..., None])
        _compare(outcome, name, each, exact, looks.take, claim, case)
    defined = _vitals_are_defined(case)
    if defined:
        _check_vitals(outcome, "vitals", found, expected, case)
    if defined and alone is not None:
        _check_vitals(outcome, "vitals alone", alone, expected, case)
    again, measured = engines.attention_with_vitals(call, backend)
    _check_equal(outcome, "repeated output", again, with_vitals)
    for name in (*FLOAT_FIELDS, *COUNT_FIELDS):
        _check_equal(outcome, f"repeated {name}", getattr(measured, name), getattr(found, name))
    if call.leaves:
        _check_gradients(outcome, call, backend, keep, exact)
    for name, x in call.tensors.items():
        _check_equal(outcome, f"{name} after the call", x.detach(), before[name])


def _vitals_are_defined(case: Case) -> bool:
    """Not where a pair that its bias calls masked takes part in the output all the same.

    It may be NaN or infinite, or, in float16, so large that -65504 does not hide it.
    """
    if case.mask != "lowest":
        return True
    broken = case.bad is not None and case.bad[0] != "value"
    outweighed = (case.mask_type or case.dtype) == "float16" and case.level >= 1e3
    return not (broken or outweighed)


def _check_gradients(outcome: Outcome, call: Call, backend, keep, exact_out) -> None:
    case = call.case
    leaves = {name: x.detach().requires_grad_() for name, x in call.leaves.items()}
    live = replace(call, tensors={**call.tensors, **leaves})

    def found() -> tuple[torch.Tensor, dict]:
        if case.with_vitals:
            out = engines.attention_with_vitals(live, backend)[0]
        else:
            out = engines.attention(live, backend)
        grads = torch.autograd.grad(out, list(leaves.values()), grad_of(case, out))
        return out, dict(zip(leaves, grads, strict=True))

    with engines.noted_peers() as peers:
        out, grads = found()
    grad = grad_of(case, out).detach().cpu().double()
    tensors = formula.on_cpu(call.tensors)
    claims = {name: torch.ones(x.shape, dtype=torch.bool) for name, x in leaves.items()}
    overflows = (exact_out.abs() > MOST * torch.finfo(out.dtype).max).any(-1)
    if case.bad is not None or overflows.any():
        broken = formula.broken_rows(call) | overflows
        claims = formula.claimed(call, broken)
        grad = grad.masked_fill(broken[..., None], 0.0)
        tensors = formula.clean(call)
        if peers:  # in a tile of theirs NaN reaches rows and keys that it is hidden from
            claims = {name: claim & ~broken.any() for name, claim in claims.items()}
    exact = formula.gradients(call, tensors, grad, keep=keep)
    looks = _Looks(
        call,
        3,
        outcome.engine,
        lambda **rounding: formula.gradients(call, tensors, grad, keep, **rounding),
        bool(peers),
    )
    for name, got in grads.items():
        each = functools.partial(looks.take, name=name)
        want, one = exact[name].detach(), name in ("scale", "sinks")
        _compare(outcome, f"gradient of {name}", got, want, each, claims[name], case, pooled=one)
    if peers:  # their sums are in no fixed order
        return
    _, again = found()
    for name, got in grads.items():
        _check_equal(outcome, f"repeated gradient of {name}", again[name], got)


class _Looks:
    """The same formula with other roundings: computed when asked for, and kept."""

    def __init__(
        self, call: Call, seed: int, engine: str, compute: Callable, by_torch: bool = False
    ) -> None:
        """by_torch: its GPU kernels make each weight again as e^(logit - lse)."""
        self.case, self.compute, self.found = call.case, compute, []
        self.far, self.each = FAR_BY_LSE if by_torch else FAR, by_torch
        self.numbers = torch.Generator().manual_seed(call.case.seed + seed)

    def take(self, count: int, name: str | None = None) -> list[torch.Tensor]:
        kind, dtype = _compute(self.case), _dtype(self.case)
        narrow = dtype if dtype.itemsize == 2 else None
        while len(self.found) < count:
            if not self.found:
                self.found.append(self.compute(compute=kind, products=narrow))
            else:
                noise = (torch.finfo(kind).eps, self.numbers, self.far, self.each)
                products = narrow if len(self.found) > 1 else None
                self.found.append(self.compute(noise=noise, products=products))
        return [(look if name is None else look[name]).detach() for look in self.found[:count]]


def _compare(outcome, name, got, exact, looks, claim, case: Case, pooled=False) -> None:
    """Within the bound where the contract says anything, finite in the same places."""
    dtype = _dtype_of(name, case, got)
    if got.dtype != dtype:
        outcome.note(name, f"is {got.dtype}, expected {dtype}")
    if got.shape != exact.shape:
        outcome.note(name, f"has shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
        return
    got = got.detach().cpu().double()
    limit = torch.finfo(dtype).max
    claim = claim & ~(exact.isfinite() & (exact.abs() > MOST * limit))  # it may overflow
    outcome.compared += int(claim.sum())
    wrong = claim & (got.isfinite() != exact.isfinite())
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        outcome.note(
            name,
            f"{list(at)} is {got[at]:.6g}, expected {exact[at]:.6g} ({int(wrong.sum())} entries)",
        )
        return
    fine = claim & exact.isfinite()
    by_head = case.packed is not None and name != "gradient of weight"  # [tokens, heads, width]
    error = _by_matrix(torch.where(fine, got - exact, 0.0), pooled, by_head)
    size = _by_matrix(torch.where(fine, exact, 0.0), pooled, by_head)
    small = torch.finfo(_compute(case))
    underflow = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    rounding = torch.finfo(dtype).eps * size + underflow + small.tiny / small.eps
    if pooled:
        rounding = rounding + torch.finfo(_compute(case)).eps
    for count in (2, 2 + MORE_LOOKS):
        bound = torch.zeros_like(error)
        for look in looks(count):
            off = torch.where(fine & look.isfinite(), look.double() - exact, 0.0)
            bound = torch.maximum(bound, _by_matrix(off, pooled, by_head))
        ratio = error / (FACTOR * (bound + rounding))
        worst = ratio.max().item() if ratio.numel() else 0.0
        if worst <= 1.0:
            outcome.worst[name] = worst
            return
    outcome.worst[name] = worst
    at = int(ratio.argmax())
    outcome.note(
        name,
        f"error {error.flatten()[at]:.3g}, the same formula's {bound.flatten()[at]:.3g}, "
        f"largest number {size.flatten()[at]:.3g}",
    )


def _by_matrix(x: torch.Tensor, pooled: bool, by_head: bool) -> torch.Tensor:
    """The largest of each head's matrix; pooled: of all."""
    if x.numel() == 0:
        return x.new_zeros(0)
    x = x.abs()
    if pooled or x.dim() < 2:
        return x.amax()
    return x.amax((0, 2)) if by_head else x.amax((-1, -2))


def _check_vitals(outcome: Outcome, name: str, found, expected, case: Case) -> None:
    names = (*oracle.FLOAT_FIELDS, *oracle.COUNT_FIELDS)
    outcome.compared += sum(getattr(expected, n).numel() for n in names)
    rows = found.per_row
    moved = {n: getattr(found, n).cpu() for n in (*FLOAT_FIELDS, *COUNT_FIELDS)}
    if rows is not None:
        rows = type(rows)(*(plane.cpu() for plane in rows))
        outcome.compared += sum(plane.numel() for plane in rows)
    found = scaledot.Vitals(**moved, per_row=rows)
    before, agreement.LOGIT_ULPS = agreement.LOGIT_ULPS, _logit_ulps(case, outcome.engine)
    try:
        agreement.assert_vitals_agree(found, expected, per_row=case.per_row)
    except AssertionError as error:
        outcome.note(name, str(error))
    finally:
        agreement.LOGIT_ULPS = before


def _logit_ulps(case: Case, engine: str) -> float:
    """Errors of a running sum of terms of one sign add up like a random walk.

    A tensor core's sums keep fewer guard bits than a float32 adder.
    """
    ulps = 64 if _on_gpu(engine) else agreement.LOGIT_ULPS
    # Terms that are all alike are rounded the same way each time.
    ulps += case.width / 8 if "expand-1" in case.layouts else math.sqrt(case.width) / 4
    return 2 * ulps if case.dtype == "float64" else ulps  # the oracle rounds as much


def _check_equal(outcome: Outcome, name: str, got: torch.Tensor, before: torch.Tensor) -> None:
    outcome.compared += got.numel()
    same = (got == before) | (got.isnan() & before.isnan())
    if not same.all():
        outcome.note(name, f"differs in {int((~same).sum())} of {got.numel()} entries")


def _check_share(outcome: Outcome, call: Call, keep: torch.Tensor) -> None:
    """As many weights are dropped as the rate says; six standard deviations."""
    case = call.case
    if (
        case.bad is not None
        or case.level > 3
        or case.dtype == "float16"
        or case.mask in FLOAT_MASKS
    ):
        return  # weights that vanish by themselves
    seen = formula.visible(call)
    count, kept = int(seen.sum()), int((seen & (keep > 0)).sum())
    rate = case.dropout
    if abs(kept - count * (1 - rate)) > 6 * math.sqrt(count * rate * (1 - rate)) + 1e-9:
        outcome.note("dropout", f"kept {kept} of {count} weights at a rate of {rate}")


def _on_gpu(engine: str) -> bool:
    return engine in ("triton", "hopper") or engines.device_of(engine) == "cuda"


def _dtype(case: Case) -> torch.dtype:
    return getattr(torch, case.dtype)


def _dtype_of(name: str, case: Case, got: torch.Tensor) -> torch.dtype:
    if name == "gradient of mask" and case.mask_type is not None:
        return getattr(torch, case.mask_type)
    return _dtype(case)


def _compute(case: Case) -> torch.dtype:
    return torch.float64 if case.dtype == "float64" else torch.float32
