"""FlexAttention, compiled, with the one statistic that it returns: the largest score of each row.

What is compiled for one shape may be in the way of the next (recompilation, dynamic shapes), so it
only ever runs in a process of its own (duel.py).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaledot.bench.workload import Answer, Inputs


def attend(inputs: Inputs) -> Answer:
    from torch.nn.attention.flex_attention import AuxRequest

    query, key, value, _, causal, _ = inputs
    mask = _causal_blocks(query.shape[-2], str(query.device)) if causal else None
    aux = AuxRequest(max_scores=True)
    with torch.no_grad():  # else it also writes what a backward pass needs
        out, _ = _compiled()(query, key, value, block_mask=mask, return_aux=aux)
    return Answer(out, None)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _causal_blocks(length: int, device: str) -> Any:
    """Which tiles are hidden, full or cut by the diagonal: made once, before the clock."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_sees, None, None, length, length, device=device)


def _sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
