"""One record of a call. Every mistake of the caller is found and named here, once.

Dimension key of the project, used in every signature and comment:

    B batch   H query heads   G key/value heads   Q queries   K keys
    D width of query and key   V width of value

Whatever the caller's rank, the record holds 4-D tensors: query [B, H, Q, D], key [B, G, K, D],
value [B, G, K, V]. A 2-D query has no heads, a 3-D query is [heads, Q, D], further leading
dimensions are folded into B; `lead` remembers the caller's own leading shape.
"""

import math
import numbers
import operator
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaledot import scale as scale_rules
from scaledot.errors import ArgumentError, ArgumentTypeError

FLOAT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ALIGNMENTS = ("top_left", "bottom_right")
LARGEST_CAP = 2.0**60  # logits divided by it are numbers of full precision in float32
LARGEST, LARGEST_DOUBLE = (torch.finfo(kind).max for kind in (torch.float32, torch.float64))
FARTHEST = 2**62  # that a window reaches: positions are int64


class Settings(NamedTuple):
    """What a call says besides its tensors; plain numbers, so that it can cross an operator."""

    scale: float  # multiplies every score; 1.0 where a tensor of one value a head does
    log_n: bool  # the score of row i is multiplied by ln(n_i) too
    softcap: float  # 0.0: no cap
    dropout_p: float
    left: int | None  # keys before the diagonal that a row may see; None: all
    right: int | None  # keys after the diagonal that a row may see; None: all
    bottom_right: bool  # the diagonal ends in the last key of the last row, else starts in (0, 0)


class Problem(NamedTuple):
    query: Tensor  # [B, H, Q, D]
    key: Tensor  # [B, G, K, D]
    value: Tensor | None  # [B, G, K, V]; None: only the scores are asked for
    mask: Tensor | None  # [B|1, H|1, Q|1, K|1], bool (True: may be seen) or a float bias
    head_scale: Tensor | None  # [B|1, H]
    sinks: Tensor | None  # [B|1, H]
    weight: Tensor | None  # [1, H, D]: the score is weight . tanh(q + k), not q . k
    key_lengths: Tensor | None  # [B]
    cu_seqlens_q: Tensor | None  # [sequences + 1]: B is 1 and Q holds packed sequences
    cu_seqlens_k: Tensor | None
    settings: Settings
    lead: tuple[
        int, ...
    ]  # the caller's leading shape (a torch.Size is a tuple); packed: (sequences, heads)
    wants_vitals: bool
    per_row: bool


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | str | Tensor | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    causal_align: str = "top_left",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    num_heads: int | None = None,
    weight: Tensor | None = None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    scores_only: bool = False,
    wants_vitals: bool = False,
    per_row: bool = False,
) -> Problem:
    """The record of a call, or one clear error."""
    if value is None and not scores_only:
        raise ArgumentTypeError("value must be a tensor, got None; scaledot.vitals needs no value")
    if not _obviously_fine(query, key, value):
        _check_tensors(query, key, value)
    if cu_seqlens is not None:
        query, key, value = _unpack(query, key, value, cu_seqlens)
    _check_sizes(query, key, value)
    enable_gqa = _read_flag("enable_gqa", enable_gqa)
    lead = query.shape[:-2]
    same_lead = key.shape[:-2] == lead and (value is None or value.shape[:-2] == lead)
    if len(lead) != 2 or not same_lead:
        query, key, value, lead = _as_four_dimensions(query, key, value, enable_gqa)
    heads = query.shape[1]
    if scale is None and weight is not None:
        scale = 1.0
    factor, log_n, head_scale = _read_scale(scale, query, num_heads)
    is_causal = _read_flag("is_causal", is_causal)
    if not isinstance(causal_align, str) or causal_align not in ALIGNMENTS:
        raise ArgumentError(f"causal_align={causal_align!r}; use 'top_left' or 'bottom_right'")
    if attn_mask is not None and is_causal_bias(attn_mask):
        attn_mask, causal_align = _read_causal_bias(
            attn_mask,
            query,
            key,
            is_causal,
            "top_left" if window is None else causal_align,
            window is None and key_lengths is None,
        )
        is_causal = is_causal or attn_mask is None
    left, right = _read_window(window, is_causal)
    dropout_p = number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:  # NaN fails too
        raise ArgumentError(f"dropout_p={dropout_p} must lie in [0, 1]")
    cap = 0.0 if softcap is None else number("softcap", softcap)
    if softcap is not None and not 0.0 < cap <= LARGEST_CAP:
        raise ArgumentError(
            f"softcap={softcap} must be a positive number, at most {LARGEST_CAP:.3g}; "
            f"leave it out for no cap"
        )
    if attn_mask is not None:
        attn_mask = _read_mask(attn_mask, query, key, lead, scores_only)
    if sinks is not None:
        sinks = _read_per_head("sinks", sinks, query, heads)
    if key_lengths is not None:
        key_lengths = _read_key_lengths(key_lengths, query, lead)
    if weight is not None:
        weight = _read_weight(weight, query)
    cu_seqlens_q = cu_seqlens_k = None
    if cu_seqlens is not None:
        cu_seqlens_q, cu_seqlens_k = (ends.contiguous() for ends in cu_seqlens)
        lead = (cu_seqlens_q.shape[0] - 1, heads)
    settings = Settings(
        factor,
        log_n,
        cap,
        dropout_p,
        left,
        right,
        causal_align == "bottom_right",
    )
    return Problem(
        query,
        key,
        value,
        attn_mask,
        head_scale,
        sinks,
        weight,
        key_lengths,
        cu_seqlens_q,
        cu_seqlens_k,
        settings,
        lead,
        wants_vitals,
        per_row,
    )


