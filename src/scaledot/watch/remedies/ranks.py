"""The ranks of a run: what they tell each other, and the largest logits of all of them.

Each measured step costs one collective, a packed maximum. Before the first one the ranks meet:
each says which layers it has, by what their weights hold. Ranks whose layer has the same name and
the same weights (data and context parallel) hold the same heads and share their maxima; shards of
heads (tensor parallel) and other layers of the same name (pipeline) have entries of their own.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from scaledot.watch.late import Late

BY_WEIGHTS, AT_CALL, REFUSED = "weights", "call", "refused"


@dataclass(frozen=True)
class Said:
    """Of one layer by one rank."""

    layer: str
    identity: str  # of its weights
    heads: int  # that the rank computes
    share: tuple[int, int]  # which part of how many of the layer's heads
    way: str
    recipe: str  # equal where the same rows would be scaled
    values: tuple[str, ...]  # of the parameters that would be scaled
    words: str  # how, or why not

    @staticmethod
    def read(told: dict[str, Any]) -> "Said":
        lists: dict[str, Any] = {name: tuple(told[name]) for name in ("share", "values")}
        return Said(**{**told, **lists})

    def same_heads(self, other: "Said") -> bool:
        return (self.layer, self.identity, self.heads) == (other.layer, other.identity, other.heads)


@dataclass(frozen=True)
class Entry:
    """Heads that some ranks hold, and where their maxima lie in what is exchanged."""

    said: Said  # agreed
    first: int
    ranks: tuple[int, ...]

    @property
    def places(self) -> slice:
        return slice(self.first, self.first + self.said.heads)


class Ranks:
    """One process, or all of a job; all of them call each method in the same order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._mine: dict[str, Entry] = {}  # those of this rank, by layer
        self._late: Late | None = None  # whether a rank had something new in the last step
        self._device = torch.device("cpu")

    @property
    def number(self) -> int:
        distributed = torch.distributed
        there = distributed.is_available() and distributed.is_initialized()
        return distributed.get_world_size() if there else 1

    @property
    def mine(self) -> int:
        return torch.distributed.get_rank() if self.number > 1 else 0

    def told(self, message: Any) -> list[Any]:
        """What every rank says, in their order; anything that JSON knows."""
        text = json.dumps(message).encode()
        if self.number == 1:
            return [json.loads(text)]
        device = _device_of_messages()
        length = torch.tensor([len(text)], device=device)
        lengths = [torch.zeros_like(length) for _ in range(self.number)]
        torch.distributed.all_gather(lengths, length)
        sizes = [int(one) for one in lengths]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        mine = mine.to(device)
        all_of_them = [torch.empty_like(mine) for _ in range(self.number)]
        torch.distributed.all_gather(all_of_them, mine)
        pairs = zip(all_of_them, sizes, strict=True)
        return [json.loads(one[:size].cpu().numpy().tobytes()) for one, size in pairs]

    def meet(self, layers: Iterable[Said], device: torch.device | None = None) -> None:
        """Everybody's new layers, agreed upon, become entries. device: of the maxima."""
        mine = [asdict(one) for one in layers]
        told = self.told({"layers": mine, "device": device.type if device is not None else ""})
        said = [
            (rank, Said.read(layer)) for rank, one in enumerate(told) for layer in one["layers"]
        ]
        if kinds := {one["device"] for one in told} - {"", "cpu"}:
            self._device = torch.device(kinds.pop(), torch.accelerator.current_device_index())
        known = [(rank, one) for rank, one in said if not self._joined(rank, one)]
        while known:
            first = known[0][1]
            alike = [(rank, one) for rank, one in known if one.same_heads(first)]
            others = [one for _, one in said if one.layer == first.layer]
            others = [one for one in others if not one.same_heads(first)]
            self._add(_agreed([one for _, one in alike], others), tuple(r for r, _ in alike))
            known = [(rank, one) for rank, one in known if not one.same_heads(first)]
        self._know_mine()

    def of(self, layer: str) -> Entry | None:
        """The heads of a layer that this rank holds."""
        return self._mine.get(layer)

    def own(self) -> list[Entry]:
        return list(self._mine.values())

    def all_heads_of(self, layer: str) -> list[Entry]:
        """Its shards in the order of heads; mine alone where the others are another layer."""
        mine = self._mine[layer]
        named = [one for one in self.entries if one.said.layer == layer]
        shares = sorted(named, key=lambda one: one.said.share)
        whole = [(part, mine.said.share[1]) for part in range(mine.said.share[1])]
        return shares if [one.said.share for one in shares] == whole else [mine]

    def refuse(self, layer: str, reason: str) -> None:
        for number, entry in enumerate(self.entries):
            if entry.said.layer == layer:
                self.entries[number] = Entry(_refused(entry.said, reason), entry.first, entry.ranks)
        self._know_mine()

    def _know_mine(self) -> None:
        self._mine = {one.said.layer: one for one in self.entries if self.mine in one.ranks}

    def largest(self, maxima: Mapping[str, Tensor], new: bool = False) -> Tensor:
        """[heads of all entries], the same on every rank; new: this rank has unknown layers."""
        device = self._device_for(maxima)
        wide = (
            torch.float32 if device.type == "mps" else torch.float64
        )  # keeps every maximum's bits
        packed = torch.full((1 + self._heads(),), -torch.inf, dtype=wide, device=device)
        packed[:1].fill_(float(new))  # an assignment would wait for the device
        for layer, maximum in maxima.items():
            entry = self.of(layer)
            if entry is not None and len(maximum) == entry.said.heads:
                # What is no number stays away from the maximum: nobody scales by infinity.
                packed[1:][entry.places] = maximum.nan_to_num(torch.inf, torch.inf, -torch.inf)
        if self.number > 1:
            torch.distributed.all_reduce(packed, torch.distributed.ReduceOp.MAX)
            self._late = Late.of(0, "", packed[0].clone())
        return packed[1:]

    def something_new(self) -> bool:
        """Whether a rank had unknown layers in the last step; read a step later, without a wait."""
        late, self._late = self._late, None
        return late is not None and late.scalar().value > 0

    def _device_for(self, maxima: Mapping[str, Tensor]) -> torch.device:
        if self.number > 1 or not maxima:
            return self._device
        return next(iter(maxima.values())).device

    def _heads(self) -> int:
        return sum(entry.said.heads for entry in self.entries)

    def _joined(self, rank: int, said: Said) -> bool:
        """A rank that meets a layer later than others, which know it."""
        for number, entry in enumerate(self.entries):
            if entry.said.same_heads(said):
                ranks = (*entry.ranks, rank)
                self.entries[number] = Entry(_agreed([entry.said, said], []), entry.first, ranks)
                return True
        return False

    def _add(self, said: Said, ranks: tuple[int, ...]) -> None:
        self.entries.append(Entry(said, self._heads(), ranks))


