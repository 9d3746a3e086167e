"""`scaledot top`: a run's heads in the terminal, while it trains and after.

The way of the numbers: `history` (what is known of the run) -> `frame` (what is shown, as data; its
healthy bands in `health`) -> `picture` (lines of text: `heat`, `curve`) -> `live` (keys, redraws).
"""

import argparse
import os
import re
import sqlite3
from pathlib import Path

from scaledot.printable import complain
from scaledot.terminal import Console, print_json
from scaledot.watch.reading import PHASES
from scaledot.watch.store import StoreError
from scaledot.watch.top import keys, live, picture
from scaledot.watch.top.frame import Frame, as_data, frame_of
from scaledot.watch.top.health import VITALS
from scaledot.watch.top.history import History


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="the run's file (default: the newest *.vitals here)"
    )
    parser.add_argument(
        "--vital", choices=VITALS, default=VITALS[0], help=f"what to begin with ({VITALS[0]})"
    )
    parser.add_argument("--phase", choices=PHASES, help="training or evaluation (default: train)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--json", action="store_true", help="print one frame as data and end")


def run(args: argparse.Namespace) -> int:
    try:
        _show(args)
    except (StoreError, sqlite3.Error) as error:
        complain("scaledot top", error)
        return 1
    return 0


def _show(args: argparse.Namespace) -> None:
    """Draw the run, or print it. Raises StoreError where what is to be shown cannot be read."""
    history = History(args.run or newest(Path()))
    phase = args.phase or history.first_phase
    console = Console()
    if console.is_terminal and not (args.once or args.json):
        with keys.keyboard() as pressed:
            live.watch(history, console, pressed, args.vital, phase)
        return
    frame = frame_of(history, args.vital, phase)
    if args.json:
        print_json(as_data(frame))
    else:
        _print(frame, console)


def newest(folder: Path) -> Path:
    """The run that was written last; of the ranks and processes of one run, the first."""
    runs = [path for path in folder.glob("*.vitals") if path.is_file()]
    if not runs:
        raise StoreError(
            f"no *.vitals file in {folder.absolute()}; type: scaledot run SCRIPT, "
            "or: scaledot top FILE"
        )
    last = _of_run(max(runs, key=lambda path: (_written(path), path.name)))
    return min((p for p in runs if _of_run(p) == last), key=lambda p: (len(p.name), p.name))


def _of_run(path: Path) -> str:
    """The name without what `ranks.file_of` adds for a further rank or process."""
    return re.sub(r"\.(rank|process)\d+$", "", path.stem)


def _written(path: Path) -> float:
    """What is new may still be in the log beside the file."""
    times = [0.0]
    for name in (path, f"{path}-wal"):
        try:
            times.append(os.stat(name).st_mtime)
        except OSError:
            continue
    return max(times)


def _print(frame: Frame, console: Console) -> None:
    # A file or a pipe has no height: there the frame is as long as the model is deep.
    height = console.height - 1 if console.is_terminal else None
    ascii_only = console.options.ascii_only
    keys = f"another: --vital {VITALS[1] if frame.vital == VITALS[0] else VITALS[0]}"
    for line in picture.draw(frame, console.width, height, keys=keys, ascii_only=ascii_only):
        console.print(line, no_wrap=True, overflow="crop")
