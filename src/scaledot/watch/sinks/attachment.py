"""What the callbacks for training frameworks share: a watch for as long as the training lasts."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from scaledot.watch.late import Late
from scaledot.watch.reading import LEARNING_RATE, Reading, RunAttributes, Scalar
from scaledot.watch.receivers import delivery_to, is_path
from scaledot.watch.steps import learning_rate
from scaledot.watch.watch import Watch


class Attachment:
    """Makes a `Watch`, gives it the framework's count of steps and its numbers, removes it.

    The arguments are those of `scaledot.Watch`. A store given as a path is opened at every `begin`
    and closed at `end`; sinks are flushed and stay open for the next training.
    """

    def __init__(
        self,
        store: Any = None,
        sinks: Iterable[Any] = (),
        every: int | None = None,
        budget: float = 0.01,
        replace: bool = False,
    ) -> None:
        self.store, self.sinks = store, tuple(sinks)
        self.every, self.budget, self.replace = every, budget, replace
        self.watch: Watch | None = None
        self._relay: Relay | None = None
        self._rate: float | None = None
        self._late: list[Late] = []

    def begin(self, model: nn.Module, first_step: int) -> None:
        """first_step: steps that ended before, in the run that is resumed."""
        self.end()
        self._rate = None
        relay = Relay(self._opened(model), self.sinks, first_step, owned=is_path(self.store))
        try:
            self.watch = Watch(
                model,
                every=self.every,
                store=relay,
                budget=self.budget,
                replace=self.replace,
                losses=False,  # the framework says what its loss is
                ranks="apart",  # the callbacks watch on rank 0 only
            )
        except BaseException:
            relay.close()
            raise
        self._relay = relay

    def stepped_with(self, optimizer: Any) -> None:
        """Remember the rate of the step that runs: schedulers change it before the step ends."""
        self._rate = learning_rate(optimizer)

    def numbers(self, **values: float | Tensor | None) -> None:
        """Numbers of the step that has just ended, such as its loss; None is left out.

        A tensor is not waited for: it is passed on when it has come from its device.
        """
        if self.watch is None:
            return
        step = self.last_step
        named = {**values, LEARNING_RATE: self._rate}
        self._late += [
            Late.of(step, name, value) for name, value in named.items() if value is not None
        ]
        self._pass_on()

    @property
    def last_step(self) -> int:
        """The number of the step that has just ended, counted from 0 as readings are."""
        if self.watch is None or self._relay is None:
            return -1
        return self._relay.first_step + max(self.watch.step_number - 1, 0)

    def end(self) -> None:
        """Remove the watch and pass on the rest; more than once is fine."""
        watch, relay = self.watch, self._relay
        self.watch = self._relay = None
        try:
            if watch is not None:
                watch.remove()
        finally:
            if relay is not None:
                self._pass_on(relay, wait=True)
                relay.close()

    def _pass_on(self, relay: "Relay | None" = None, wait: bool = False) -> None:
        relay = relay or self._relay
        while self._late and relay is not None and (wait or self._late[0].here):
            relay.add([self._late.pop(0).scalar()])

    def _opened(self, model: nn.Module) -> Any:
        if not is_path(self.store):
            return self.store
        from scaledot.watch.store import Store

        return Store(self.store, RunAttributes.here(model, budget=self.budget))


class Relay:
    """Between the watch and its receivers: numbers steps as the run does that is resumed.

    The watch counts the steps it has seen, from 0.
    """

    def __init__(
        self, store: Any, sinks: Sequence[Any], first_step: int, owned: bool = False
    ) -> None:
        self.first_step = first_step
        self._store, self._sinks, self._owned = store, sinks, owned
        receivers = [*([] if store is None else [store]), *sinks]
        self._deliveries = [delivery_to(receiver) for receiver in receivers]
        self._latest: dict[str, int] = {}  # the last step of each series

    def write(self, readings: Sequence[Reading] = (), scalars: Sequence[Scalar] = ()) -> None:
        """What the watch has measured."""
        if self.first_step:
            readings = [
                dataclasses.replace(reading, step=reading.step + self.first_step)
                for reading in readings
            ]
            scalars = [scalar._replace(step=scalar.step + self.first_step) for scalar in scalars]
        self._deliver(readings, scalars)

    def add(self, scalars: Sequence[Scalar]) -> None:
        """What the framework knows, except what the watch has said of the same step."""
        new = [scalar for scalar in scalars if self._latest.get(scalar.name) != scalar.step]
        if new:
            self._deliver((), new)

    def note(self, name: str, value: Any) -> None:
        if callable(note := getattr(self._store, "note", None)):
            note(name, value)

    def close(self) -> None:
        for receiver in (self._store, *self._sinks):
            if callable(flush := getattr(receiver, "flush", None)):
                flush()
        if self._owned:
            self._store.close()

    def _deliver(self, readings: Sequence[Reading], scalars: Sequence[Scalar]) -> None:
        self._latest |= {scalar.name: scalar.step for scalar in scalars}
        for deliver in self._deliveries:
            deliver(readings, scalars)
