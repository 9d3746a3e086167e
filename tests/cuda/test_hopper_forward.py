"""A call on the Hopper kernel made again launches what the long way would launch for it.

No kernel runs: launches are written down, and held against each other.
"""

import pytest
import torch

tl = pytest.importorskip("triton.language")
launching = pytest.importorskip("scaledot.backends.cuda.launching")
hopper_forward = pytest.importorskip("scaledot.backends.cuda.hopper.forward")

from noted_kernels import Kernel, as_on_a_gpu  # noqa: E402

from scaledot.backends.cuda import (  # noqa: E402
    gram,
    hopper,
    moments,
    repair,
    replay,
    summary,
    whole_moments,
)
from scaledot.backends.cuda.hopper import launch  # noqa: E402
from scaledot.backends.cuda.summary import keys as keys_module  # noqa: E402
from scaledot.backends.operators import inputs_of  # noqa: E402
from scaledot.measure import ROW_FIELDS  # noqa: E402
from scaledot.problem import describe  # noqa: E402

HEADS, WIDTH = 4, 24


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch, launching, replay)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    straight_to = launching.straight_to
    monkeypatch.setattr(
        launching, "straight_to", lambda *given: straight_to(*given)._replace(notes=[{}] * 3)
    )
    monkeypatch.setattr(
        launching,
        "expand",
        lambda given, _: [given.base.data_ptr(), tuple(given.shape), tuple(given.strides)],
    )


@pytest.fixture
def kernels(monkeypatch):
    """All that a call may launch, in that order."""
    numbers = launch.attend.do_not_specialize
    made = [Kernel(launch.attend.fn, do_not_specialize=numbers)]
    monkeypatch.setattr(launch, "attend", made[0])
    for module, name in (
        (keys_module, "squares_kernel"),
        (gram, "measure_keys"),
        (moments, "_run_on"),
        (moments, "_add_to_rows"),
        (whole_moments, "_merge_chunks"),
        (whole_moments, "_measure_rows"),
        (summary, "chunks_kernel"),
        (summary, "heads_kernel"),
        (repair, "_repair_kernel"),
    ):
        made.append(Kernel(getattr(module, name).fn))
        monkeypatch.setattr(module, name, made[-1])
    return made


def problem(
    queries=70, keys=130, groups=HEADS, dtype=torch.bfloat16, values=True, width=WIDTH, **words
):
    """Heads as views of [B, T, H, D]."""

    def draw(tokens, heads):
        return torch.zeros(2, tokens, heads, width, dtype=dtype).transpose(1, 2)

    words = {name: word() if callable(word) else word for name, word in words.items()}
    value = draw(keys, groups) if values else None
    return describe(
        draw(queries, HEADS),
        draw(keys, groups),
        value,
        enable_gqa=groups != HEADS,
        scores_only=not values,
        **words,
    )


def forward(given, wants_vitals=True, per_row=False):
    """The call's own tensors, and what was measured."""
    inputs = inputs_of(given)
    out = None if inputs.value is None else torch.empty_like(inputs.query)
    measured = hopper._forward(inputs, given.settings, out, wants_vitals, per_row)
    return [t for t in (*inputs, out, *measured[:3]) if t is not None], measured


def assert_alike(wanted, found, addresses):
    """wanted: of the long way, with tensors; found: with addresses, which stand for the same."""
    if isinstance(wanted, torch.Tensor):
        assert addresses.setdefault(wanted.data_ptr(), found) == found
    elif isinstance(wanted, tuple):
        assert len(wanted) == len(found)
        for one, other in zip(wanted, found, strict=True):
            assert_alike(one, other, addresses)
    else:
        assert repr(found) == repr(None if isinstance(wanted, tl.constexpr) else wanted)


def flat(values):
    """A descriptor as the arguments that stand for it."""
    for value in values:
        if launching.is_descriptor(value):
            yield from (value.base, tuple(value.shape), tuple(value.strides))
        else:
            yield value


def assert_each_waits_for_all_before(launches):
    """The pass for what came before the call; of the others, none but the first runs beside it."""
    the_pass, first, *others = launches
    assert not the_pass.get("launch_pdl")
    assert first["launch_pdl"]
    assert first.get("BESIDE") or first["SOON"]
    for words in others:
        assert words["launch_pdl"]
        assert words["SOON"]


