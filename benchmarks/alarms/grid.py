"""Which runs the study makes, which of them tuned the rules, and which were kept to judge them."""

from dataclasses import dataclass, replace

from runs import Setup

SMALL = Setup(layers=2, width=64, heads=4)
DEEP = Setup(layers=3, width=64, heads=2)
NARROW = Setup(layers=4, width=48, heads=4)
SHORT = Setup(layers=2, width=64, heads=4, tokens=48, steps=150, warm_up=25)
SHORT_DEEP = replace(SHORT, layers=3, heads=2)
SEEDS = (0, 1)


@dataclass(frozen=True)
class Family:
    """The same run at several learning rates and seeds."""

    name: str
    setup: Setup
    rates: tuple[float, ...]
    seeds: tuple[int, ...] = SEEDS
    tunes: bool = False  # the thresholds were set with these runs in sight

    def setups(self) -> list[Setup]:
        return [
            replace(self.setup, rate=rate, seed=seed) for seed in self.seeds for rate in self.rates
        ]


FAMILIES = (
    Family("AdamW", SMALL, (3e-3, 1e-2, 3e-2, 6e-2, 1e-1, 2e-1), tunes=True),
    Family("AdamW, deeper", DEEP, (3e-3, 1e-2, 3e-2, 6e-2, 1e-1, 2e-1)),
    Family("AdamW, narrower", NARROW, (1e-2, 6e-2, 1e-1), (0,)),
    Family("AdamW, learned positions", replace(SHORT, model="learned"), (3e-3, 3e-2, 1e-1)),
    Family("AdamW, no scale", replace(SHORT, scale="none"), (3e-3, 1e-2, 3e-2, 1e-1)),
    Family("AdamW, 1/d_k", replace(SHORT, scale="dk"), (3e-3, 3e-2, 1e-1), (0,)),
    Family("Muon", replace(SHORT, optimizer="muon"), (1e-2, 3e-2, 1e-1, 3e-1)),
    Family("Muon, deeper", replace(SHORT_DEEP, optimizer="muon"), (3e-2, 1e-1, 3e-1), (0,)),
    Family("SGD", replace(SHORT, optimizer="sgd"), (0.3, 1.0, 3.0, 10.0)),
    Family("SGD, no scale", replace(SHORT, optimizer="sgd", scale="none"), (1.0, 3.0), (0,)),
)
