"""The launches of a call made again: the same kernels and numbers, the call's own addresses."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch

tl = pytest.importorskip("triton.language")
launching = pytest.importorskip("scaledot.backends.cuda.launching")
additive = pytest.importorskip("scaledot.backends.cuda.additive.forward")
prepare = pytest.importorskip("scaledot.backends.cuda.additive.prepare")
replay = additive.replay

from noted_kernels import Descriptor, Kernel, as_on_a_gpu  # noqa: E402

from scaledot.backends.inputs import Inputs  # noqa: E402
from scaledot.problem import describe  # noqa: E402


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch, launching, replay)


class Record(NamedTuple):
    ptr: object
    stride: object
    SIZE: object


def body(record, other_ptr, room_ptr, number, BLOCK: tl.constexpr):
    pass


def call(kernel, one, two, fact=None, number=0.5):
    """One launch with a room; True where it was made again."""
    described = replay.describe((one, two), fact)
    if replay.again(described):
        return True
    recording = replay.Recording(described)
    one, two = recording.tensors
    room = recording.room(one, 12, torch.float32)
    arguments = {
        "record": Record(one, one.stride(0), tl.constexpr(4)),
        "other_ptr": two,
        "room_ptr": room[8:],
        "number": number,
        "BLOCK": 64,
    }
    recording.launch(kernel, 5, one, arguments, num_warps=4)
    recording.keep()
    return False


def numbers(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def test_what_does_not_come_again_is_not_written_down(monkeypatch):
    monkeypatch.setattr(replay, "_seen", seen := set())
    monkeypatch.setattr(replay, "MOST_KEPT", 2)
    kernel = Kernel(body)
    for fact in range(5):
        assert not call(kernel, numbers(4, 8), numbers(8), fact)
        assert len(seen) <= 2
    assert not replay._known
    assert not call(kernel, numbers(4, 8), numbers(8), 4)  # the second of its kind
    assert len(replay._known) == 1
    assert call(kernel, numbers(4, 8), numbers(8), 4)


def test_addresses_of_the_later_call_are_filled_in(monkeypatch):
    kernel = Kernel(body)
    assert not call(kernel, numbers(4, 8), numbers(8))
    rooms = []
    monkeypatch.setattr(torch.Tensor, "new_empty", _noting(torch.Tensor.new_empty, rooms))
    one, two = numbers(4, 8), numbers(8)
    assert call(kernel, one, two)
    ((grid, values),) = kernel.launches
    (room,) = rooms
    assert grid == (5, 1, 1)
    assert values == ((one.data_ptr(), 8, None), two.data_ptr(), room.data_ptr() + 32, 0.5, 64)
    assert (room.numel(), room.dtype) == (replay.ROOM_STEP, torch.uint8)
    assert len(kernel.searched) == 1


def _noting(function, made):
    def call(*args, **kwargs):
        made.append(function(*args, **kwargs))
        return made[-1]

    return call


def test_one_tensor_in_two_places_may_be_two_later():
    kernel, both = Kernel(body), numbers(4, 8)
    assert not call(kernel, both, both)
    one, two = numbers(4, 8), numbers(4, 8)
    assert call(kernel, one, two)
    ((_, values),) = kernel.launches
    assert (values[0][0], values[1]) == (one.data_ptr(), two.data_ptr())


def rooms_body(one_ptr, two_ptr, three_ptr, made_ptr):
    pass


def call_with_rooms(kernel, one, made):
    described = replay.describe((one,), made=(None, made))
    if replay.again(described):
        return True
    recording = replay.Recording(described)
    one, _, made = recording.tensors
    first = recording.room(one, 3, torch.float64)
    second = recording.room(one, 1000, torch.bfloat16)
    nothing = recording.room(one, 0, torch.float32)
    assert nothing.numel() == 0
    arguments = {"one_ptr": one, "two_ptr": first, "three_ptr": second[8:], "made_ptr": made}
    recording.launch(kernel, 5, one, arguments)
    recording.keep()
    return False


def test_rooms_lie_side_by_side_in_one_allocation(monkeypatch):
    kernel = Kernel(rooms_body)
    assert not call_with_rooms(kernel, numbers(4), numbers(5))
    rooms = []
    monkeypatch.setattr(torch.Tensor, "new_empty", _noting(torch.Tensor.new_empty, rooms))
    one, made = numbers(4), numbers(5)
    assert call_with_rooms(kernel, one, made)
    ((_, values),) = kernel.launches
    (room,) = rooms
    start = room.data_ptr()
    second = start + replay.ROOM_STEP + 16  # eight numbers of two bytes further
    assert values == (one.data_ptr(), start, second, made.data_ptr())
    assert room.nbytes >= replay.ROOM_STEP + 2000


def test_what_a_call_makes_is_told_apart_by_its_alignment_alone():
    kernel, memory = Kernel(rooms_body), torch.zeros(64)
    offset = -(memory.data_ptr() // 4) % 4
    aligned, moved = memory[offset:][:5], memory[offset + 1 :][:5]
    assert not call_with_rooms(kernel, numbers(4), aligned)
    assert call_with_rooms(kernel, numbers(4), aligned[:3])
    assert not call_with_rooms(kernel, numbers(4), moved)
    described = [replay.describe((numbers(4),), made=made) for made in ((), (None,), (moved,))]
    assert len({one.key for one in described}) == 3


def described_body(desc, number):
    pass


def call_with_descriptor(kernel, tensor):
    described = replay.describe((tensor,))
    if replay.again(described):
        return True
    recording = replay.Recording(described)
    (tensor,) = recording.tensors
    block = Descriptor(tensor, [4, 8], [8, 1], [2, 8])
    recording.launch(kernel, 5, tensor, {"desc": block, "number": 3})
    recording.keep()
    return False


@pytest.fixture
def encoded(monkeypatch):
    """Addresses that were encoded, by a launcher that takes a descriptor's parts."""
    addresses, straight_to = [], launching.straight_to

    def expand(described, note):
        assert note == "a note"
        addresses.append(described.base.data_ptr())
        return [("map", addresses[-1]), *described.shape, *described.strides]

    monkeypatch.setattr(launching, "expand", expand)
    monkeypatch.setattr(
        launching,
        "straight_to",
        lambda *given: straight_to(*given)._replace(notes=["a note"]),
    )
    return addresses


