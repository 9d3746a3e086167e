"""The table of backends, fastest first, and who serves a problem.

A backend is a module with a `name`, `refuses(problem) -> reason | None`, `how(problem) -> words`,
and `attend(problem) -> Result`; those that measure have an `engine` (operators.Engine) too. One
that is asked for by name never falls back silently.
"""

from types import ModuleType

from scaledot.backends import cpu, torch_sdpa
from scaledot.backends.cuda import hopper, portable
from scaledot.backends.operators import Engine
from scaledot.errors import ArgumentError
from scaledot.problem import Problem

TABLE: tuple[ModuleType, ...] = (torch_sdpa, hopper, cpu, portable)


def choose(problem: Problem, asked: str | None = None) -> ModuleType:
    """The first backend that serves the problem, or the one asked for, or an error with reasons."""
    if asked is None:
        for backend in TABLE:
            if backend.refuses(problem) is None:
                return backend
        reasons = "; ".join(f"{b.name}: {b.refuses(problem)}" for b in TABLE)
        raise ArgumentError(f"no backend serves this call: {reasons}")
    for backend in TABLE:
        if backend.name == asked:
            reason = backend.refuses(problem)
            if reason is not None:
                raise ArgumentError(f"backend={asked!r} cannot serve this call: {reason}")
            return backend
    names = ", ".join(repr(backend.name) for backend in TABLE)
    raise ArgumentError(f"backend={asked!r} does not exist; use one of {names}")


def engine_for(problem: Problem, asked: str | None = None) -> Engine:
    """The kernels themselves of the first backend that has any and serves the problem."""
    for backend in TABLE:
        meant = asked in (None, backend.name) and hasattr(backend, "engine")
        if meant and backend.refuses(problem) is None:
            return backend.engine
    served = choose(problem, asked)  # says why, if no backend serves it at all
    raise ArgumentError(f"backend={served.name!r} has no kernels that can serve a part of the keys")


def explain(problem: Problem) -> dict[str, str | None]:
    """For each backend: None if it can serve the problem, else why not."""
    return {backend.name: backend.refuses(problem) for backend in TABLE}
