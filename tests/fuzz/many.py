"""Run many random cases, or one of them again.

    PYTHONPATH=src:tests python -m fuzz --cases 20000 --seed 1 --workers 2
    PYTHONPATH=src:tests python -m fuzz --seed 1 --case 45 --engine cpu-tiles
    PYTHONPATH=src:tests python -m fuzz --engine triton --only "Case(seed=7, queries=3)"

Each failure prints its reproduction in one line. The engines are taken in turn. A run that was cut
short goes on with --first; --seconds ends it early and says so.
"""

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator

import torch

from fuzz import engines
from fuzz.cases import Case, draw, fit, smaller
from fuzz.checks import Outcome, check
from fuzz.kinds import draw_of_kind

TURN = 20  # seconds between two progress lines


def main(arguments: list[str] | None = None) -> int:
    options = _read(arguments)
    torch.set_num_threads(options.threads)
    engines.prepare(options.engine)
    chosen = (options.engine,) if options.engine else engines.on_this_machine()
    if options.only is not None:
        case = eval(options.only, {"Case": Case})
        return max([_report(case, engine, check(case, engine)) for engine in chosen])
    if options.case is not None:
        engine = _engine(options, chosen, options.case)
        case = _case(options, options.case, engine)
        return _report(case, engine, check(case, engine))
    return _run_many(options, chosen)


def _read(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("fuzz", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--seed", type=int, default=1)
    add("--cases", type=int, default=500, help="how many")
    add("--first", type=int, default=0, help="number of the first case")
    add("--case", type=int, help="this case alone")
    add("--only", help="the text of a case")
    add("--engine", choices=engines.ENGINES, help="default: those of this machine in turn")
    add("--kinds", type=int, help="so many kinds of calls, for which kernels are compiled")
    add("--small", action="store_true", help="few tokens and narrow heads, for the interpreter")
    add("--workers", type=int, default=1, help="processes")
    add("--threads", type=int, default=1, help="threads of torch in each process")
    add("--seconds", type=float, help="end after so long, whatever is left")
    add("--log", help="file to which failures are appended as lines of JSON")
    return parser.parse_args(arguments)


def _run_many(options: argparse.Namespace, chosen: tuple[str, ...]) -> int:
    start = last = time.monotonic()
    total, faulty = Counter(), Counter()
    worst: dict[str, float] = {}
    for index, engine, outcome in _outcomes(options, chosen):
        total["cases"] += 1
        total[engine] += 1
        total["compared"] += outcome.compared
        if not outcome.faults:
            for name, ratio in outcome.worst.items():
                worst[name] = max(worst.get(name, 0.0), ratio)
        if outcome.faults:
            total["failed"] += 1
            faulty[engine] += 1
            _print_fault(options, index, engine, outcome)
        now = time.monotonic()
        if now - last > TURN:
            last = now
            print(f"# {_summary(options, total, now - start)}, at case {index}", flush=True)
    seconds = time.monotonic() - start
    each = ", ".join(f"{name}: {total[name]} ({faulty[name]} failed)" for name in chosen)
    print(f"{_summary(options, total, seconds)}; {each}", flush=True)
    closest = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(worst.items()))
    print(f"largest error of those that passed, as a share of its bound: {closest}", flush=True)
    if total["cases"] < options.cases:
        print(f"NOT FINISHED: {options.cases - total['cases']} cases are left", flush=True)
    return 1 if total["failed"] or total["cases"] < options.cases else 0


def _summary(options: argparse.Namespace, total: Counter, seconds: float) -> str:
    return (
        f"fuzz seed {options.seed}: {total['cases']} of {options.cases} cases, "
        f"{total['compared']} numbers compared, {total['failed']} cases failed, {seconds:.0f} s"
    )


def _outcomes(
    options: argparse.Namespace, chosen: tuple[str, ...]
) -> Iterator[tuple[int, str, Outcome]]:
    """Each case's result; those of one kind go to one process, which compiles for it once."""
    numbers = range(options.first, options.first + options.cases)
    stop = None if options.seconds is None else time.time() + options.seconds
    if options.workers == 1:
        yield from _work(options, chosen, numbers, stop)
        return
    stride = options.kinds or len(numbers)
    shares = [
        [n for n in numbers if n % stride % options.workers == worker]
        for worker in range(options.workers)
    ]
    running = [_Worker(options, chosen, share, stop) for share in shares if share]
    while running:
        time.sleep(0.05)
        for worker in list(running):
            ended = not worker.process.is_alive()
            yield from worker.results()
            if ended:
                running.remove(worker)
                if worker.share and worker.process.exitcode:
                    index = worker.share[0]
                    died = Outcome(faults=[f"died: exit code {worker.process.exitcode}"])
                    yield index, _engine(options, chosen, index), died
                    worker.share.pop(0)
                if worker.share and (stop is None or time.time() < stop):
                    running.append(_Worker(options, chosen, worker.share, stop))


class _Worker:
    """A process that takes one case after the other of a share, and may die of one."""

    def __init__(self, options, chosen, share: list[int], stop: float | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.share, self.pipe = share, context.Pipe(duplex=False)
        self.process = context.Process(
            target=_serve, args=(options, chosen, share, stop, self.pipe[1]), daemon=True
        )
        self.process.start()
        self.pipe[1].close()

    def results(self) -> Iterator[tuple[int, str, Outcome]]:
        try:
            while self.pipe[0].poll():
                yield self.pipe[0].recv()
                self.share.pop(0)
        except EOFError:
            return


def _serve(options, chosen, numbers, stop, pipe) -> None:
    torch.set_num_threads(options.threads)
    engines.prepare(options.engine)
    for result in _work(options, chosen, numbers, stop):
        pipe.send(result)
        if any("CUDA error" in fault for fault in result[2].faults):
            return  # nothing works in this process any more: another one goes on


def _work(options, chosen, numbers, stop) -> Iterator[tuple[int, str, Outcome]]:
    for index in numbers:
        if stop is not None and time.time() > stop:
            return
        engine = _engine(options, chosen, index)
        yield index, engine, check(_case(options, index, engine), engine)


def _engine(options, chosen: tuple[str, ...], index: int) -> str:
    """In turn; a kind of call keeps its engine, or kernels would be compiled for both."""
    return chosen[(index if options.kinds is None else index % options.kinds) % len(chosen)]


def _case(options: argparse.Namespace, index: int, engine: str) -> Case:
    if options.kinds is None:
        case = draw(options.seed, index)
    else:
        case = draw_of_kind(options.seed, index, options.kinds)
    return fit(smaller(case) if options.small else case, engine)


def _print_fault(options, index: int, engine: str, outcome: Outcome) -> None:
    case = str(_case(options, index, engine))
    print(f"FAILED: case {index} of seed {options.seed}")
    _report(case, engine, outcome)
    if options.log:
        with open(options.log, "a") as log:
            line = {"index": index, "engine": engine, "faults": outcome.faults, "case": case}
            log.write(json.dumps(line) + "\n")


def _report(case: Case | str, engine: str, outcome: Outcome) -> int:
    if not outcome.faults:
        print(f"{engine}: {outcome.compared} numbers agree")
        return 0
    print(f"  python -m fuzz --engine {engine} --only {json.dumps(str(case))}")
    for fault in outcome.faults:
        print(f"    {fault}", flush=True)
    return 1
