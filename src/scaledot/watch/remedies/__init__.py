"""What to do about a head that closes: `propose` shows, `apply` does, `install` keeps doing.

    remedy = remedies.parse("qk-clip:100")
    applied = remedies.apply(remedy, model, inputs=batch)   # now, once
    print(applied.describe()); applied.undo()
    remedies.install(watch, remedy)                         # after every step of a watched run

`remedy` names them. By weights: `capture` runs the model once and catches its attention calls,
`discover` finds the rows that make a head's queries and keys (`supports`) and tries them, `rows`
scales them, `sigma` reparametrises. At the call: `calls` stands in its way, `rules` are what is
done there. `applied` is for once, `live` for a run (`beside`: what it takes from the watch,
`factors`: its temperatures). Several ranks: `shards` knows what of a weight lies here, `together`
keeps a trial in step, `ranks` agrees on each layer's way (`ways`) and takes the largest logits.
"""

import importlib
from typing import TYPE_CHECKING, Any

from scaledot.watch.remedies.proposal import Proposal, propose
from scaledot.watch.remedies.remedy import REMEDIES, Remedy, RemedyError, parse

if TYPE_CHECKING:
    from scaledot.watch.remedies.applied import Applied, apply
    from scaledot.watch.remedies.live import Installed, install

__all__ = [
    "REMEDIES",
    "Applied",
    "Installed",
    "Proposal",
    "Remedy",
    "RemedyError",
    "apply",
    "install",
    "parse",
    "propose",
]

_LATER = {"Applied": "applied", "apply": "applied", "Installed": "live", "install": "live"}


def __getattr__(name: str) -> Any:
    """Load torch on first use: a report that names a remedy needs none."""
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
