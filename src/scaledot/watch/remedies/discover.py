"""Which weight rows make a head's query and key, found in one forward pass and then tried.

Found: the gradient of one head's query with respect to a weight is zero but for the rows that make
it. It does not matter how the model splits, transposes, rotates or repeats in between. Tried: each
head's rows are scaled by a factor of their own, the attention module runs once more on what it was
given, and every head's scores must have changed by exactly that head's factor.

Of sharded weights the rows that lie on this rank are found and tried; what they are in the whole
is known from where they lie. Ranks that compute a layer together decide together.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scaledot.problem import Problem
from scaledot.watch.names import Names
from scaledot.watch.remedies import capture, rows, shards
from scaledot.watch.remedies.capture import Call, Inputs, Running
from scaledot.watch.remedies.rows import HALF, WHOLE, Layer, Part
from scaledot.watch.remedies.supports import supports
from scaledot.watch.remedies.together import Together

OUTWARD = 3  # modules around the call that are searched: some keep projections one level up
LOOKED_AT = 64  # queries and keys whose scores are compared
ROUNDINGS = 64  # of the type, relative to the largest score, by which a trial may be off
# But no more than this, for 64 roundings of bfloat16 are a half, and factors are 0.75 at most: rows
# that move nothing would pass. The right rows are 0.01 off at most, on all the models of the tests.
COARSEST = 0.03
TF32 = 2.0**-10  # 10 bits: what torch.set_float32_matmul_precision("high") leaves of float32
LARGER = (64.0, 128.0)

CANNOT_RUN = "its attention module cannot be run a second time on its own"
APART = "ranks that compute it together found different rows"
UNITS = (
    "its projections are FSDP units of their own, whose weights come and go during a trial; give "
    "fully_shard the attention module or its block instead"
)
NO_ROWS = "no rows were found that make one head alone"
NORM = "a norm follows the weights that make its queries and keys, so scaling them changes nothing"


def layers(inputs: Inputs, names: Names) -> dict[str, Layer]:
    """Every attention layer that one forward pass calls, by the name the watch gives it."""
    found: dict[str, Layer] = {}

    def look(call: Call) -> None:
        if call.layer not in found:  # a layer that runs again has the same weights
            found[call.layer] = _layer(call, inputs.model)

    capture.run(inputs, names, look)
    modules = [layer.module for layer in found.values()]
    return {name: _held(layer, modules) for name, layer in found.items()}


def _held(layer: Layer, modules: list[nn.Module | None]) -> Layer:
    """After the pass, when the weights lie as the optimizer knows them."""
    layer = _with(layer, alone=modules.count(layer.module) == 1)
    reasons = (shards.why_not(part.parameter, part.axis) for part in layer.parts)
    reason = next(filter(None, reasons), "")
    return _with(layer, parts=(), refused=reason) if reason else layer


@torch.enable_grad()
def _layer(call: Call, model: nn.Module) -> Layer:
    heads = call.problem.query.shape[1]
    weights = _nearest_weights(call.running)
    layer = Layer(
        call.layer,
        heads,
        call.module,
        call.kind,
        max_logit=call.max_logit,
        identity=_identity(weights),
        share=shards.share(weights.values()),
    )
    reason = _why_not_by_weights(call.problem)
    normalised = False
    if Together(weights.values()).all(not reason):
        for running in call.running[:OUTWARD]:
            parts, reason, normalised, values = _parts(running, call.problem, model)
            if parts:
                return _with(layer, parts=parts, values=values)
            if normalised or reason == UNITS:
                break
    return _with(layer, refused=reason or APART, normalised=normalised)


def _nearest_weights(running: Sequence[Running]) -> dict[str, Tensor]:
    for one in running:
        if found := dict[str, Tensor](one.module.named_parameters()):
            return found
    return {}


def _identity(weights: dict[str, Tensor]) -> str:
    prints = [f"{path} {shards.fingerprint(weight)}" for path, weight in weights.items()]
    return hashlib.sha256("\n".join(prints).encode()).hexdigest()[:16]


def _with(layer: Layer, **changes: object) -> Layer:
    return Layer(**{**vars(layer), **changes})  # type: ignore[arg-type]


def _why_not_by_weights(problem: Problem) -> str:
    if problem.weight is not None:
        return "its scores are additive, not products of query and key"
    mask = problem.mask
    if mask is not None and mask.dtype != torch.bool:
        lowest = torch.finfo(mask.dtype).min / 2
        if bool(((mask != 0) & (mask > lowest)).any()):
            return "a bias is added to its scores, which scaling query and key does not scale"
    return ""


class Found(NamedTuple):
    parts: tuple[Part, ...]
    refused: str
    normalised: bool = False
    values: tuple[str, ...] = ()  # see Layer


class Candidate(NamedTuple):
    """A parameter along one axis; the rows that a head's q or k depends on, [heads, n] each."""

    path: str  # within the module
    axis: int
    matrix: bool
    query: Tensor
    key: Tensor


