"""Modules: parameters only; the work is in scaledot.functional.

Every module returns its output alone and keeps the vitals of its last call in `.vitals`;
`measuring(model, False)` switches that off for a while.
"""

from scaledot.nn.additive import AdditiveAttention
from scaledot.nn.measured import Measured, measuring
from scaledot.nn.multihead import MultiHeadAttention

__all__ = ["AdditiveAttention", "Measured", "MultiHeadAttention", "measuring"]
