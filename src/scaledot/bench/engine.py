"""Who examines and measures: one engine a device, with the same four questions to each."""

from collections.abc import Callable
from typing import Protocol, Self

from scaledot.bench import gate, outcome
from scaledot.bench.cases import Case
from scaledot.bench.gate import Check, Subject
from scaledot.bench.outcome import Outcome


class Engine(Protocol):
    """Entered before the gate, left when all is measured."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def subjects(self) -> list[Subject]: ...

    def examine(self, subject: Subject) -> list[Check]: ...

    def groups(self) -> list[list[Case]]:
        """Cases that are measured together."""
        ...

    def measure(
        self, group: list[Case], repeats: int, after_round: Callable[[], None]
    ) -> list[Outcome]: ...


class OnCpu:
    """Each case by itself."""

    def __init__(self, chosen: list[Case]) -> None:
        self._chosen = chosen

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def subjects(self) -> list[Subject]:
        return gate.subjects(self._chosen)

    def examine(self, subject: Subject) -> list[Check]:
        return gate.examine(subject)

    def groups(self) -> list[list[Case]]:
        return [[case] for case in self._chosen]

    def measure(
        self, group: list[Case], repeats: int, after_round: Callable[[], None]
    ) -> list[Outcome]:
        return [outcome.measure(case, repeats, after_round) for case in group]
