"""`scaledot run script.py ...`: a script under the watch, without a change to it.

The script is not run here: this process becomes the Python that runs it (exec), with one folder
more in PYTHONPATH. Python loads `inject/sitecustomize.py` from there, which waits for the import of
torch and then begins the watch (`inside.py`). So the script's __main__, arguments, paths, output,
signals and exit status are Python's own, and torch is imported when the script imports it (and not
before, in this process).

Watched is the program that was named or, behind a launcher (torchrun, accelerate, deepspeed, a
shell script), what it starts; further every process that is given a rank of its own, by RANK or by
joining a process group in a process of multiprocessing. What a watched program starts otherwise is
not: workers that read data, helpers, other programs.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from scaledot.printable import complain
from scaledot.watch.alarms import GRADES, overridden
from scaledot.watch.ranks import MODES

OPTIONS = "SCALEDOT_RUN"  # the environment variable that carries the options to every process
INJECT = Path(__file__).parent / "inject"
SUFFIX = ".vitals"


class Launch(NamedTuple):
    command: list[str]
    environment: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "scaledot run [--every N] [--store FILE] [--replace] [--fail-on GRADE] [--alarms FILE]\n"
        "                    [--alarm NAME=NUMBER] [--ranks merge|apart] "
        "[--remedy SPEC [--dry-run]]\n"
        "                    SCRIPT [arguments...]\n"
        "       scaledot run [...] -m MODULE [arguments...]\n"
        "       scaledot run [...] torchrun --nproc-per-node 2 SCRIPT [arguments...]"
    )
    parser.add_argument(
        "--every",
        type=_steps,
        metavar="N",
        help="measure every N-th step, whatever it costs (default: within 1 %% of the step time)",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="FILE",
        help="where the vitals go (default: a new file here, named after the script and the time). "
        "A file that another run writes now is left to it: this one gets a file of its own next to "
        "it. A file whose run has ended is continued: every start counts its steps from 0, and "
        "steps that come again take the place of the old ones. A training that resumes from a "
        "checkpoint is better given a file of its own, or TrainerCallback or LightningCallback, "
        "which know its step",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="compute the model's attention with scaledot's, vitals from the same pass",
    )
    parser.add_argument(
        "--fail-on",
        choices=GRADES,
        metavar="GRADE",
        help=f"end the run with exit code 3 at an alarm of this grade: {', '.join(GRADES)}",
    )
    parser.add_argument(
        "--alarms", type=Path, metavar="FILE", help="append every alarm to FILE, as JSON lines"
    )
    parser.add_argument(
        "--alarm",
        action="append",
        metavar="NAME=NUMBER",
        help="another threshold for an alarm (growth=200), or none of that kind (growth=off)",
    )
    parser.add_argument(
        "--ranks",
        choices=MODES,
        default="merge",
        help="of a job of several processes: the readings of all ranks in one file (merge, the "
        "default), or a file for each (apart)",
    )
    parser.add_argument(
        "--remedy", metavar="SPEC", help="apply a remedy after each step, such as qk-clip:100"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="with --remedy: only say what it would change"
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="a Python file or a command that starts one; what follows it is passed on untouched",
    )


def run(args: argparse.Namespace) -> int:
    try:
        launch = launch_of(args, os.environ)
    except ValueError as error:
        complain("scaledot run", error)
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "nt":
        os.execve(launch.command[0], launch.command, launch.environment)
    # Windows has no exec that the shell would wait for.
    return subprocess.call(launch.command, env=launch.environment)


def launch_of(args: argparse.Namespace, environment: Mapping[str, str]) -> Launch:
    """The command and the environment that run the script under the watch."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ValueError("which script? type: scaledot run SCRIPT [arguments...]")
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError("Python was started with -I, -E or -S; start it without these")
    store = args.store or Path(_default_name(command[0]))
    _refuse_unwritable(store)
    _refuse_foreign(store)
    if args.alarms is not None:
        _refuse_unwritable(args.alarms, "--alarms")
    overridden(args.alarm or ())
    _check_remedy(args.remedy, args.dry_run)
    options = {
        "store": str(store.absolute()),
        "claim": args.store is None,
        "every": args.every,
        "replace": args.replace,
        "ranks": args.ranks,
        "alarm": args.alarm or [],
        "alarms": None if args.alarms is None else str(args.alarms.absolute()),
        "fail_on": args.fail_on,
        "remedy": args.remedy,
        "dry_run": args.dry_run,
        "main": os.getpid(),
        "started": time.time(),
    }
    paths = [str(INJECT), environment.get("PYTHONPATH", "")]
    changed = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        OPTIONS: json.dumps(options),
    }
    return Launch(_command(command, args.module), {**environment, **changed})


