"""How the keys of all ranks reach the rows of each.

Ring: every rank computes with the keys it has while they travel on to the next rank; after R rounds
all have met all. A rank holds two shards of keys at a time. Gathered: one collective brings all
keys to everybody, then one round of computing; simpler, fewer messages, R times the memory.

Gradients of keys and values go the same way back, summed in the compute type.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from scaledot.distributed.group import Ranks, all_bytes
from scaledot.distributed.layout import Segment, Shard, tokens_of


class Round(NamedTuple):
    """Keys that have arrived: whose they are in the sequence, [B, G, K, D], [B, G, K, V]."""

    shard: Shard
    key: Tensor
    value: Tensor | None


Differentiate = Callable[[Round], tuple[Tensor, Tensor]]


class Ring:
    overlap = True  # False: wait for each message before computing, to measure what overlap gains

    def __init__(self, ranks: Ranks, shards: Sequence[Shard], key: Tensor, value: Tensor | None):
        self.ranks, self.shards, self.key, self.value = ranks, shards, key, value

    def rounds(self) -> Iterator[Round]:
        """The rank's own keys first, then those of the ranks before it, one after the other."""
        ranks = self.ranks
        flat = _packed(self.key, self.value)
        for step in range(ranks.size):
            owner = (ranks.rank - step) % ranks.size
            coming = None
            if step + 1 < ranks.size:
                coming = self._pass_on(flat, owner - 1)
            if coming is not None and not self.overlap:
                coming.wait()
            yield Round(self.shards[owner], *self._unpacked(flat, owner))
            if coming is not None:
                flat = coming.wait()

    def gradients(self, differentiate: Differentiate) -> tuple[Tensor, Tensor]:
        """Each shard's sums follow its keys around the ring, a round behind, and come home."""
        ranks, coming, flat = self.ranks, None, None
        for step, here in enumerate(self.rounds()):
            flat = _packed(*differentiate(here))
            if coming is not None:
                flat += coming.wait()
            if ranks.size > 1:
                coming = self._pass_on(flat, ranks.rank - step - 1)
        if coming is not None:
            flat = coming.wait()
        assert flat is not None
        key, value = self._unpacked(flat, ranks.rank)
        assert value is not None
        return key, value

    def _pass_on(self, flat: Tensor, owner: int) -> "Coming":
        """Send to the next rank, receive what the one before has: the shard of `owner`."""
        key, value = self._shapes(owner % self.ranks.size)
        numbers = key.numel() + (0 if value is None else value.numel())
        return Coming(self.ranks, flat, flat.new_empty(max(numbers, 1)))

    def _shapes(self, owner: int) -> tuple[torch.Size, torch.Size | None]:
        tokens = tokens_of(self.shards[owner])
        batch, groups, _, width = self.key.shape
        key = torch.Size((batch, groups, tokens, width))
        if self.value is None:
            return key, None
        return key, torch.Size((batch, groups, tokens, self.value.shape[-1]))

    def _unpacked(self, flat: Tensor, owner: int) -> tuple[Tensor, Tensor | None]:
        key, value = self._shapes(owner)
        end = key.numel()
        if value is None:
            return flat[:end].view(key), None
        return flat[:end].view(key), flat[end : end + value.numel()].view(value)


class Coming:
    """A message on its way to the next rank and one from the rank before."""

    def __init__(self, ranks: Ranks, flat: Tensor, room: Tensor) -> None:
        self.device = flat.device
        place = ranks.meeting_place(self.device)
        self.flat, self.room = flat.to(place), room.to(place)  # alive until both have arrived
        send, receive = self.flat.view(torch.uint8), self.room.view(torch.uint8)
        self._works: list[Any] | None = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send, ranks.neighbour(1), group=ranks.group),
                dist.P2POp(dist.irecv, receive, ranks.neighbour(-1), group=ranks.group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works or ():
            work.wait()
        self._works = None
        return self.room.to(self.device)


class Gathered:
    def __init__(self, ranks: Ranks, shards: Sequence[Shard], key: Tensor, value: Tensor | None):
        self.ranks, self.shards, self.key, self.value = ranks, shards, key, value
        self.longest = max(tokens_of(shard) for shard in shards)
        self.tokens = sum(tokens_of(shard) for shard in shards)

    def rounds(self) -> Iterator[Round]:
        """All keys in the order of the sequence, once."""
        both = self.key if self.value is None else torch.cat([self.key, self.value], -1)
        padded = both.new_zeros(*both.shape[:2], self.longest, both.shape[-1])
        padded[:, :, : both.shape[2]] = both
        everybodys = all_bytes(self.ranks, padded)
        whole = both.new_empty(*both.shape[:2], self.tokens, both.shape[-1])
        for rank, place, segment in self._places():
            part = everybodys[rank, :, :, place : place + segment.length]
            whole[:, :, segment.start : segment.start + segment.length] = part
        width = self.key.shape[-1]
        value = None if self.value is None else whole[..., width:]
        yield Round((Segment(0, self.tokens),), whole[..., :width], value)

    def gradients(self, differentiate: Differentiate) -> tuple[Tensor, Tensor]:
        (here,) = self.rounds()
        whole = torch.cat(differentiate(here), -1)
        shape = (self.ranks.size, *whole.shape[:2], self.longest, whole.shape[-1])
        parts = whole.new_zeros(shape)
        for rank, place, segment in self._places():
            part = whole[:, :, segment.start : segment.start + segment.length]
            parts[rank, :, :, place : place + segment.length] = part
        place = self.ranks.meeting_place(parts.device)
        own = parts.new_empty(shape[1:], device=place)
        if own.numel():
            dist.reduce_scatter(own, list(parts.to(place)), group=self.ranks.group)
        own = own[:, :, : self.key.shape[2]].to(parts.device)
        width = self.key.shape[-1]
        return own[..., :width], own[..., width:]

    def _places(self) -> Iterator[tuple[int, int, Segment]]:
        """Every segment: whose it is, and where in the rank's shard."""
        for rank, shard in enumerate(self.shards):
            place = 0
            for segment in shard:
                yield rank, place, segment
                place += segment.length


METHODS: dict[str, type[Ring] | type[Gathered]] = {"ring": Ring, "all_gather": Gathered}


def _packed(key: Tensor, value: Tensor | None) -> Tensor:
    """One message; never empty, which not every backend sends."""
    parts = [key.reshape(-1)] if value is None else [key.reshape(-1), value.reshape(-1)]
    flat = torch.cat(parts)
    return flat if flat.numel() else flat.new_zeros(1)
