"""The remedy: one attention call, without scaling and with it, read by its vital signs."""

from dataclasses import dataclass

import scaledot
from scaledot.lab.experiments.draws import normal, seeded
from scaledot.measure import BANDS


@dataclass(frozen=True)
class Reading:
    """One vital sign of the same call under both rules, and the band it should be in."""

    name: str
    unscaled: float
    scaled: float
    low: float | None
    high: float | None
    unscaled_healthy: bool | None  # None: this number has no band
    scaled_healthy: bool | None
    meaning: str


@dataclass(frozen=True)
class VitalSigns:
    d_k: int
    tokens: int
    readings: tuple[Reading, ...]


def vital_signs(seed: int = 0, d_k: int = 512, tokens: int = 64) -> VitalSigns:
    """`attention_with_vitals` on the same tensors with scale="none" and with the default."""
    query, key, value = normal(seeded(seed), (1, 1, tokens, d_k), 3)
    _, unscaled = scaledot.attention_with_vitals(query, key, value, scale="none")
    _, scaled = scaledot.attention_with_vitals(query, key, value)
    readings = tuple(
        _reading(name, float(getattr(unscaled, name)), float(getattr(scaled, name)))
        for name in BANDS
    )
    return VitalSigns(d_k, tokens, readings)


def _reading(name: str, unscaled: float, scaled: float) -> Reading:
    low, high, words = BANDS[name]
    healthy = _inside(unscaled, low, high), _inside(scaled, low, high)
    return Reading(name, unscaled, scaled, low, high, *healthy, words)


def _inside(number: float, low: float | None, high: float | None) -> bool | None:
    if low is None and high is None:
        return None
    return (low is None or low <= number) and (high is None or number <= high)
