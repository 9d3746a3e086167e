"""Whether a run that has written no end is still running: one rule for `top` and `report`."""

import statistics
from collections.abc import Iterable

from scaledot.watch import crash
from scaledot.watch.store import Segment

SILENT_AFTER = 10.0  # seconds without a commit, or five times the usual, if that is more
GAPS = 8  # readings of a layer that say what is usual


def silent(segment: Segment, last: float, gaps: Iterable[Iterable[float]], now: float) -> bool:
    """last: when the last reading was taken; gaps: of each layer, seconds between its last ones."""
    ends = crash.from_note(segment.attributes.more.get(crash.NOTE))
    if any(one.kind != "loss" and last <= one.time for one in ends):
        return True  # nothing came after it
    return now - max(segment.seen, last) > _patience(gaps)


def _patience(gaps: Iterable[Iterable[float]]) -> float:
    usual = [statistics.median(one) for gap in gaps if (one := list(gap))]
    return max(SILENT_AFTER, 5 * min(usual)) if usual else 6 * SILENT_AFTER
