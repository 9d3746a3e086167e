"""The distribution of q.k for standard normal entries, from its formulas.

Given q, the product is normal with standard deviation |q|, and |q| follows the chi distribution
with d degrees of freedom.
"""

import functools
import math

import torch

POINTS = 4000  # of the integral over |q|


def mean_size(d: int) -> float:
    """E|q.k| = E|N(0, 1)| E|q|."""
    norm = math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
    return math.sqrt(2 / math.pi) * norm


@functools.lru_cache(maxsize=1024)
def tail(d: int, threshold: float) -> float:
    """P(|q.k| > t) = E erfc(t / (sqrt(2) |q|))."""
    norm = torch.linspace(0, math.sqrt(d) + 10, POINTS + 1, dtype=torch.float64)[1:]
    density = torch.softmax((d - 1) * norm.log() - norm.square() / 2, 0)
    return float((density * torch.erfc(threshold / (math.sqrt(2) * norm))).sum())


@functools.lru_cache(maxsize=64)
def median_size(d: int) -> float:
    low, high = 0.0, 2 * math.sqrt(d)
    for _ in range(30):  # halves: to a billionth of the interval
        middle = (low + high) / 2
        low, high = (middle, high) if tail(d, middle) > 0.5 else (low, middle)
    return (low + high) / 2


def kurtosis(d: int) -> float:
    """E x^4 / (E x^2)^2: 3 for a normal distribution, more for a narrow product."""
    return 3 + 6 / d
