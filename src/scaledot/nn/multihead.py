"""Multi-head attention with every score and scaling rule behind one argument."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaledot import functional, problem
from scaledot import scale as scale_rules
from scaledot.errors import ArgumentError, ArgumentTypeError
from scaledot.nn.arguments import check_dropout, check_heads, check_sizes, read_sources
from scaledot.nn.checkpoint import translate_torch_names
from scaledot.nn.measured import Measured

SCORES = ("dot", "cosine", "additive")
NORM_EPSILON = 1e-6  # of qk_norm, as in Qwen3 and OLMo 2

# A vector shorter than this has no direction to speak of, and its cosines fade to 0. One over it is
# what the gradient of a zero vector is multiplied with: float16 ends at 65504.
SHORTEST = 1e-6
SHORTEST_FLOAT16 = 1e-3


class MultiHeadAttention(Measured):
    """out_proj(concat over heads h of softmax(score_h(q, k)) v), with d_k = d_model / num_heads.

    The score of head h, and what `scale` is for it (None: the value named first):

        dot        scale * q.k                "sqrt_dk", any rule of scaledot.scale, or a number
        cosine     t_h * q.k / (|q| |k|)      where the learned temperature t_h starts; see below
        additive   scale * w_h . tanh(q + k)  "none", any rule, or a number

    Cosines of independent vectors have a deviation of 1/sqrt(d_k), so a temperature that starts at
    sqrt(d_k) brings the scores' to 1. A rule means the temperature it amounts to when |q| and |k|
    are sqrt(d_k), d_k times the rule: sqrt(d_k) for "sqrt_dk". It is learned as its logarithm, one
    a head, and so stays positive; no score leaves [-t_h, t_h].

    num_kv_heads: heads of keys and values; each serves num_heads / num_kv_heads query heads.
    qk_norm: RMSNorm with a learned gain over the d_k entries of each head's q and k, before the
    score. sinks: one learned logit a head, which takes probability and gives nothing. window,
    softcap: as in scaledot.attention. kdim, vdim: widths of key and value, where not d_model.
    out_bias: whether out_proj has a bias (None: as `bias`). measure: see Measured.

    Parameters start as torch.nn.MultiheadAttention's do, for the same seed with the same numbers.
    For LayerNormed inputs the scaled dot products then have a deviation of 0.50, not the 1 that
    sqrt(d_k) is made for: torch draws the three projections as one matrix and so with half of the
    variance. It is 1.00 where a vdim or kdim of nearly d_model keeps it from doing so, and with
    qk_norm. A state dict of nn.MultiheadAttention loads as it is, with equal results.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        score: str = "dot",
        scale: float | str | None = None,
        qk_norm: bool = False,
        bias: bool = True,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        measure: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(measure)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        kdim = d_model if kdim is None else kdim
        vdim = d_model if vdim is None else vdim
        check_heads(d_model, num_heads, num_kv_heads)
        check_sizes(kdim=kdim, vdim=vdim)
        check_dropout(dropout)
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_kv_heads
        self.d_k = d_model // num_heads
        self.kdim, self.vdim = kdim, vdim
        self.score = score
        self.scale = _default_scale(score) if scale is None else scale
        self.dropout = dropout
        self.window = window
        self.softcap = softcap
        self._check_score(qk_norm)

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        kv_width = num_kv_heads * self.d_k
        self.q_proj = _undrawn_linear(d_model, d_model, bias, **factory)
        self.k_proj = _undrawn_linear(kdim, kv_width, bias, **factory)
        self.v_proj = _undrawn_linear(vdim, kv_width, bias, **factory)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = _undrawn_linear(d_model, d_model, out_bias, **factory)
        self.q_norm = nn.RMSNorm(self.d_k, NORM_EPSILON, **factory) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.d_k, NORM_EPSILON, **factory) if qk_norm else None
        self.log_temperature = self.additive_weight = self.sinks = None
        if score == "cosine":
            self.log_temperature = nn.Parameter(torch.empty(num_heads, **factory))
        if score == "additive":
            self.additive_weight = nn.Parameter(torch.empty(num_heads, self.d_k, **factory))
        if sinks:
            self.sinks = nn.Parameter(torch.empty(num_heads, **factory))
        self.register_load_state_dict_pre_hook(translate_torch_names)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The draws of nn.MultiheadAttention, in its order."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        self.out_proj.reset_parameters()
        packed = self.kdim == self.vdim == self.d_model  # torch: one matrix [3 d_model, d_model]
        for projection in projections:
            if packed:
                bound = math.sqrt(6 / (self.d_model + 3 * self.d_model))
                nn.init.uniform_(projection.weight, -bound, bound)
            else:
                nn.init.xavier_uniform_(projection.weight)
        for projection in (*projections, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        if self.log_temperature is not None:
            nn.init.constant_(self.log_temperature, math.log(self._first_temperature()))
        if self.additive_weight is not None:
            bound = 1 / math.sqrt(self.d_k)  # a Linear's: no score passes sqrt(d_k) at the start
            nn.init.uniform_(self.additive_weight, -bound, bound)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        key_lengths: Tensor | None = None,
        causal_align: str = "top_left",
    ) -> Tensor:
        """query [batch, Q, d_model], key [batch, K, kdim], value [batch, K, vdim] -> like query.

        Without key: self attention. Without value: the key is the value. All of them may come
        without the batch dimension. attn_mask: a float bias, or bool with **True = may be seen** as
        in torch's scaled_dot_product_attention; nn.MultiheadAttention means the opposite, so what
        it takes is `~mask` here. It broadcasts to [batch, heads, Q, K]. is_causal needs no mask
        beside it. key_lengths [batch]: keys past it are padding.
        """
        query, key, value = read_sources(query, key, value, (self.d_model, self.kdim, self.vdim))
        ambiguous = isinstance(attn_mask, Tensor) and not problem.is_causal_bias(attn_mask)
        if ambiguous and attn_mask.dim() == query.dim() == 3:
            raise ArgumentError(
                f"attn_mask has shape {list(attn_mask.shape)}, which may mean one a batch entry or "
                f"one a head; make it [batch, 1, Q, K], [1, heads, Q, K] or [batch, heads, Q, K]"
            )
        q = self._normalised(self._split(self.q_proj(query), self.num_heads), self.q_norm)
        k = self._normalised(self._split(self.k_proj(key), self.num_kv_heads), self.k_norm)
        v = self._split(self.v_proj(value), self.num_kv_heads)
        keywords: dict[str, Any] = {
            "attn_mask": attn_mask,
            "dropout_p": self.dropout if self.training else 0.0,
            "is_causal": is_causal,
            "scale": self.scale if self.score != "cosine" else self.temperature,
            "enable_gqa": self.num_kv_heads != self.num_heads,
            "window": self.window,
            "causal_align": causal_align,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "key_lengths": key_lengths,
            "num_heads": self.num_heads,
        }
        if self.additive_weight is None:
            twins = functional.attention, functional.attention_with_vitals
            heads = self._attend(*twins, q, k, v, **keywords)
        else:
            twins = functional.additive_attention, functional.additive_attention_with_vitals
            heads = self._attend(*twins, q, k, v, self.additive_weight, **keywords)
        return self.out_proj(heads.transpose(-3, -2).flatten(-2))

    @property
    def temperature(self) -> Tensor | None:
        """What multiplies each head's cosines, [heads]; None for the other scores."""
        if self.log_temperature is None:
            return None
        # Sixteen bits would know it to one part in a hundred only.
        return torch.exp(_at_least_float32(self.log_temperature))

    def extra_repr(self) -> str:
        facts = [f"d_model={self.d_model}", f"num_heads={self.num_heads}", f"d_k={self.d_k}"]
        if self.num_kv_heads != self.num_heads:
            facts.append(f"num_kv_heads={self.num_kv_heads}")
        if self.score != "dot":
            facts.append(f"score={self.score!r}")
        facts.append(self._scale_in_words())
        if self.kdim != self.d_model or self.vdim != self.d_model:
            facts.append(f"kdim={self.kdim}, vdim={self.vdim}")
        if self.q_norm is not None:
            facts.append("qk_norm=True")
        if self.dropout:
            facts.append(f"dropout={self.dropout}")
        if self.window is not None:
            facts.append(f"window={self.window}")
        if self.softcap is not None:
            facts.append(f"softcap={self.softcap}")
        if self.sinks is not None:
            facts.append("sinks=True")
        if not self.measure:
            facts.append("measure=False")
        return ", ".join(facts)

    def _scale_in_words(self) -> str:
        if self.score == "cosine":
            return f"temperature={self._first_temperature():.4g} at the start, learned"
        if not isinstance(self.scale, str):
            return f"scale={self.scale:.4g}"
        number = scale_rules.resolve(self.scale, self.d_k, self.num_heads)
        per_row = " ln(n)" if self.scale == "log_n" else ""
        return f"scale={number:.4g}{per_row} ({self.scale})"

    def _first_temperature(self) -> float:
        if isinstance(self.scale, str):
            return self.d_k * scale_rules.resolve(self.scale, self.d_k, self.num_heads)
        return float(self.scale)

    def _split(self, projected: Tensor, heads: int) -> Tensor:
        """[..., tokens, heads * d_k] -> [..., heads, tokens, d_k], without a copy."""
        return projected.unflatten(-1, (heads, self.d_k)).transpose(-3, -2)

    def _normalised(self, heads: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        if norm is not None:
            return norm(heads.to(norm.weight.dtype))  # under autocast the gain stays float32
        if self.score == "cosine":
            shortest = SHORTEST_FLOAT16 if heads.dtype == torch.float16 else SHORTEST
            return F.normalize(_at_least_float32(heads), dim=-1, eps=shortest).to(heads.dtype)
        return heads

    def _check_score(self, qk_norm: bool) -> None:
        if self.score not in SCORES:
            raise ArgumentError(f"score={self.score!r} is unknown; use one of {', '.join(SCORES)}")
        if isinstance(self.scale, Tensor):
            raise ArgumentTypeError("scale must be a number or the name of a rule, got a tensor")
        # What scaledot.attention would refuse at every call is refused here, in the same words.
        token = torch.empty(1, self.num_heads, 1, self.d_k, device="meta")
        rest: dict[str, Any] = {"window": self.window, "softcap": self.softcap}
        problem.describe(token, token, token, scale=self.scale, num_heads=self.num_heads, **rest)
        if self.score != "cosine":
            return
        if qk_norm:
            raise ArgumentError(
                "qk_norm=True with score='cosine' normalises twice; leave qk_norm out"
            )
        if self.scale == "log_n" or self._first_temperature() <= 0.0:
            raise ArgumentError(
                f"scale={self.scale!r} is no temperature for score='cosine' to start at; give a "
                f"positive number, or leave it out for sqrt(d_k) = {math.sqrt(self.d_k):.4g}"
            )


def _default_scale(score: str) -> str:
    return "none" if score == "additive" else "sqrt_dk"


def _undrawn_linear(
    inputs: int,
    outputs: int,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Linear:
    """A Linear that has drawn no random number yet; `reset_parameters` does."""
    linear = nn.Linear(inputs, outputs, bias, device="meta")
    linear.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
    if bias:
        linear.bias = nn.Parameter(torch.empty(outputs, device=device, dtype=dtype))
    return linear


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