def _command(command: list[str], module: bool) -> list[str]:
    name = command[0]
    if module:
        return [*_python(), "-m", *command]
    if name == "-" or (os.path.exists(name) and _is_for_python(name)):
        return [*_python(), *command]
    # torchrun lies beside the interpreter, also where that environment was not activated.
    program = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
    if program is None and os.path.exists(name):
        raise ValueError(
            f"{name} is a script of another program and is not executable; type: chmod +x {name}"
        )
    if program is None or name.endswith(".py"):
        raise ValueError(f"there is no file {name}; type: scaledot run SCRIPT [arguments...]")
    _refuse_deaf(program, command[1:])
    return [program, *command[1:]]


def _is_for_python(path: str) -> bool:
    """Whether a path that exists is a Python program, and not an interpreter or another script."""
    if path.endswith((".py", ".pyw", ".pyz", ".pyc")) or not os.path.isfile(path):
        return True  # a folder or a pipe may hold one
    with open(path, "rb") as file:
        start = file.readline(256)
    if start.startswith(b"#!"):
        return b"python" in start
    return not (os.access(path, os.X_OK) and b"\0" in start)


DEAF = {
    "-I": "-I hides the environment from it",
    "-E": "-E hides the environment from it",
    "-S": "-S leaves out sitecustomize",
}
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


# Programs that become, or wait for, the one that their arguments name.
AROUND = (
    "chrt",
    "env",
    "ionice",
    "nice",
    "nohup",
    "numactl",
    "setsid",
    "stdbuf",
    "taskset",
    "time",
)
AROUND += ("timeout", "xvfb-run")
PYTHON = re.compile(r"(python|pypy)[0-9.]*(\.exe)?")


def _refuse_deaf(program: str, arguments: list[str]) -> None:
    """A Python that would not load the watch would run without it and say nothing."""
    words = [program, *arguments] if os.path.basename(program) in AROUND else [program]
    places = (i for i, word in enumerate(words) if PYTHON.fullmatch(os.path.basename(word)))
    if (place := next(places, None)) is None:
        return
    waiting = iter(arguments[place:])
    for argument in waiting:
        if argument in WITH_VALUE:
            next(waiting, None)
        elif not argument.startswith("-") or argument in ("-", "-c", "-m", "--"):
            return
        elif not argument.startswith(("--", *WITH_VALUE)):
            for flag in argument[1:]:
                if flag in "cm":
                    return
                if reason := DEAF.get(f"-{flag}"):
                    raise ValueError(f"{argument}: this Python would not be watched, for {reason}")


def _python() -> list[str]:
    """This interpreter, with the flags it was itself started with."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # -u is not among sys.flags; it shows in the streams. torchrun starts its workers with it.
    if getattr(sys.stdout, "write_through", False):
        flags.append("-u")
    return [sys.executable, *flags]


def _default_name(script: str) -> str:
    stem = Path(script).stem if script != "-" else "stdin"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}{SUFFIX}"


def _check_remedy(spec: str | None, dry_run: bool) -> None:
    if spec is not None:
        from scaledot.watch import remedies

        remedies.parse(spec)
    elif dry_run:
        raise ValueError("--dry-run of what? type: scaledot run --remedy qk-clip:100 --dry-run ...")


def _refuse_foreign(store: Path) -> None:
    """Better now than after the script has loaded its data for an hour."""
    if not store.exists() or (store.is_file() and not store.stat().st_size):
        return
    from scaledot.watch.store import RunReader, StoreError  # only where needed

    try:
        RunReader(store).latest()  # what a continuation looks at
    except StoreError as error:
        raise ValueError(str(error)) from None


def _refuse_unwritable(file: Path, option: str = "--store") -> None:
    file = file.absolute()
    # What is in a folder that may not be entered does not exist for os.path; Path would raise.
    place = next(path for path in (file, *file.parents) if os.path.exists(path))
    in_folder = os.path.isdir(place)
    if place != file and not in_folder:
        raise ValueError(f"cannot write {file}: {place} is no folder; give another {option} FILE")
    effective = os.access in os.supports_effective_ids
    rights = os.W_OK | (os.X_OK if in_folder else 0)
    if not os.access(place, rights, effective_ids=effective):
        raise ValueError(f"cannot write {file}: no right to write {place}; give {option} FILE")
    if option == "--alarms" and in_folder and place != file.parent:
        missing = "it is a folder" if place == file else f"there is no folder {file.parent}"
        raise ValueError(f"cannot write {file}: {missing}; give another {option} FILE")


def _steps(text: str) -> int:
    steps = int(text) if text.isdecimal() else 0
    if steps < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps; use 1, 2, 3, ...")
    return steps