def _parts(running: Running, seen: Problem, model: nn.Module) -> Found:
    module = running.module
    parameters: dict[str, Tensor] = {
        path: parameter
        for path, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }
    if not parameters:
        return Found((), f"{type(module).__name__} has no trained weight of its own")
    if any(one is not module and hasattr(one, "unshard") for one in module.modules()):
        return Found((), UNITS)
    together = Together(parameters.values())
    problem = _run(running, seen, parameters, (), seen.query.new_ones(seen.query.shape[1]))
    if not together.all(problem is not None):
        return Found((), CANNOT_RUN)
    assert problem is not None
    if not (problem.query.requires_grad and problem.key.requires_grad):
        return Found((), "its queries or keys come from no weight that is trained")
    candidates = list(_candidates(parameters, problem))
    reason = NO_ROWS
    if not together.same(_alike_on_ranks(candidates)):
        return Found((), APART)
    for chosen in _choices(candidates):
        recipe = _recipe(running, problem, parameters, chosen, together)
        trial = NO_ROWS
        if together.all(bool(recipe)):
            trial = _tried(running, problem, parameters, recipe)
        if together.all(not trial):
            parts = tuple(_owned(module, model, part) for part in recipe)
            prints = (shards.fingerprint(parameters[part.path]) for part in recipe)
            pairs = zip(parts, prints, strict=True)
            named = [f"{part.path} {mark}" for part, mark in pairs if not mark.endswith(":")]
            return Found(parts, "", values=tuple(named))
        reason = trial or APART
    if _is_normalised(running, problem, parameters, together):
        return Found((), NORM, normalised=True)
    return Found((), reason)


def _alike_on_ranks(candidates: list[Candidate]) -> str:
    """What decides which trials come next."""
    return repr(
        [
            (one.path, one.axis, bool(one.query.any()), bool(one.key.any()), own.any().item())
            for one in candidates
            for own in [one.key & (one.key.sum(0) == 1)]
        ]
    )


def _candidates(parameters: dict[str, Tensor], problem: Problem) -> Iterator[Candidate]:
    heads = problem.query.shape[1]
    query = supports(problem.query, parameters, heads)
    key = supports(problem.key, parameters, heads)
    for path, parameter in parameters.items():
        for axis in range(parameter.dim()):
            rows = query[path][axis], key[path][axis]
            # More rows than a query has entries: another rank's head is in it (heads that are
            # dealt out after the projection), or what comes before the projection.
            makes_query = bool(rows[0].any()) and int(rows[0].sum(0).max()) <= 1
            makes_query &= int(rows[0].sum(1).max()) <= problem.query.shape[-1]
            makes_key = bool((rows[1].sum(0) == 1).any())
            if makes_query or makes_key:
                yield Candidate(path, axis, parameter.dim() > 1, *rows)
                break  # the other axis is the input's


def _choices(candidates: list[Candidate]) -> Iterator[list[Candidate]]:
    """All of them (a weight and its bias, a low-rank addition), else those of one module each.

    One by one matters where there is one head: then everything before it makes it, too.
    """
    query = [one for one in candidates if one.query.any()]
    key = [one for one in candidates if one.key.any()]
    if not any(one.matrix for one in query):
        return  # a norm's gains, at most: QK-Clip is about weights
    yield candidates
    for mine in reversed(_by_owner(query)):
        for theirs in reversed([[], *_by_owner(key)]):
            together = {id(one): one for one in (*mine, *theirs)}
            yield list(together.values())


def _by_owner(candidates: list[Candidate]) -> list[list[Candidate]]:
    owners: dict[str, list[Candidate]] = {}
    for one in candidates:
        owners.setdefault(one.path.rpartition(".")[0], []).append(one)
    return list(owners.values())


class Draft(NamedTuple):
    """A Part before its owner is known."""

    path: str
    axis: int
    head: Tensor
    power: Tensor


