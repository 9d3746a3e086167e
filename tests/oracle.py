"""The definitions of DESIGN.md as dense float64 sums, with no concern for speed or memory.

Written from the text of the contract alone: it shares no line with the library, so a mistake in
one of them shows as a disagreement.  `attend` is differentiable; `diagnose` follows the list of
vitals field by field; the packed twins cut the tokens into sequences and call those two.
Dimensions: H query heads, G key heads, Q queries, K keys, D width of q and k, V width of v.
"""

import math
from itertools import pairwise
from types import SimpleNamespace

import torch

FLOAT_FIELDS = [
    "max_logit",
    "logit_mean",
    "logit_std",
    "row_std",
    "entropy",
    "entropy_ratio",
    "sum_p2",
    "passes",
    "top_p",
    "saturated",
    "sink",
    "off",
    "q_rms",
    "k_rms",
]
COUNT_FIELDS = ("rows", "pairs", "nonfinite")
LIKE_INFINITY = 1e6  # a bias of this size swallows the score in float32 and float64 alike
ROW_FIELDS = ("max_logit", "lse", "entropy", "top_p", "sum_p2")


def attend(
    query,
    key,
    value,
    attn_mask=None,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    compute=torch.float64,
    keep=None,
    products=None,
    noise=None,
    **keywords,
):
    """softmax(scores) @ value in the type `compute`; rows without an allowed key are zero.

    keep multiplies the weights: 0 or 1 / (1 - dropout). products is a type of fewer digits to which
    factors and results of the matrix products are rounded, as a kernel for tensor cores does.
    noise=(eps, generator, far) moves every sum, there and in the gradient, at random and as far as
    a sum rounded to eps in some order may be off; and a row's weights in the gradient by eps of its
    lse, up to `far`, as where they are made again as e^(logit - lse). With a fourth of True each
    weight is moved by itself, as where the logit is rounded in another order, too. With products
    and noise what is rounded to the type of fewer digits is off by as much at random.
    """
    scene = _scene(query, key, attn_mask, is_causal, scale, enable_gqa, compute=compute, **keywords)
    value = value.to(compute)
    if enable_gqa and value.dim() > 2:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
    rounding = _Rounding(compute, products, noise)
    factor = scene.factor.detach().abs()
    scores = factor * _terms(scene), (scene.logits - scene.bias).detach()
    lost = rounding.of_sum(*scores, query.shape[-1], scene.logits + scene.bias)
    argument = scene.argument + lost
    weights, _, lse = _softmax(argument, scene.visible, scene.sinks)
    dropped = weights if keep is None else weights * keep.to(compute)
    used = dropped + rounding.of_factor(dropped)
    finite = torch.where(value.isfinite(), value, 0)
    seen = scene.visible.to(compute) @ (~value.isfinite()).to(compute) > 0
    out = used @ finite
    if noise is not None and argument.requires_grad:
        by_lse = (
            rounding.of_lse(lse, used.shape[-1]) * used.detach()
        ) @ finite  # the weights as the gradient has them
        out = used @ finite.detach() + by_lse - by_lse.detach()
    lost = rounding.of_sum(used.detach() @ finite.detach().abs(), out.detach(), value.shape[-2])
    out = (out + lost).masked_fill(seen, math.nan)
    if argument.requires_grad and (products or noise):
        rounding.enter_backward(out, dropped, argument, weights.detach(), finite.detach())
        if scene.capped is not scene.scores and scene.scores.requires_grad:
            rounding.enter_slope(scene.capped, scene.scores)
    return out


