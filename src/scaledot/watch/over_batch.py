"""`Vitals.over_batch` of numbers that lie on the host, in numpy, for readings.

torch needs some microseconds to begin each of its hundred small operators, in every step; the
numbers themselves are few. The sums are those of `measure`, in float64, and divided at the end:
a count times a float32 is exact there. Squares are not scaled, for none of a float32 overflows.
"""

import numpy as np

from scaledot.fields import COUNT_FIELDS, FLOAT_FIELDS

# What each field but the first is a mean over.
OVER = {
    "logit_mean": "pairs",
    "logit_std": "pairs",
    "row_std": "rows",
    "entropy": "rows",
    "entropy_ratio": "ratio_rows",
    "sum_p2": "rows",
    "top_p": "rows",
    "saturated": "rows",
    "sink": "rows",
    "off": "rows",
    "q_rms": "q_entries",
    "k_rms": "k_entries",
}
assert ("max_logit", *OVER) == FLOAT_FIELDS
COUNTS = np.array([COUNT_FIELDS.index(count) for count in OVER.values()])
# Roots of a mean square: it is the squares that are averaged.
ROOTS = np.array([list(OVER).index(name) for name in ("logit_std", "row_std", "q_rms", "k_rms")])
LOGIT_MEAN, LOGIT_STD = (list(OVER).index(name) for name in ("logit_mean", "logit_std"))


def over_batch(floats: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[fields, batch, heads] -> [fields, heads], in the order of FLOAT_FIELDS and COUNT_FIELDS."""
    if floats.shape[1] == 1:
        return floats[:, 0], counts[:, 0]
    total = counts.sum(1)
    divisor = np.maximum(total, 1)[COUNTS]
    weight = counts[COUNTS].astype(np.float64)
    values = floats[1:].astype(np.float64)
    merged = np.empty((len(floats), floats.shape[2]), floats.dtype)
    with np.errstate(all="ignore"):  # of heads that broke there are infinity and NaN
        merged[0] = floats[0].max(0, initial=-np.inf)
        values[ROOTS] = np.square(values[ROOTS])
        means = _weighted(weight, values) / divisor
        # The entries' own means of the logits lie apart, too.
        apart = np.square(values[LOGIT_MEAN] - means[LOGIT_MEAN])
        means[LOGIT_STD] += _weighted(weight[LOGIT_STD], apart) / divisor[LOGIT_STD]
        means[ROOTS] = np.sqrt(means[ROOTS])
        merged[1:] = means
    return merged, total


def _weighted(weight: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The sum of weight * value over the batch; 0 where the weight is 0, whatever the value."""
    return np.where(weight > 0, weight * value, 0.0).sum(-2)
