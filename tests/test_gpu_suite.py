"""Which tests the call on a GPU chooses, and how it counts what was done before an end."""

import threading
import time

import gpu_suite
import pytest


def test_cases_are_spread_over_all_of_a_test():
    tests = [f"a.py::one[{n}]" for n in range(10)] + ["a.py::two", "a.py::three[x]"]
    assert gpu_suite.some_of(tests, 0, 1) == tests
    some = gpu_suite.some_of(tests, 3, 0)
    assert some == ["a.py::one[0]", "a.py::one[3]", "a.py::one[6]", "a.py::two", "a.py::three[x]"]
    assert gpu_suite.some_of(tests, 3, 2)[:3] == ["a.py::one[2]", "a.py::one[5]", "a.py::one[8]"]
    assert sorted(gpu_suite.some_of(tests, 99, 5)) == sorted(tests)


@pytest.mark.nightly
@pytest.mark.slow
def test_tests_that_were_not_reached_did_not_pass():
    names = ("test_cases_are_spread_over_all_of_a_test", "test_that_is_not_there")
    tests = [f"tests/test_gpu_suite.py::{name}" for name in names]
    deadline = time.monotonic() + 100
    result = gpu_suite._pytest(tests[:1], deadline, threading.Semaphore())
    assert (result.passed, result.failed) == (1, 0)
    result = gpu_suite._pytest(tests, deadline, threading.Semaphore())
    assert result.failed == 2  # pytest runs nothing where one is unknown
    result = gpu_suite._pytest(tests[:1], time.monotonic(), threading.Semaphore())
    assert (result.passed, result.failed) == (0, 1)
