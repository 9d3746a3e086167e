"""Every test draws the same numbers, alone or in company; SCALEDOT_TEST_DEVICE=cuda: on a GPU."""

import functools
import os
import pathlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

import scaledot
from conformance import agreement

HERE = pathlib.Path(__file__).parent
DEVICE = os.environ.get("SCALEDOT_TEST_DEVICE", "cpu")
FUNCTIONS = (
    "attention",
    "attention_with_vitals",
    "vitals",
    "attention_varlen",
    "attention_varlen_with_vitals",
    "vitals_varlen",
    "additive_attention",
    "additive_attention_with_vitals",
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


def pytest_collection_modifyitems(items):
    """Let torch's compiler be imported: under newer Pythons it warns of torch.jit as it is."""
    old = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("compile"):
            item.add_marker(old)


def _moved(tensor, device):
    """Return the tensor on the device, laid out in its memory as it is here."""
    if tensor.requires_grad or tensor.is_neg() or tensor.is_nested or torch.is_inference(tensor):
        return tensor.to(device)
    storage = tensor.untyped_storage().to(device=device)
    there = torch.empty(0, dtype=tensor.dtype, device=device)
    return there.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_nowhere(leaf):
    """Whether a tensor has no memory of its own that could be moved: of vmap, fake, or meta."""
    if not isinstance(leaf, torch.Tensor):
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(leaf)
    return wrapped or leaf.is_meta or isinstance(leaf, FakeTensor)


def _on_the_device(function):
    """Move a call's tensors to the device, and what it returns back: tests stay as they are.

    A CPU's autocast holds there too. A call that is compiled or has no numbers stays where it is.
    """

    @functools.wraps(function)
    def call(*args, **keywords):
        def there(leaf):
            return _moved(leaf, DEVICE) if isinstance(leaf, torch.Tensor) else leaf

        def here(leaf):
            return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf

        if torch.compiler.is_compiling() or any(
            map(_is_nowhere, _pytree.tree_leaves((args, keywords)))
        ):
            return function(*args, **keywords)
        args, keywords = _pytree.tree_map(there, (args, keywords))
        autocast = torch.autocast(
            torch.device(DEVICE).type,
            dtype=torch.get_autocast_dtype("cpu"),
            enabled=torch.is_autocast_enabled("cpu"),
        )
        with autocast:
            return _pytree.tree_map(here, function(*args, **keywords))

    return call


if DEVICE != "cpu":  # before a test module takes a function under a name of its own
    agreement.LOGIT_ULPS = 64  # tensor cores keep fewer guard bits than a float32 adder
    for name in FUNCTIONS:
        setattr(scaledot, name, _on_the_device(getattr(scaledot, name)))
