"""torch's `context_parallel`, with scaledot's attention in it: training code stays as it is.

    from scaledot.distributed import context_parallel

    with context_parallel(mesh, buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
        loss = model(tokens, labels)
        loss.backward()

Inside, the buffers hold the rank's shard (zigzag: balanced for causal models), and
torch.nn.functional.scaled_dot_product_attention attends over the whole sequence.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scaledot.distributed.attention import attention
from scaledot.distributed.sharding import shard, unshard
from scaledot.errors import ArgumentError

LAYOUT = "zigzag"


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    method: str = "ring",
) -> Iterator[None]:
    """buffers: what has a sequence dimension (tokens, labels, positions), cut in place along
    buffer_seq_dims and put back at the end, but for no_restore_buffers.

    Sequences of any length; torch's own wants a multiple of twice the ranks.
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if len(buffers) != len(dims):
        raise ArgumentError(
            f"{len(buffers)} buffers but {len(dims)} buffer_seq_dims; each buffer needs one"
        )
    kept = {id(buffer) for buffer in no_restore_buffers or ()}
    if not kept <= {id(buffer) for buffer in buffers}:
        raise ArgumentError("no_restore_buffers must be some of the buffers")
    originals = [None if id(buffer) in kept else buffer.clone() for buffer in buffers]
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            _become(buffer, shard(buffer, mesh, dim, LAYOUT).clone())
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _over(mesh, method)  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original  # type: ignore[assignment]
        with torch.no_grad():
            for buffer, whole in zip(buffers, originals, strict=True):
                if whole is not None:
                    _become(buffer, whole)


def context_parallel_unshard(
    mesh: Any, buffers: Sequence[Tensor], seq_dims: Sequence[int]
) -> list[Tensor]:
    """The whole of each buffer, from the shards that `context_parallel` made."""
    return [
        unshard(buffer, mesh, dim, LAYOUT) for buffer, dim in zip(buffers, seq_dims, strict=True)
    ]


def _become(buffer: Tensor, content: Tensor) -> None:
    buffer.resize_(content.shape)
    buffer.copy_(content)


def _over(mesh: Any, method: str) -> Any:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ArgumentError(
                "context_parallel takes no attn_mask: its rows and keys are those of one rank; "
                "use is_causal=True, or scaledot.distributed.attention(..., window=...)"
            )
        if dropout_p > 0.0:
            raise ArgumentError("context_parallel has no attention dropout; set it to 0")
        return attention(
            query,
            key,
            value,
            mesh,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            layout=LAYOUT,
            method=method,
        )

    return scaled_dot_product_attention
