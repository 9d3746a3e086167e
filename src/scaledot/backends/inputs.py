"""What the operators of every backend take and give back, in this order."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The tensors of a call, as an operator receives them."""

    query: Tensor  # [B, H, Q, D]
    key: Tensor  # [B, G, K, D]
    value: Tensor | None  # [B, G, K, V]
    mask: Tensor | None  # [B|1, H|1, Q|1, K|1]
    head_scale: Tensor | None  # [B|1, H]
    sinks: Tensor | None  # [B|1, H]
    weight: Tensor | None  # [B|1, H, D]: additive scores weight . tanh(q + k) instead of q . k
    key_lengths: Tensor | None  # [B]
    cu_seqlens_q: Tensor | None  # [sequences + 1]: the one batch entry holds packed sequences
    cu_seqlens_k: Tensor | None
    seed: Tensor | None  # names the dropout's random numbers


class Wanted(NamedTuple):
    """Which gradients are asked for, besides those of query, key and value."""

    mask: bool
    head_scale: bool
    sinks: bool
    weight: bool


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    head_scale: Tensor | None
    sinks: Tensor | None
    weight: Tensor | None