def _recipe(
    running: Running,
    problem: Problem,
    parameters: dict[str, Tensor],
    chosen: list[Candidate],
    together: Together,
) -> list[Draft]:
    """Key rows of one head alone take the root of its factor, and so do the query rows they meet.

    Which entries of the query they meet is seen by scaling them: those of the key move, the others
    stay. Plain attention: all of them. Grouped heads: none, so the query takes all.
    """
    heads = problem.query.shape[1]
    nothing = torch.zeros(heads, problem.query.shape[-1], dtype=torch.bool, device="cpu")
    wide = _spread(parameters, [one for one in chosen if one.query.any()])
    own = [
        _draft(one, None, one.key & (one.key.sum(0) == 1))
        for one in chosen
        # A key that lies whole on ranks which share out the queries serves their heads, too.
        if shards.spread(parameters[one.path], one.axis) >= wide
    ]
    own = [draft for draft in own if draft is not None]
    moved = _moved(running, problem, parameters, own) if together.all(bool(own)) else nothing
    if moved is None or not moved.any():
        own, moved = [], nothing
    if not together.same(f"{bool(moved.any())} {bool(moved.all())}"):
        return []
    meets = {one.path: one.query if moved.all() else one.query & False for one in chosen}
    if moved.any() and not moved.all():
        mask = moved.to(problem.query.device)[None, :, None, :]
        part = supports(problem.query * mask, parameters, heads)
        rest = supports(problem.query * ~mask, parameters, heads)
        for one in chosen:
            meets[one.path] = part[one.path][one.axis]
            if (meets[one.path] & rest[one.path][one.axis]).any():
                own, meets = [], {other.path: other.query & False for other in chosen}
                break
    drafts = {draft.path: draft for draft in own}
    for one in chosen:
        made = _draft(one, meets[one.path], one.query)
        known = drafts.get(one.path)
        if made is None:
            continue
        if known is not None:  # one matrix for query and key
            head = torch.where(made.head >= 0, made.head, known.head)
            power = torch.where(made.head >= 0, made.power, known.power)
            made = made._replace(head=head, power=power)
        drafts[one.path] = made
    return list(drafts.values())


def _spread(parameters: dict[str, Tensor], candidates: list[Candidate]) -> frozenset[object]:
    found = [shards.spread(parameters[one.path], one.axis) for one in candidates if one.matrix]
    return frozenset[object]().union(*found)


def _draft(one: Candidate, meets: Tensor | None, rows: Tensor) -> Draft | None:
    """rows [heads, n]: which head each index belongs to. meets None: key rows, always the root."""
    if not rows.any() or int(rows.sum(0).max()) > 1:
        return None
    head = torch.where(rows.any(0), rows.int().argmax(0), -1)
    halves = rows.any(0) if meets is None else (rows & meets).any(0)
    power = torch.where(halves, HALF, WHOLE)
    return Draft(one.path, one.axis, head, power)


def _moved(
    running: Running, problem: Problem, parameters: dict[str, Tensor], own: Sequence[Draft]
) -> Tensor | None:
    """Entries of each head's key, [heads, D], that follow its own rows; None: some only in part."""
    factors = _distinct(problem)
    key = _run(running, problem, parameters, own, factors**2)  # they take the root of it
    if key is None:
        return None
    before, after = _per_head(problem.key, problem), _per_head(key.key, problem)
    tolerance = _tolerance(problem) * before.abs().amax()
    follows = (after - before * factors[:, None, None]).abs().amax((0, 2)) <= tolerance
    stays = (after - before).abs().amax((0, 2)) <= tolerance
    follows &= ~stays
    return follows.cpu() if bool((follows | stays).all()) else None


def _tried(
    running: Running, problem: Problem, parameters: dict[str, Tensor], recipe: list[Draft]
) -> str:
    """Empty where every head's scores are its factor times what they were."""
    factors = _distinct(problem)
    after = _run(running, problem, parameters, recipe, factors)
    if after is None:
        return CANNOT_RUN
    wanted = _scores(problem) * factors[:, None, None]
    off = (_scores(after) - wanted).abs().amax((0, 2, 3))
    if bool((off <= _tolerance(problem) * wanted.abs().amax()).all()):
        return ""
    return "scaling the rows that make a head did not scale exactly its scores"


