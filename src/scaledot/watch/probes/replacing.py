"""scaledot's attention in the place of a library's own, with the vitals of the same pass."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError

from scaledot.measure import Vitals
from scaledot.watch.probes import hub
from scaledot.watch.probes.seen import Seen, why_not


class _Kept:
    """The model's own attention has to serve."""


KEPT = _Kept()


def replaced(
    query: Tensor,
    attend: Callable[[], tuple[Any, Vitals]],
    kind: str,
    module: nn.Module | None = None,
    *,
    reason: str = "",
) -> Any:
    """What attend() computes, its vitals offered; KEPT where a reason stands against it.

    A recomputation inside of a backward pass is replaced as its forward pass was, and not offered.
    """
    reason = why_not(query) or reason
    if not reason:
        try:
            with hub.quiet():
                out, vitals = attend()
        except _StopRecomputationError:  # a checkpoint has all that it wanted of a recomputation
            raise
        except Exception as error:  # our refusal is no reason for the model to stop
            reason = f"{type(error).__name__}: {error}"
        else:
            if hub.wants():
                hub.offer(Seen(query, lambda: vitals, kind, module, measured=True))
            return out
    hub.keeps_own(kind, reason, module)
    return KEPT
