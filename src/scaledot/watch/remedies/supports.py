"""Which indices of a weight a head's query or key depends on, read from gradients."""

import torch
from torch import Tensor

from scaledot.watch.remedies import shards


def supports(
    tensor: Tensor, parameters: dict[str, Tensor], heads: int, together: bool = False
) -> dict[str, list[Tensor]]:
    """Of each parameter and axis, [heads, n]: which indices a head's entries depend on.

    Where the gradient of a random sum of them is not zero; of a sharded parameter, the indices that
    lie here. Key heads are repeated to query heads;
    together: all heads at once, [1, n].
    """
    # Drawn where they are used: queries of a large model are gigabytes.
    generator = torch.Generator(tensor.device).manual_seed(0)
    weights = torch.randn(
        tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device
    )
    found: dict[str, list[list[Tensor]]] = {path: [] for path in parameters}
    for head in range(1 if together else tensor.shape[1]):
        part = slice(None) if together else slice(head, head + 1)
        slopes = torch.autograd.grad(
            tensor[:, part],
            list(parameters.values()),
            weights[:, part],
            retain_graph=True,
            allow_unused=True,
        )
        for (path, parameter), slope in zip(parameters.items(), slopes, strict=True):
            found[path].append(_where(parameter, slope))
    repeats = 1 if together else heads // tensor.shape[1]
    return {
        path: [torch.stack(axis).repeat_interleave(repeats, 0) for axis in zip(*each, strict=True)]
        for path, each in found.items()
    }


def _where(parameter: Tensor, slope: Tensor | None) -> list[Tensor]:
    """For each axis, [n]: where a gradient is not zero."""
    if slope is None:
        sizes = shards.here(parameter).shape
        return [torch.zeros(size, dtype=torch.bool, device="cpu") for size in sizes]
    there = (shards.laid_as(slope, parameter) != 0)[..., None]
    return [there.movedim(axis, 0).flatten(1).any(1).cpu() for axis in range(slope.dim())]