def _is_normalised(
    running: Running, problem: Problem, parameters: dict[str, Tensor], together: Together
) -> bool:
    """What makes the queries or keys is made larger, and they stay as they are.

    Much larger, and twice: a norm's epsilon may outweigh the small weights of a fresh model.
    """
    heads = problem.query.shape[1]
    for name in ("query", "key"):
        slopes = supports(getattr(problem, name), parameters, heads, together=True)
        makes = [path for path in parameters if slopes[path][0].any()]
        owners = {path.rpartition(".")[0] for path in makes if parameters[path].dim() > 1}
        if not together.same(repr(sorted(owners))):
            return False
        for owner in sorted(owners):
            drafts = [
                Draft(path, 0, torch.zeros(n, device="cpu").long(), torch.ones(n, device="cpu"))
                for path in makes
                if path.rpartition(".")[0] == owner
                for n in shards.here(parameters[path]).shape[:1]
            ]
            runs = [
                _run(
                    running,
                    problem,
                    parameters,
                    drafts,
                    problem.query.new_full((heads,), factor).double(),
                )
                for factor in LARGER
            ]
            stays = all(runs) and _stays(*(getattr(one, name) for one in (problem, *runs)))
            if together.all(stays):
                return True
    return False


def _stays(before: Tensor, larger: Tensor, twice: Tensor) -> bool:
    """Of the same size, and turned nowhere: a saturated tanh keeps its size, but turns."""
    same = (larger - twice).abs().amax() <= 0.02 * larger.abs().amax()
    turned = torch.nn.functional.cosine_similarity(before, twice, dim=-1).amin() < 0.99
    return bool(same & ~turned)


def _run(
    running: Running,
    problem: Problem,
    parameters: dict[str, Tensor],
    recipe: Sequence[Draft],
    factors: Tensor,
) -> Problem | None:
    """The call with scaled weights; None where the module cannot be run, or calls another."""
    scaled: dict[str, Tensor] = {}
    for draft in recipe:
        parameter = parameters[draft.path].detach()
        local = rows.scaled(shards.here(parameter), *draft[1:], factors)
        scaled[draft.path] = shards.like(parameter, local)
    try:
        found = capture.again(running, scaled)
    except Exception:
        return None  # it needs what only its caller has; the layer is refused in words
    # The same call among several of one module: the one that did not change but for its factors.
    alike = [one for one in found if _alike(one, problem)]
    if len(alike) <= 1:
        return alike[0] if alike else None
    return min(alike, key=lambda one: float((one.query - problem.query).detach().abs().amax()))


def _alike(one: Problem, other: Problem) -> bool:
    return one.query.shape == other.query.shape and one.key.shape == other.key.shape


def _distinct(problem: Problem) -> Tensor:
    """One factor a head, no two alike: rows that move another head are seen."""
    heads = problem.query.shape[1]
    steps = torch.arange(1, heads + 1, device=problem.query.device, dtype=torch.float64)
    return 0.5 + 0.25 * steps / heads


def _per_head(key: Tensor, problem: Problem) -> Tensor:
    """[B, H, K, D] in float64, without a graph."""
    repeats = problem.query.shape[1] // key.shape[1]
    return key.detach().double().repeat_interleave(repeats, 1)


def _scores(problem: Problem) -> Tensor:
    """[1, H, queries, keys] of the first batch entry: as many as are compared."""
    query = problem.query.detach()[:1, :, -LOOKED_AT:].double()
    key = _per_head(problem.key[:1, :, -LOOKED_AT:], problem)
    return query @ key.transpose(-1, -2)


def _tolerance(problem: Problem) -> float:
    return min(ROUNDINGS * _rounding(problem.query), COARSEST)


def _rounding(query: Tensor) -> float:
    """Of the products that made it."""
    coarse = query.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return TF32 if coarse and query.dtype == torch.float32 else torch.finfo(query.dtype).eps


def _owned(module: nn.Module, model: nn.Module, draft: Draft) -> Part:
    owner_path, _, name = draft.path.rpartition(".")
    owner = module.get_submodule(owner_path)
    prefix = next((path for path, one in model.named_modules() if one is owner), owner_path)
    path = f"{prefix}.{name}" if prefix else name
    parameter = getattr(owner, name)
    mine = shards.rows_here(parameter, draft.axis)
    head = draft.head.new_full((parameter.shape[draft.axis],), -1)
    power = draft.power.new_ones(head.shape)
    head[mine], power[mine] = draft.head, draft.power
    return Part(owner, name, path, draft.axis, head, power)
