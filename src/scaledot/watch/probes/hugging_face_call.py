"""One call of an attention function of transformers, in the words of scaledot's own functions."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scaledot import functional
from scaledot.watch.probes.scores import Scores


class Call(NamedTuple):
    """What the function was given by name, completed by what its module says.

    `flash` are flash_attn's rules: aligned to the last key, a window, padding as [batch, keys].
    Else it is softmax(cap(q k^T * scale) + mask): windows and packed sequences are in the mask.
    """

    query: Tensor  # [batch, heads, tokens, width]
    key: Tensor
    mask: Tensor | None
    position_bias: Tensor | None
    sinks: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    scale: float
    softcap: float | None
    sliding_window: int | None
    is_causal: bool
    flash: bool

    def computed(self, value: Tensor | None = None, dropout: float = 0.0) -> Any:
        """The vitals or, with values, the output [batch, tokens, heads, width] and the vitals."""
        if self.flash and self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            return self._packed(value, dropout)
        shared = self._flash() if self.flash else self._eager()
        if value is None:
            return functional.vitals(self.query, self.key, **shared)
        out, vitals = functional.attention_with_vitals(
            self.query, self.key, value, dropout_p=dropout, **shared
        )
        return out.transpose(1, 2).contiguous(), vitals

    def scores(self) -> Scores | None:
        """Of which a part of the batch can be measured; None: its sequences are packed."""
        if self.flash and self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            return None
        return Scores(self.query, self.key, **(self._flash() if self.flash else self._eager()))

    def _shared(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "enable_gqa": self.key.shape[1] != self.query.shape[1],
            "softcap": self.softcap,
            "sinks": self.sinks,
        }

    def _eager(self) -> dict[str, Any]:
        bias = None if self.mask is None else self.mask[..., : self.key.shape[-2]]
        if self.position_bias is not None:
            more = self.position_bias
            bias = more if bias is None else more + _as_bias(bias, more)
        return {**self._shared(), "attn_mask": bias}

    def _flash(self) -> dict[str, Any]:
        queries, keys = self.query.shape[-2], self.key.shape[-2]
        shared = {**self._shared(), "causal_align": "bottom_right"}
        shared["is_causal"] = self.is_causal and queries > 1
        if self.sliding_window is not None and keys > self.sliding_window:
            left = self.sliding_window - 1
            shared["window"] = (left, 0 if self.is_causal else left)
        if self.mask is not None:
            real = self.mask.bool()
            # Padding asks nothing.
            shared["attn_mask"] = real[:, None, None, :] & real[:, None, -queries:, None]
        return shared

    def _packed(self, value: Tensor | None, dropout: float) -> Any:
        assert self.cu_seqlens_q is not None
        assert self.cu_seqlens_k is not None
        lengths = self.cu_seqlens_q, self.cu_seqlens_k
        rows, columns = _tokens(self.query), _tokens(self.key)
        shared = self._replace(mask=None)._flash()
        if value is None:
            return functional.vitals_varlen(rows, columns, *lengths, **shared)
        out, vitals = functional.attention_varlen_with_vitals(
            rows, columns, _tokens(value), *lengths, dropout_p=dropout, **shared
        )
        return out.unflatten(0, (self.query.shape[0], -1)), vitals


def call_of(
    flash: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **_: Any,
) -> Call:
    """Of what transformers' functions are given. Also traced: it looks at no size."""
    if scaling is None:
        scaling = getattr(module, "head_dim", query.shape[-1]) ** -0.5
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return Call(
        query,
        key,
        mask,
        position_bias,
        s_aux,
        cu_seq_lens_q,
        cu_seq_lens_k,
        scaling,
        softcap,
        sliding_window,
        is_causal,
        flash,
    )


def _tokens(tensor: Tensor) -> Tensor:
    """[batch, heads, tokens, width] -> [batch * tokens, heads, width]"""
    return tensor.transpose(1, 2).flatten(0, 1)


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -torch.inf)
