"""What every lesson is made of: controls, claims, and the record that names them.

A lesson's function is pure: keyword arguments in, a frozen dataclass of numbers out. Its controls
are the one list of arguments that the command line, the server and the page go by.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Numbers = float | tuple[float, ...]
KINDS = ("choice", "steps", "range", "toggle", "text", "numbers")


@dataclass(frozen=True)
class Control:
    """One argument that a person can move.

    kind says which other fields count: "choice" and "steps" (numbers, in order) have `values`,
    "range" has low, high and step, "text" has `length` in characters, "numbers" has `length` in
    numbers, "toggle" has none.
    """

    name: str
    kind: str
    default: Any
    values: tuple = ()
    low: float | None = None
    high: float | None = None
    step: float | None = None
    length: int | None = None

    def check(self, value: Any) -> Any:
        """The clean value; ValueError names the argument, what it may be, and what it was."""
        return getattr(self, f"_{self.kind}")(value)

    def _choice(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.values:
            return value
        raise self._refused(f"must be one of {_listed(self.values)}", value)

    def _steps(self, value: Any) -> Any:
        number = _number(value)
        for allowed in self.values:
            if number == allowed:
                return allowed  # 64, where 64.0 was sent
        raise self._refused(f"must be one of {_listed(self.values)}", value)

    def _range(self, value: Any) -> float:
        number = _number(value)
        assert self.low is not None
        assert self.high is not None
        if number is None or not self.low <= number <= self.high:
            raise self._refused(f"must be a number from {self._ends()}", value)
        if not isinstance(self.step, int):
            return float(number)
        if number != int(number):
            raise self._refused("must be a whole number", value)
        return int(number)

    def _ends(self) -> str:
        """A whole number with all of its digits, also where it has more than six."""
        return " to ".join(
            f"{end:d}" if isinstance(end, int) else f"{end:g}" for end in (self.low, self.high)
        )

    def _toggle(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise self._refused("must be true or false", value)

    def _text(self, value: Any) -> str:
        assert self.length is not None
        if not isinstance(value, str) or not value.strip():
            raise self._refused("must be a text with at least one word", value)
        if len(value) > self.length:
            raise self._refused(f"must have at most {self.length} characters", len(value))
        return value

    def _numbers(self, value: Any) -> tuple[float, ...]:
        assert self.length is not None
        if not isinstance(value, (list, tuple)) or not 0 < len(value) <= self.length:
            raise self._refused(f"must be a list of 1 to {self.length} numbers", value)
        numbers = [_number(item) for item in value]
        if not all(number is not None and abs(number) <= LARGEST for number in numbers):
            raise self._refused(f"must hold numbers of size {LARGEST:g} at most", value)
        return tuple(float(number) for number in numbers if number is not None)

    def _refused(self, expected: str, got: Any) -> ValueError:
        shown = repr(got)
        return ValueError(
            f"{self.name} {expected}; got {shown if len(shown) <= 60 else shown[:57] + '...'}"
        )


LARGEST = 1e6  # of typed numbers: far past anything a lesson shows, far from overflow


def seed_control() -> Control:
    return Control("seed", "range", 0, low=0, high=2**31 - 1, step=1)


@dataclass(frozen=True)
class Claim:
    """What is said, beside what is measured and what the formula gives.

    key finds the words: `{lesson}.claim.{key}` and `{lesson}.verdict.{key}` of the catalogue.
    folklore None: nobody claims a number. agrees: computed by `claim`, never typed in; None where
    this measurement cannot tell.
    """

    key: str
    folklore: Numbers | str | None
    measured: Numbers | str
    theory: Numbers | str | None
    agrees: bool | None
    tolerance: float | None


def claim(
    key: str,
    *,
    folklore: Numbers | str | None,
    measured: Numbers | str,
    theory: Numbers | str | None = None,
    tolerance: float | None = None,
) -> Claim:
    """Set the folklore (where it has none, the theory) against the measurement.

    Numbers agree where none differs by more than `tolerance`: half a unit of the folklore's last
    digit where the measurement is exact, several standard errors where it is a sample. Words agree
    where they are equal.
    """
    said = theory if folklore is None else folklore
    if said is None:
        raise ValueError(f"nothing to compare {key} with; give a folklore or a theory")
    if isinstance(said, str) or isinstance(measured, str):
        return Claim(key, folklore, measured, theory, said == measured, None)
    if tolerance is None:
        raise ValueError(f"the numbers of {key} need a tolerance")
    return Claim(key, folklore, measured, theory, _close(said, measured, tolerance), tolerance)


def _close(said: Numbers, measured: Numbers, tolerance: float) -> bool:
    one, two = _as_tuple(said), _as_tuple(measured)
    if len(one) != len(two):
        return False
    return all(abs(a - b) <= tolerance for a, b in zip(one, two, strict=True))


def _as_tuple(numbers: Numbers) -> tuple[float, ...]:
    return numbers if isinstance(numbers, tuple) else (numbers,)


@dataclass(frozen=True)
class Lesson:
    """name, the pure function, its controls, and the writer of its few lines of Python."""

    name: str
    run: Callable[..., Any]
    controls: tuple[Control, ...]
    code: Callable[..., str]

    def arguments(self, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Every argument: the default, or what was given, checked."""
        given = given or {}
        known = {control.name: control for control in self.controls}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(
                f"{self.name} has no argument {_listed(unknown)}; it has {_listed(known)}"
            )
        return {
            name: control.check(given[name]) if name in given else control.default
            for name, control in known.items()
        }

    def python(self, arguments: Mapping[str, Any] | None = None) -> str:
        """A few lines that run as they stand. Each line they print is a field of the result, by
        the path to it, then its value: `variance 63.9`, `dot.sd 8.1`, `weights [0.67, ...]`."""
        return self.code(**self.arguments(arguments))


def as_json(result: Any) -> Any:
    """A result as plain JSON: tuples as lists, numbers that JSON lacks as "nan", "inf", "-inf"."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {
            field.name: as_json(getattr(result, field.name)) for field in dataclasses.fields(result)
        }
    if isinstance(result, Mapping):
        return {str(name): as_json(value) for name, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [as_json(item) for item in result]
    if isinstance(result, float) and not math.isfinite(result):
        return "nan" if math.isnan(result) else "inf" if result > 0 else "-inf"
    if result is None or isinstance(result, (bool, int, float, str)):
        return result
    raise TypeError(f"{type(result).__name__} has no place in a result")


def _number(value: Any) -> float | int | None:
    """The finite number it is; None for everything else, True and False included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an int that no float holds
        return None


def _listed(names: Any) -> str:
    return ", ".join(str(name) for name in names)