def _obviously_fine(query: Tensor, key: Tensor, value: Tensor | None) -> bool:
    """What nearly every call is, found quickly: float tensors of one type on one device."""
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return False
    dtype, device = query.dtype, query.device
    return (
        dtype in FLOAT_TYPES
        and key.dtype is dtype
        and value.dtype is dtype
        and key.device == device
        and value.device == device
        and query.dim() > 1
        and key.dim() > 1
        and value.dim() > 1
        and is_dense(query)
        and is_dense(key)
        and is_dense(value)
    )


def is_dense(tensor: Tensor) -> bool:
    """Neither nested nor sparse: it has a shape, and a stride in each dimension."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _check_tensors(query: Tensor, key: Tensor, value: Tensor | None) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor is None and name == "value":
            continue
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not is_dense(tensor):
            if not tensor.is_nested:
                raise ArgumentTypeError(f"{name} is a sparse tensor; use {name}.to_dense()")
            raise ArgumentTypeError(
                f"{name} is a nested tensor; scaledot.attention, attention_with_vitals and vitals "
                f"take them where query, key and value all are; else pad the sequences and pass "
                f"key_lengths, or pack them for attention_varlen"
            )
        if tensor.dim() < 2:
            raise ArgumentError(
                f"{name} has shape {list(tensor.shape)}; it needs at least 2 dimensions, "
                f"[..., heads, tokens, width]"
            )
        if tensor.dtype not in FLOAT_TYPES:
            raise ArgumentTypeError(
                f"{name} is {tensor.dtype}; attention takes float64, float32, bfloat16 or "
                f"float16: convert it with {name}.to(torch.float32)"
            )
        if tensor.dtype != query.dtype:
            raise ArgumentTypeError(
                f"{name} is {tensor.dtype} but query is {query.dtype}; convert one of them"
            )
        if tensor.device != query.device:
            raise ArgumentError(
                f"{name} is on {tensor.device} but query is on {query.device}; "
                f"move it with {name}.to(query.device)"
            )


def _check_sizes(query: Tensor, key: Tensor, value: Tensor | None) -> None:
    if key.shape[-1] != query.shape[-1]:
        raise ArgumentError(
            f"key has width {key.shape[-1]} but query has width {query.shape[-1]}; "
            f"their last dimensions must be equal"
        )
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise ArgumentError(
            f"value has {value.shape[-2]} tokens but key has {key.shape[-2]}; "
            f"each key needs exactly one value"
        )


def _as_four_dimensions(
    query: Tensor, key: Tensor, value: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """Broadcast the leading dimensions as torch does, then fold them to [B, heads]."""
    tensors = [query, key] if value is None else [query, key, value]
    heads = [t.shape[-3] if t.dim() > 2 else 1 for t in tensors]
    names = ("query", "key", "value")
    for name, count in zip(names[1:], heads[1:], strict=False):
        if count in (heads[0], 1) or (not enable_gqa and heads[0] == 1):
            continue
        if not enable_gqa:
            hint = "; pass enable_gqa=True" if count and heads[0] % count == 0 else ""
            raise ArgumentError(
                f"{name} has {count} heads but query has {heads[0]}; the numbers of heads must be "
                f"equal{hint}"
            )
        if count == 0 or heads[0] % count:
            raise ArgumentError(
                f"{name} has {count} heads but query has {heads[0]}; query heads must be a "
                f"multiple of {name} heads"
            )
    query_heads = heads[0] if enable_gqa else _broadcast("heads", [(h,) for h in heads])[0]
    batch = _broadcast("batch dimensions", [tuple(t.shape[:-3]) for t in tensors])
    lead = (*batch, query_heads) if max(t.dim() for t in tensors) > 2 else ()
    # Where key and value differ in their heads, each query head gets its own view of both.
    kv_heads = heads[1] if value is None or heads[1] == heads[2] else query_heads

    def fold(tensor: Tensor, count: int) -> Tensor:
        if tensor.dim() == 2:
            tensor = tensor.unsqueeze(0)
        own = tensor.shape[-3]
        if own not in (count, 1):
            tensor = tensor.repeat_interleave(count // own, dim=-3)
        tokens, width = tensor.shape[-2:]
        tensor = tensor.expand(*batch, count, tokens, width)
        if len(batch) == 1:
            return tensor
        return tensor.reshape(math.prod(batch), count, tokens, width)

    folded_value = None if value is None else fold(value, kv_heads)
    return fold(query, query_heads), fold(key, kv_heads), folded_value, lead


def _broadcast(what: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = ", ".join(str(list(shape)) for shape in shapes)
        raise ArgumentError(
            f"the {what} of query, key and value do not fit together: {listed}"
        ) from None


def _read_scale(
    scale: float | str | Tensor | None, query: Tensor, num_heads: int | None
) -> tuple[float, bool, Tensor | None]:
    d_k = query.shape[-1]
    if num_heads is not None:
        num_heads = whole_number("num_heads", num_heads)
        if num_heads < 1:
            raise ArgumentError(f"num_heads={num_heads} must be at least 1")
    if scale is None:
        return scale_rules.resolve("sqrt_dk", d_k), False, None
    if isinstance(scale, str):
        return scale_rules.resolve(scale, d_k, num_heads), scale == "log_n", None
    if isinstance(scale, Tensor):
        if not scale.dtype.is_floating_point:
            raise ArgumentTypeError(
                f"scale is {scale.dtype}; a scale tensor must be floating point"
            )
        if scale.numel() == 1:
            scale = scale.reshape(1).expand(query.shape[1])
        return 1.0, False, _read_per_head("scale", scale, query, query.shape[1])
    if not isinstance(scale, (int, float)) and not hasattr(scale, "__float__"):
        raise ArgumentTypeError(
            f"scale must be a number, the name of a rule ({', '.join(scale_rules.RULES)}) or a "
            f"tensor of one number a head, got {_kind(scale)}"
        )
    factor = number("scale", scale)
    if not -math.inf < factor < math.inf:
        raise ArgumentError(f"scale={factor} must be finite; leave it out for 1/sqrt(d_k)")
    return factor, False, None


def number(name: str, value: Any) -> float:
    """Return a plain number: comparisons rather than math.isfinite, which no compiler can trace."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, int) and not -LARGEST_DOUBLE <= value <= LARGEST_DOUBLE:
            raise ArgumentError(f"{name} is a whole number too large for any floating point type")
        return value
    dtype = getattr(value, "dtype", None)  # of a tensor, an array or a number of numpy
    is_truth = isinstance(value, bool) or str(dtype) in ("bool", "torch.bool")
    is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
    if (
        is_truth
        or is_complex
        or "complex" in str(dtype)
        or isinstance(value, str)
        or not hasattr(value, "__float__")
        or getattr(value, "shape", ()) != ()
    ):
        raise ArgumentTypeError(f"{name} must be a number, got {_kind(value)}")
    return float(value)


