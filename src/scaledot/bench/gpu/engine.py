"""How a GPU is measured: one race of all contenders of a workload, then every case is a pair of it.

Somebody else's code that cannot be imported, fails or computes something else is set aside with
the reason; so is our own where it cannot serve a call. Our own that computes something else is the
gate's affair, and stops the run.
"""

from collections.abc import Callable, Iterable
from typing import Self

from scaledot.bench import gate
from scaledot.bench.cases import Case, Contender
from scaledot.bench.clock import Samples
from scaledot.bench.gate import Check, Subject
from scaledot.bench.gpu import absence, clock, memory
from scaledot.bench.gpu.ahead import Ahead
from scaledot.bench.gpu.apart import Duels
from scaledot.bench.outcome import Outcome
from scaledot.bench.workload import Inputs, touch

WAITS = "waits for the GPU inside its call: its time has the host's in it"


class OnGpu:
    def __init__(self, chosen: list[Case]) -> None:
        self._chosen = chosen
        self._absent: dict[Subject, str] = {}
        self._duels = Duels(case.workload for case in chosen if case.apart)
        self._ahead = Ahead(self.subjects())
        self._device: clock.Device | None = None

    def __enter__(self) -> Self:
        self._ahead.__enter__()  # both compile while the gate is at work
        self._duels.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._duels.__exit__()
        self._ahead.__exit__()

    def subjects(self) -> list[Subject]:
        """Both sides; but a peer that runs apart is examined there."""
        found: dict[Subject, None] = {}
        for case in self._chosen:
            found[Subject(case.ours, case.workload)] = None
            if not case.apart:
                found[Subject(case.peer, case.workload)] = None
        return sorted(found, key=self._order)

    def examine(self, subject: Subject) -> list[Check]:
        """Our own errors; whoever is not there is remembered."""
        contender, workload = subject
        try:
            if not contender.foreign:
                return gate.examine(subject)
            reason = absence.wrong(contender, workload)
        except Exception as error:
            reason = absence.reason_of(error)
        if reason is not None:
            self._absent[subject] = reason
        return []

    def groups(self) -> list[list[Case]]:
        """Cases of one workload; those in a process of their own and memory each by itself."""
        together: dict[object, list[Case]] = {}
        for case in self._chosen:
            shared = case.measures == "time" and not case.apart
            together.setdefault(case.workload if shared else case, []).append(case)
        return list(together.values())

    def measure(
        self, group: list[Case], repeats: int, after_round: Callable[[], None]
    ) -> list[Outcome]:
        self._ahead.ready()
        self._duels.ready()
        first = group[0]
        if first.apart:
            return [self._apart(case, repeats, after_round) for case in group]
        if first.measures != "time":
            return [self._weigh(case, repeats, after_round) for case in group]
        return self._race(group, repeats, after_round)

    def _race(
        self, group: list[Case], repeats: int, after_round: Callable[[], None]
    ) -> list[Outcome]:
        inputs = group[0].workload.make()
        contenders = {
            side.name: _call(side, inputs)
            for case in group
            for side in (case.peer, case.ours)
            if Subject(side, case.workload) not in self._absent
        }
        self._device = device = self._device or clock.Cuda()
        raced = clock.race(contenders, repeats, device, after_round=after_round)
        samples = {name: found.times(1e3) for name, found in raced.samples.items()}
        return [self._outcome(case, samples, raced.waits) for case in group]

    def _weigh(self, case: Case, repeats: int, after_round: Callable[[], None]) -> Outcome:
        samples: dict[str, Samples] = {}
        for side in (case.peer, case.ours):
            if Subject(side, case.workload) not in self._absent:
                weights = [memory.peak_bytes_a_row(side, case.workload) for _ in range(repeats)]
                samples[side.name] = Samples(tuple(weights))
        for _ in range(repeats):
            after_round()
        return self._outcome(case, samples, ())

    def _apart(self, case: Case, repeats: int, after_round: Callable[[], None]) -> Outcome:
        report = self._duels.race(case.workload, repeats)
        for _ in range(repeats):
            after_round()
        sides = {"ours": case.ours, "peer": case.peer}
        for side, reason in report.absent.items():
            self._absent.setdefault(Subject(sides[side], case.workload), reason)
        samples = {sides[side].name: found.times(1e3) for side, found in report.samples.items()}
        return self._outcome(case, samples, [sides[side].name for side in report.waits])

    def _outcome(self, case: Case, samples: dict[str, Samples], waits: Iterable[str]) -> Outcome:
        notes = []
        for side in (case.ours, case.peer):
            reason = self._absent.get(Subject(side, case.workload))
            if reason is not None:
                notes.append(f"{side.name}: {reason}")
            elif side.name in waits:
                notes.append(f"{side.name} {WAITS}")
        ours, peer = samples.get(case.ours.name), samples.get(case.peer.name)
        return Outcome(case, ours, peer, "; ".join(notes))

    def _order(self, subject: Subject) -> int:
        """Subjects of one workload side by side: they share one truth in float64."""
        workloads = list(dict.fromkeys(case.workload for case in self._chosen))
        return workloads.index(subject.workload)


def _call(side: Contender, inputs: Inputs) -> Callable[[], None]:
    prepared = side.prepare(inputs)
    return lambda: touch(side.attend(prepared))
