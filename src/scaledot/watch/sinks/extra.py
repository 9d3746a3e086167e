"""Libraries that a sink needs and scaledot does not: imported when the sink is made."""

import importlib
from typing import Any


def required(module: str, extra: str, what: str) -> Any:
    """The module, or an error that says what to type: `what` needs it, `extra` brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{what} needs {module.partition('.')[0]} ({error}); "
            f"type: pip install 'scaledot[{extra}]'"
        ) from error
