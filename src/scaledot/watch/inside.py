"""What `scaledot run` does inside the script's process, from the import of torch to the exit."""

import atexit
import contextlib
import dataclasses
import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from scaledot.printable import complain, typed
from scaledot.watch.alarms import Alarm, overridden
from scaledot.watch.alarms.telling import Telling
from scaledot.watch.evidence import Read, least
from scaledot.watch.ranks.files import file_of, rank_here
from scaledot.watch.reading import Reading, RunAttributes, Scalar
from scaledot.watch.store import RunReader, Store, StoreError
from scaledot.watch.store.ownership import name_of_its_own
from scaledot.watch.watch import Watch

if TYPE_CHECKING:
    from scaledot.watch.remedies import Installed


def begin(options: Mapping[str, Any]) -> "Session":
    """Watch every attention of this process until it ends. options: see run.py."""
    log = logging.getLogger("scaledot")
    log.addHandler(_Spoken(logging.WARNING))
    log.propagate = False
    session = Session(options)
    atexit.register(session.end)
    return session


class _Spoken(logging.Handler):
    """Say what the watch logs in its own name: the script's handlers are for the script's words."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


class Session:
    """A watch, the file that its readings open, and the two lines that the user sees."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.nothing = ""  # what is to be said at the end if no attention was found
        self._process = os.getpid()
        main = options["main"] == self._process
        self.store = LateStore(
            Path(options["store"]),
            claim=options["claim"],
            main=main,
            started=options.get("started", 0.0),
            only_rank=options.get("only_rank", False),
        )
        rules = overridden(options.get("alarm") or ())
        self.watch = Watch(
            every=options["every"],
            ranks=options.get("ranks", "merge"),
            store=self.store,
            replace=options["replace"],
            alarms={name: rule.threshold for name, rule in rules.items()},
        )
        self.store.watch = self.watch
        self.store.telling = Telling(
            self.store.say, _file_of_alarms(options, main), options.get("fail_on")
        )
        self.watch.guard.install()
        self._remedy: Installed | None = None
        if options.get("remedy"):
            from scaledot.watch import remedies

            remedy, dry_run = remedies.parse(options["remedy"]), options.get("dry_run", False)
            self._remedy = remedies.install(self.watch, remedy, dry_run, self.store.say)

    def end(self) -> None:
        if os.getpid() != self._process:
            return  # the copy in a forked process: the watch belongs to the parent
        if self.store.telling is not None:
            self.store.telling.over = True
        self.watch.guard.uncaught()
        self.watch.remove()
        self.store.close()
        if self.store.refused or self.watch.silent:
            return  # that was said when it happened, or rank 0 speaks
        if not self.store.anything:
            # begun: there will be no further step in which attention could be seen.
            found = [str(dataclasses.replace(self.watch.coverage(), begun=True))]
            if steps := self.watch.step_number:
                found.append(f"the losses of {_count(steps, 'step')} were watched alone")
            if self.store.telling is not None and (told := self.store.telling.summary()):
                found.append(told)
            self.nothing = "; ".join(found)
        elif self.store.speaks:
            if self._remedy is not None:
                say(self._remedy.describe())
            say(self._summary())

    def _summary(self) -> str:
        store, cadence = self.store, self.watch.cadence
        assert store.path is not None
        cost = "not known after so few steps"
        if cadence.share is not None:
            cost = f"{cadence.share:.2%} of the whole run"
            if cadence.steady_share is not None:
                cost += f", {cadence.steady_share:.2%} when steady"
        parts = [
            store.coverage,
            store.evidence(self.watch.step_number),
            f"own cost {cost}",
            *store.losses(),
            *([summary] if store.telling and (summary := store.telling.summary()) else []),
            *(
                [f"see them: scaledot top {typed(shown(store.path))}"]
                if store.path.exists()
                else []
            ),
        ]
        return "; ".join(parts)


