"""What `scaledot run` does with alarms: a calm line each, JSON lines for machines, an exit code."""

import contextlib
import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from scaledot.printable import one_line
from scaledot.watch.alarms.alarm import Alarm, Grade, as_json, at_least, is_loud
from scaledot.watch.alarms.words import line

EXIT_CODE = 3


class Telling:
    """say: prints a line, or nothing. file: gets one JSON object a line.

    fail_on: an alarm of this grade or a graver one ends the run: SystemExit with code 3, raised at
    the end of the step, and again at the next if the script went on all the same.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        file: Path | None = None,
        fail_on: Grade | None = None,
    ) -> None:
        self.over = False  # the training has ended: there is nothing left to end
        self.counts: dict[str, int] = {}  # by grade
        self.file = file  # None: nobody reads lines, or another rank writes them
        self._say, self._fail_on = say, fail_on
        self._fatal: Alarm | None = None
        self._said: set[tuple[str, str]] = set()  # kinds and grades

    def tell(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            self.counts[alarm.grade] = self.counts.get(alarm.grade, 0) + 1
        self._write(alarms)
        for _, alike in groupby(alarms, key=lambda one: (one.step, one.kind, one.grade)):
            self._print(list(alike))
        if self._fatal is None:
            self._fatal = next(filter(self._ends, alarms), None)
        self.check()

    def check(self) -> None:
        """Ends the training where an alarm has asked for it."""
        if self._fatal is not None and not self.over:
            why = f"{self._fatal.grade} of kind {self._fatal.kind} at step {self._fatal.step:,}"
            self._say(f"ended by --fail-on {self._fail_on}: {why}; exit code {EXIT_CODE}")
            raise SystemExit(EXIT_CODE)

    def summary(self) -> str:
        """ "": nothing was raised."""
        told = [f"{number} {grade}" for grade, number in self.counts.items()]
        return f"alarms: {', '.join(told)}" if told else ""

    def _print(self, alike: list[Alarm]) -> None:
        """Each kind and grade once: where one layer falls ill, its neighbours follow for steps.

        Those, and notes, are for who looks: `scaledot top`, `scaledot report`, the JSON lines. A
        note about the scale is a question to the person who has just started the run.
        """
        first = alike[0]
        key = first.kind, first.grade
        if key not in self._said and (is_loud(first) or self._ends(first)):
            self._said.add(key)
            self._say(one_line(line(alike)))

    def _ends(self, alarm: Alarm) -> bool:
        return self._fail_on is not None and at_least(alarm.grade, self._fail_on)

    def _write(self, alarms: Sequence[Alarm]) -> None:
        if self.file is None:
            return
        try:
            with self.file.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(as_json(one)) + "\n" for one in alarms)
        except OSError as error:
            with contextlib.suppress(Exception):
                self._say(f"no alarms go to {self.file}: {error.strerror}")
            self.file = None
