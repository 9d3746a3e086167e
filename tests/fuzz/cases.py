"""Draw one random call over every argument: a frozen record of plain values.

Dimension letters: H query heads, G key heads, Q queries, K keys, D width of q and k, V of v.
"""

import math
import random
from dataclasses import dataclass, fields, replace

TYPES = ("float32", "float32", "float64", "bfloat16", "float16")
SIXTEEN_BITS = ("bfloat16", "float16")
SIZES = (1, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 63, 64, 65, 67, 95, 96, 97, 127, 128, 129)
LONG = (255, 256, 257, 300, 511, 512, 513, 700, 1023, 1024, 1025, 1061)
WIDTHS = (1, 2, 3, 5, 7, 8, 8, 11, 13, 16, 16, 17, 31, 32, 33, 59, 63, 64, 64, 65, 80, 96, 128)
WIDE = (101, 127, 129, 192, 200, 255, 256, 257, 260)
MOST_PAIRS = 120_000  # of all heads together: the oracle holds them as matrices
LAYOUTS = (
    "permuted",  # heads behind the tokens, as a projection leaves them
    "transposed",  # the last two dimensions
    "reversed",  # all dimensions
    "padded",  # wider rows, NaN around
    "more_tokens",  # a slice of a longer buffer, NaN behind
    "step",  # every second entry of a row
    "misaligned",  # one entry behind an aligned address
    "negative",  # torch's lazy minus sign
    "single",  # odd strides where a dimension has one entry
    "expand0",  # the first dimension has stride 0; the others below likewise
    "expand-3",
    "expand-2",
    "expand-1",
)
FLOAT_MASKS = ("float", "minus_inf", "lowest", "far")
MASKS = ("bool", "bool", "rows", "late", *FLOAT_MASKS)
RULES = ("sqrt_dk", "dk", "none", "sqrt_dmodel", "log_n", "log_n")
NUMBERS = (0.3, 1.0, -0.4, 0.0, -0.0, 2)
PER_HEAD = ("heads", "heads", "negative_heads", "same_heads", "one", "one_0d")
BAD = ("nan", "inf", "-inf")
PLACES = ("hidden", "visible", "anywhere")