def test_a_descriptor_is_encoded_once_for_each_address(encoded):
    kernel, one, two = Kernel(described_body), numbers(4, 8), numbers(4, 8)
    assert not call_with_descriptor(kernel, one)
    for tensor in (one, two, one, two):
        assert call_with_descriptor(kernel, tensor)
        grid, values = kernel.launches[-1]
        assert grid == (5, 1, 1)
        assert values == (("map", tensor.data_ptr()), 4, 8, 8, 1, 3)
    assert encoded == [one.data_ptr(), two.data_ptr()]


def test_few_encoded_descriptors_are_kept(encoded, monkeypatch):
    monkeypatch.setattr(replay, "MOST_MAPS", 2)
    monkeypatch.setattr(replay, "_encoded", {})
    kernel, tensors = Kernel(described_body), [numbers(4, 8) for _ in range(7)]
    for tensor in tensors:
        call_with_descriptor(kernel, tensor)
        assert len(replay._encoded) <= 2
    assert encoded == [tensor.data_ptr() for tensor in tensors]


def test_a_descriptor_without_a_note_on_it_is_made_each_time():
    kernel = Kernel(described_body)
    for _ in range(3):
        assert not call_with_descriptor(kernel, numbers(4, 8))


def test_a_launch_that_needs_more_than_numbers_is_made_each_time(monkeypatch):
    monkeypatch.setattr(launching, "straight_to", lambda *_: None)
    kernel = Kernel(body)
    for _ in range(3):
        assert not call(kernel, numbers(4, 8), numbers(8))


