"""What is measured on a GPU, against whom, and the bar it has to clear: one H200, bfloat16.

A cell is a head width d, a length n and causal or not; 16k tokens in all, H * D = 2048. Ratios are
of speeds, so that more is better, but for `vitals_alone`, which is a share of time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from scaledot.bench import ours as everywhere
from scaledot.bench import peers as eager
from scaledot.bench.bars import Bar, Quantity
from scaledot.bench.cases import Case, Contender
from scaledot.bench.gpu import flex, ours, peers
from scaledot.bench.workload import Workload

WIDTHS, LENGTHS = (64, 128, 256), (1024, 4096, 16384)
SHORT, MIDDLE, LONG = LENGTHS
TOKENS, MODEL_WIDTH = 16384, 2048
ADDITIVE = (1, 8, 1024, 128)
QUICK_WIDTHS, QUICK_LENGTHS, QUICK_REPEATS = (128,), (4096,), 11
REPEATS = {SHORT: 101, MIDDLE: 51, LONG: 31}  # samples a second or two give
FORWARD_BACKWARD = 3.5  # forward passes: the backward pass has five products, the forward two

OWN = Contender("own kernel", ours.own)
OWN_VITALS = Contender("own kernel with vitals", ours.own_with_vitals)
VITALS = Contender("vitals", ours.own_vitals, work=0.5)
DISPATCHED = Contender("attention", everywhere.attention)
TRITON_VITALS = Contender("triton with vitals", ours.triton_with_vitals)
STEP = Contender("forward + backward with vitals", ours.forward_backward, work=FORWARD_BACKWARD)
ADDITIVE_OURS = Contender("additive_attention", everywhere.additive_attention, work=0)
OURS = (OWN, OWN_VITALS, VITALS, DISPATCHED, TRITON_VITALS, STEP, ADDITIVE_OURS)

CUDNN = Contender("cuDNN", peers.cudnn, foreign=True)
FLASH = Contender("flash", peers.flash, foreign=True)
FA4 = Contender("FA4", peers.flash_4, peers.tokens_first, foreign=True)
FLEX = Contender("FlexAttention", flex.attend, foreign=True)
CUDNN_STEP = Contender(
    "cuDNN forward + backward", peers.cudnn_forward_backward, foreign=True, work=FORWARD_BACKWARD
)
FA4_STEP = Contender(
    "FA4 forward + backward",
    peers.flash_4_forward_backward,
    peers.tokens_first,
    foreign=True,
    work=FORWARD_BACKWARD,
)
EAGER_ADDITIVE = Contender("plain PyTorch", eager.plain_additive, foreign=True, work=0)
OUTPUT_ALONE = Contender("its output", peers.output_alone, foreign=True, work=0)

ROW_BYTES = 256.0  # a few dozen numbers a row, whatever the number of keys
ADDITIVE_ROW_BYTES = 4096.0  # and float32 copies of query and key, prepared for the tanh


def on_gpu(
    *,
    quick: bool = False,
    widths: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    device: str = "cuda",
) -> list[Case]:
    """Quick: one cell, causal and not, and few repeats."""
    widths = widths or (QUICK_WIDTHS if quick else WIDTHS)
    lengths = lengths or (QUICK_LENGTHS if quick else LENGTHS)
    cells = [
        Cell(width, length, causal, device)
        for width in widths
        for length in lengths
        for causal in (False, True)
    ]
    found = [case for cell in cells for case in cell.cases()]
    found += [*_additive(device)]
    return [_few(case) for case in found] if quick else found


@dataclass(frozen=True)
class Cell:
    width: int
    length: int
    causal: bool
    device: str = "cuda"

    def cases(self) -> list[Case]:
        every = [*self._forward(), *self._backward(), *self._triton(), *self._memory()]
        repeats = REPEATS[self.length]
        return [
            case if case.measures != "time" else replace(case, repeats=repeats) for case in every
        ]

    @property
    def workload(self) -> Workload:
        return Workload(
            TOKENS // self.length,
            MODEL_WIDTH // self.width,
            self.length,
            self.width,
            self.causal,
            dtype="bfloat16",
            device=self.device,
        )

    def _forward(self) -> Iterator[Case]:
        load = self.workload
        judged = self.length >= MIDDLE
        speed, at_least = Quantity.SPEED, _at_least
        yield Case(
            "own_cudnn",
            load,
            OWN,
            CUDNN,
            speed,
            at_least(1.00) if judged else None,
            goal=at_least(1.10) if self.length == LONG else None,
        )
        yield Case(
            "own_fa4",
            load,
            OWN,
            FA4,
            speed,
            at_least(0.97) if judged else None,
            goal=Bar(">", 1.0) if judged else None,
        )
        yield Case("own_flash", load, OWN, FLASH, speed, None)
        yield Case("dispatched", load, DISPATCHED, CUDNN, speed, at_least(0.98), goal=at_least(1.0))
        yield Case(
            "vitals_cost",
            load,
            OWN_VITALS,
            OWN,
            speed,
            self._vitals_cost(),
            goal=at_least(0.98) if judged else None,
        )
        yield Case(
            "vitals_cudnn",
            load,
            OWN_VITALS,
            CUDNN,
            speed,
            at_least(1.00) if self.length == LONG else None,
            goal=at_least(1.00) if self.length == MIDDLE else None,
        )
        yield Case("vitals_alone", load, VITALS, OWN, Quantity.RATIO, Bar("<=", 0.65))

    def _vitals_cost(self) -> Bar | None:
        if self.length == LONG:
            return _at_least(0.88 if self.width == 64 else 0.93)
        return _at_least(0.88) if self.length == MIDDLE else None

    def _backward(self) -> Iterator[Case]:
        load = replace(self.workload, backward=True)
        bar = {MIDDLE: _at_least(0.98), LONG: _at_least(1.00)}.get(self.length)
        yield Case("backward_cudnn", load, STEP, CUDNN_STEP, Quantity.SPEED, bar)
        yield Case("backward_fa4", load, STEP, FA4_STEP, Quantity.SPEED, None)

    def _triton(self) -> Iterator[Case]:
        judged = self.length >= MIDDLE and self.width <= 128
        bar = _at_least(1.00) if judged else None
        load = self.workload
        yield Case("triton_flex", load, TRITON_VITALS, FLEX, Quantity.SPEED, bar, apart=True)

    def _memory(self) -> Iterator[Case]:
        # All cells have the same tokens: bytes a row that grow with n show from cell to cell.
        yield Case(
            "vitals_memory",
            self.workload,
            OWN_VITALS,
            OWN,
            Quantity.EXTRA_BYTES,
            Bar("<=", ROW_BYTES),
            measures="row memory",
            repeats=1,
        )


def _additive(device: str) -> Iterator[Case]:
    load = Workload(*ADDITIVE, additive=True, dtype="bfloat16", device=device)
    time = Case(
        "additive",
        load,
        ADDITIVE_OURS,
        EAGER_ADDITIVE,
        Quantity.SPEED,
        _at_least(20),
        repeats=REPEATS[SHORT],
    )
    yield time
    yield replace(time, workload=replace(load, dtype="float32"), bar=None)
    memory = replace(time, measures="row memory", repeats=1)
    yield replace(
        memory,
        name="additive_memory",
        peer=OUTPUT_ALONE,
        quantity=Quantity.EXTRA_BYTES,
        bar=Bar("<=", ADDITIVE_ROW_BYTES),
    )
    yield replace(memory, name="additive_eager_memory", quantity=Quantity.RATIO, bar=None)


def _at_least(limit: float) -> Bar:
    return Bar(">=", limit)


def _few(case: Case) -> Case:
    return replace(case, repeats=min(case.repeats, QUICK_REPEATS))
