"""What is checked: a model and the inputs of one forward pass, from a folder or a function."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from scaledot.printable import typed

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

Say = Callable[[str], None]  # takes the line that tells what is being waited for


class CannotRead(Exception):
    """Nothing could be measured; the message says why and what to type next."""


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    inputs: dict[str, Any]
    positional: tuple[Any, ...]  # inputs that have no name
    about: str  # where the inputs come from, for the reader
    made_up: tuple[str, ...] = field(default=())  # weights that the file does not hold


def subject_of(name: str, text: str | None, say: Say) -> Subject:
    """name: a folder or `module:function`; text: a file, for folders only."""
    if os.path.isdir(name):
        from scaledot.watch.check.folder import open_folder

        return open_folder(Path(name), text, say)
    if os.path.exists(name):
        folder = typed(Path(name).parent)
        raise CannotRead(f"{name} is a file; give the folder it lies in: scaledot check {folder}")
    if FUNCTION.fullmatch(name):
        from scaledot.watch.check.function import call_function

        if text is not None:
            raise CannotRead(
                f"--text goes with a model folder; {name} brings its own inputs: leave --text out"
            )
        return call_function(name, say)
    raise CannotRead(_no_such(name))


def _no_such(name: str) -> str:
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        folder = typed(name.rpartition("/")[2])
        return (
            f"there is no folder {name} here, and check opens no network; if it is a model of the "
            f"Hugging Face hub, download it first: hf download {name} --local-dir {folder}\n"
            f"then type: scaledot check {folder}"
        )
    return (
        f"there is no folder {name}; type: scaledot check FOLDER (config.json, model.safetensors "
        f"and a tokenizer), or scaledot check MODULE:FUNCTION (returns a model and its inputs)"
    )