def test_a_profiler_sees_the_long_way(monkeypatch):
    kernel = Kernel(body)
    call(kernel, numbers(4, 8), numbers(8))
    assert call(kernel, numbers(4, 8), numbers(8))
    monkeypatch.setattr(launching, "hooked", lambda: True)
    assert not call(kernel, numbers(4, 8), numbers(8))


@pytest.mark.parametrize(
    "other",
    [
        (numbers(5, 8), numbers(8)),
        (numbers(4, 16)[:, ::2], numbers(8)),
        (numbers(4, 8, dtype=torch.int32), numbers(8)),
        (numbers(4, 8), numbers(9)[1:]),
        (numbers(4, 8), None),
        (numbers(4, 8), numbers(8), "another fact"),
    ],
    ids=["shape", "strides", "type", "alignment", "none", "fact"],
)
def test_calls_that_are_not_alike_are_described_anew(other):
    kernel = Kernel(body)
    assert not call(kernel, numbers(4, 8), numbers(8))
    assert not call(kernel, *other)
    assert call(kernel, *other)


@pytest.mark.parametrize("number", [float("inf"), -0.0, 1e-300, True, None])
def test_numbers_come_again_as_they_were(number):
    kernel = Kernel(body)
    for _ in range(2):
        call(kernel, numbers(4, 8), numbers(8), number=number)
    ((_, values),) = kernel.launches
    assert repr(values[3]) == repr(number)


def test_what_torch_computed_is_computed_each_time():
    kernel = Kernel(body)
    for _ in range(3):
        assert not call(kernel, numbers(4, 8), numbers(8), number=numbers(1) + 1)


@pytest.mark.parametrize("known", [False, True])
def test_only_a_triton_that_we_know_is_given_addresses(monkeypatch, known):
    monkeypatch.setattr(launching, "KNOWN", known)
    kernel = Kernel(body)
    call(kernel, numbers(4, 8), numbers(8))
    assert call(kernel, numbers(4, 8), numbers(8)) is known


def test_hooks_and_other_devices_go_the_long_way(monkeypatch):
    kernel = Kernel(body)
    call(kernel, numbers(4, 8), numbers(8))
    assert call(kernel, numbers(4, 8), numbers(8))
    kernel.pre_run_hooks.append(print)
    assert not call(kernel, numbers(4, 8), numbers(8))
    kernel.pre_run_hooks.clear()
    assert call(kernel, numbers(4, 8), numbers(8))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    described = replay.describe((numbers(4, 8), numbers(8)), None)
    assert not replay.again(described)


def test_no_tensor_is_kept():
    one, two = numbers(4, 8), numbers(8)
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in (one, two)]
    gone = [weakref.ref(one), weakref.ref(two)]
    kernel = Kernel(body)
    call(kernel, one, two)
    del one, two
    kernel.searched.clear()  # its own notes
    gc.collect()
    assert [kept() for kept in (*gone, *storages)] == [None] * 4


# Additive attention: what a call made again launches is what the long way would launch for it.

HEADS, WIDTH = 3, 20


def problem(queries=70, keys=130, dtype=torch.bfloat16, **words):
    query = torch.randn(2, HEADS, queries, WIDTH).to(dtype)
    key, value = (torch.randn(2, HEADS, keys, WIDTH).to(dtype) for _ in range(2))
    words = {name: word() if callable(word) else word for name, word in words.items()}
    return describe(query, key, value, weight=torch.randn(HEADS, WIDTH).to(dtype), **words)


AGAIN = {
    "plain": {},
    "float32": {"dtype": torch.float32},
    "causal": {"is_causal": True},
    "window and cap": {"window": (5, 3), "softcap": 20.0},
    "log_n": {"scale": "log_n"},
    "a scale a head": {"scale": lambda: torch.rand(HEADS)},
    "sinks": {"sinks": lambda: torch.randn(HEADS)},
    "lengths": {"key_lengths": lambda: torch.tensor([5, 7])},
    "bias": {"attn_mask": lambda: torch.randn(70, 130)},
}
ANEW = {
    "float64": {"dtype": torch.float64},
    "a bool mask": {"attn_mask": lambda: torch.rand(70, 130) > 0.5},
    "log_n of a bias": {"attn_mask": lambda: torch.randn(70, 130), "scale": "log_n"},
}


