"""Draw calls that share compiled kernels: what Triton compiles for stays, all else differs.

Triton compiles a kernel for types, layouts and flags, and for what it knows of each integer: that
it is 1, or a multiple of 16. So the calls of a kind have lengths with the same powers of two, and
the same layouts; numbers, lengths, splits of packed tokens and windows are drawn for each call.
"""

import math
import random
from dataclasses import replace

from fuzz.cases import LONG, MOST_PAIRS, NUMBERS, Case, draw, draw_numbers

SHORT = range(2, 140)
SEQUENCES = (0, 1, 1, 2, 3, 5, 16, 17, 33, 63, 64, 65, 97, 128, 129)
SINKS = ("normal", "normal", "far", "minus_inf")


def draw_of_kind(seed: int, index: int, kinds: int) -> Case:
    """Draw case number `index` of this seed, which is of kind number `index % kinds`."""
    kind = draw(seed, index % kinds)
    pick = random.Random(f"{seed}/{kinds}/{index}")
    case = replace(draw_numbers(pick, kind), only_wanted=kind.only_wanted, bad=None)
    if index >= kinds:  # each kind once as it is
        case = _resized(pick, case)
    case = replace(case, seed=pick.randrange(2**31), bad=draw_numbers(pick, kind).bad)
    case = replace(case, per_row=pick.random() < 0.5, with_vitals=pick.random() < 0.5)
    if case.window is not None:
        left, right = (_like_end(pick, end) for end in case.window)
        case = replace(case, window=(left, right))
    if case.scale in NUMBERS and type(case.scale) in (int, float):
        positive = case.scale > 0
        case = replace(case, scale=pick.choice([x for x in NUMBERS if (x > 0) == positive]))
    if case.sinks is not None:
        case = replace(case, sinks=pick.choice(SINKS))
    return case


def _resized(pick: random.Random, case: Case) -> Case:
    """The same call of other lengths."""
    if case.packed is not None:
        return _split_again(pick, case)
    heads = max(math.prod(case.lead), 1)
    queries, keys = case.queries, case.keys
    for _ in range(8):
        new_queries = _like(pick, case.queries)
        new_keys = new_queries if case.queries == case.keys else _like(pick, case.keys)
        if heads * new_queries * new_keys <= MOST_PAIRS:
            queries, keys = new_queries, new_keys
            break
    lengths = case.key_lengths
    if lengths is not None:
        some = (0, 1, keys // 2, keys, pick.randint(0, keys))
        lengths = tuple(min(pick.choice(some), keys) for _ in lengths)
    full = (*case.lead, queries, keys)
    sizes = full[len(full) - len(case.mask_shape) :]
    mask = tuple(1 if own == 1 else n for own, n in zip(case.mask_shape, sizes, strict=True))
    return replace(case, queries=queries, keys=keys, key_lengths=lengths, mask_shape=mask)


def _like(pick: random.Random, length: int) -> int:
    """A length with the same powers of two, up to 16."""
    if length < 2:
        return length
    power = math.gcd(length, 16)
    pool = SHORT if pick.random() < 0.85 else LONG
    return pick.choice([n for n in pool if math.gcd(n, 16) == power] or [length])


def _split_again(pick: random.Random, case: Case) -> Case:
    """As many sequences, with totals that Triton takes for the same."""
    assert case.packed is not None
    if not case.packed:
        return case
    same = all(queries == keys for queries, keys in case.packed)
    queries = [pick.choice(SEQUENCES) for _ in case.packed]
    keys = queries if same else [pick.choice(SEQUENCES) for _ in case.packed]
    _fit_total(pick, queries, case.queries)
    if not same:
        _fit_total(pick, keys, case.keys)
    packed = tuple(zip(queries, keys, strict=True))
    return replace(case, packed=packed, queries=sum(queries), keys=sum(keys))


def _fit_total(pick: random.Random, lengths: list[int], total: int) -> None:
    """Lengthen a sequence until the total is like another one."""
    if total < 2:
        lengths[:] = [0] * len(lengths)
        lengths[pick.randrange(len(lengths))] = total
        return
    at = pick.randrange(len(lengths))
    while sum(lengths) < 2 or math.gcd(sum(lengths), 16) != math.gcd(total, 16):
        lengths[at] += 1


def _like_end(pick: random.Random, end: int | None) -> int | None:
    """The end of a window that Triton takes for the same."""
    if end is None or end == 1:
        return end
    return pick.choice((0, 0, 16, 48, 2**40) if end % 16 == 0 else (2, 3, 7, 21, 66))
