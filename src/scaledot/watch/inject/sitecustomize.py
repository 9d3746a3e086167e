"""Python loads this at the start of every process below `scaledot run`; see scaledot/watch/run.py.

Only what Python itself has loaded already, until the script has imported torch: what a script sets
before that (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES, a seed of hashes) must still count, and a module
of the script's folder may bear the name of one of the standard library's. A process that never
imports torch (a launcher, a worker that reads data) carries nothing but this file. It may be an
older Python than scaledot asks for, so the syntax is plain.
"""

import atexit
import os
import sys

importing = sys.modules["_frozen_importlib"]

OPTIONS = "SCALEDOT_RUN"
WATCHED = "SCALEDOT_RUN_WATCHED"  # set for the processes that a watched one starts
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "torch.distributed.")
LAUNCHERS += ("accelerate.commands.", "deepspeed.launcher.")
FOLDER = os.path.dirname(os.path.abspath(__file__))


class AfterTorch:
    """Calls `begin` when the import of torch has ended, before its importer goes on.

    It stands behind the search for modules, not among sys.meta_path, which scripts may look at.
    """

    def __init__(self, begin, broken):
        self.begin = begin
        self.broken = broken
        self.find_spec = importing._find_spec
        setattr(importing, "_find_spec", self.find)  # noqa: B010 - no type knows it

    def find(self, name, path, target=None):
        spec = self.find_spec(name, path, target)
        if name == "torch" and spec is not None and spec.loader is not None:
            setattr(importing, "_find_spec", self.find_spec)  # noqa: B010
            self.follow(spec.loader)
        return spec

    def follow(self, loader):
        execute = loader.exec_module

        def exec_module(module):
            try:
                execute(module)
            except BaseException as error:  # Ctrl-C, or a torch that cannot be loaded
                self.broken()
                here = error.__traceback__
                error.__traceback__ = here and here.tb_next  # without this frame
                raise
            self.begin()

        loader.exec_module = exec_module


class Start:
    def __init__(self, text):
        self.text = text
        self.session = None
        self.failed = False

    def begin(self):
        try:
            with Own():
                import json

                options = json.loads(self.text)
                options["only_rank"] = is_spawned()
                from scaledot.watch import inside

                self.session = inside.begin(options)
        except Exception as error:  # whatever it is, the script runs as if we were not here
            self.failed = True
            say(f"not watching: {type(error).__name__}: {error} (in {sys.executable})")
        if not is_launcher():
            os.environ[WATCHED] = f"{os.getpid()} {rank()}"

    def broken(self):
        self.failed = True

    def end(self):
        """Runs after the session's own end: what was registered first comes last."""
        if os.getpid() != int(number(self.text, "main")) or self.failed:
            return
        if self.session is None:
            nothing = "no attention found: torch was not imported"
        else:
            nothing = self.session.nothing
        # A launcher finds none itself, but the processes that it started may have.
        if nothing and not written_since(number(self.text, "started"), path(self.text, "store")):
            say(nothing)


# At the exit nothing may be imported that runs code of its own: json brings modules that do, and
# Python would forget that Ctrl-C has ended the script.
def number(text, name):
    return float(text.partition(f'"{name}": ')[2].partition(",")[0].rstrip("}"))


def path(text, name):
    import _json

    start = f'"{name}": "'
    return _json.scanstring(text, text.index(start) + len(start), True)[0]


class Own:
    """While it lasts, imports find the standard library and not what bears its names.

    A `random.py` beside the script is found before Python's own random. Afterwards everything is
    as it was: the script's modules, and Python's own only where the script would find them, too.
    """

    def __enter__(self):
        self.path = list(sys.path)
        self.before = dict(sys.modules)
        self.folders = [entry for entry in sys.path[:1] if is_of_script(entry)]
        sys.path[:] = sys.path[len(self.folders) :] + self.folders
        self.shadows = {
            name: module for name, module in self.before.items() if self.is_shadowed(name, module)
        }
        for name in self.shadows:
            del sys.modules[name]
        return self

    def __exit__(self, *exception):
        sys.path[:] = self.path
        for name in list(sys.modules):
            top = name.partition(".")[0]
            if name not in self.before and top in STANDARD and self.has(top):
                del sys.modules[name]  # ours keep it; the script finds its own
        sys.modules.update(self.shadows)

    def is_shadowed(self, name, module):
        origin = getattr(module, "__file__", None) or ""
        inside = any(
            origin.startswith(os.path.abspath(one or ".") + os.sep) for one in self.folders
        )
        return inside and name.partition(".")[0] in STANDARD

    def has(self, top):
        for folder in self.folders:
            place = os.path.join(folder, top)
            if os.path.exists(place + ".py") or os.path.isdir(place):
                return True
        return False


STANDARD = getattr(sys, "stdlib_module_names", frozenset())


def is_of_script(entry):
    """Whether this entry of sys.path is where the script lies, and not the standard library."""
    library = os.path.dirname(os.path.abspath(os.__file__))
    return not os.path.abspath(entry or ".").startswith(library) and not entry.endswith(".zip")


def is_watched():
    """Whether this process is one of the run's: its program, or a rank of it.

    A launcher passes the watch on to what it starts. What a watched program starts (workers that
    read data, helpers, other programs) is not watched, unless it is given a rank of its own.
    """
    above, _, rank_above = os.environ.get(WATCHED, "").partition(" ")
    return above in ("", str(os.getpid())) or rank() not in ("", rank_above) or is_spawned()


def rank():
    return next((os.environ[name] for name in RANKS if os.environ.get(name, "").isdigit()), "")


def is_spawned():
    """Whether a watched process started it by multiprocessing: a rank, or a worker."""
    arguments = getattr(sys, "orig_argv", sys.argv)
    return bool(os.environ.get(WATCHED)) and "--multiprocessing-fork" in arguments


def is_launcher():
    arguments = getattr(sys, "orig_argv", sys.argv)[1:]
    for place, argument in enumerate(arguments):
        if argument == "-m":
            return (arguments[place + 1 : place + 2] or [""])[0].startswith(LAUNCHERS)
        if not argument.startswith("-"):
            return os.path.basename(argument) in LAUNCHERS
    return False


def written_since(started, store):
    """Whether the run has written a file: its own name, or that with a rank or number in it."""
    folder, name = os.path.split(store)
    stem, suffix = os.path.splitext(name)
    try:
        found = os.listdir(folder)
    except OSError:
        return False
    alike = [one for one in found if one.startswith(stem) and one.endswith(suffix)]
    return any(os.path.getmtime(os.path.join(folder, one)) >= started for one in alike)


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
        importing._gcd_import("sitecustomize")  # importlib.import_module, loaded already
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


if OPTIONS in os.environ and is_watched():
    start = Start(os.environ[OPTIONS])
    atexit.register(start.end)
    if "torch" in sys.modules:  # by a .pth file of somebody's
        start.begin()
    else:
        AfterTorch(start.begin, start.broken)
if __name__ == "sitecustomize":
    step_aside()
