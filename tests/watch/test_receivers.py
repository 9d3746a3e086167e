"""Who takes readings, and who is closed."""

import logging

import pytest

from scaledot.watch.receivers import close_all, delivery_to


class Closable:
    def __init__(self, fails: bool = False) -> None:
        self.closed, self.fails = 0, fails

    def write(self, readings=(), scalars=()) -> bool:
        return True

    def close(self) -> None:
        self.closed += 1
        if self.fails:
            raise OSError("no space left")


def test_all_that_can_be_closed_are_closed_though_one_fails(caplog):
    first, second = Closable(fails=True), Closable()
    with caplog.at_level(logging.ERROR, "scaledot.watch"):
        close_all([first, [], second])
    assert (first.closed, second.closed) == (1, 1)
    (record,) = caplog.records
    assert "Closable could not be closed" in record.getMessage()


def test_what_takes_no_readings_is_refused_with_what_does():
    with pytest.raises(TypeError, match="give the path of a file"):
        delivery_to(7)


def test_a_list_and_a_put_get_readings_one_by_one():
    taken: list = []
    delivery_to(taken)(("a", "b"), ())

    class Put:
        def put(self, reading) -> None:
            taken.append(reading.upper())

    delivery_to(Put())(("c",), ())
    assert taken == ["a", "b", "C"]