def _agreed(alike: list[Said], others: list[Said]) -> Said:
    """What the ranks that hold the same heads do, all of them; others: of the same name."""
    first = alike[0]
    if any((one.way, one.recipe) != (first.way, first.recipe) for one in alike):
        ways = sorted({f"{one.way} ({one.words})" for one in alike})
        return _refused(first, f"the ranks that hold its heads do not agree: {'; '.join(ways)}")
    if others and (not first.identity or any(not other.identity for other in others)):
        return _refused(first, "it could not be looked at on every rank")
    held = {value for other in others if other.way == BY_WEIGHTS for value in other.values}
    if first.way == BY_WEIGHTS and (both := held.intersection(first.values)):
        path = sorted(both)[0].partition(" ")[0]
        return _refused(
            first,
            f"{path} is held by ranks that compute other heads, too, and would be scaled in "
            f"different ways; make it a DTensor, or use temperature",
        )
    return first


def _refused(said: Said, reason: str) -> Said:
    return Said(**{**asdict(said), "way": REFUSED, "recipe": "", "values": (), "words": reason})


def together(coupled: list[list[int]], has_inputs: list[bool]) -> list[bool]:
    """Of each rank: whether all that its forward pass needs have inputs for one.

    coupled: the ranks each needs, which need others in turn.
    """
    groups = [{rank, *needs} for rank, needs in enumerate(coupled)]
    for _ in groups:
        groups = [set().union(*(groups[one] for one in group)) for group in groups]
    return [all(has_inputs[one] for one in group) for group in groups]


def _device_of_messages() -> torch.device:
    """On the host, if the job has a backend for it."""
    pairs = torch.distributed.get_backend_config().split(",")
    kinds = [pair.partition(":")[0] for pair in pairs]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())
