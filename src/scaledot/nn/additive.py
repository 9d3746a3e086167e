"""Bahdanau's attention as a module."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from scaledot import functional
from scaledot.nn.arguments import check_dropout, check_sizes, read_sources
from scaledot.nn.measured import Measured
from scaledot.problem import is_causal_bias


class AdditiveAttention(Measured):
    """softmax_j(weight . tanh(W_q query_i + W_k key_j)) value: Bahdanau, Cho and Bengio (2015).

    One head. Each tanh lies in [-1, 1], so no score leaves [-|weight|_1, |weight|_1], however large
    query and key are. W_q [width, query_dim] and W_k [width, key_dim] start as Xavier's, weight
    [width] as a Linear's: the scores of unit-variance inputs then have a deviation of about 0.4.
    bias: one vector inside the tanh, added to the projected query. Values may have any width: they
    are averaged, not projected. measure: see Measured.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        width: int,
        *,
        bias: bool = False,
        dropout: float = 0.0,
        measure: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(measure)
        check_sizes(query_dim=query_dim, key_dim=key_dim, width=width)
        check_dropout(dropout)
        self.query_dim = query_dim
        self.key_dim = key_dim
        self.width = width
        self.dropout = dropout
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(query_dim, width, bias, **factory)
        self.k_proj = nn.Linear(key_dim, width, bias=False, **factory)
        self.weight = nn.Parameter(torch.empty(width, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.q_proj.weight)
        nn.init.xavier_uniform_(self.k_proj.weight)
        if self.q_proj.bias is not None:
            nn.init.zeros_(self.q_proj.bias)
        bound = 1 / math.sqrt(self.width)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        key_lengths: Tensor | None = None,
        causal_align: str = "top_left",
    ) -> Tensor:
        """query [batch, Q, query_dim], key [batch, K, key_dim], value [batch, K, V].

        Returns [batch, Q, V]. Without value: the key is the value. All of them may come without the
        batch dimension. attn_mask: a float bias, or bool with True = may be seen; it broadcasts
        to [batch, Q, K]. key_lengths [batch]: keys past it are padding.
        """
        widths = (self.query_dim, self.key_dim, None)
        query, key, value = read_sources(query, key, value, widths)
        whole = not isinstance(attn_mask, Tensor) or is_causal_bias(attn_mask)
        if not whole and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(-3)  # [batch, Q, K] -> [batch, head, Q, K]
        head = self._attend(
            functional.additive_attention,
            functional.additive_attention_with_vitals,
            self.q_proj(query).unsqueeze(-3),
            self.k_proj(key).unsqueeze(-3),
            value.unsqueeze(-3),
            self.weight,
            attn_mask=attn_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            key_lengths=key_lengths,
            causal_align=causal_align,
        )
        return head.squeeze(-3)

    def extra_repr(self) -> str:
        facts = [f"query_dim={self.query_dim}", f"key_dim={self.key_dim}", f"width={self.width}"]
        if self.dropout:
            facts.append(f"dropout={self.dropout}")
        if not self.measure:
            facts.append("measure=False")
        return ", ".join(facts)
