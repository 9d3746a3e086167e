"""`propose`: which remedy for which alarm, and what it would do. Nothing is changed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from scaledot.watch.remedies.remedy import Remedy

if TYPE_CHECKING:
    from torch import nn

LIMIT = 100.0  # Kimi K2's tau
# A sink is no illness; what holds NaN cannot be scaled; a wrong scale is mended in the script.
NO_REMEDY = ("sink", "broken", "loss", "scale")


class AlarmLike(Protocol):
    """What is read of an alarm (scaledot.watch.alarms.Alarm)."""

    @property
    def kind(self) -> str: ...
    @property
    def layer(self) -> str: ...
    @property
    def head(self) -> int | None: ...
    @property
    def heads(self) -> tuple[int, ...]: ...
    @property
    def words(self) -> str: ...


@dataclass(frozen=True)
class Proposal:
    """A remedy for some heads of some layers: why, what it would change, how to have it."""

    remedy: Remedy
    layers: tuple[str, ...]
    heads: dict[str, tuple[int, ...]]  # by layer, where the alarm names them
    why: str
    command: str  # for a run of the command line
    code: str  # for a script

    def __str__(self) -> str:
        kind = self.remedy.kind
        return (
            f"{self.remedy} for {', '.join(self.layers)}: {self.why}\n"
            f"  changes: {kind.changes}\n  promises: {kind.promise} ({kind.source})\n"
            f"  state dict: {kind.keys}\n  try: {self.command}\n  or:  {self.code}"
        )


def propose(model_or_watch: Any, alarms: Iterable[AlarmLike] = ()) -> list[Proposal]:
    """For a model or its watch; without alarms, from what the watch has read last.

    Heads whose logits grow: qk-clip, or a temperature where the layer normalises queries and keys.
    Heads that fade (too flat over many keys): log-n.
    """
    from torch import nn

    model = model_or_watch if isinstance(model_or_watch, nn.Module) else model_or_watch.model
    return choose(alarms or _from_readings(model_or_watch), lambda one: _has_norm(model, one))


def choose(
    alarms: Iterable[AlarmLike], has_norm: Callable[[str], bool] = lambda layer: False
) -> list[Proposal]:
    """Choose by the alarms alone: a viewer of a run has no model, and loads no torch.

    has_norm: whether a layer normalises its queries and keys.
    """
    fading: dict[str, set[int]] = {}
    growing: dict[str, set[int]] = {}
    words: dict[str, str] = {}
    for alarm in alarms:
        if alarm.kind in NO_REMEDY:
            continue
        group = fading if alarm.kind == "fading" else growing
        heads = group.setdefault(alarm.layer, set())
        heads.update(alarm.heads or (() if alarm.head is None else (alarm.head,)))
        words.setdefault(alarm.layer, alarm.words)
    normed = {layer for layer in growing if has_norm(layer)}
    plain = {layer: heads for layer, heads in growing.items() if layer not in normed}
    behind = {layer: heads for layer, heads in growing.items() if layer in normed}
    groups = (
        (Remedy("qk-clip", LIMIT), plain),
        (Remedy("temperature", LIMIT), behind),
        (Remedy("log-n"), fading),
    )
    return [_proposal(remedy, group, words) for remedy, group in groups if group]


def _proposal(remedy: Remedy, group: dict[str, set[int]], words: dict[str, str]) -> Proposal:
    heads = {layer: tuple(sorted(numbers)) for layer, numbers in group.items() if numbers}
    call = f"scaledot.watch.remedies.apply({str(remedy)!r}, model"
    batch = ", inputs=batch" if remedy.kind.reads else ""
    named = f", heads={ {layer: list(numbers) for layer, numbers in heads.items()} }"
    return Proposal(
        remedy=remedy,
        layers=tuple(group),
        heads=heads,
        why=words[next(iter(group))],
        command=f"scaledot run --remedy {remedy} SCRIPT",
        code=f"{call}{named if heads and remedy.kind.reads else ''}{batch})",
    )


@dataclass(frozen=True)
class _High:
    kind: str
    layer: str
    head: int | None
    heads: tuple[int, ...]
    words: str


def _from_readings(watch: Any) -> Sequence[AlarmLike]:
    found = []
    for key, reading in getattr(watch, "latest", {}).items():
        if key.phase != "train":
            continue
        for head, value in enumerate(reading.value("max_logit")):
            if value > LIMIT:
                words = f"head {head} has a logit of {value:.4g}, above {LIMIT:g}"
                found.append(_High("growth", reading.layer, head, (head,), words))
    return found


def _has_norm(model: "nn.Module | None", layer: str) -> bool:
    """By its looks: a proposal runs no forward pass. `apply` finds out."""
    from scaledot.watch.coverage import attention_modules

    if model is None:
        return False
    paths = {module: path for path, module in model.named_modules()}
    for module in attention_modules(model):
        if paths[module] == layer.partition("#")[0]:
            names = [path.rpartition(".")[2] for path, _ in module.named_modules()]
            return any("norm" in name and name.startswith(("q_", "qk")) for name in names)
    return False
