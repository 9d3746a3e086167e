"""What a module was given: are the sizes sizes, who asks, who answers, do the shapes fit."""

from typing import NamedTuple

from torch import Tensor

from scaledot.errors import ArgumentError, ArgumentTypeError
from scaledot.problem import number, whole_number


class Sources(NamedTuple):
    query: Tensor  # [batch, Q, width] or [Q, width]
    key: Tensor
    value: Tensor


def read_sources(
    query: Tensor, key: Tensor | None, value: Tensor | None, widths: tuple[int, int, int | None]
) -> Sources:
    """No key: self attention. No value: the key's. One clear error where the shapes do not fit.

    widths: of query, key and value; None: any.
    """
    if key is None and value is not None:
        raise ArgumentError("value was given without key; give both, or neither for self attention")
    stand_ins = (
        "",
        "" if key is not None else " (no key was given, so it is the query)",
        "" if value is not None else " (no value was given, so it is the key)",
    )
    key = query if key is None else key
    value = key if value is None else value
    sources = Sources(query, key, value)
    for name, tensor, width, why in zip(Sources._fields, sources, widths, stand_ins, strict=True):
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() not in (2, 3):
            raise ArgumentError(
                f"{name} has shape {list(tensor.shape)}; it must be [batch, tokens, width] or "
                f"[tokens, width]"
            )
        if tensor.dim() != query.dim():
            raise ArgumentError(
                f"{name} has shape {list(tensor.shape)} but query {list(query.shape)}; "
                f"give a batch dimension to all of them or to none"
            )
        if width is not None and tensor.shape[-1] != width:
            raise ArgumentError(
                f"{name} has width {tensor.shape[-1]} but this module was made for {width}{why}"
            )
    return sources


def check_heads(d_model: int, num_heads: int, num_kv_heads: int) -> None:
    check_sizes(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if d_model % num_heads:
        raise ArgumentError(
            f"d_model={d_model} is not divisible by num_heads={num_heads}; "
            f"each head takes d_k = d_model / num_heads entries"
        )
    if num_heads % num_kv_heads:
        raise ArgumentError(
            f"num_heads={num_heads} is not divisible by num_kv_heads={num_kv_heads}; "
            f"each key head serves num_heads / num_kv_heads query heads"
        )


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if whole_number(name, size) < 1:
            raise ArgumentError(f"{name}={size} must be at least 1")


def check_dropout(dropout: float) -> None:
    if not 0.0 <= number("dropout", dropout) <= 1.0:  # NaN fails too
        raise ArgumentError(f"dropout={dropout} must lie in [0, 1]")
