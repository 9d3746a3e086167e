"""The watch's own operators, as if nobody else were there."""

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class undisturbed:
    """No gradients, no modes of the user's.

    A dispatch mode would count our operators as the model's; selective checkpointing would even
    hand their results to the model. A class and no generator: calls of attention enter it.
    """

    __slots__ = ("_functions", "_modes", "_with_grad")

    def __enter__(self) -> None:
        modes = torch._C._len_torch_dispatch_stack() > 0
        self._modes: Any = _disable_current_modes() if modes else None
        if self._modes is not None:
            self._modes.__enter__()  # first: the only one that may refuse
        self._with_grad = torch.is_grad_enabled()
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *exception: Any) -> None:
        torch._C._set_grad_enabled(self._with_grad)
        self._functions.__exit__(*exception)
        if self._modes is not None:
            self._modes.__exit__(*exception)


def any_mode() -> bool:
    """Whether anybody looks at operators."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
