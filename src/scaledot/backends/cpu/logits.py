"""The logits of a tile, the same for every pass over them: forward, vitals, backward."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from scaledot.backends.cpu import additive
from scaledot.backends.cpu.tiles import (
    Block,
    Fringe,
    Slab,
    blocks,
    fringe,
    key_tiles,
    packed_slabs,
    slabs,
)
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings


class Plan:
    """Shapes, views and scales that every tile of a call shares."""

    def __init__(self, inputs: Inputs, settings: Settings) -> None:
        query, key = inputs.query, inputs.key
        if inputs.sinks is not None:  # a sink of +inf would quietly take everything: show it
            inputs = inputs._replace(
                sinks=inputs.sinks.masked_fill(inputs.sinks == math.inf, math.nan)
            )
        self.inputs, self.settings = inputs, settings
        self.batch, self.heads, self.queries, self.width = query.shape
        self.groups, self.keys = key.shape[1], key.shape[2]
        self.repeats = self.heads // self.groups if self.groups else 0
        self.dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.packed = inputs.cu_seqlens_q is not None
        self.slabs: list[Slab]
        if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
            ends = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
            self.slabs = packed_slabs(settings, self.queries, self.keys, *ends)
        else:
            self.slabs = slabs(settings, self.batch, self.queries, self.keys, inputs.key_lengths)
        self.query = self.by_group(query)  # [B, G, repeats, Q, D]
        self.mask = None if inputs.mask is None else self.by_group(inputs.mask)
        self.bool_mask = inputs.mask is not None and inputs.mask.dtype == torch.bool
        self.biased = inputs.mask is not None and not self.bool_mask
        # A bias this low means «masked» to the models that use it; the statistics agree.
        self.unread_below = (
            torch.finfo(inputs.mask.dtype).min / 2
            if inputs.mask is not None and self.biased
            else -math.inf
        )
        self.factor = self._row_factor()
        self.buffers: dict[str, Tensor] = {}
        self.fringes: dict[tuple, Fringe] = {}

    def blocks(self) -> list[Block]:
        if not (self.batch and self.groups and self.queries and self.repeats):
            return []
        return list(blocks(self.slabs, self.groups, self.repeats))

    def by_group(self, tensor: Tensor) -> Tensor:
        """[B, H, ...] as [B, G, repeats, ...]; one head for all stays one."""
        if tensor.shape[1] == 1 and self.heads != 1:
            return tensor.unsqueeze(1)
        return tensor.unflatten(1, (self.groups, self.repeats))

    def take(self, tensor: Tensor, block: Block) -> Tensor:
        """The block's rows of a tensor [B|1, G|1, repeats|1, Q|1, ...], sizes of 1 kept."""
        batch = block.batch if tensor.shape[0] != 1 else slice(None)
        groups = block.groups if tensor.shape[1] != 1 else slice(None)
        rows = slice(block.row, block.row_end) if tensor.shape[3] != 1 else slice(None)
        return tensor[batch, groups, :, rows]

    def query_rows(self, block: Block) -> Tensor:
        """The block's queries [heads, repeats * rows, D]; times their scale where q.k is next."""
        rows = self.query[block.batch, block.groups, :, block.row : block.row_end].to(self.dtype)
        if self.inputs.weight is None:
            rows = rows * self.take_factor(block)
        return rows.reshape(
            rows.shape[0] * rows.shape[1], rows.shape[2] * rows.shape[3], self.width
        )

    def take_factor(self, block: Block) -> float | Tensor:
        return self.take(self.factor, block) if isinstance(self.factor, Tensor) else self.factor

    def take_keys(self, tensor: Tensor, block: Block, key: int, key_end: int) -> Tensor:
        """The block's keys or values [heads, keys, width] in the compute type."""
        part = tensor[block.batch, block.groups, key:key_end]
        heads = part.shape[0] * part.shape[1]
        return part.reshape(heads, key_end - key, part.shape[-1]).to(self.dtype)

    def tiles(self, block: Block) -> Iterator["Tile"]:
        for key, key_end in key_tiles(block):
            mask = hidden = None
            if self.mask is not None:
                mask = self.take_mask(block, key, key_end)
                hidden = ~mask if self.bool_mask else mask == -math.inf
            yield Tile(block, key, key_end, self._fringe(block, key, key_end), mask, hidden)

    def _fringe(self, block: Block, key: int, key_end: int) -> Fringe:
        """Blocks of the same shape and place relative to the diagonal share their edges."""
        shift = block.row + block.diagonal.offset
        where = (shift - key, block.row_end - block.row, key_end - key, block.diagonal.left)
        low, high = block.diagonal.low(block.row_end - 1), block.diagonal.high(block.row)
        place = (*where, block.diagonal.right, low - key, high - key)
        if place not in self.fringes:
            self.fringes[place] = fringe(block, key, key_end)
        return self.fringes[place]

    def scores_of(self, query: Tensor, tile: "Tile") -> Tensor:
        """scale * q.k of a tile [batch, groups, repeats, rows, keys], in a buffer used again."""
        block = tile.block
        keys = self.take_keys(self.inputs.key, block, tile.key, tile.key_end)
        shape = (
            block.batch.stop - block.batch.start,
            block.groups.stop - block.groups.start,
            self.repeats,
            block.row_end - block.row,
            tile.key_end - tile.key,
        )
        scores = self._buffer("scores", math.prod(shape))
        flat = scores.view(keys.shape[0], -1, shape[-1])
        if self.inputs.weight is None:
            torch.bmm(query, keys.transpose(1, 2), out=flat)
            return scores.view(shape)
        additive.fill_scores(flat, query, keys, self.take_weight(block))
        return scores.view(shape).mul_(self.take_factor(block))

    def unscaled_scores(self, query: Tensor, tile: "Tile") -> Tensor:
        """The additive score before its scale, in memory of its own."""
        block = tile.block
        keys = self.take_keys(self.inputs.key, block, tile.key, tile.key_end)
        scores = torch.empty(query.shape[0], query.shape[1], keys.shape[1], dtype=self.dtype)
        additive.fill_scores(scores, query, keys, self.take_weight(block))
        heads = (block.batch.stop - block.batch.start, block.groups.stop - block.groups.start)
        return scores.view(*heads, self.repeats, block.row_end - block.row, -1)

    def take_weight(self, block: Block) -> Tensor:
        """The additive score's weight for each of the block's rows, [heads, repeats * rows, D]."""
        assert self.inputs.weight is not None
        weight = self.by_group(self.inputs.weight.to(self.dtype).unsqueeze(2))
        part = self.take(weight, block)  # [batch|1, groups|1, repeats|1, 1, D]
        heads = (block.batch.stop - block.batch.start, block.groups.stop - block.groups.start)
        part = part.expand(*heads, self.repeats, block.row_end - block.row, self.width)
        return part.reshape(heads[0] * heads[1], -1, self.width)

    def exponentials_of(self, arguments: Tensor) -> Tensor:
        """e^a in a second buffer."""
        weights = self._buffer("weights", arguments.numel()).view(arguments.shape)
        return torch.exp(arguments, out=weights)

    def make_arguments(self, scores: Tensor, tile: "Tile", hidden_as: float = -math.inf) -> None:
        """Scores to what the softmax takes, in place: cap, bias, hidden pairs far below."""
        cap = self.settings.softcap
        if cap:
            scores.div_(cap).tanh_().mul_(cap)
        if self.biased:
            assert tile.mask is not None
            scores.add_(tile.mask)
        tile.hide(scores, hidden_as)

    def _buffer(self, name: str, size: int) -> Tensor:
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.dtype)
        return self.buffers[name][:size]

    def take_sinks(self, block: Block) -> Tensor:
        """The block's learned sinks [batch, groups, repeats, 1]."""
        assert self.inputs.sinks is not None
        sinks = self.by_group(self.inputs.sinks.to(self.dtype).unsqueeze(-1).unsqueeze(-1))
        return self.take(sinks, block).squeeze(-1)

    @property
    def hides_pairs(self) -> bool:
        settings = self.settings
        return (
            self.mask is not None
            or settings.left is not None
            or settings.right is not None
            or self.packed
            or any(part.diagonal.keys < self.keys for part in self.slabs)
        )

    def take_mask(self, block: Block, key: int, key_end: int) -> Tensor:
        assert self.mask is not None
        part = self.take(self.mask, block)
        return part[..., key:key_end] if self.mask.shape[-1] != 1 else part

    def _row_factor(self) -> float | Tensor:
        """What multiplies the scores of a row: a number, or [B|1, G|1, repeats|1, Q|1, 1]."""
        if self.inputs.head_scale is not None:
            factor = self.inputs.head_scale.to(self.dtype) * self.settings.scale
            return self.by_group(factor.unsqueeze(-1).unsqueeze(-1))
        if not self.settings.log_n:
            return self.settings.scale
        seen = self.visible_counts().clamp(min=1).to(self.dtype).log() * self.settings.scale
        return self.by_group(seen.unsqueeze(-1))

    def all_counts(self) -> Tensor:
        """Keys that each row may see, [B, H, Q]."""
        return self.visible_counts().expand(self.batch, self.heads, self.queries)

    def visible_counts(self) -> Tensor:
        """Keys that enter each row's softmax, [B|1, H|1, Q]."""
        if self.mask is None:
            counts = torch.zeros(self.batch, 1, self.queries, dtype=torch.int64)
            for part in self.slabs:
                rows = slice(part.row, part.row_end)
                counts[part.start : part.stop, :, rows] = part.diagonal.counts(
                    part.row, part.row_end
                )
            return counts
        counts = torch.zeros(self.batch, self.groups, self.repeats, self.queries, dtype=torch.int64)
        for block in self.blocks():
            for key in range(block.key, block.key_end, 4096):
                key_end = min(key + 4096, block.key_end)
                mask = self.take_mask(block, key, key_end)
                seen = mask if self.bool_mask else mask > -math.inf
                shape = self.take(counts.unsqueeze(-1), block).shape[:-1]
                seen = seen.expand(*shape, key_end - key).clone()
                hide(seen, fringe(block, key, key_end), None, 0)
                self.take(counts.unsqueeze(-1), block).squeeze(-1).add_(seen.sum(-1))
        return counts.flatten(1, 2)


class Tile(NamedTuple):
    """A block's keys [key, key_end), and which of its pairs are hidden."""

    block: Block
    key: int
    key_end: int
    edges: Fringe  # hidden by the diagonal
    mask: Tensor | None  # bool or bias, broadcastable to the tile
    hidden: Tensor | None  # hidden by the mask

    def hide(self, scores: Tensor, fill: float) -> None:
        """Overwrite the hidden pairs."""
        hide(scores, self.edges, self.hidden, fill)


def hide(scores: Tensor, edges: Fringe, hidden: Tensor | None, fill: float) -> None:
    for columns, outside in edges:
        scores[..., columns].masked_fill_(outside, fill)
    if hidden is not None:
        scores.masked_fill_(hidden, fill)
