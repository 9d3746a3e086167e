"""sigmaReparam: a weight is its gain times its direction, W / sigma(W) (Zhai et al. 2023).

sigma(W), the largest singular value, is followed by one power iteration a training step from exact
singular vectors. The gain starts at sigma, so nothing changes when it is put in.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from scaledot.watch.remedies.remedy import RemedyError

NAME = "weight"


class SpectralGain(nn.Module):
    """gain / sigma(W) * W of a matrix; further dimensions are folded into the second."""

    gain: Tensor
    left: Tensor
    right: Tensor

    def __init__(self, weight: Tensor, learned: bool) -> None:
        super().__init__()
        matrix = weight.detach().flatten(1)
        left, sigma, right = torch.linalg.svd(_at_least_float32(matrix), full_matrices=False)
        gain = sigma[0].to(weight.dtype)
        if learned:
            self.gain = nn.Parameter(gain)
        else:
            self.register_buffer("gain", gain)
        self.register_buffer("left", left[:, 0].to(weight.dtype))
        self.register_buffer("right", right[0].to(weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        if weight.is_meta:  # has no autocast
            return self._gained(weight)
        # In the weight's own precision: autocast would round sigma to bfloat16, 0.4 % off.
        with torch.autocast(weight.device.type, enabled=False):
            return self._gained(weight)

    def _gained(self, weight: Tensor) -> Tensor:
        matrix = weight.flatten(1)
        # A recomputation inside of a backward pass must give what its forward pass gave.
        if self.training and torch._C._current_graph_task_id() == -1:
            self._follow(matrix.detach())
        left, right = self.left.clone(), self.right.clone()  # the next step writes into them
        return weight * (self.gain / torch.dot(left, matrix @ right))

    @torch.no_grad()
    def _follow(self, matrix: Tensor) -> None:
        self.right.copy_(nn.functional.normalize(matrix.T @ self.left, dim=0))
        self.left.copy_(nn.functional.normalize(matrix @ self.right, dim=0))


def add(model: nn.Module, optimizer: Optimizer | None) -> tuple[list[str], Callable[[], None]]:
    """The paths of the Linears that have it now, and what takes it away again."""
    linears = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and not parametrize.is_parametrized(module, NAME)
    }
    if not linears:
        raise RemedyError("sigma-reparam: the model has no nn.Linear without a parametrization")
    for path, linear in linears.items():
        if hasattr(linear.weight, "placements"):
            raise RemedyError(
                f"sigma-reparam: {path}.weight is sharded; apply it before fully_shard(model)"
            )
    gains = []
    for linear in linears.values():
        # unsafe: the result is not compared with the weight, from which rounding may part it.
        spectral = SpectralGain(linear.weight, learned=optimizer is not None)
        spectral.train(linear.training)
        parametrize.register_parametrization(linear, NAME, spectral, unsafe=True)
        gains.append(spectral.gain)
    remove_group = (lambda: None) if optimizer is None else add_group(optimizer, gains)
    versions = [_original(linear)._version for linear in linears.values()]

    def undo() -> None:
        for linear, version in zip(linears.values(), versions, strict=True):
            if parametrize.is_parametrized(linear, NAME):
                # Trained since: the product becomes the weight's value. Else it is as it was.
                trained = _original(linear)._version != version
                parametrize.remove_parametrizations(linear, NAME, leave_parametrized=trained)
        remove_group()

    return list(linears), undo


def _original(linear: nn.Linear) -> Tensor:
    return linear.get_parameter(f"parametrizations.{NAME}.original")


def add_group(optimizer: Optimizer, parameters: list[Tensor]) -> Callable[[], None]:
    """A group of its own, without decay: a gain that decays closes the layer.

    Its learning rate is the first group's now; a scheduler that knows its groups leaves it there.
    Returns what removes it.
    """
    rest = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    optimizer.add_param_group({**rest, "params": parameters, "weight_decay": 0.0})
    group = optimizer.param_groups[-1]

    def remove() -> None:
        optimizer.param_groups[:] = [one for one in optimizer.param_groups if one is not group]
        for parameter in parameters:
            optimizer.state.pop(parameter, None)

    return remove


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
