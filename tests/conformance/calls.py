"""Calls to compare: a seeded draw over the whole argument space, and its pieces."""

import math
import random
from dataclasses import dataclass, field, replace

import torch

SIZES = (1, 2, 3, 5, 7, 13, 31, 63, 64, 65, 67, 127, 129)
SMALL_SIZES = (1, 2, 3, 5, 7)
WIDTHS = (1, 3, 5, 8, 16, 17, 31, 64)


@dataclass(frozen=True)
class Call:
    """Tensors and keywords of one `attention`; `vitals` takes the same without the value."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    keywords: dict = field(default_factory=dict)

    @property
    def tensors(self):
        return self.query, self.key, self.value

    def with_keywords(self, **keywords):
        return replace(self, keywords={**self.keywords, **keywords})

    def __str__(self):
        shapes = ", ".join(str(list(t.shape)) for t in self.tensors)
        words = {
            n: f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else x
            for n, x in self.keywords.items()
        }
        return f"{shapes} {self.query.dtype} {words}"


def call(
    *,
    lead=(2, 3),
    queries=13,
    keys=17,
    width=8,
    value_width=5,
    key_heads=None,
    dtype=torch.float32,
    **keywords,
):
    """Normal random tensors of these sizes."""
    key_lead = lead if key_heads is None else (*lead[:-1], key_heads)
    return Call(
        torch.randn(*lead, queries, width).to(dtype),
        torch.randn(*key_lead, keys, width).to(dtype),
        torch.randn(*key_lead, keys, value_width).to(dtype),
        keywords if key_heads is None else {**keywords, "enable_gqa": True},
    )


def draw(seed, dtype=torch.float32, sizes=SIZES):
    """One random call: every argument present or absent, every size odd or even, GQA or not."""
    torch.manual_seed(seed)
    pick = random.Random(seed)
    lead = pick.choice([(), (3,), (2, 2), (2, 6), (1, 4), (2, 2, 3)])
    key_heads = (
        pick.choice([g for g in range(1, lead[-1] + 1) if lead[-1] % g == 0]) if lead else None
    )
    drawn = call(
        lead=lead,
        queries=pick.choice(sizes),
        keys=pick.choice(sizes),
        width=pick.choice(WIDTHS),
        value_width=pick.choice(WIDTHS),
        key_heads=key_heads,
        dtype=dtype,
    )
    drawn = replace(drawn, query=drawn.query * pick.choice([0.1, 1, 1, 3]))
    if pick.random() < 0.2:
        drawn = replace(drawn, key=drawn.key + pick.choice([10, 1000]))
    return drawn.with_keywords(**draw_keywords(pick, drawn, lead))


def draw_keywords(pick, drawn, lead):
    """Keywords that fit the tensors."""
    queries, keys = drawn.query.shape[-2], drawn.key.shape[-2]
    heads = lead[-1] if lead else 1
    words = {
        "attn_mask": draw_mask(pick, lead, queries, keys, drawn.query.dtype),
        "is_causal": pick.random() < 0.4,
        "causal_align": pick.choice(["top_left", "bottom_right"]),
        "window": pick.choice([None, None, draw_window(pick, keys)]),
        "softcap": pick.choice([None, None, 0.7, 5.0, 30.0]),
        "scale": draw_scale(pick, heads, bool(lead), drawn.query.dtype),
    }
    if words["scale"] == "sqrt_dmodel":
        words["num_heads"] = heads
    if lead and pick.random() < 0.3:
        words["sinks"] = torch.randn(heads).to(drawn.query.dtype)
    if len(lead) == 2 and pick.random() < 0.3:
        words["key_lengths"] = torch.randint(0, keys + 1, (lead[0],))
    return words


def draw_window(pick, keys):
    ends = [None, 0, 1, 2, keys // 3, keys]
    return pick.choice(ends), pick.choice(ends)


def draw_scale(pick, heads, has_heads, dtype):
    rules = ["sqrt_dk", "dk", "none", "sqrt_dmodel", "log_n", None, None, 0.3, -0.4, 0.0]
    return pick.choice([*rules, torch.randn(heads).to(dtype)] if has_heads else rules)


def draw_mask(pick, lead, queries, keys, dtype):
    """None, bool or float, each in a random shape that broadcasts."""
    full = (*lead, queries, keys)
    shape = [pick.choice([1, n, n]) for n in full[pick.randrange(len(full)) :]]
    kind = pick.choice(["none", "none", "bool", "float", "minus_inf", "lowest"])
    if kind == "none":
        return None
    if kind == "bool":
        return torch.rand(shape) < pick.choice([0.2, 0.6, 0.9])
    mask = torch.randn(shape).to(dtype)
    if kind != "float":
        low = -math.inf if kind == "minus_inf" else torch.finfo(dtype).min
        mask[torch.rand(shape) < 0.3] = low
    return mask
