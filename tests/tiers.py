"""Which tests are left to the night: see CONTRIBUTING.md."""

from collections.abc import Iterable

import pytest


def leave_to_the_night(items: Iterable[pytest.Item]) -> None:
    """Mark all cases of each test but the first that runs here, in whatever order they come."""
    cases: dict[tuple[object, str], list[pytest.Item]] = {}
    for item in items:
        if not _skipped(item):
            cases.setdefault((item.path, item.originalname), []).append(item)
    for same in cases.values():
        for item in sorted(same, key=_place)[1:]:
            item.add_marker(pytest.mark.nightly)


def _skipped(item: pytest.Item) -> bool:
    return any(mark.args and mark.args[0] is True for mark in item.iter_markers("skipif"))


def _place(item: pytest.Item) -> tuple[int, ...]:
    """Where a case stands among those of its test."""
    return tuple(item.callspec.indices.values()) if hasattr(item, "callspec") else ()
