"""Python loads this at the start of every process below `scaledot run`; see scaledot/watch/run.py.

Only the standard library, until the script itself has imported torch: what a script sets before
that (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES, a seed of hashes) must still count. A process that
never imports torch (a launcher, a worker that reads data) carries nothing but this file. It may be
an older Python than scaledot asks for, so the syntax is plain.
"""

import atexit
import glob
import importlib.abc
import importlib.util
import json
import os
import sys

OPTIONS = "SCALEDOT_RUN"
FOLDER = os.path.dirname(os.path.abspath(__file__))


class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls `begin` when the import of torch has ended, before its importer goes on."""

    def __init__(self, begin, broken):
        self.begin = begin
        self.broken = broken
        self.looking = False

    def find_spec(self, fullname, path, target=None):
        if fullname != "torch" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.looking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            try:
                execute(module)
            except BaseException:  # Ctrl-C, or a torch that cannot be loaded: Python says it all
                self.broken()
                raise
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.begin()

        spec.loader.exec_module = exec_module
        return spec


class Start:
    def __init__(self, options):
        self.options = options
        self.session = None
        self.failed = False

    def begin(self):
        try:
            from scaledot.watch import inside

            self.session = inside.begin(self.options)
        except Exception as error:  # whatever it is, the script runs as if we were not here
            self.failed = True
            say(f"not watching: {type(error).__name__}: {error} (in {sys.executable})")

    def broken(self):
        self.failed = True

    def end(self):
        """Runs after the session's own end: what was registered first comes last."""
        if os.getpid() != self.options["main"] or self.failed:
            return
        if self.session is None:
            nothing = "no attention found: torch was not imported"
        else:
            nothing = self.session.nothing
        # A launcher finds none itself, but the processes that it started may have.
        if nothing and not written_since(self.options["started"], self.options["store"]):
            say(nothing)


def written_since(started, store):
    stem, suffix = os.path.splitext(store)
    for path in glob.glob(glob.escape(stem) + "*" + glob.escape(suffix)):
        if os.path.getmtime(path) >= started:
            return True
    return False


def say(line):
    line = "".join(one if one.isprintable() else "\ufffd" for one in line)  # no escapes
    try:
        sys.stderr.write(f"scaledot: {line}\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass  # no stderr, or a closed one


def step_aside():
    """Leave sys.path as it would be, and load the sitecustomize that we stand in front of."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != FOLDER]
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


if OPTIONS in os.environ:
    start = Start(json.loads(os.environ[OPTIONS]))
    atexit.register(start.end)
    if "torch" in sys.modules:  # by a .pth file of somebody's
        start.begin()
    else:
        sys.meta_path.insert(0, AfterTorch(start.begin, start.broken))
if __name__ == "sitecustomize":
    step_aside()
