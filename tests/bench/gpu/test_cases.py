"""The cases say what the project promises on a GPU, cell by cell."""

import pytest

from scaledot.bench.bars import Quantity
from scaledot.bench.gpu import cases

CELLS = [(d, n, c) for d in (64, 128, 256) for n in (1024, 4096, 16384) for c in (False, True)]
EVERY = cases.on_gpu()


def _bars(name: str, what: str = "bar") -> dict[tuple[int, int, bool], str]:
    return {
        (case.workload.width, case.workload.length, case.workload.causal): str(getattr(case, what))
        for case in EVERY
        if case.name == name and getattr(case, what) is not None
    }


def _at(bar: str, lengths: tuple[int, ...], widths: tuple[int, ...] = (64, 128, 256)):
    return {(d, n, c): bar for d, n, c in CELLS if n in lengths and d in widths}


BOTH = (4096, 16384)


@pytest.mark.parametrize(
    ("name", "bars", "goals"),
    [
        ("own_cudnn", _at(">= 1", BOTH), _at(">= 1.1", (16384,))),
        ("own_fa4", _at(">= 0.97", BOTH), _at("> 1", BOTH)),
        ("own_flash", {}, {}),
        ("dispatched", _at(">= 0.98", (1024, *BOTH)), _at(">= 1", (1024, *BOTH))),
        (
            "vitals_cost",
            _at(">= 0.93", (16384,), (128, 256))
            | _at(">= 0.88", (16384,), (64,))
            | _at(">= 0.88", (4096,)),
            _at(">= 0.98", BOTH),
        ),
        ("vitals_cudnn", _at(">= 1", (16384,)), _at(">= 1", (4096,))),
        ("vitals_alone", _at("<= 0.65", (1024, *BOTH)), {}),
        ("backward_cudnn", _at(">= 0.98", (4096,)) | _at(">= 1", (16384,)), {}),
        ("backward_fa4", {}, {}),
        ("triton_flex", _at(">= 1", BOTH, (64, 128)), {}),
        ("vitals_memory", _at("<= 256", (1024, *BOTH)), {}),
    ],
)
def test_bars_and_goals(name, bars, goals):
    assert _bars(name) == bars
    assert _bars(name, "goal") == goals
    found = [case for case in EVERY if case.name == name]
    assert len(found) == len(CELLS)  # what has no bar is reported


def test_additive_is_judged_in_bfloat16_and_reported_in_float32():
    found = [
        (case.name, case.workload.shape, case.workload.dtype, str(case.bar or ""))
        for case in EVERY
        if case.workload.additive
    ]
    assert found == [
        ("additive", "1x8x1024x128", "bfloat16", ">= 20"),
        ("additive", "1x8x1024x128", "float32", ""),
        ("additive_memory", "1x8x1024x128", "bfloat16", "<= 4096"),
        ("additive_eager_memory", "1x8x1024x128", "bfloat16", ""),
    ]


def test_every_cell_has_16k_tokens_and_2048_channels():
    for case in EVERY:
        load = case.workload
        assert load.device == "cuda"
        if not load.additive:
            assert load.batch * load.length == 16384
            assert load.heads * load.width == 2048
            assert load.dtype == "bfloat16"


def test_more_is_better_but_for_vitals_alone_and_memory():
    share = {case.name for case in EVERY if case.quantity is Quantity.RATIO}
    assert share == {"vitals_alone", "additive_eager_memory"}
    bytes_a_row = {case.name for case in EVERY if case.quantity is Quantity.EXTRA_BYTES}
    assert bytes_a_row == {"vitals_memory", "additive_memory"}
    assert {case.quantity for case in EVERY} == {
        Quantity.SPEED,
        Quantity.RATIO,
        Quantity.EXTRA_BYTES,
    }


def test_only_flex_runs_apart_and_only_steps_go_backward():
    assert {case.name for case in EVERY if case.apart} == {"triton_flex"}
    assert {case.name for case in EVERY if case.workload.backward} == {
        "backward_cudnn",
        "backward_fa4",
    }


def test_whose_absence_is_nobodys_fault():
    foreign = {side.name for case in EVERY for side in (case.ours, case.peer) if side.foreign}
    assert foreign == {
        "cuDNN",
        "flash",
        "FA4",
        "FlexAttention",
        "cuDNN forward + backward",
        "FA4 forward + backward",
        "plain PyTorch",
        "its output",
    }


def test_widths_and_lengths_choose():
    some = [
        case for case in cases.on_gpu(widths=[128], lengths=[4096]) if not case.workload.additive
    ]
    assert {case.workload.shape for case in some} == {"4x16x4096x128"}
    assert {case.workload.causal for case in some} == {False, True}


def test_a_quick_try_has_the_same_names_and_few_repeats():
    quick = cases.on_gpu(quick=True)
    assert {case.name for case in quick} == {case.name for case in EVERY}
    assert len(quick) < len(EVERY) / 5
    assert max(case.repeats for case in quick) <= 11
    promised = {(case.name, case.workload, case.bar) for case in EVERY}
    assert all((case.name, case.workload, case.bar) in promised for case in quick)
