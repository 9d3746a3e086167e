"""What is left to the night: all cases but the first that runs here, in any order."""

import itertools
from types import SimpleNamespace

import pytest
from tiers import leave_to_the_night


class Item:
    def __init__(self, name, *places, skipped=False):
        self.path, self.originalname, self.skipped = "file.py", name, skipped
        if places:
            self.callspec = SimpleNamespace(indices=dict(zip("ab", places, strict=False)))
        self.nightly = False

    def iter_markers(self, name):
        return [pytest.mark.skipif(self.skipped, reason="no GPU").mark]

    def add_marker(self, mark):
        assert mark.name == "nightly"
        self.nightly = True


def test_the_first_case_that_is_not_skipped_stays_in_whatever_order():
    for order in itertools.permutations(range(4)):
        cases = [Item("one", place, 0, skipped=place == 0) for place in range(4)]
        leave_to_the_night(cases[place] for place in order)
        assert [case.nightly for case in cases] == [False, False, True, True]


def test_tests_do_not_share_their_cases():
    items = [Item("one"), Item("two", 1), Item("three", 0)]
    leave_to_the_night(items)
    assert not any(item.nightly for item in items)
