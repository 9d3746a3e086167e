"""Attention without a function of its own: a softmax over products that a module makes itself.

Queries and keys cannot be read there, for nobody hands them over together, but the layer can be
named. Where gradients are recorded, the graph behind the softmax says whether its input is a
product of two computed matrices; else its shape and the module's looks have to do.

The stand-ins stay until the watch ends and then do nothing: a compiled graph asks whether the
functions it was traced with are still the same.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function

from scaledot.watch.coverage import looks_like_attention
from scaledot.watch.probes import compiled, frames, hub, place
from scaledot.watch.probes.patch import Attribute, KnownToScript, Swap, stands_for
from scaledot.watch.probes.sdpa import known_to_torch_alone

# Under which module and name each is found, and what torch.jit calls it.
FUNCTIONS = (
    (torch.softmax, ("torch", "softmax"), "aten::softmax"),
    (torch.special.softmax, ("torch.special", "softmax"), "aten::special_softmax"),
)

# Names of autograd's nodes: products of two matrices, and what may stand between them and softmax.
PRODUCTS = ("BmmBackward", "MmBackward", "BaddbmmBackward")
LEAF = "AccumulateGrad"
MOVES = ("View", "Transpose", "TBackward", "Permute", "Expand", "Reshape", "Unsqueeze", "Clone")
FURTHEST = 24  # nodes that are looked at behind one softmax


def probes() -> tuple[Any, ...]:
    stand_ins = [(one, _stand_in(one, place), known) for one, place, known in FUNCTIONS]
    # torch.nn.functional.softmax and nn.Softmax end here as well.
    method = Tensor.softmax, _stand_in(Tensor.softmax, ("torch", "Tensor.softmax"))
    return (
        Swap(method, *((function, stand_in) for function, stand_in, _ in stand_ins)),
        *(KnownToScript(*three) for three in stand_ins),
        Attribute(Tensor, "softmax", method[1]),
    )


def _stand_in(
    original: Callable[..., Any], place: tuple[str, str] | None = None
) -> Callable[..., Any]:
    is_method = original is Tensor.softmax  # torch itself tells its overrides of the stand-in

    def softmax(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced(*args, **kwargs)
        try:
            if not is_method:
                args = frames.unbound(softmax, args)
            scores = args[0] if args else kwargs.get("input")
            if has_torch_function((scores,)):
                if not (is_method or known_to_torch_alone((scores,))):
                    return handle_torch_function(softmax, (scores,), *args, **kwargs)
            elif hub.keepers:
                _note(scores)
            return frames.caller(sys._getframe(1))(original, args, kwargs)
        except BaseException as error:
            frames.hide(error)
            raise

    def traced(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Dynamo reads this line, or calls a tensor's method with a tensor that stands in.
        if compiled.tracing() or type(input) is FakeTensor:
            _note_traced(input.dim())
        return original(input, *args, **kwargs)

    return stands_for(original, softmax, place)


@compiled.constant
def _note_traced(dimensions: int) -> int:
    """Runs while the compiler traces: there is no graph yet to be followed."""
    for keeper in hub.inventory():
        module = compiled.innermost_module()
        if module is not None and _by_its_looks(dimensions, module):
            keeper.found_by_hand(module)
    return 0


def _note(scores: Any) -> None:
    """Nothing that goes wrong here may reach the model."""
    keepers = hub.inventory()
    if not keepers or type(scores) is not Tensor:
        return
    try:
        module = next((m for m in place.here().modules if not isinstance(m, nn.Softmax)), None)
        if scores.grad_fn is not None:
            found = _is_product(scores.grad_fn)
        else:
            found = module is not None and _by_its_looks(scores.dim(), module)
        for keeper in keepers if found else ():
            keeper.found_by_hand(module)
    except Exception:
        hub.log.exception("the watch could not look at a softmax")


OPERATORS = ("ScaledDotProduct", "FlashAttention", "EfficientAttention", "CudnnAttention")
MOST_NODES = 20_000  # of a graph that are looked at
PAST = "called as an operator, past torch's public function"


def note_graph(loss: Tensor, keepers: Iterable[hub.Keeper]) -> None:
    """Name torch's attention in the graph behind a loss, where no probe has met any.

    torch.ops.aten and torch._C._nn lead to the operator without passing a function that could be
    exchanged.
    """
    for keeper in keepers:
        if loss.grad_fn is not None and not keeper.knows_attention():
            try:
                if _has_attention(loss.grad_fn):
                    keeper.passed_by("scaled_dot_product_attention", PAST)
            except Exception:
                hub.log.exception("the watch could not look at a loss")


def _has_attention(node: Any) -> bool:
    waiting, seen = [node], {node}
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if any(operator in node.name() for operator in OPERATORS):
            return True
        found = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= found
        waiting += found
    return False


def _by_its_looks(dimensions: int, module: nn.Module) -> bool:
    """[batch, heads, queries, keys], or any shape within what looks like attention."""
    return dimensions >= 4 or looks_like_attention(module)


def _is_product(node: Any) -> bool:
    """Whether the nearest products behind are of two matrices neither of which is a parameter.

    A classifier's or a router's softmax stands behind a Linear, whose weight is one.
    """
    waiting = [node]
    for _ in range(FURTHEST):
        if not waiting:
            return False
        node = waiting.pop(0)
        if node.name().startswith(PRODUCTS):
            factors = [factor for factor, _ in node.next_functions[-2:]]
            if all(factor is None or not _is_parameter(factor) for factor in factors):
                return True
        elif not node.name().startswith(("Addmm", "Softmax", "Embedding", "NativeLayerNorm")):
            waiting += [before for before, _ in node.next_functions if before is not None]
    return False


def _is_parameter(node: Any) -> bool:
    while not node.name().endswith(LEAF):  # it has its namespace before it
        if not node.name().startswith(MOVES) or not node.next_functions:
            return False
        node = node.next_functions[0][0]
        if node is None:
            return False
    return True