class _Rounding:
    """Errors of rounding: zeros, those of a type of fewer digits, or random ones."""

    def __init__(self, compute, products, noise):
        self.compute, self.products = compute, products
        self.eps, self.generator, self.far, *each = noise or (0.0, None, 0.0)
        self.each = any(each)
        self.row = 1.0

    def of_factor(self, x):
        """Of one factor of a product."""
        x = x.detach()
        if self.products is not None and self.generator is not None:  # another rounding's luck
            drawn = torch.rand(x.shape, dtype=x.dtype, generator=self.generator)
            return torch.finfo(self.products).eps * x * (drawn - 0.5)
        if self.products is not None:
            return x.to(self.products).to(x.dtype) - x
        return self.eps * x * self._normal(x.shape)

    def of_sum(self, terms, result, count, more=0.0):
        """Of a running sum: errors that add up like a random walk.

        Each is as large as the partial sum: that reaches the result where all terms have one sign,
        and the root of the sum of their squares where signs are mixed.
        """
        if not self.eps:
            return torch.zeros((), dtype=self.compute)
        size = 0.5 * terms + 0.3 * math.sqrt(count) * result.abs()
        size = (size + torch.as_tensor(more).abs()).detach().nan_to_num(0.0, 0.0, 0.0)
        return self.eps * size * self._normal(size.shape)

    def of_lse(self, lse, keys):
        """Draw by what each row's weights are multiplied in the gradient."""
        size = lse.detach().abs().clamp(max=self.far).nan_to_num(0.0)[..., None]
        size = size.expand(*lse.shape, keys if self.each else 1)
        self.row = 1 + self.eps * size * self._normal(size.shape)
        return self.row

    def enter_backward(self, out, dropped, argument, weights, value):
        """Round dP and dS; let the rows of dS sum to the rounding of dO . O."""
        plain, count = out.detach(), out.shape[-1]  # a hook that holds its tensor is never freed
        lost, shifts = self.of_factor(plain), []

        def at_output(grad):
            grad = grad.nan_to_num(0.0, 0.0, 0.0)
            shift = (grad * lost).sum(-1, keepdim=True)
            delta = (grad * plain).sum(-1, keepdim=True)
            terms = (grad * plain).abs().sum(-1, keepdim=True)
            shifts.append((shift + self.of_sum(terms, delta, count), grad))

        def at_weights(grad):
            terms = shifts[-1][1].abs() @ value.abs().mT
            grad = grad + self.of_sum(terms, grad, count)
            return grad if self.products is None else grad + self.of_factor(grad)

        def at_argument(grad):
            grad = (grad - weights * shifts[-1][0]) * self.row
            return grad + self.of_factor(grad)

        out.register_hook(at_output)
        dropped.register_hook(at_weights)
        argument.register_hook(at_argument)

    def enter_slope(self, capped, scores):
        """Round the slope of a cap, 1 - tanh^2, to eps of 1: near 0 it has no digits left."""
        received = []
        capped.register_hook(received.append)
        scores.register_hook(lambda grad: grad + self.eps * received[-1] * self._normal(grad.shape))

    def _normal(self, shape):
        return torch.randn(shape, dtype=self.compute, generator=self.generator)


def diagnose(
    query,
    key,
    attn_mask=None,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    compute=torch.float64,
    **keywords,
):
    """Every field of Vitals, and `per_row`; `reach` is the size of what went into one logit."""
    scene = _scene(query, key, attn_mask, is_causal, scale, enable_gqa, compute=compute, **keywords)
    allowed = scene.visible & ~scene.called_masked
    broken = (allowed & ~scene.logits.isfinite()).any(-1)
    counted = allowed.any(-1) & ~broken
    allowed = allowed & counted[..., None]

    logits = scene.logits.masked_fill(~allowed, 0)
    n = allowed.sum(-1)
    weights, off, lse = _softmax(scene.argument, allowed, scene.sinks)
    row_mean = logits.sum(-1) / n.clamp(min=1)
    row_variance = (logits - row_mean[..., None]).square().masked_fill(~allowed, 0).sum(
        -1
    ) / n.clamp(min=1)
    outcomes = n if scene.sinks is None else n + 1
    entropy = -(torch.special.xlogy(weights, weights).sum(-1) + torch.special.xlogy(off, off))
    sum_p2 = weights.square().sum(-1) + off.square()
    top_p = weights.amax(-1) if weights.shape[-1] else torch.zeros_like(entropy)
    row_max = logits.masked_fill(~allowed, -math.inf)
    row_max = row_max.amax(-1) if weights.shape[-1] else torch.full_like(entropy, -math.inf)
    first_p = weights[..., 0] if weights.shape[-1] else torch.zeros_like(entropy)

    def mean(x, over=counted):
        return (x * over).sum(-1) / over.sum(-1).clamp(min=1)

    pairs = n.sum(-1)
    logit_mean = logits.sum((-1, -2)) / pairs.clamp(min=1)
    spread = (logits - logit_mean[..., None, None]).square().masked_fill(~allowed, 0)
    rows = counted.sum(-1)
    mean_p2 = mean(sum_p2)
    hide = [(~counted, 0.0), (broken, math.nan)]
    return SimpleNamespace(
        max_logit=row_max.amax(-1)
        if row_max.shape[-1]
        else torch.full(rows.shape, -math.inf, dtype=compute),
        logit_mean=logit_mean,
        logit_std=(spread.sum((-1, -2)) / pairs.clamp(min=1)).sqrt(),
        row_std=mean(row_variance).sqrt(),
        entropy=mean(entropy),
        entropy_ratio=mean(
            entropy / outcomes.clamp(min=2).to(compute).log(), counted & (outcomes > 1)
        ),
        sum_p2=mean_p2,
        passes=(1 - mean_p2).masked_fill(rows == 0, 0),
        top_p=mean(top_p),
        saturated=mean((top_p > 0.99).to(compute)),
        sink=mean(first_p),
        off=mean(off),
        q_rms=_rms(scene.query, counted[..., None]),
        k_rms=_rms(scene.key, scene.within_length),
        rows=rows,
        pairs=pairs,
        nonfinite=broken.sum(-1),
        per_row=SimpleNamespace(
            max_logit=_filled(row_max, [(~counted, -math.inf), (broken, math.nan)]),
            lse=_filled(lse, [(~counted, -math.inf), (broken, math.nan)]),
            entropy=_filled(entropy, hide),
            top_p=_filled(top_p, hide),
            sum_p2=_filled(sum_p2, hide),
        ),
        reach=_reach(scene, allowed),
        output_reach=_reach(scene, scene.visible & (scene.bias.abs() < LIKE_INFINITY)),
        keys=weights.shape[-1],
    )