def whole_number(name: str, value: Any) -> int:
    """Return a plain int; a number that was rounded somewhere is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{name}={_shown(value)} must be a whole number")
    return operator.index(value)


def _read_flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) or getattr(value, "shape", ()) != () or value not in (0, 1):
        raise ArgumentTypeError(f"{name}={_shown(value)} must be True or False")
    return bool(value)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (int, float, complex, str)) else _kind(value)


def _kind(value: Any) -> str:
    """Describe an argument's type, without the numbers that a tensor would print."""
    name = type(value).__name__
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return name
    return f"{name} of shape {list(value.shape)} and type {value.dtype}"


def _read_window(
    window: tuple[int | None, int | None] | None, is_causal: bool
) -> tuple[int | None, int | None]:
    left = right = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ArgumentTypeError(
                f"window={window!r} must be a pair (left, right) of key counts; None = unlimited"
            )
        left, right = window
        for side in (left, right):
            if side is None:
                continue
            if isinstance(side, (bool, Tensor)) or not hasattr(side, "__index__"):
                raise ArgumentTypeError(f"window={window!r}: each side is a whole number or None")
            if side < 0:
                raise ArgumentError(
                    f"window={window!r}: a side cannot be negative; None = unlimited"
                )
        left, right = (None if side is None else _reach(side) for side in (left, right))
    if is_causal:
        right = 0
    return left, right


