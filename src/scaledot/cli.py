"""The command line: one verb a job. A verb's module is imported when it is typed, not before.

Such a module has `add_arguments(parser)` and `run(args) -> int`.
"""

import argparse
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import scaledot
from scaledot.printable import complain, one_line

VERBS = {
    "demo": ("scaledot.lab.demo", "why attention divides by sqrt(d_k), in measured numbers"),
    "explain": ("scaledot.lab.explain", "one question of attention at a time, in the terminal"),
    "lab": ("scaledot.lab.server", "the lab in a browser, computed on this machine alone"),
    "run": ("scaledot.watch.run", "a training script under the watch, without editing it"),
    "report": ("scaledot.watch.report", "what happened in a run: verdict, story, remedy"),
    "top": ("scaledot.watch.top", "a run's heads in the terminal, live or after it has ended"),
    "check": ("scaledot.watch.check", "how healthy each head of a saved model is"),
    "bench": ("scaledot.bench", "time and memory against torch, after a correctness gate"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status: 0 done, 1 failed, 2 the call was wrong."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb.startswith("-"):
        parser.parse_args(arguments)  # --help and --version end here
    if verb not in VERBS:
        parser.error(f"there is no verb {verb!r}{_nearest(verb, VERBS)}")
    return _run(verb, rest)


def _run(verb: str, arguments: Sequence[str]) -> int:
    module_name, summary = VERBS[verb]
    module = importlib.import_module(module_name)
    parser = Parser(prog=f"scaledot {verb}", description=f"{_sentence(summary)}.")
    module.add_arguments(parser)
    args = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without √ gets ?, not a traceback
    try:
        status = module.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        complain(f"scaledot {verb}", "stopped")
        return 130  # what a shell reports for a command ended by Ctrl-C
    except BrokenPipeError:  # the reader has gone, as in `scaledot demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell reports then; 1 would be a verdict of `check`
    return status


class Parser(argparse.ArgumentParser):
    """A parser whose errors say what to type next."""

    def __init__(self, prog: str, **options) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        known = [name for action in self._actions for name in action.option_strings]
        unknown = re.search(r"unrecognized arguments: (-[^\s=]+)", message)
        hint = _nearest(unknown[1], known) if unknown else ""
        self.exit(2, f"{self.prog}: {one_line(message + hint)}\ntype: {self.prog} --help\n")


def _parser() -> Parser:
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in VERBS.items()]
    parser = Parser(
        "scaledot",
        usage="scaledot VERB [options]",
        description="Scaled dot-product attention that reports its own vital signs.",
        epilog="\n".join(
            ["verbs:", *lines, "", "`scaledot VERB --help` lists the options of a verb."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"scaledot {scaledot.__version__}")
    return parser


def _nearest(typed: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(typed, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
