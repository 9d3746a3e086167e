"""Fill the compiler's table of functions with torch's own, where stand-ins lie under their names.

Dynamo looks functions up by name: when it is first asked, and again after torch.distributed has
made or ended a process group. A function that is missing from the table is traced through instead
of taken whole, also after the watch has gone.
"""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from scaledot.watch.probes import holders
from scaledot.watch.probes.patch import Attribute

MODULE = "torch._dynamo.trace_rules"


def probes() -> tuple[Any, ...]:
    rules = sys.modules[MODULE]
    if not hasattr(rules, "load_object"):
        return ()
    return (Attribute(rules, "load_object", _loading_originals(rules.load_object)),)


def _loading_originals(load: Callable[[str], Any]) -> Callable[[str], Any]:
    def load_object(name: str) -> Any:
        found = load(name)
        is_ours = isinstance(found, FunctionType) and found in holders.stand_ins
        return getattr(found, "__wrapped__", found) if is_ours else found

    return load_object