def attend_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, **keywords):
    """[tokens, heads, width], sequence by sequence."""
    pieces = [
        attend(q, k, v, **keywords).transpose(0, 1)
        for q, k, v in zip(
            _cut(query, cu_seqlens_q),
            _cut(key, cu_seqlens_k),
            _cut(value, cu_seqlens_k),
            strict=True,
        )
    ]
    heads, width = query.shape[1], value.shape[-1]
    return torch.cat([torch.zeros(0, heads, width, dtype=torch.float64), *pieces])


def diagnose_packed(query, key, cu_seqlens_q, cu_seqlens_k, **keywords):
    """Fields [sequences, heads]; per_row fields [heads, tokens]."""
    pieces = [
        diagnose(q, k, **keywords)
        for q, k in zip(_cut(query, cu_seqlens_q), _cut(key, cu_seqlens_k), strict=True)
    ]
    none = torch.zeros(0, query.shape[1], dtype=torch.float64)
    whole = none.long()
    stacked = {
        name: torch.stack([getattr(p, name) for p in pieces]) if pieces else empty
        for names, empty in ((FLOAT_FIELDS, none), (COUNT_FIELDS, whole))
        for name in names
    }
    per_row = {
        name: torch.cat([none.T, *(getattr(p.per_row, name) for p in pieces)], -1)
        for name in ROW_FIELDS
    }
    return SimpleNamespace(
        **stacked,
        per_row=SimpleNamespace(**per_row),
        reach=max([p.reach for p in pieces], default=0.0),
        keys=max([p.keys for p in pieces], default=0),
        pieces=pieces,
    )


def _scene(
    query,
    key,
    attn_mask,
    is_causal,
    scale,
    enable_gqa,
    *,
    compute,
    window=None,
    causal_align="top_left",
    softcap=None,
    sinks=None,
    key_lengths=None,
    num_heads=None,
    weight=None,
):
    """The dense matrices of one call: logits, softmax argument, and who may see whom."""
    q, k = query.to(compute), key.to(compute)
    if enable_gqa and k.dim() > 2:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    queries, keys, width = q.shape[-2], k.shape[-2], q.shape[-1]
    q, k = q.expand(*lead, queries, width), k.expand(*lead, keys, width)

    visible, within_length = _visible(
        lead, queries, keys, is_causal, window, causal_align, key_lengths
    )
    bias = torch.zeros((), dtype=compute)
    called_masked = torch.zeros((), dtype=torch.bool)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        visible = visible & (attn_mask != -math.inf)
        called_masked = attn_mask <= torch.finfo(attn_mask.dtype).min / 2
        bias = attn_mask.to(compute)
    bias = bias.expand(*lead, queries, keys)

    if scale is None and weight is not None:
        scale = 1.0
    factor = _factor(scale, width, num_heads, visible.sum(-1), compute)
    # An entry that no row may use must not reach the sums: 0 * NaN is NaN.
    if weight is not None:
        weight = weight.to(compute)[..., None, None, :]
        scores = factor * (weight * torch.tanh(q[..., None, :] + k[..., None, :, :])).sum(-1)
    elif width:
        scores = factor * (q @ k.transpose(-1, -2))
    else:
        scores = torch.zeros(*lead, queries, keys, dtype=compute)
    scores = scores.masked_fill(~visible, 0)
    bias = bias.masked_fill(~visible, 0)
    capped = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return SimpleNamespace(
        query=q,
        key=k,
        factor=factor,
        weight=weight,
        scores=scores,
        capped=capped,
        bias=bias,
        visible=visible,
        within_length=within_length,
        called_masked=called_masked,
        logits=scores + bias,
        argument=capped + bias,
        sinks=None if sinks is None else sinks.to(compute)[:, None, None],
    )


