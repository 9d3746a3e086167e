"""Hold the arguments of `scaledot.vitals` for one call, and cut out a part of their batch."""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from scaledot import functional
from scaledot.functional import Scale, Window
from scaledot.measure import Vitals


class Sizes(NamedTuple):
    batch: int
    heads: int
    rows: int  # of a batch entry and head


class Scores(NamedTuple):
    """Hold what the vitals of a call are computed from."""

    query: Tensor
    key: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    scale: Scale = None
    enable_gqa: bool = False
    window: Window = None
    causal_align: str = "top_left"
    softcap: float | None = None
    sinks: Tensor | None = None
    key_lengths: Tensor | None = None
    num_heads: int | None = None

    def vitals(self) -> Vitals:
        query, key, attn_mask, is_causal, scale, enable_gqa, *_ = self
        return functional.vitals(
            query,
            key,
            attn_mask,
            is_causal,
            scale,
            enable_gqa,
            window=self.window,
            causal_align=self.causal_align,
            softcap=self.softcap,
            sinks=self.sinks,
            key_lengths=self.key_lengths,
            num_heads=self.num_heads,
        )

    def itself(self) -> "Scores":
        return self

    @property
    def sizes(self) -> Sizes | None:
        query, key = self.query.shape, self.key.shape
        if len(query) != 4 or len(key) != 4 or query[0] != key[0] or not (query[0] and query[1]):
            return None
        return Sizes(query[0], query[1], query[2])

    def part(self, entries: slice) -> "Scores":
        """Return the same call with some entries of its batch."""
        mask, lengths = self.attn_mask, self.key_lengths
        if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
            mask = mask[entries]
        return self._replace(
            query=self.query[entries],
            key=self.key[entries],
            attn_mask=mask,
            key_lengths=None if lengths is None else lengths[entries],
        )


class Source(Protocol):
    """Whatever scores can be had from, all of them or a part: `Scores`, or a module's inputs."""

    @property
    def query(self) -> Any: ...

    @property
    def key(self) -> Any: ...

    @property
    def sizes(self) -> Sizes | None:
        """None: there are no entries that could be told apart."""
        ...

    def part(self, entries: slice) -> Scores: ...


def nothing() -> None:
    """The source of a call that is measured whole."""
    return


def all_finite(tensor: Tensor) -> bool:
    """Tell whether a tensor on a CPU holds numbers alone; False too where their sum overflows."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return math.isfinite((tensor.sum(dtype=torch.float32) if half else tensor.sum()).item())
