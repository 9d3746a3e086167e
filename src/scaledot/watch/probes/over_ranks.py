"""scaledot's attention over ranks: context parallel."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot.measure import Vitals
from scaledot.watch.probes import hub
from scaledot.watch.probes.patch import Swap, stands_for
from scaledot.watch.probes.seen import Seen, why_not

MODULE = "scaledot.distributed"
KIND = "scaledot.distributed.attention"


def probes() -> tuple[Any, ...]:
    from scaledot import distributed

    return (
        Swap(
            (distributed.attention, _beside(distributed.attention, distributed.vitals)),
            (
                distributed.attention_with_vitals,
                _measured(distributed.attention_with_vitals, distributed.merge_vitals),
            ),
            everywhere=False,
        ),
    )


def _beside(attend: Callable[..., Tensor], measure: Callable[..., Vitals]) -> Callable[..., Tensor]:
    signature, known = inspect.signature(attend), inspect.signature(measure).parameters

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or not hub.wants():
            return attend(*args, **kwargs)
        with hub.quiet():
            out = attend(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        given = {name: value for name, value in given.items() if name in known}
        # Of this rank's rows: the ranks' readings are merged by the watch. The keys travel once
        # more for it, so all ranks must measure in the same steps.
        _offer(given["query"], lambda: measure(**given, merge=False), over_ranks=True)
        return out

    return stands_for(attend, attention)


def _measured(attend: Callable[..., Any], merge_vitals: Callable[..., Vitals]) -> Any:
    signature = inspect.signature(attend)

    def attention_with_vitals(*args: Any, **kwargs: Any) -> tuple[Tensor, Vitals]:
        if torch.compiler.is_compiling() or not hub.wants():
            return attend(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        merge = given.arguments["merge"]
        given.arguments["merge"] = False
        with hub.quiet():
            out, vitals = attend(*given.args, **given.kwargs)
        _offer(given.arguments["query"], lambda: vitals, over_ranks=False)
        return out, merge_vitals(vitals, given.arguments["mesh"]) if merge else vitals

    return stands_for(attend, attention_with_vitals)


def _offer(query: Tensor, measure: Callable[[], Vitals], over_ranks: bool) -> None:
    if reason := why_not(query):
        hub.cannot_see(KIND, reason)
    else:
        hub.offer(Seen(query, measure, KIND, over_ranks=over_ranks))