def gram_at_once(monkeypatch):
    for table in ("GRAM_WHOLE", "GRAM_EDGES"):
        monkeypatch.setattr(hopper, table, {64: (8, 8), 128: (8, 8)})
    monkeypatch.setattr(hopper, "GRAM_FROM_QUERIES", 1)


AGAIN = {
    "plain": {},
    "causal": {"is_causal": True},
    "float16": {"dtype": torch.float16},
    "window": {"window": (5, 3)},
    "grouped": {"groups": 2},
    "one group, one query": {"groups": 1, "queries": 1},
    "log_n": {"scale": "log_n"},
    "no scale": {"scale": -0.0},
    "a scale a head": {"scale": lambda: torch.rand(HEADS)},
    "sinks": {"sinks": lambda: torch.randn(HEADS)},
    "lengths": {"key_lengths": lambda: torch.tensor([5, 7])},
    "scores": {"values": False},
}


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("words", AGAIN.values(), ids=AGAIN)
def test_a_call_is_made_again_as_it_was(kernels, monkeypatch, words, long, per_row):
    if long:
        gram_at_once(monkeypatch)
        monkeypatch.setattr(moments, "block_for", lambda keys, width: 64)
        monkeypatch.setattr(summary, "FEW_ROWS", 0)
        monkeypatch.setattr(summary, "_cut", summary._cut.__wrapped__)
    calls = [forward(problem(**words), per_row=per_row) for _ in range(3)]
    assert any(replay._known.values())
    addresses = [
        {a.data_ptr(): b.data_ptr() for a, b in zip(calls[0][0], later, strict=True)}
        for later, _ in calls[1:]
    ]
    matrices = long and "window" not in words
    whole = matrices and not {"is_causal", "key_lengths"} & set(words)  # rows see every key
    blocks = matrices and not whole
    squares = not matrices and "key_lengths" not in words
    chunks = long or "key_lengths" in words
    hides = bool({"is_causal", "window"} & set(words))
    made = [True, squares, matrices, *[blocks] * 2, *[whole] * 2, chunks, True, hides]
    assert [bool(kernel.searched) for kernel in kernels] == made
    used = [kernel for kernel in kernels if kernel.searched]
    assert_each_waits_for_all_before([kernel.searched[0][1] for kernel in used])
    for kernel in used:
        ((grid, wanted),) = kernel.searched
        for (own_grid, found), own in zip(kernel.launches, addresses, strict=True):
            assert own_grid == (*grid, 1, 1)
            values = flat(wanted[name] for name in kernel.arg_names)
            assert_alike(tuple(values), found, own)
    for own in addresses:  # two tensors of the long way never became one
        assert len(set(own.values())) == len(own)
    for _, measured in calls:
        assert (measured.rows is not None) == per_row
        assert not per_row or measured.rows.shape[0] == len(ROW_FIELDS)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"keys": 130}, 2 * (130 // 64 + 1)),  # a number for each half of a tile of keys
        ({"keys": 130, "groups": 2, "is_causal": True}, 2 * (130 // 64 + 1)),
        ({"keys": 130, "values": False}, 2 * (130 // 128 + 1)),
        ({"keys": 131}, None),  # not those of the rows' own places
        ({"keys": 130, "key_lengths": lambda: torch.tensor([5, 7])}, None),
        ({"keys": 130, "width": 128}, 2 * (130 // 128 + 1)),
        ({"keys": 64 * 129, "queries": 64 * 129, "is_causal": True}, None),  # too many to sum
    ],
)
def test_which_keys_are_squared_in_the_pass(kernels, words, told):
    """The squares of the others are launched apart, or are the summary's where lengths count."""
    forward(problem(**{"queries": 130, "width": 256, **words}))
    the_pass, beside, *_, heads, _ = kernels
    ((_, of_pass),), ((_, of_heads),) = the_pass.searched, heads.searched
    assert of_pass["SQUARES"] == ("query" if told is None else "both")
    assert bool(beside.searched) == (told is None and "key_lengths" not in words)
    if told is not None:
        groups = words.get("groups", HEADS)
        assert of_pass["key_squares"].numel() == 2 * groups * told
        assert of_heads["key_squares_ptr"].data_ptr() == of_pass["key_squares"].data_ptr()
        assert of_heads["parts"].key_chunks == told


@pytest.mark.parametrize("values", [True, False])
def test_tokens_of_no_sequence_see_no_key(kernels, values):
    """The kernel, which does not run here, does not meet them."""
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    query, key = (torch.zeros(9, HEADS, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    given = describe(
        query, key, key if values else None, cu_seqlens=(ends, ends), scores_only=not values
    )
    tensors, measured = forward(given, per_row=True)
    if values:
        assert (tensors[5] == 0.0).all()
    rows = dict(zip(ROW_FIELDS, measured.rows, strict=True))
    assert (measured.lse == -float("inf")).all()
    for name, plane in rows.items():
        assert (plane == (-float("inf") if name in ("max_logit", "lse") else 0.0)).all()


@pytest.mark.parametrize("values", [True, False])
def test_without_vitals_there_is_one_launch_and_no_room(kernels, values):
    for _ in range(3):
        _, measured = forward(problem(values=values), wants_vitals=False)
        assert measured[1:] == (None, None, None)
    assert [len(kernel.launches) for kernel in kernels] == [2, *[0] * 9]
    (made,) = replay._known.values()
    assert made.room_bytes == 0


def test_packed_sequences_are_made_again_over_zeros(kernels):
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    tokens = [torch.zeros(10, HEADS, WIDTH, dtype=torch.bfloat16) for _ in range(3)]
    for _ in range(3):
        inputs = inputs_of(describe(*tokens, cu_seqlens=(ends, ends), wants_vitals=True))
        out = torch.ones_like(inputs.query)
        settings = describe(*tokens, cu_seqlens=(ends, ends)).settings
        measured = hopper._forward(inputs, settings, out, True, False)
        assert not out.any()  # tokens of no sequence
        assert measured.floats.shape[1:] == (2, HEADS)
    assert len(kernels[0].launches) == 2


SPREAD = {
    "rows with gaps": lambda t: torch.zeros(*t.shape[:-1], WIDTH + 4, dtype=t.dtype)[..., :WIDTH],
    "one head for all": lambda t: t[:, :1].expand(t.shape),
    "misaligned": lambda t: torch.zeros(t.numel() + 4, dtype=t.dtype)[4:].view(t.shape),
}


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("layout", SPREAD.values(), ids=SPREAD)
def test_tensors_that_are_copied_first_are_copied_each_time(kernels, which, layout):
    given = problem()
    given = given._replace(**{which: layout(getattr(given, which))})
    for _ in range(3):
        forward(given)
    assert set(replay._known.values()) == {None}
    assert len(kernels[0].launches) == 2  # found again by its key, with a new copy


def test_numbers_of_heads_that_lie_apart_are_copied_each_time(kernels):
    given = problem()._replace(sinks=torch.zeros(1, 2 * HEADS)[:, ::2])
    for _ in range(2):
        forward(given)
    assert set(replay._known.values()) == {None}


def test_one_tensor_as_query_key_and_value_may_be_three_later(kernels):
    given = problem(keys=70)
    forward(given._replace(key=given.query, value=given.query))
    forward(given)
    ((_, values),) = kernels[0].launches
    named = dict(zip(("q", "k", "v"), values[0:9:3], strict=True))
    assert named == {
        "q": given.query.data_ptr(),
        "k": given.key.data_ptr(),
        "v": given.value.data_ptr(),
    }


def test_calls_that_are_not_alike_are_told_apart(kernels, monkeypatch):
    def made(**words):
        known = len(replay._known)
        forward(problem(**words))
        return len(replay._known) > known

    assert made()
    assert not made()
    assert made(scale=0.5)
    assert made(scale=0.0)
    assert made(scale=-0.0)
    assert made(keys=131)
    monkeypatch.setattr(launch, "config_for", lambda *a, **k: launch.Config(64, 2, 2, False))
    assert made()
    gram_at_once(monkeypatch)
    assert made()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper GPU here",
)
@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"window": (100, 0)}], ids=str)
def test_a_gpu_computes_the_same_again(monkeypatch, words):
    import scaledot

    monkeypatch.undo()  # the device is there

    def draw():
        shape = 2, 300, 3, 64
        tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        return [t.transpose(1, 2) for t in tensors]

    def attend(tensors):
        out, vitals = scaledot.attention_with_vitals(*tensors, **words, per_row=True)
        return [out, *vitals.packed(), *vitals.per_row]

    def assert_same(found):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

    first, second = draw(), draw()
    replay._known.clear()
    wanted = attend(second)
    replay._known.clear()
    attend(first)
    assert any(replay._known.values())
    assert_same(attend(second))
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert_same(attend(second))
    with torch.cuda.graph(graph):
        captured = attend(second)
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    assert_same(captured)