class LateStore:
    """Opens its file with the first reading: a script without attention leaves none behind.

    In a job of several ranks rank 0 alone opens one; the others hear of alarms, for one may end
    the run.
    """

    on_every_rank = True
    closes_with_watch = True

    def __init__(
        self,
        wish: Path,
        *,
        claim: bool,
        main: bool,
        started: float = 0.0,
        only_rank: bool = False,
    ) -> None:
        """claim: the name was not asked for, so a file that exists is somebody else's.

        started: when the run began; a file that was written since is another process's. only_rank:
        multiprocessing started this process, which counts if it is a rank of a process group.
        """
        self.wish = wish
        self.path: Path | None = None
        self.watch: Watch | None = None
        self.telling: Telling | None = None
        self.coverage = ""
        self.anything = False  # was read
        self._read: dict[str, Read] = {}  # the steps of training, by layer
        self.speaks = False
        self._claim, self._main, self._started = claim, main, started
        self._only_rank = only_rank
        self.refused = False  # the file could not be opened
        self._store: Store | None = None
        self._notes: dict[str, Any] = {}  # what came before the file was open
        self._lines: list[str] = []  # to be said then: which rank speaks is known by then
        self._layers: set[str] = set()
        self._account = ""  # of what is not watched, as it was last said

    def write(self, readings: Sequence[Reading] = (), scalars: Sequence[Scalar] = ()) -> bool:
        if self._is_left_alone():
            return True  # a worker, not a rank
        if self._silent:
            self._check()
            return True
        if self._store is None and readings and not self.refused:
            self._open()
        if self._store is None:
            return False
        if readings:
            self._look_at_coverage({reading.layer for reading in readings})
        self.anything = self.anything or bool(readings)
        for reading in readings:
            if reading.phase == "train":
                self._read.setdefault(reading.layer, Read()).add(reading.step)
        taken = self._store.write(readings, scalars)
        self._check()
        return taken

    def write_alarms(self, alarms: Sequence[Alarm]) -> None:
        if self._is_left_alone():
            return
        if self._store is not None:
            self._store.write_alarms(alarms)
        if self.telling is not None:
            if self._silent:
                self.telling.file = None
            self.telling.tell(alarms)

    def _is_left_alone(self) -> bool:
        """Whether multiprocessing started this process and it has joined no process group yet."""
        self._only_rank = self._only_rank and not dist.is_initialized()
        return self._only_rank

    @property
    def _silent(self) -> bool:
        return self.watch is not None and self.watch.silent

    def _check(self) -> None:
        if self.telling is not None:
            self.telling.check()

    def say(self, line: str) -> None:
        if self._store is None and not (self.speaks or self.refused or self._silent):
            self._lines.append(line)
        elif self.speaks:
            say(line)

    def evidence(self, steps: int) -> str:
        """How many steps of the run were read, and whether that is enough to judge it."""
        if not self._read:
            return "evaluation alone was read"
        found = least(read.until(0, steps - 1) for read in self._read.values())
        return str(found) if found.enough else f"too little seen: {found.advice}"

    def flush(self) -> bool:
        return self._store is not None and self._store.flush()

    def note(self, name: str, value: Any) -> None:
        if name == "coverage":
            self._look_at_coverage(None)
            self._say_what_is_not_watched()
        elif self._store is None:
            self._notes[name] = value
        else:
            self._store.note(name, value)

    def losses(self) -> list[str]:
        """What the user should know about the file, if anything."""
        assert self._store is not None
        dropped = self._store.dropped
        lost = [f"{_count(dropped, 'number')} dropped"] if dropped else []
        return lost + ([f"not all written: {self._store.broken}"] if self._store.broken else [])

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _open(self) -> None:
        rank = rank_here()
        self.speaks = not rank
        # What a launcher starts without ranks: the first that has a reading takes the name.
        first = self._main or not _written_since(self.wish, self._started)
        path = file_of(self.wish, rank, first)
        try:
            self.path = wanted = name_of_its_own(path) if self._claim else path
            # The first reading has come: its model is running.
            model = "" if self.watch is None else self.watch.models()
            attributes = dataclasses.replace(RunAttributes.here(), model=model)
            held = "" if self._claim else _held(self.path)
            self._store = Store(self.path, attributes)
            self.path = self._store.path
            # It would close at the exit before the session has handed on its last readings.
            atexit.unregister(self._store.close)
        except (StoreError, sqlite3.Error, OSError) as error:
            self.refused = True
            say(f"nothing is kept: {error}")
            return
        for name, value in self._notes.items():
            self._store.note(name, value)
        if self.speaks and not self._store.broken:  # the store itself has told that
            name = shown(self.path)
            say(f"vitals go to {name}; live view: scaledot top {typed(name)}")
            if self.path != wanted:
                say(f"another run writes {shown(wanted)} now, so this one has its own file")
            elif held:
                say(held)
        self._speak()

    def _say_what_is_not_watched(self) -> None:
        """After the first steps, and again where it has changed: not when the run has ended."""
        if self.watch is None or self.refused or self._silent or self._is_left_alone():
            return
        steps, coverage = self.watch.step_number, self.watch.coverage()
        if not steps or not (coverage.unseen or coverage.kept or not coverage.watched):
            return
        account = str(coverage)
        if account == self._account:
            return
        self._account = account
        if not coverage.watched:
            account = account if coverage.unseen else "no attention found yet"
            account += "; the losses are watched for NaN and infinity"
            self._speak()  # there may never be a file to be opened
        self.say(f"after {_count(steps, 'step')}: {account}")

    def _speak(self) -> None:
        """Say what has waited for the file."""
        self.speaks = not rank_here()
        for line in self._lines if self.speaks else ():
            say(line)
        self._lines.clear()

    def _look_at_coverage(self, layers: set[str] | None) -> None:
        """Once for each set of layers: an account lists all modules of the model."""
        if self._store is None or self.watch is None or (layers and layers <= self._layers):
            return
        self._layers |= layers or set()
        self.coverage = self.watch.coverage_in_words()
        self._store.note("coverage", self.coverage)


def _written_since(path: Path, started: float) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime >= started
    return False


def _file_of_alarms(options: Mapping[str, Any], main: bool) -> Path | None:
    """Processes by themselves write into files of their own, as their readings do."""
    wish = options.get("alarms")
    if not wish:
        return None
    first = main or not _written_since(Path(wish), options.get("started", 0.0))
    return file_of(Path(wish), rank_here(), first)


def say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stderr
        complain("scaledot", *text.split("\n"))


def shown(path: Path) -> str:
    """As short as it can be typed here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _held(path: Path) -> str:
    """What the user should know who continues a file."""
    last = RunReader(path).latest() if path.exists() and path.stat().st_size else None
    if last is None:
        return ""
    return (
        f"{shown(path)} holds an earlier start, up to step {last.step:,}; this one counts from 0, "
        "and its steps take the place of those"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
