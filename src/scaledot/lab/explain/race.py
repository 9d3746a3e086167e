"""The race as it is run: a progress bar, and for every rule its loss so far as a sparkline."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from scaledot.lab import drawing
from scaledot.lab.experiments import race_steps
from scaledot.lab.experiments.race import Finish, RaceStep, Runner
from scaledot.lab.explain.charts import Sparkline
from scaledot.lab.explain.voice import Voice

COLUMNS = (("", "rule"), ("", "loss_curve"), (">", "loss"), (">", "accuracy"), (">", "entropy"))


def play(console: Console, voice: Voice, arguments: Mapping[str, Any]) -> None:
    """Run it before the reader's eyes; the last picture is cleared, for the lesson shows it."""
    console.print(Text(voice.say("race.title"), "bold"))
    curves: list[RaceStep] = []
    with Live(console=console, transient=True, refresh_per_second=12) as live:
        for step in race_steps(**arguments):
            curves.append(step)
            live.update(_frame(voice, curves, arguments["steps"]))


def table(voice: Voice, curves: Sequence[RaceStep]) -> Table:
    """A line for each rule: its loss over the steps so far, and its numbers at the last one."""
    names = [side + voice.say(f"explain.column.{key}") for side, key in COLUMNS]
    shown = drawing.table(*names, ">" + voice.say("explain.column.dead"))
    shown.columns[1].no_wrap = False  # where room is short, the curve is the one to give way
    for place, runner in enumerate(curves[-1].runners):
        losses = [step.runners[place].loss for step in curves]
        shown.add_row(
            voice.say(f"explain.rule.{runner.rule}"),
            Sparkline(losses),
            f"{runner.loss:.3f}",
            Text(share(runner, "accuracy", 0), "bold"),
            share(runner, "entropy_ratio", 0),
            Text(share(runner, "dead", 0), "bold red" if runner.dead > 0.05 else ""),
        )
    return shown


def share(run: Runner | Finish, name: str, places: int) -> str:
    """What a run has of something; a run that broke has nothing."""
    return f"{getattr(run, name):.{places}%}" if math.isfinite(run.loss) else "-"


def _frame(voice: Voice, curves: Sequence[RaceStep], total: int) -> RenderableType:
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        voice.say("explain.racing", step=len(curves), steps=total),
        ProgressBar(total, len(curves), width=30),
    )
    return Group(bar, table(voice, curves))
