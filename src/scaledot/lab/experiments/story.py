"""The experiments of `scaledot demo`: larger samples than a slider can wait for, in six chapters.

One pure function a chapter: arguments and a seed in, a frozen record of numbers out.
"""

from scaledot.lab.experiments.divisor import Divisors, divisors
from scaledot.lab.experiments.dot_product import SmallVectors, Variance, small_vectors, variance
from scaledot.lab.experiments.finding import Finding
from scaledot.lab.experiments.remedy import VitalSigns, vital_signs
from scaledot.lab.experiments.softmax import Gradient, Saturation, gradient, saturation

LESSONS = (small_vectors, variance, saturation, gradient, divisors, vital_signs)

__all__ = [
    "LESSONS",
    "Divisors",
    "Finding",
    "Gradient",
    "Saturation",
    "SmallVectors",
    "Variance",
    "VitalSigns",
    "divisors",
    "gradient",
    "saturation",
    "small_vectors",
    "variance",
    "vital_signs",
]
