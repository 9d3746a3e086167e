"""The watch's own operators are nobody else's."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from scaledot.watch.undisturbed import any_mode, undisturbed


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.called.append(function)
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_modes_see_what_is_outside_only(mode):
    x = torch.ones(3)
    assert not any_mode()
    with mode() as seen:
        assert any_mode()
        with undisturbed():
            torch.add(x, x)
        assert not seen.called
        torch.add(x, x)
        assert len(seen.called) == 1
    assert not any_mode()


@pytest.mark.parametrize("with_grad", [False, True])
def test_gradients_are_as_before_afterwards_whatever_happens_inside(with_grad):
    x = torch.ones(3, requires_grad=True)

    def fail():
        with undisturbed():
            assert not (x + x).requires_grad
            raise ArithmeticError("out of luck")

    with torch.set_grad_enabled(with_grad):
        with pytest.raises(ArithmeticError):
            fail()
        assert (x + x).requires_grad == with_grad
