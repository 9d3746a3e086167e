"""`module:function`: any model, as a function of the user's makes it."""

import contextlib
import importlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from scaledot.watch.check.subject import CannotRead, Say, Subject

EXAMPLE = "def build(): return model, inputs"


def call_function(name: str, say: Say) -> Subject:
    """Imports the module as `python -m` would, from the current folder too, and calls."""
    module_name, _, path = name.partition(":")
    say(f"calling {name}")
    function = _find(module_name, path)
    try:
        made = function()
    except SystemExit as error:
        raise CannotRead(
            f"{name} ended the program with {error.code!r} and returned nothing; it must return a "
            f"model and the inputs of one forward pass: {EXAMPLE}"
        ) from None
    except Exception as error:
        raise CannotRead(f"{name} failed: {_words(error)}{_where(error)}") from error
    return _subject(name, made)


def _find(module_name: str, path: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with _arguments_of(module_name):
            found = importlib.import_module(module_name)
    except SystemExit as error:
        raise CannotRead(
            f"importing {module_name} ran it as a script, which ended with {error.code!r}; put "
            f"what it does as a script under: if __name__ == '__main__':"
        ) from None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise CannotRead(f"importing {module_name} failed: {error}") from error
        raise CannotRead(
            f"there is no module {module_name} here or among the installed packages; type "
            f"MODULE:FUNCTION with a module that `python -m {module_name}` would find"
        ) from None
    except Exception as error:
        raise CannotRead(
            f"importing {module_name} failed: {_words(error)}{_where(error)}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise CannotRead(
                f"{module_name} has no {path}; write one that returns a model and the inputs of "
                f"one forward pass: {EXAMPLE}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise CannotRead(f"{module_name}:{path} is no function; write one: {EXAMPLE}")
    return found


@contextlib.contextmanager
def _arguments_of(module_name: str) -> Iterator[None]:
    """None: those of the command line are ours, and a module may look at them."""
    kept = sys.argv
    sys.argv = [module_name]
    try:
        yield
    finally:
        sys.argv = kept


def _subject(name: str, made: Any) -> Subject:
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise CannotRead(
            f"{name} returned {_kind(made)}; it must return two things, a model (nn.Module) and "
            f"the inputs of one forward pass (a tensor, a tuple or a dict): {EXAMPLE}"
        )
    model, inputs = made
    about = f"inputs from {name}"
    if isinstance(inputs, Mapping):
        return Subject(model, dict(inputs), (), about)
    if isinstance(inputs, Tensor) or not isinstance(inputs, tuple | list):
        inputs = (inputs,)
    return Subject(model, {}, tuple(inputs), about)


def _kind(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return f"a {type(made).__name__}"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _where(error: BaseException) -> str:
    """The user's own lines of the traceback: whoever wrote the function wants to see them."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame[0]]
    return "".join(["\n", *traceback.format_list(own)]).rstrip()
