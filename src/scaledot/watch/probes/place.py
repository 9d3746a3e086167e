"""Which module is running, read from the stack: no hook is installed, so none can be in the way.

A forward hook on nn.TransformerEncoderLayer, for one, turns off its fast path and so changes the
numbers. The stack costs nothing while nobody looks.
"""

import sys
from types import FrameType
from typing import NamedTuple

from torch import nn

from scaledot.watch.probes import frames

# Every module's __call__ passes through here; its frame holds the module as `self` and keeps alive
# nothing that its caller does not hold.
CALL = nn.Module._wrapped_call_impl.__code__


# Code and offset of each frame. The code itself, not its address: a notebook's cell that runs again
# is equal to what it was, and an address is given to other code in time.
Site = tuple[object, ...]


class Near(NamedTuple):
    """The innermost module around a call, and the lines between the two by their addresses.

    Good to recognise a call while the code lives: to hash an address takes a tenth of the time that
    a code object takes. The lines of a call outside of any module are not looked at.
    """

    module: nn.Module | None
    lines: tuple[int, ...]  # address of the code and offset of each frame


class Place(NamedTuple):
    modules: tuple[nn.Module, ...]  # that are running, the innermost first
    site: Site  # the lines between the innermost module and the call
    inside_function: bool  # of an autograd.Function's forward, as in reentrant checkpointing
    caller: str  # the function that called, for attention outside of any module


def near(ours: int) -> Near:
    """Find the module and the lines next to a call, and nothing of what lies around them.

    ours: how many frames, the caller's included, are the watch's own at every call.
    """
    lines: list[int] = []
    frame: FrameType | None = sys._getframe(ours + 1)
    while frame is not None:
        code = frame.f_code
        if code is CALL:
            return Near(frame.f_locals["self"], tuple(lines))
        if not frames.is_caller(code):
            lines += (id(code), frame.f_lasti)
        frame = frame.f_back
    return Near(None, ())


def here() -> Place:
    """The place of whoever called the probe that calls this."""
    modules: list[nn.Module] = []
    site: list[object] = []
    inside_function = False
    caller = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is CALL:
            modules.append(frame.f_locals["self"])
        elif not frames.is_caller(code):
            # Our own lines are not the model's: a remedy comes and goes, and the layer stays.
            if not modules and not frame.f_globals.get("__name__", "").startswith(PASSING):
                site += (code, frame.f_lasti)
            if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
                inside_function = True
            if not caller and not frame.f_globals.get("__name__", "").startswith(OURS):
                caller = code.co_qualname
        frame = frame.f_back
    return Place(tuple(modules), tuple(site), inside_function, caller)


OURS = ("scaledot.", "torch.")
PASSING = ("scaledot.watch.", "scaledot.functional")  # between the model's line and the probe
