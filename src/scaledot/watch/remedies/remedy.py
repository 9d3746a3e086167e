"""The remedies by name: what each takes, what it changes, what it promises, where it is from."""

import math
from dataclasses import dataclass
from typing import NamedTuple


class RemedyError(ValueError):
    """A remedy that cannot be applied as asked; says why and what to do instead."""


class Kind(NamedTuple):
    value: str  # what the number after the colon is; "": it takes none
    default: float | None  # None: the number must be given, or there is none
    reads: bool  # whether it needs every step's max logits
    at_call: bool  # changes the attention call, which a compiled graph does not let in
    changes: str
    keys: str  # what becomes of the state dict
    promise: str
    source: str


UNCHANGED = "unchanged"
BESIDE = "unchanged; the remedy's own state_dict() is to be kept beside the model's: "

REMEDIES: dict[str, Kind] = {
    "qk-clip": Kind(
        "the largest logit that is left alone",
        100.0,
        reads=True,
        at_call=False,
        changes="weights and biases that make the query and the key of each head above it, after "
        "the optimizer's step",
        keys=UNCHANGED,
        promise="the head's logits shrink to it, and no other head's change",
        source="Kimi K2, arXiv 2507.20534",
    ),
    "temperature": Kind(
        "the largest logit that is left alone",
        100.0,
        reads=True,
        at_call=True,
        changes="one factor a head on the queries that enter the attention call",
        keys=BESIDE + "X.factor of each layer X",
        promise="the head's logits shrink to it, and no other head's change",
        source="the same rule, at the call instead of in the weights",
    ),
    "softcap": Kind(
        "the cap",
        50.0,
        reads=False,
        at_call=True,
        changes="the scores: cap * tanh(score / cap), computed by scaledot's attention",
        keys=UNCHANGED,
        promise="no score that enters a softmax passes the cap; max_logit is read before it",
        source="Gemma 2, arXiv 2408.00118",
    ),
    "qk-norm": Kind(
        "the gain",
        1.0,
        reads=False,
        at_call=True,
        changes="queries and keys: each divided by its root mean square over the head's width, "
        "times one gain a head",
        keys="unchanged; with an optimizer the gains are learned, and each layer's module has one "
        "more parameter, scaledot_qk_gain",
        promise="no logit passes gain * sqrt(d_k) in size, where the scores are divided by "
        "sqrt(d_k)",
        source="ViT-22B, arXiv 2302.05442; without learned gains as in nanochat",
    ),
    "log-n": Kind(
        "the number of keys at which nothing changes (default: those of the first call)",
        None,
        reads=False,
        at_call=True,
        changes="the scores of a row that sees n keys: times ln(n) / ln(N), computed by scaledot's "
        "attention",
        keys=BESIDE + ".keys, the number N",
        promise="a row that sees N keys keeps its logits; longer rows are sharper, shorter flatter",
        source="scalable softmax, arXiv 2501.19399, with s = 1 / ln(N)",
    ),
    "sigma-reparam": Kind(
        "",
        None,
        reads=False,
        at_call=False,
        changes="the weight of every Linear: gain / sigma(W) * W, sigma by one power iteration a "
        "step",
        keys="X.weight becomes X.parametrizations.weight.original, and beside it come "
        "X.parametrizations.weight.0.gain, .left and .right",
        promise="each weight's spectral norm is its gain, which starts at the present one: when it "
        "is applied nothing changes",
        source="sigmaReparam, arXiv 2303.06296",
    ),
}


@dataclass(frozen=True)
class Remedy:
    """One of REMEDIES and its number; `str` gives back what `parse` reads."""

    name: str
    value: float | None = None

    def __post_init__(self) -> None:
        if self.name not in REMEDIES:
            raise RemedyError(
                f"there is no remedy {self.name!r}; use one of {', '.join(REMEDIES)}, for example "
                f"qk-clip:100"
            )
        kind = self.kind
        value = kind.default if self.value is None else self.value
        if value is not None and not kind.value:
            raise RemedyError(f"{self.name} takes no number; say {self.name}")
        least = 1.0 if self.name == "log-n" else 0.0
        if value is not None and not least < value < math.inf:
            raise RemedyError(
                f"{self.name}:{value:g}: {kind.value} must be a number above {least:g}"
            )
        object.__setattr__(self, "value", value)

    @property
    def kind(self) -> Kind:
        return REMEDIES[self.name]

    @property
    def number(self) -> float:
        """The value, of a remedy that always has one."""
        assert self.value is not None
        return self.value

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}:{self.value:g}"


def parse(text: str) -> Remedy:
    """ "qk-clip:100" or "qk-clip": a name of REMEDIES, and its number where it is not the usual."""
    name, colon, number = text.strip().partition(":")
    if not colon:
        return Remedy(name)
    try:
        value = float(number)
    except ValueError:
        raise RemedyError(
            f"{text!r}: {number!r} is no number; say for example qk-clip:100"
        ) from None
    return Remedy(name, value)
