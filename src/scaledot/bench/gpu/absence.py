"""Why a contender is not there, in a few words: it cannot be imported, it fails, or it is wrong."""

from scaledot.bench import gate
from scaledot.bench.cases import Contender
from scaledot.bench.gate import Subject
from scaledot.bench.workload import Workload

LONGEST = 160  # characters of somebody else's message
# A peer is not judged by our bar for errors: only another function, layout or mask shows here.
PEER_SLACK = 8.0


def reason_of(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    words = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."


def wrong(peer: Contender, workload: Workload) -> str | None:
    """What a peer computes instead of attention, None where it is attention."""
    for check in gate.examine(Subject(peer, workload)):
        if not check.used <= PEER_SLACK:  # so that NaN is wrong too
            return f"its {check.field} is off by {check.error:.3g}, allowed is {check.bound:.3g}"
    return None