@pytest.fixture
def kernels(monkeypatch):
    made = Kernel(prepare._prepare_kernel.fn), Kernel(additive._forward_kernel.fn)
    monkeypatch.setattr(prepare, "_prepare_kernel", made[0])
    monkeypatch.setattr(additive, "_forward_kernel", made[1])
    counts = pytest.importorskip("scaledot.backends.cuda.counts")
    monkeypatch.setattr(counts, "_count_kernel", Kernel(counts._count_kernel.fn))
    return made


def forward(given, wants_vitals):
    out = torch.empty_like(given.query)
    inputs = Inputs(*given[:10], None)
    lse, statistics = additive.forward(inputs, given.settings, out, wants_vitals)
    tensors = (*inputs, out, lse, statistics if wants_vitals else None)
    return {t.data_ptr(): name for name, t in enumerate(tensors) if t is not None}


def compared(values, names, start=None):
    """Arguments with a tensor of the call as its name, one of the room as its distance."""
    if isinstance(values, tuple):
        return tuple(compared(value, names, start) for value in values)
    if isinstance(values, tl.constexpr):
        return None
    address = values.data_ptr() if isinstance(values, torch.Tensor) else values
    if address in names:
        return f"tensor {names[address]}"
    inside = isinstance(address, int) and start is not None and 0 <= address - start < 2**24
    return f"room {address - start}" if inside else address


def launched(kernel, launch, names, start):
    _, values = launch
    if isinstance(values, dict):
        values = tuple(values[name] for name in kernel.arg_names)
    return compared(values, names, start)


def room_of(launch, kernel):
    """The address of query.exponent_ptr, the first part of the room."""
    _, values = launch
    score = values["score"] if isinstance(values, dict) else values[kernel.arg_names.index("score")]
    first = score[0][0]
    return first.data_ptr() if isinstance(first, torch.Tensor) else first


@pytest.mark.parametrize("wants_vitals", [False, True])
@pytest.mark.parametrize("words", AGAIN.values(), ids=AGAIN)
def test_additive_attention_is_made_again_as_it_was(kernels, words, wants_vitals):
    names = [forward(problem(**words), wants_vitals) for _ in range(3)]
    for kernel in kernels:
        assert (len(kernel.searched), len(kernel.launches)) == (1, 2)
        first, later = kernel.searched[0], kernel.launches
        wanted = launched(kernel, first, names[0], room_of(first, kernel))
        assert "tensor 0" in str(wanted) or "tensor 2" in str(wanted)
        for launch, own in zip(later, names[1:], strict=True):
            assert launch[0] == (*first[0], 1, 1)
            assert launched(kernel, launch, own, room_of(launch, kernel)) == wanted


@pytest.mark.parametrize("words", ANEW.values(), ids=ANEW)
def test_additive_attention_that_torch_prepares_is_prepared_each_time(kernels, words):
    for _ in range(3):
        forward(problem(**words), True)
    assert set(replay._known.values()) == {None}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("words", [{}, {"is_causal": True}], ids=["plain", "causal"])
def test_a_gpu_computes_the_same_again(monkeypatch, words):
    import scaledot

    monkeypatch.undo()  # the device is there

    def draw():
        query, key, value = (torch.randn(1, 2, 200, 32, device="cuda") for _ in range(3))
        return query, key, value, torch.randn(2, 32, device="cuda")

    first, second = draw(), draw()
    replay._known.clear()
    wanted = scaledot.additive_attention(*second, **words)
    replay._known.clear()
    scaledot.additive_attention(*first, **words)
    assert any(replay._known.values())
    assert torch.equal(scaledot.additive_attention(*second, **words), wanted)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(scaledot.additive_attention(*second, **words), wanted)
    with torch.cuda.graph(graph):
        captured = scaledot.additive_attention(*second, **words)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, wanted)
