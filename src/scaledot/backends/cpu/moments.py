"""Mean and spread of each row's logits: sum z and sum z^2 over the keys that the row may see.

Without a mask tensor no pass over the scores is needed. With keys x_j = k_j - centre,

    sum_j (q.x_j)   = q . (sum_j x_j)
    sum_j (q.x_j)^2 = q^T (sum_j x_j x_j^T) q

so a running sum of keys and of their outer products serves every row; only the few keys in which
the rows of a chunk differ (the diagonal's edges) are scored one by one. With a mask tensor, or with
non-finite keys, the moments come from the tiles.
"""

import torch
from torch import Tensor

from scaledot.backends.cpu.logits import Plan, Tile
from scaledot.backends.cpu.tiles import Diagonal, Slab

CHUNK = 128  # rows that share one Gram matrix


def gram_moments(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """count, mean, sum of squared deviations of each row, [B, G, repeats, Q]; float64."""
    shape = (plan.batch, plan.groups, plan.repeats, plan.queries)
    device = plan.query.device
    mean = torch.zeros(shape, dtype=torch.float64, device=device)
    m2 = torch.zeros(shape, dtype=torch.float64, device=device)
    counts = torch.zeros(shape, dtype=torch.int64, device=device)
    for part in plan.slabs:
        place = (slice(part.start, part.stop), ..., slice(part.row, part.row_end))
        count = part.diagonal.counts(part.row, part.row_end).to(device)
        counts[place] = count
        if mean[place].numel() and part.diagonal.keys:
            mean[place], m2[place] = _slab_moments(plan, part, count)
    return counts, mean, m2


def _slab_moments(plan: Plan, part: Slab, count: Tensor) -> tuple[Tensor, Tensor]:
    span, diagonal = slice(part.start, part.stop), part.diagonal
    query = plan.query[span, :, :, part.row : part.row_end].flatten(0, 1)  # [heads, repeats, Q, D]
    keys = plan.inputs.key[span].flatten(0, 1)  # [heads, K, D]
    # Of keys that some row sees: what the others hold, unfilled memory perhaps, costs no digits.
    low, high = diagonal.low(part.row), diagonal.high(part.row_end - 1)
    if low >= high:
        low, high = diagonal.first, diagonal.last
    centre = keys[:, low:high].mean(1, keepdim=True, dtype=torch.float64)
    gram = RunningGram(keys, centre)
    firsts, seconds = [], []
    uniform = diagonal.left is None and diagonal.right is None
    step = max(4096 // plan.repeats, 1) if uniform else CHUNK
    for row in range(part.row, part.row_end, step):
        row_end = min(row + step, part.row_end)
        rows = query[:, :, row - part.row : row_end - part.row].double()
        rows = rows.flatten(1, 2)  # [heads, repeats * rows, D]
        first, second = _chunk_sums(gram, diagonal, rows, row, row_end, plan.repeats)
        firsts.append(first)
        seconds.append(second)
    shape = (part.stop - part.start, plan.groups, plan.repeats, part.row_end - part.row)
    first, second = torch.cat(firsts, -1).view(shape), torch.cat(seconds, -1).view(shape)
    number = count.clamp(min=1).double()
    offset = (query.double() @ centre.unsqueeze(1).mT).view(shape)
    factor = plan.factor
    if isinstance(factor, Tensor):
        batch = span if factor.shape[0] != 1 else slice(None)
        rows = slice(part.row, part.row_end) if factor.shape[3] != 1 else slice(None)
        factor = factor[batch, :, :, rows, 0].double()
    mean = torch.where(count > 0, offset + first / number, 0.0) * factor
    m2 = (second - first * first / number).clamp(min=0.0) * (factor * factor)
    return mean, m2


class RunningGram:
    """sum x and sum x x^T over the keys [start, stop), x = key - centre, in float64."""

    def __init__(self, keys: Tensor, centre: Tensor) -> None:
        heads, _, width = keys.shape
        self.keys, self.centre = keys, centre
        self.start = self.stop = 0  # no keys yet
        self.first = centre.new_zeros(heads, width, 1)
        self.second = centre.new_zeros(heads, width, width)

    def centred(self, start: int, stop: int) -> Tensor:
        return self.keys[:, start:stop].double() - self.centre

    def move(self, start: int, stop: int) -> None:
        """To the keys [start, stop), adding and taking away what differs."""
        if start >= self.stop:
            self.first.zero_()
            self.second.zero_()
            self.start = self.stop = start
        self._add(self.stop, stop, 1.0)
        self._add(self.start, start, -1.0)
        self.start, self.stop = start, stop

    def _add(self, start: int, stop: int, sign: float) -> None:
        for low in range(start, stop, 4096):
            keys = self.centred(low, min(low + 4096, stop))
            self.first.add_(keys.sum(1).unsqueeze(-1), alpha=sign)
            torch.baddbmm(self.second, keys.transpose(1, 2), keys, alpha=sign, out=self.second)


def _chunk_sums(
    gram: RunningGram, diagonal: Diagonal, rows: Tensor, row: int, row_end: int, repeats: int
) -> tuple[Tensor, Tensor]:
    """sum q.x and sum (q.x)^2 over each row's keys, [heads, repeats, rows]."""
    shape = (rows.shape[0], repeats, row_end - row)
    low, high = diagonal.low(row), diagonal.high(row_end - 1)
    core_low, core_high = diagonal.low(row_end - 1), diagonal.high(row)  # seen by every row
    first, second = rows.new_zeros(shape), rows.new_zeros(shape)
    if core_low < core_high:
        gram.move(core_low, core_high)
        first += torch.bmm(rows, gram.first).view(shape)
        second += torch.linalg.vecdot(torch.bmm(rows, gram.second), rows).view(shape)
        edges = [(low, core_low), (core_high, high)]
    else:
        edges = [(low, high)]
    index = torch.arange(row, row_end, device=rows.device).unsqueeze(1)
    for start, stop in edges:
        for key in range(start, stop, 1024):
            key_end = min(key + 1024, stop)
            scores = torch.bmm(rows, gram.centred(key, key_end).transpose(1, 2))
            scores = scores.view(*shape, key_end - key)
            columns = torch.arange(key, key_end, device=rows.device)
            if diagonal.right is not None:
                outside = columns > index + (diagonal.offset + diagonal.right)
                scores.masked_fill_(outside, 0.0)
            if diagonal.left is not None:
                outside = columns < index + (diagonal.offset - diagonal.left)
                scores.masked_fill_(outside, 0.0)
            first += scores.sum(-1)
            second += scores.square_().sum(-1)
    return first, second


class TileMoments:
    """The same moments from the logits themselves, tile after tile, by Chan's rule."""

    def __init__(self, plan: Plan, wide: bool) -> None:
        shape = (plan.batch, plan.groups, plan.repeats, plan.queries)
        self.wide = wide  # squares of scores would overflow the compute type
        self.count = torch.zeros(shape, dtype=torch.int64)
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.m2 = torch.zeros(shape, dtype=torch.float64)

    def add(self, logits: Tensor, tile: Tile, unread: Tensor | None) -> None:
        """logits [batch, groups, repeats, rows, keys], hidden and unread pairs at -inf."""
        block = tile.block
        place = (block.batch, block.groups, slice(None), slice(block.row, block.row_end))
        read = torch.ones(logits.shape, dtype=torch.bool)
        tile.hide(read, 0)
        if unread is not None:
            read.masked_fill_(unread, 0)
        skipped = read.logical_not_()
        number = logits.shape[-1] - skipped.sum(-1)
        divisor = number.clamp(min=1).double()
        values = logits.masked_fill(skipped, 0.0)
        if self.wide:
            values = values.double()
        mean = values.sum(-1, dtype=torch.float64) / divisor
        m2 = _squared_deviations(values, mean, skipped)
        if unread is not None and not self.wide and not torch.isfinite(m2).all():
            values = logits.masked_fill(skipped, 0.0).double()  # a bias may be of any size
            m2 = _squared_deviations(values, mean, skipped)
        before = self.count[place]
        total = before + number
        share = number / total.clamp(min=1).double()
        delta = mean - self.mean[place]
        self.mean[place] += delta * share
        self.m2[place] += m2 + delta * delta * (share * before)
        self.count[place] = total

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.mean, self.m2


def _squared_deviations(values: Tensor, mean: Tensor, skipped: Tensor) -> Tensor:
    """Their sum in each row; the values are used up."""
    deviation = values.sub_(mean.unsqueeze(-1).to(values.dtype)).masked_fill_(skipped, 0.0)
    return deviation.square_().sum(-1, dtype=torch.float64)
