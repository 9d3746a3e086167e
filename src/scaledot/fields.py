"""Declare the names of the vitals, their order and where a healthy head's lie.

Nothing here needs torch, so that a run can be looked at without it.
"""

from typing import NamedTuple

SATURATED_ABOVE = 0.99  # a row whose largest probability is above this passes next to no gradient

FLOAT_FIELDS = (
    "max_logit",
    "logit_mean",
    "logit_std",
    "row_std",
    "entropy",
    "entropy_ratio",
    "sum_p2",
    "top_p",
    "saturated",
    "sink",
    "off",
    "q_rms",
    "k_rms",
)
# What a backend may make at once: `passes` follows from the others, but on a GPU by four launches.
MADE_FIELDS = (*FLOAT_FIELDS, "passes")
COUNT_FIELDS = ("rows", "pairs", "nonfinite", "ratio_rows", "q_entries", "k_entries")
ROW_FIELDS = ("max_logit", "lse", "entropy", "top_p", "sum_p2")


class Band(NamedTuple):
    """Where a healthy head is found: a hint beside the number, not an alarm."""

    low: float | None
    high: float | None
    words: str


# The bands of `scaledot.vitals`' table. Sources: 100 is the clipping threshold of Kimi K2's QK-Clip
# and of Megatron-LM; a softmax over n Gaussian scores freezes when their deviation passes
# sqrt(2 ln n), 3.3 to 4.1 for n = 256 to 4096 (random energy model); the rest is what sqrt(d_k)
# promises at the start, with room for what training does to it.
BANDS: dict[str, Band] = {
    "max_logit": Band(None, 100.0, "below 100"),
    "logit_mean": Band(None, None, "any: a shift of a row changes nothing"),
    "logit_std": Band(0.1, 4.0, "about 1 when sqrt(d_k) is right"),
    "row_std": Band(0.1, 3.5, "below sqrt(2 ln n)"),
    "entropy": Band(None, None, "0 (one key) to ln n (all keys alike)"),
    "entropy_ratio": Band(0.1, 0.98, "0: collapsed, 1: looks at everything"),
    "sum_p2": Band(None, 0.9, "1/n (flat) to 1 (one-hot)"),
    "passes": Band(0.1, None, "how much gradient the softmax lets through"),
    "top_p": Band(None, 0.9, "mean largest weight of a row"),
    "saturated": Band(None, 0.5, "share of rows above 0.99"),
    "sink": Band(None, 0.9, "weight on the first key"),
    "off": Band(None, 0.9, "weight on the learned sink"),
    "q_rms": Band(None, None, "growth of the logits starts here"),
    "k_rms": Band(None, None, "growth of the logits starts here"),
    "nonfinite": Band(None, 0.0, "rows that hold NaN or inf"),
}
