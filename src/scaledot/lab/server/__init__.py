"""`scaledot lab`: the lab in a browser, served by this machine to itself alone.

The way of a request: `gate` (is it our own page that asks?) -> `app` (the routes) -> `page` (the
built files, sent by `packed`, the document with the data of `start`), `ask` (lessons over a
WebSocket, computed by `worker`, worded by `answers`) or `monitor` (a run, read by `run_feed`).
`serve` finds the port and starts it all; `export` writes one file instead.
"""

import argparse
from importlib import util
from pathlib import Path

from scaledot.lab.server.page import MissingPage, load_page
from scaledot.printable import complain, one_line

PACKAGES = ("starlette", "uvicorn", "websockets")  # what the extra [lab] brings
LANGUAGES = ("en", "hi")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, help="where to listen (default: a free port)")
    parser.add_argument("--no-browser", action="store_true", help="print the address, open nothing")
    parser.add_argument(
        "--lang", choices=LANGUAGES, default="en", help="English or Hinglish (default: en)"
    )
    parser.add_argument(
        "--run", metavar="FILE", help="show this run's heads, live or after it has ended"
    )
    parser.add_argument(
        "--export", metavar="FILE", help="write one self-contained page with canned numbers and end"
    )


def run(args: argparse.Namespace) -> int:
    try:
        page = load_page()
    except MissingPage as error:
        return _fail(error)
    if args.export and args.run:
        return _fail("--export writes the lessons alone, without a run; leave out --run")
    if args.export:
        from scaledot.lab.server.export import write

        folder = Path(args.export).absolute().parent
        if not folder.is_dir():
            return _fail(f"{args.export} cannot be written: there is no folder {folder}")
        complain("scaledot lab", "computing every lesson at every place of its controls: a minute")
        try:
            size = write(Path(args.export), page, args.lang)
        except OSError as error:
            return _fail(f"{args.export} cannot be written: {error.strerror}")
        size_words = f"{size / 1e6:.1f} MB; open it in any browser, without Python"
        print(f"{one_line(args.export)}: {size_words}")
        return 0
    missing = [name for name in PACKAGES if util.find_spec(name) is None]
    if missing:
        return _fail(f"{', '.join(missing)} not installed; type: pip install 'scaledot[lab]'")
    from scaledot.lab.server.serve import CannotServe, serve

    try:
        return serve(page, args.lang, port=args.port, run=args.run, browser=not args.no_browser)
    except CannotServe as error:
        return _fail(error)


def _fail(reason: object) -> int:
    complain("scaledot lab", reason)
    return 1


def _port(typed: str) -> int:
    if not (typed.isdecimal() and 1 <= int(typed) <= 65535):
        raise argparse.ArgumentTypeError(f"{typed!r} is no port; use a number from 1 to 65535")
    return int(typed)
