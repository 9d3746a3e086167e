"""What a remedy at the attention call does to the call's arguments."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scaledot import scale as scale_rules


class Arguments(NamedTuple):
    """Of scaledot.attention; torch's function takes the same names."""

    query: Tensor
    key: Tensor
    rest: dict[str, Any]  # without value


class Rule:
    """What is done to the calls below one module. State that is worth keeping is in `state`."""

    ours = False  # whether scaledot's attention has to compute it
    used = False  # whether it has changed a call

    def first_used(self) -> None:
        """Called once, at the first call that is changed."""

    def change(self, given: Arguments) -> Arguments:
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        assert not state


class Temperature(Rule):
    """One factor a head on the queries, [heads]."""

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    def change(self, given: Arguments) -> Arguments:
        factor = heads_of(self._factor_for(given.query), given.query)
        return given._replace(query=given.query * factor)

    def _factor_for(self, query: Tensor) -> Tensor:
        """From a checkpoint it comes on the host: a copy at every call would make each wait."""
        if self.factor.device == query.device:
            return self.factor
        if query.is_meta or type(query) not in (Tensor, torch.nn.Parameter):
            return self.factor.to(query.device)  # without numbers: not to be kept
        with torch.inference_mode(False):  # what is made under it could not be trained with
            self.factor = self.factor.to(query.device)
        return self.factor

    def state(self) -> dict[str, Tensor]:
        return {"factor": self.factor}

    def load(self, state: dict[str, Tensor]) -> None:
        self.factor = state["factor"].to(self.factor)


class Softcap(Rule):
    ours = True

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def change(self, given: Arguments) -> Arguments:
        cap = min(self.cap, given.rest.get("softcap") or math.inf)
        return given._replace(rest={**given.rest, "softcap": cap})


class QKNorm(Rule):
    """Queries and keys of root mean square 1; `gain` of the module the call belongs to, a head."""

    def __init__(self, gain: float, learned: Callable[[], Tensor | None] = lambda: None) -> None:
        self.gain, self.learned = gain, learned

    def change(self, given: Arguments) -> Arguments:
        width = given.query.shape[-1:]
        query, key = F.rms_norm(given.query, width), F.rms_norm(given.key, width)
        learned = self.learned()
        gain = self.gain if learned is None else heads_of(learned, query)
        return given._replace(query=query * gain, key=key)


class LogN(Rule):
    """ln(n) / ln(N) for a row of n keys; N of the first call where it was not said."""

    ours = True

    def __init__(self, keys: float | None) -> None:
        self.keys = keys

    def change(self, given: Arguments) -> Arguments:
        if self.keys is None:
            self.keys = float(max(given.key.shape[-2], 2))
        width, rest = given.query.shape[-1], dict(given.rest)
        scale = rest.get("scale")
        if scale == "log_n":
            return given
        if isinstance(scale, str) or scale is None:
            scale = scale_rules.resolve(scale or "sqrt_dk", width, rest.get("num_heads"))
        factor = heads_of(scale, given.query) if isinstance(scale, Tensor) else scale
        query = given.query * (factor * math.sqrt(width) / math.log(self.keys))
        return given._replace(query=query, rest={**rest, "scale": "log_n"})

    def state(self) -> dict[str, Tensor]:
        return {} if self.keys is None else {"keys": torch.tensor(self.keys)}

    def load(self, state: dict[str, Tensor]) -> None:
        self.keys = float(state["keys"]) if state else self.keys


def heads_of(values: Tensor, query: Tensor) -> Tensor:
    """[heads] beside [..., heads, Q, D]; [batch * heads, Q, D] is a batch of them."""
    values = values.to(query.device, query.dtype)
    if query.dim() == 3 and len(query) != len(values) and len(query) % len(values) == 0:
        values = values.repeat(len(query) // len(values))
    return values[:, None, None]