def _reach(side: int) -> int:
    return min(whole_number("window", side), FARTHEST)


def is_causal_bias(mask: Any) -> bool:
    """Tell whether this is a torch.nn.attention.bias.CausalBias, without importing its module."""
    if type(mask) is Tensor:
        return False
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _read_causal_bias(
    bias: Any, query: Tensor, key: Tensor, is_causal: bool, causal_align: str, alone: bool
) -> tuple[Tensor | None, str]:
    """Return the mask that is left to apply and causal_align; no mask: is_causal says it all.

    The bias is a tensor only by name: it has no values, and not the shape of its triangle. alone:
    no other argument speaks of the diagonal, so that it can be moved to the bias's own.
    """
    if is_causal:
        raise ArgumentError(
            "CausalBias should not be used with causal=True: attn_mask is causal already; leave "
            "is_causal out"
        )
    sizes = (bias.seq_len_q, bias.seq_len_kv)
    if sizes != (query.shape[-2], key.shape[-2]):
        raise ArgumentError(
            f"attn_mask is a CausalBias of shape {list(sizes)} but the scores have shape "
            f"{[query.shape[-2], key.shape[-2]]}; make it for these lengths"
        )
    lower_right = bias.variant.name == "LOWER_RIGHT" and sizes[0] != sizes[1]
    if not lower_right and causal_align == "top_left":
        return None, causal_align
    if lower_right and alone:
        return None, "bottom_right"
    return bias._materialize(query.device), causal_align


def _read_mask(
    mask: Tensor, query: Tensor, key: Tensor, lead: tuple[int, ...], scores_only: bool
) -> Tensor:
    """The mask as [B|1, H|1, Q|1, K|1]; nothing is expanded, nothing copied up to rank 4."""
    if not isinstance(mask, Tensor):
        raise ArgumentTypeError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    if not is_dense(mask):
        raise ArgumentTypeError("attn_mask is a sparse or nested tensor; use attn_mask.to_dense()")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ArgumentTypeError(
            f"attn_mask is {mask.dtype}; use a bool mask (True = may be seen) or a float bias"
        )
    if mask.device != query.device:
        raise ArgumentError(f"attn_mask is on {mask.device} but query is on {query.device}")
    if mask.dtype == torch.float64 != query.dtype:  # what float32 does not hold is not -inf
        mask = torch.where(mask.isinf(), mask, mask.clamp(-LARGEST, LARGEST)).float()
    full = (*lead, query.shape[-2], key.shape[-2])
    if mask.dim() > max(len(full), 4) or any(
        own not in (size, 1)  # in this order: of symbols, only the first may be known
        for own, size in zip(reversed(mask.shape), reversed((1, 1, *full)), strict=False)
    ):
        hint = "; a value has no place in vitals(query, key, ...)" if scores_only else ""
        raise ArgumentError(
            f"attn_mask has shape {list(mask.shape)}, which does not broadcast to the scores' "
            f"shape {list(full)}{hint}"
        )
    if len(full) > 4 and mask.dim() > 3:  # several batch dimensions become one
        batch = full[:-3] if math.prod(mask.shape[:-3]) != 1 else (1,) * (len(full) - 3)
        mask = mask.expand(*batch, *mask.shape[-3:])
        return mask.reshape(math.prod(batch), *mask.shape[-3:])
    return mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask


