"""Scale rules: what multiplies a score before the softmax, as pure functions of the call's sizes.

The variance of q.k over independent unit-variance entries is d_k, so dividing by sqrt(d_k) brings
it back to 1. The other rules are here to be compared with it:

    sqrt_dk       1 / sqrt(d_k)              the default (Vaswani et al. 2017)
    dk            1 / d_k                    what muP uses (Yang et al. 2022)
    none          1                          the disease
    sqrt_dmodel   1 / sqrt(heads * d_k)      the classic mistake, kept to be seen
    log_n         ln(n_i) / sqrt(d_k)        scalable softmax; n_i = keys that row i may see
"""

import math

from scaledot.errors import ArgumentError

RULES = ("sqrt_dk", "dk", "none", "sqrt_dmodel", "log_n")


def resolve(rule: str, d_k: int, num_heads: int | None = None) -> float:
    """The number that `rule` multiplies every score with (for `log_n`, the part all rows share)."""
    if rule in ("sqrt_dk", "log_n"):
        return 1.0 / math.sqrt(d_k) if d_k else 1.0
    if rule == "dk":
        return 1.0 / d_k if d_k else 1.0
    if rule == "none":
        return 1.0
    if rule == "sqrt_dmodel":
        if num_heads is None:
            raise ArgumentError(
                'scale="sqrt_dmodel" needs num_heads: d_model is num_heads * d_k; '
                "pass num_heads=, the number of heads of the whole layer"
            )
        return 1.0 / math.sqrt(d_k * num_heads) if d_k else 1.0
    raise ArgumentError(
        f"scale={rule!r} is no scale rule; use one of {', '.join(RULES)}, or a number"
    )
