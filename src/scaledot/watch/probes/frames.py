"""Keep the watch's own frames out of the user's tracebacks and warnings."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

OURS = ("scaledot.watch.",)
MOST = 4096  # places of calls that are remembered
# Python leaves the frames of its import system out where a warning counts frames, and knows them by
# two words in the name of their file.
UNCOUNTED = "<scaledot.watch: no importlib._bootstrap, but not to be counted either>"

_call = (lambda function, args, kwargs: function(*args, **kwargs)).__code__
# By identity: a hash of a code object is one of all its names and constants. Code that is kept here
# lives on, so that no other takes its address.
_callers: dict[tuple[int, int], tuple[CodeType, FunctionType]] = {}
_codes: dict[int, CodeType] = {}


def caller(frame: FrameType) -> Callable[..., Any]:
    """Return a function that calls another one in the name of `frame`.

    A warning names the innermost Python frame. A stand-in in front of a function written in C
    would be named in the place of the user's line, and the filters of warnings would look at the
    stand-in's module. So the call goes through a frame with the user's file, line and globals.
    """
    place = id(frame.f_code), frame.f_lasti
    if (known := _callers.get(place)) is not None:
        function = known[1]
        if function.__globals__ is frame.f_globals:
            return function
    if len(_callers) >= MOST:
        forget()
    code = _call.replace(
        co_filename=frame.f_code.co_filename,
        co_name=frame.f_code.co_name,
        co_qualname=frame.f_code.co_qualname,
        co_firstlineno=frame.f_lineno or 1,
    )
    _codes[id(code)] = code
    function = FunctionType(code, frame.f_globals)
    _callers[place] = frame.f_code, function
    return function


def forget() -> None:
    """Let go of the users' code."""
    _callers.clear()
    _codes.clear()


def is_caller(code: CodeType) -> bool:
    """Whether the frame of this code stands for one that is there anyway."""
    return id(code) in _codes


def hide(error: BaseException) -> None:
    """Take the frames of the watch off the head of a traceback.

    For an `except` block that ends in a bare `raise`, which adds no frame of its own.
    """
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if not (is_caller(frame.f_code) or frame.f_globals.get("__name__", "").startswith(OURS)):
            break
        traceback = traceback.tb_next
    error.__traceback__ = traceback


def invisible(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a stand-in: what fails inside of it shows the user's frames and the library's.

    A warning from inside that counts frames (stacklevel) counts those alone, too.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return stand_in(*args, **kwargs)
        try:
            return stand_in(*args, **kwargs)
        except BaseException as error:
            hide(error)
            raise

    return functools.wraps(stand_in)(uncounted(called, stand_in))


def uncounted(function: FunctionType, *more: FunctionType) -> FunctionType:
    """Leave the frames of functions out where a warning counts frames; return the first."""
    for one in (function, *more):
        one.__code__ = one.__code__.replace(co_filename=UNCOUNTED)
    return function


def given(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments by name; None: the call is wrong, and the original says so of itself.

    Outside of the `except` block: an error raised inside of one shows the first error as well.
    """
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None


def unbound(stand_in: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without an object that is there by mistake.

    A function written in C that lies in a class stays a function where an object of the class is
    asked for it; its stand-in becomes a method, and gets the object as one more argument.
    """
    if not args or isinstance(args[0], torch.Tensor):
        return args
    for kind in type(args[0]).__mro__:
        for value in vars(kind).values():
            if value is stand_in:
                return args[1:]
    return args


def user_frame() -> FrameType:
    """The nearest frame on the stack that is not the watch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OURS):
        frame = frame.f_back
    return frame
