"""A statement of the folklore, put to the test."""

from dataclasses import dataclass

Numbers = float | tuple[float, ...]


@dataclass(frozen=True)
class Finding:
    """Numbers side by side: what is said, what the library measures, what the formula gives."""

    key: str  # finds the words for it in `scaledot.lab.words`
    claim: Numbers | None  # None: nobody claims a number; the theory is what is put to the test
    measured: Numbers
    theory: Numbers | None  # None: there is no closed form
    agree: bool


def compare(
    key: str,
    measured: Numbers,
    *,
    claim: Numbers | None = None,
    theory: Numbers | None = None,
    within: float,
) -> Finding:
    """Set the claim (or, without one, the theory) against the measured value.

    They agree where no number differs by more than `within`: half a unit of the claim's last
    digit where the measurement is exact, several standard errors where it is a sample.
    """
    expected = theory if claim is None else claim
    if expected is None:
        raise ValueError(f"nothing to compare {key} with; give a claim or a theory")
    pairs = zip(_as_tuple(expected), _as_tuple(measured), strict=True)
    agree = all(abs(said - seen) <= within for said, seen in pairs)
    return Finding(key, claim, measured, theory, agree)


def _as_tuple(numbers: Numbers) -> tuple[float, ...]:
    return numbers if isinstance(numbers, tuple) else (numbers,)