def _visible(lead, queries, keys, is_causal, window, causal_align, key_lengths):
    """[*lead, Q, K]: allowed by causality, window, length; and [*lead, K, 1]: by length alone."""
    j = torch.arange(keys)
    lengths = torch.tensor(keys) if key_lengths is None else key_lengths[..., None, None, None]
    diagonal = torch.arange(queries)[:, None]
    if causal_align == "bottom_right":
        diagonal = diagonal + (lengths - queries)
    visible = j < lengths
    if is_causal:
        visible = visible & (j <= diagonal)
    left, right = window or (None, None)
    if left is not None:
        visible = visible & (j >= diagonal - left)
    if right is not None:
        visible = visible & (j <= diagonal + right)
    within = (j < lengths).expand(*lead, 1, keys).transpose(-1, -2)
    return visible.expand(*lead, queries, keys), within


def _factor(scale, width, num_heads, visible_keys, compute):
    """The scale as something that multiplies [..., H, Q, K]."""
    if isinstance(scale, torch.Tensor):
        return scale.to(compute).reshape(-1, 1, 1) if scale.dim() else scale.to(compute)
    if isinstance(scale, int | float):
        return torch.tensor(scale, dtype=compute)
    root = math.sqrt(width) or 1.0
    if scale == "log_n":
        return visible_keys.clamp(min=1).to(compute).log()[..., None] / root
    rules = {None: root, "sqrt_dk": root, "dk": width or 1, "none": 1.0}
    if scale == "sqrt_dmodel":
        rules[scale] = math.sqrt(width * num_heads) or 1.0
    return torch.tensor(1 / rules[scale], dtype=compute)


def _softmax(argument, allowed, sinks):
    """Weights of the keys, of the sink, and lse; rows with no allowed key weigh nothing.

    Nor do rows whose logits are all -inf by their own numbers: torch takes them for masked.
    """
    some = (allowed & (argument != -math.inf)).any(-1)
    sink = argument.new_full((*argument.shape[:-1], 1), -math.inf)
    if sinks is not None:
        sink = sinks.expand_as(sink)
    outcomes = torch.cat([argument.masked_fill(~allowed, -math.inf), sink], -1)
    # Rows with nothing allowed take a harmless stand-in, so that no NaN enters the gradient.
    outcomes = torch.where(some[..., None], outcomes, torch.zeros_like(outcomes))
    lse = torch.logsumexp(outcomes, -1)
    weights = torch.softmax(outcomes, -1) * some[..., None]
    return weights[..., :-1] * allowed, weights[..., -1], lse


def _reach(scene, allowed):
    """The largest sum of absolute terms behind one logit: its rounding is eps times this."""
    size = scene.factor.abs() * _terms(scene) + scene.bias.abs()
    size = torch.where(allowed & size.isfinite(), size, 0)
    reach = size.max().item() if size.numel() else 0.0
    return (
        reach
        if scene.sinks is None or not scene.sinks.numel()
        else max(reach, scene.sinks.abs().max().item())
    )


def _terms(scene):
    """The sum of the absolute terms of each score, before the scale."""
    if scene.weight is None:
        return scene.query.detach().abs() @ scene.key.detach().abs().transpose(-1, -2)
    return scene.weight.detach().abs().sum(-1).expand(scene.logits.shape)  # a tanh is at most 1


def _rms(x, over):
    """Root mean square of the finite entries of x [..., n, D] within `over` [..., n, 1]."""
    keep = over & x.isfinite()
    return (x.masked_fill(~keep, 0).square().sum((-1, -2)) / keep.sum((-1, -2)).clamp(min=1)).sqrt()


def _filled(x, fills):
    for where, with_what in fills:
        x = x.masked_fill(where, with_what)
    return x


def _cut(packed, cu_seqlens):
    """Sequences as [heads, tokens, width]."""
    ends = cu_seqlens.tolist()
    return [packed[a:b].transpose(0, 1) for a, b in pairwise(ends)]