def _read_per_head(name: str, tensor: Tensor, query: Tensor, heads: int) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(
            f"{name} must be a tensor of one value a head, got {type(tensor).__name__}"
        )
    if not tensor.dtype.is_floating_point:
        raise ArgumentTypeError(f"{name} is {tensor.dtype}; it must be floating point")
    if tuple(tensor.shape) != (heads,):
        raise ArgumentError(
            f"{name} has shape {list(tensor.shape)}; it needs one value a query head: [{heads}]"
        )
    if tensor.device != query.device:
        raise ArgumentError(f"{name} is on {tensor.device} but query is on {query.device}")
    return tensor.unsqueeze(0)


def _read_key_lengths(key_lengths: Tensor, query: Tensor, lead: tuple[int, ...]) -> Tensor:
    if not isinstance(key_lengths, Tensor):
        raise ArgumentTypeError(
            f"key_lengths must be a tensor [batch], got {type(key_lengths).__name__}; "
            f"wrap it in torch.tensor(...)"
        )
    if key_lengths.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(f"key_lengths is {key_lengths.dtype}; it must be int32 or int64")
    if len(lead) < 2:
        raise ArgumentError(
            "key_lengths needs a batch dimension: make the query [batch, heads, Q, D]"
        )
    if tuple(key_lengths.shape) not in (tuple(lead[:-1]), (math.prod(lead[:-1]),)):
        raise ArgumentError(
            f"key_lengths has shape {list(key_lengths.shape)}; it needs one length a batch entry: "
            f"{list(lead[:-1])}"
        )
    if key_lengths.device != query.device:
        raise ArgumentError(
            f"key_lengths is on {key_lengths.device} but query is on {query.device}"
        )
    return key_lengths.reshape(-1).contiguous()  # kernels read them one after the other


def _read_weight(weight: Tensor, query: Tensor) -> Tensor:
    heads, width = query.shape[1], query.shape[-1]
    if not isinstance(weight, Tensor):
        raise ArgumentTypeError(f"weight must be a tensor, got {type(weight).__name__}")
    if not weight.dtype.is_floating_point:
        raise ArgumentTypeError(f"weight is {weight.dtype}; it must be floating point")
    if tuple(weight.shape) not in ((width,), (heads, width)):
        raise ArgumentError(
            f"weight has shape {list(weight.shape)}; it must be [{width}] (the width of the "
            f"projections) or [{heads}, {width}] (one a head)"
        )
    if width == 0:
        raise ArgumentError("weight has width 0; an additive score needs at least one entry")
    if weight.device != query.device:
        raise ArgumentError(f"weight is on {weight.device} but query is on {query.device}")
    return weight.expand(1, heads, width)


def _unpack(
    query: Tensor, key: Tensor, value: Tensor | None, cu_seqlens: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed [tokens, heads, width] as one batch entry [1, heads, tokens, width]."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor is not None and tensor.dim() != 3:
            raise ArgumentError(
                f"{name} has shape {list(tensor.shape)}; packed tensors are [tokens, heads, width]"
            )
    for name, ends in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True):
        if not isinstance(ends, Tensor):
            raise ArgumentTypeError(f"{name} must be a tensor, got {type(ends).__name__}")
        if ends.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(f"{name} is {ends.dtype}; it must be int32 or int64")
        if ends.dim() != 1 or ends.shape[0] < 1:
            raise ArgumentError(f"{name} has shape {list(ends.shape)}; it must be [sequences + 1]")
        if ends.device != query.device:
            raise ArgumentError(f"{name} is on {ends.device} but query is on {query.device}")
    if cu_seqlens[0].shape != cu_seqlens[1].shape:
        raise ArgumentError(
            f"cu_seqlens_q names {cu_seqlens[0].shape[0] - 1} sequences but cu_seqlens_k "
            f"{cu_seqlens[1].shape[0] - 1}"
        )

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).unsqueeze(0)

    return unpack(query), unpack(key), None if value is None else unpack(value)
