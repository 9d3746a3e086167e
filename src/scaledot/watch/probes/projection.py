"""From a module's inputs to its heads: what torch does to queries and keys before they meet."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scaledot.measure import Vitals
from scaledot.watch.probes.scores import Scores, Sizes


class Heads(NamedTuple):
    """Projected and split: query [B, H, Q, D], key [B, H, K, D], a mask that broadcasts to both."""

    query: Tensor
    key: Tensor
    mask: Tensor | None

    def scores(self) -> Scores:
        return Scores(self.query, self.key, self.mask)

    def vitals(self) -> Vitals:
        return self.scores().vitals()


class Inputs:
    """A module's inputs, of which a part is projected, or all.

    given: the arguments of torch's multi_head_attention_forward by name; `project` takes what it
    needs of them. Tensors are [tokens, batch, width].
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.query, self.key = given["query"], given["key"]
        self.sizes: Sizes | None = None
        if self.query.dim() == 3 and self.query.shape[1] and given.get("static_k") is None:
            rows, batch, _ = self.query.shape
            self.sizes = Sizes(batch, given["num_heads"], rows)

    def itself(self) -> "Inputs":
        return self

    def vitals(self) -> Vitals:
        return project(**self.given).vitals()

    def part(self, entries: slice) -> Scores:
        """Some entries of the batch."""
        if entries == slice(None):
            return project(**self.given).scores()
        padding, mask = self.given["key_padding_mask"], self.given["attn_mask"]
        if mask is not None and mask.dim() == 3:  # [batch * heads, Q, K]
            mask = mask.unflatten(0, (self.query.shape[1], -1))[entries].flatten(0, 1)
        some: dict[str, Any] = {
            "query": self.query[:, entries],
            "key": self.key[:, entries],
            "key_padding_mask": None if padding is None else padding[entries],
            "attn_mask": mask,
        }
        return project(**{**self.given, **some}).scores()


def project(
    query: Tensor,
    key: Tensor,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    add_zero_attn: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    use_separate_proj_weight: bool,
    q_proj_weight: Tensor | None,
    k_proj_weight: Tensor | None,
    static_k: Tensor | None,
    **_: Any,
) -> Heads:
    """What torch.nn.functional.multi_head_attention_forward does to its queries and keys."""
    if query.dim() == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    batch = query.shape[1]
    q_bias, k_bias = (None, None) if in_proj_bias is None else in_proj_bias.chunk(3)[:2]
    if use_separate_proj_weight:
        q_weight, k_weight = q_proj_weight, k_proj_weight
    else:
        assert in_proj_weight is not None
        q_weight, k_weight, _value = in_proj_weight.chunk(3)
    assert q_weight is not None
    assert k_weight is not None
    q = split(F.linear(query, q_weight, q_bias), num_heads)
    if static_k is None:
        projected = F.linear(key, k_weight, k_bias)
        if bias_k is not None:  # one more key
            projected = torch.cat([projected, bias_k.repeat(1, batch, 1)])
        k = split(projected, num_heads)
    else:
        k = static_k.unflatten(0, (batch, num_heads))
    if add_zero_attn:
        k = F.pad(k, (0, 0, 0, 1))
    mask = _as_bias(attn_mask, q.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (batch, num_heads))
    padding = _as_bias(key_padding_mask, q.dtype)
    padding = None if padding is None else padding[:, None, None, :]
    masks = [
        F.pad(part, (0, k.shape[-2] - part.shape[-1]))  # nothing hides the keys that were added
        for part in (mask, padding)
        if part is not None
    ]
    return Heads(q, k, sum(masks[1:], start=masks[0]) if masks else None)


def split(projected: Tensor, heads: int) -> Tensor:
    """[tokens, batch, heads * D] -> [batch, heads, tokens, D]"""
    return projected.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """nn.MultiheadAttention's masks: True hides, numbers are added."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
