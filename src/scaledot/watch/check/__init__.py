"""`scaledot check MODEL`: one forward pass under the watch, and how healthy each head is."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from scaledot.printable import complain, one_line
from scaledot.watch.check.subject import CannotRead, Say

SHOWN = 12  # heads in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  scaledot check ./my-model                 a folder of model.save_pretrained\n"
        "  scaledot check ./my-model --text law.txt  how it reads a text of yours\n"
        "  scaledot check train:build                build() in train.py returns (model, inputs)\n"
        "\n"
        "status: 0 every head is healthy, 1 a head is outside a band or fewer than half of the\n"
        "layers were seen, 2 nothing could be read"
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with config.json, model.safetensors and a tokenizer, or MODULE:FUNCTION, a "
        "function that returns a model and the inputs of one forward pass",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="what the model reads (default: a paragraph that is built in)",
    )
    parser.add_argument(
        "--top",
        type=_number,
        metavar="N",
        help=f"show the N worst heads (default {SHOWN}; with --json: all)",
    )
    parser.add_argument("--json", action="store_true", help="print the same as data")


def run(args: argparse.Namespace) -> int:
    try:
        with _progress() as say:
            from scaledot.watch.check.subject import subject_of

            subject = subject_of(args.model, args.text, say)
            from scaledot.watch.check.examine import examine

            examination = examine(subject)
    except CannotRead as error:
        complain("scaledot check", *str(error).split("\n"))
        return 2
    if args.json:
        from scaledot.terminal import print_json
        from scaledot.watch.check.data import as_data

        print_json(as_data(examination, args.model, args.top))
    else:
        from scaledot.terminal import Console
        from scaledot.watch.check.show import show

        show(examination, args.model, SHOWN if args.top is None else args.top, Console())
    return 0 if examination.healthy else 1


@contextlib.contextmanager
def _progress() -> Iterator[Say]:
    """A line on standard error that says what is being waited for; in a terminal it disappears."""
    if not sys.stderr.isatty():
        yield lambda line: complain("scaledot check", line)
        return
    from rich.text import Text

    from scaledot.terminal import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda line: status.update(Text(one_line(line)))  # a str would be read as markup


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of heads; use 0, 1, 2, ...")
    return int(text)