@dataclass(frozen=True)
class Case:
    """One call. Every field has a plain value, so that its text makes the same call again."""

    seed: int = 0  # of the tensors' numbers and of the dropout
    query_lead: tuple[int, ...] = (1, 2)
    key_lead: tuple[int, ...] = (1, 2)
    value_lead: tuple[int, ...] = (1, 2)
    queries: int = 5
    keys: int = 7
    width: int = 8
    value_width: int = 8
    dtype: str = "float32"
    gqa: bool = False
    packed: tuple[tuple[int, int], ...] | None = None  # (queries, keys) of each sequence
    additive: str | None = None  # weight: "shared" or "heads"
    level: float = 1.0  # size of the logits, times sqrt(D)
    common: bool = False  # all logits of one sign, near -level
    value_size: float = 1.0
    value_shift: float = 0.0
    mask: str | None = None
    mask_shape: tuple[int, ...] = ()
    mask_type: str | None = None  # of a float mask; None: the query's
    mask_layout: str = "plain"
    is_causal: bool = False
    causal_align: str = "top_left"
    window: tuple[int | None, int | None] | None = None
    key_lengths: tuple[int, ...] | None = None
    int32: bool = False  # key_lengths and cu_seqlens
    softcap: float | None = None
    sinks: str | None = None  # "normal", "far", "minus_inf"
    scale: str | float | None = None  # a rule, a number, or one of PER_HEAD
    dropout: float = 0.0
    layouts: tuple[str, str, str] = ("plain", "plain", "plain")  # query, key, value
    small_layout: str = "plain"  # scale, sinks, weight, lengths
    grad_layout: str = "plain"
    bad: tuple[str, str, str] | None = None  # tensor, number, place
    per_row: bool = True
    with_vitals: bool = False  # the gradients are those of attention_with_vitals
    only_wanted: str | None = None  # the one tensor that requires a gradient; None: all

    def __str__(self) -> str:
        own = [(f.name, getattr(self, f.name)) for f in fields(self)]
        plain = Case()
        return f"Case({', '.join(f'{n}={x!r}' for n, x in own if x != getattr(plain, n))})"

    @property
    def heads(self) -> int:
        if self.gqa or not self.query_lead:
            return self.query_lead[-1] if self.query_lead else max(self.key_heads, self.value_heads)
        return max(self.query_lead[-1], self.key_heads, self.value_heads)

    @property
    def key_heads(self) -> int:
        return self.key_lead[-1] if self.key_lead else 1

    @property
    def value_heads(self) -> int:
        return self.value_lead[-1] if self.value_lead else 1

    @property
    def batch(self) -> tuple[int, ...]:
        """Batch dimensions of the result, broadcast."""
        each = [lead[:-1] for lead in (self.query_lead, self.key_lead, self.value_lead)]
        length = max(map(len, each))
        padded = [(1,) * (length - len(lead)) + lead for lead in each]
        return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading shape of the result; () where nobody has heads."""
        if not (self.query_lead or self.key_lead or self.value_lead):
            return ()
        return (*self.batch, self.heads)


def draw(seed: int, index: int) -> Case:
    """Draw case number `index` of this seed."""
    pick = random.Random(f"{seed}/{index}")
    case = Case(
        seed=pick.randrange(2**31),
        dtype=pick.choice(TYPES),
        width=_width(pick),
        per_row=pick.random() < 0.5,
        with_vitals=pick.random() < 0.5,
        int32=pick.random() < 0.3,
    )
    case = replace(case, value_width=case.width if pick.random() < 0.4 else _width(pick))
    kind = pick.random()
    if kind < 0.12:
        case = _draw_packed(pick, case)
    else:
        case = _draw_heads(pick, case)
        case = _draw_lengths(pick, case)
        if kind > 0.92:
            case = replace(
                case,
                additive=pick.choice(["shared", "heads"]) if case.lead else "shared",
                width=min(case.width, 33),
                queries=min(case.queries, 40),
                keys=min(case.keys, 70),
            )
        case = _draw_mask(pick, case)
    case = _draw_words(pick, case)
    case = draw_numbers(pick, case)
    return _draw_layouts(pick, case)


def fit(case: Case, engine: str) -> Case:
    """The nearest case that an engine serves."""
    if engine == "cpu-native":
        return _for_compiled_kernel(case)
    if engine == "hopper":
        return _for_hopper(case)
    return case


def smaller(case: Case, most: int = 20) -> Case:
    """The same call with few tokens, narrow heads and one batch dimension, for an interpreter."""
    leads = (case.query_lead, case.key_lead, case.value_lead)
    query_lead, key_lead, value_lead = (lead[-2:] for lead in leads)
    case = replace(case, query_lead=query_lead, key_lead=key_lead, value_lead=value_lead)
    if case.packed is not None:
        packed = tuple((min(q, most // 2), min(k, most // 2)) for q, k in case.packed[:3])
        queries, keys = sum(q for q, _ in packed), sum(k for _, k in packed)
        case = replace(case, packed=packed)
    else:
        queries, keys = min(case.queries, most), min(case.keys, most + 13)
    full = (*case.lead, queries, keys)
    mask = case.mask_shape[-len(full) :]
    mask = tuple(min(own, n) for own, n in zip(mask, full[len(full) - len(mask) :], strict=True))
    lengths = case.key_lengths
    if lengths is not None:
        lengths = tuple(min(n, keys) for n in lengths[: math.prod(case.batch)])
    return replace(
        case,
        queries=queries,
        keys=keys,
        width=min(case.width, 33),
        value_width=min(case.value_width, 33),
        mask_shape=mask,
        key_lengths=lengths,
    )


def _for_compiled_kernel(case: Case) -> Case:
    """Float32 at most, no float mask, no cap, no dropout, no additive score."""
    if case.dtype == "float64":
        case = replace(case, dtype="float32", mask_type=None)
    if case.mask in FLOAT_MASKS:
        case = replace(_unbiased(case), mask="bool", mask_type=None)
    return replace(_dot(case), softcap=None, dropout=0.0)


def _for_hopper(case: Case) -> Case:
    """16 bits, widths that are multiples of 8, no mask tensor, no additive score, no dropout."""
    if case.dtype not in SIXTEEN_BITS:
        case = replace(case, dtype=SIXTEEN_BITS[(case.width + case.value_width) % 2])
    case = replace(_unbiased(case), mask=None, mask_shape=(), mask_type=None, mask_layout="plain")
    widths = (min(-(-n // 8) * 8, 256) for n in (case.width, case.value_width))
    case = replace(_dot(case), dropout=0.0, softcap=None)
    if case.packed is None:
        case = replace(case, queries=max(case.queries, 1), keys=max(case.keys, 1))
    return replace(case, **dict(zip(("width", "value_width"), widths, strict=True)))


def _dot(case: Case) -> Case:
    wanted = None if case.only_wanted == "weight" else case.only_wanted
    return replace(case, additive=None, only_wanted=wanted)


def _unbiased(case: Case) -> Case:
    """Without what only a float mask has."""
    wanted = None if case.only_wanted == "mask" else case.only_wanted
    bad = None if case.bad is not None and case.bad[0] == "mask" else case.bad
    return replace(case, bad=bad, only_wanted=wanted)


def _width(pick: random.Random) -> int:
    return pick.choice(WIDTHS if pick.random() < 0.85 else WIDE)


def _draw_packed(pick: random.Random, case: Case) -> Case:
    sizes = (0, *SIZES, 150)
    count = pick.choice([0, 1, 2, 3, 3, 5])
    same = pick.random() < 0.5  # self-attention: as many keys as queries
    packed = []
    for _ in range(count):
        queries = pick.choice(sizes)
        packed.append((queries, queries if same else pick.choice(sizes)))
    groups = pick.choice([1, 1, 2, 3])
    repeats = pick.choice([1, 1, 2, 4])
    return replace(
        case,
        packed=tuple(packed),
        queries=sum(q for q, _ in packed),
        keys=sum(k for _, k in packed),
        query_lead=(groups * repeats,),
        key_lead=(groups,),
        value_lead=(groups,),
        gqa=repeats > 1,
    )


def _draw_heads(pick: random.Random, case: Case) -> Case:
    batch = pick.choice([None, (), (1,), (2,), (2,), (3,), (2, 2), (2, 1)])
    if batch is None:
        return replace(case, query_lead=(), key_lead=(), value_lead=())
    groups, how = pick.choice([1, 2, 2, 3]), pick.random()
    if how < 0.45:
        lead = (*batch, groups)
        return replace(case, query_lead=lead, key_lead=lead, value_lead=lead)
    if how < 0.75:
        heads = groups * pick.choice([2, 3, 4])
        lead, keys = (*batch, heads), (*batch, groups)
        values = keys if pick.random() < 0.85 else (*batch, pick.choice([1, heads]))
        return replace(case, query_lead=lead, key_lead=keys, value_lead=values, gqa=True)
    # Broadcast: a dimension of 1, or leading dimensions that are missing.
    leads = []
    for _ in range(3):
        own = tuple(n if pick.random() < 0.6 else 1 for n in (*batch, groups))
        leads.append(own[pick.randrange(len(own)) :] if pick.random() < 0.3 else own)
    return replace(case, query_lead=leads[0], key_lead=leads[1], value_lead=leads[2])


def _draw_lengths(pick: random.Random, case: Case) -> Case:
    queries, keys = pick.choice(SIZES), pick.choice(SIZES)
    how = pick.random()
    if how < 0.04:
        queries, keys = pick.choice([(0, keys), (queries, 0), (0, 0)])
    elif how < 0.12:
        queries, keys = pick.choice([1, 3, 17, 65]), pick.choice(LONG)
    elif how < 0.15:
        queries, keys = pick.choice(LONG), pick.choice([1, 3, 17, 65])
    elif how < 0.4:
        queries = keys
    elif how < 0.45:
        queries = 1
    heads = max(math.prod(case.lead), 1)
    while heads * queries * keys > MOST_PAIRS:
        queries = max(queries // 2 + 1, 1)
        if queries < 20:
            keys = keys // 2 + 1
    return replace(case, queries=queries, keys=keys)


def _draw_mask(pick: random.Random, case: Case) -> Case:
    if pick.random() < 0.5:
        return case
    full = (*case.lead, case.queries, case.keys)
    shape = tuple(pick.choice([1, n, n]) for n in full[pick.randrange(len(full)) :])
    kind = pick.choice(MASKS)
    own_type = None
    if kind not in ("bool", "rows", "late") and pick.random() < 0.2:
        own_type = pick.choice(["float32", "bfloat16", "float16"])
    if own_type == case.dtype:
        own_type = None
    layout = pick.choice(LAYOUTS) if pick.random() < 0.35 else "plain"
    return replace(case, mask=kind, mask_shape=shape, mask_type=own_type, mask_layout=layout)


def _draw_words(pick: random.Random, case: Case) -> Case:
    words: dict = {"is_causal": pick.random() < 0.35}
    if pick.random() < 0.4:
        words["causal_align"] = "bottom_right"
    if pick.random() < 0.25:
        ends = (None, 0, 1, 2, 7, case.keys // 3, case.keys, 2**40)
        words["window"] = (pick.choice(ends), pick.choice(ends))
    entries = math.prod(case.batch)
    if case.batch and case.packed is None and pick.random() < 0.2:
        lengths = [
            pick.choice([0, 1, case.keys // 2, case.keys, pick.randint(0, case.keys)])
            for _ in range(entries)
        ]
        words["key_lengths"] = tuple(min(n, case.keys) for n in lengths)
    if pick.random() < 0.15:
        words["softcap"] = pick.choice([0.7, 5.0, 30.0, 1e4])
    heads = case.packed is not None or case.lead != ()
    if heads and pick.random() < 0.2:
        words["sinks"] = pick.choice(["normal", "normal", "far", "minus_inf"])
    kind = pick.random()
    if kind < 0.15:
        words["scale"] = pick.choice(RULES)
    elif kind < 0.3:
        words["scale"] = pick.choice(NUMBERS)
    elif kind < 0.5 and heads:
        words["scale"] = pick.choice(PER_HEAD)
    if pick.random() < 0.1:
        words["dropout"] = pick.choice([0.1, 0.5, 0.9, 1.0])
    return replace(case, **words)


def draw_numbers(pick: random.Random, case: Case) -> Case:
    level = pick.choice([0.01, 1.0, 1.0, 1.0, 1.0, 3.0, 10.0, 1e2, 1e3, 1e4, 1e6])
    words: dict = {"level": level, "common": level >= 10 and pick.random() < 0.5}
    if pick.random() < 0.2:
        words["value_size"] = pick.choice([1e-3, 1e2])
    if pick.random() < 0.15:
        words["value_shift"] = pick.choice([10.0, -100.0])
    roles = ["query", "key", "key", "value", "value"]
    if case.mask in FLOAT_MASKS:
        roles.append("mask")
    if pick.random() < 0.12:
        words["bad"] = (pick.choice(roles), pick.choice(BAD), pick.choice(PLACES))
    if pick.random() < 0.1:
        wanted = ["query", "key", "value"]
        wanted += ["mask"] if "mask" in roles else []
        wanted += ["sinks"] if case.sinks else []
        wanted += ["scale"] if case.scale in PER_HEAD else []
        wanted += ["weight"] if case.additive else []
        words["only_wanted"] = pick.choice(wanted)
    return replace(case, **words)


def _draw_layouts(pick: random.Random, case: Case) -> Case:
    def layout(often: float) -> str:
        return pick.choice(LAYOUTS) if pick.random() < often else "plain"

    if pick.random() < 0.15:  # as a projection leaves them
        return replace(case, layouts=("permuted",) * 3, grad_layout="permuted")
    return replace(
        case,
        layouts=(layout(0.3), layout(0.3), layout(0.3)),
        small_layout=layout(0.25),
        grad_layout=layout(0.5),
    )
