"""Launching again by our own key: what Triton compiles apart must have another one."""

import functools
import types
from typing import NamedTuple

import pytest
import torch

jit = pytest.importorskip("triton.runtime.jit")
tl = pytest.importorskip("triton.language")
launching = pytest.importorskip("scaledot.backends.cuda.launching")
specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
CUDABackend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend

from noted_kernels import STREAM, Descriptor  # noqa: E402


class Record(NamedTuple):
    ptr: object
    stride: object
    SIZE: object


def body(record, number, BLOCK: tl.constexpr):
    tl.store(record.ptr + record.stride, number)


KERNEL = jit.JITFunction(body)
NUMBERS = torch.zeros(16)


def record(ptr=NUMBERS, stride=16, size=4):
    return Record(ptr, stride, tl.constexpr(size))


def arguments(record, number=3.0, block=64):
    return {"record": record, "number": number, "BLOCK": block}


VARIANTS = {
    "the same": arguments(record()),
    "another tensor": arguments(record(torch.ones(32))),
    "another type": arguments(record(NUMBERS.double())),
    "a tensor that is not aligned": arguments(record(NUMBERS[1:])),
    "no tensor": arguments(record(None)),
    "another multiple of 16": arguments(record(stride=48)),
    "zero": arguments(record(stride=0)),
    "one": arguments(record(stride=1)),
    "no multiple of 16": arguments(record(stride=17)),
    "a long number": arguments(record(stride=2**31)),
    "a longer one": arguments(record(stride=2**63)),
    "the least short one": arguments(record(stride=-(2**31))),
    "one below it": arguments(record(stride=-(2**31) - 16)),
    "another constant in the record": arguments(record(size=5)),
    "another float": arguments(record(), number=1.0),
    "an integer": arguments(record(), number=3),
    "a bool": arguments(record(), number=True),
    "another constant": arguments(record(), block=32),
    "a record in a record": arguments((record(), 16)),
}


def described_by_triton(given):
    kinds = [specialize(CUDABackend, given[name], False, True, True) for name in KERNEL.arg_names]
    sizes = [entry.value for entry in given["record"] if isinstance(entry, tl.constexpr)]
    return str(kinds[:-1]), sizes, given["BLOCK"]


@pytest.mark.parametrize("other", sorted(VARIANTS))
@pytest.mark.parametrize("one", ["the same", "one", "an integer", "no multiple of 16"])
def test_what_triton_compiles_apart_has_another_key(one, other):
    if described_by_triton(VARIANTS[one]) != described_by_triton(VARIANTS[other]):
        assert key_of(one) != key_of(other)


@pytest.mark.parametrize("other", ["the same", "another tensor", "another float"])
def test_other_numbers_of_the_same_shape_have_the_same_key(other):
    assert key_of(other) == key_of("the same")


@pytest.mark.parametrize("kind", [torch.nn.Parameter, lambda t: t.as_subclass(Own)])
def test_a_subclass_of_tensor_has_the_key_of_a_tensor(kind):
    given = arguments(record(kind(NUMBERS)))
    assert type(given["record"][0]) is not torch.Tensor
    assert launching.launch_key(KERNEL, 0, given, {"num_warps": 4}) == key_of("the same")


class Own(torch.Tensor):
    """Whatever is made of it is of its kind, what detach() gives too."""


def key_of(name):
    return launching.launch_key(KERNEL, 0, VARIANTS[name], {"num_warps": 4})


def test_devices_options_and_kernels_are_told_apart():
    given = VARIANTS["the same"]
    keys = {
        launching.launch_key(KERNEL, 0, given, {"num_warps": 4}),
        launching.launch_key(KERNEL, 1, given, {"num_warps": 4}),
        launching.launch_key(KERNEL, 0, given, {"num_warps": 8}),
        launching.launch_key(KERNEL, 0, given, {"num_stages": 4}),
        launching.launch_key(jit.JITFunction(body), 0, given, {"num_warps": 4}),
    }
    assert len(keys) == 5


class Compiled:
    """As Triton's: called with a grid of three and every argument in order."""

    packed_metadata = "metadata"
    function = "function"

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *values: self.launches.append((grid, values))

    def run(self, x, y, z, stream, function, packed, launch, enter, leave, *values):
        assert (stream, function, packed) == (STREAM, "function", "metadata")
        assert launch is enter is leave is None
        self.launches.append(((x, y, z), values))


class Counting(jit.JITFunction):
    """Counts the launches that go through Triton."""

    def run(self, *args, grid, warmup, **kwargs):
        self.searches = [*getattr(self, "searches", []), (grid, kwargs)]
        return Compiled()


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})
    stream = {NUMBERS.device.index: STREAM}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", stream.get, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: NUMBERS.device.index)
    return Counting(body)


@pytest.mark.parametrize("known", [False, True])
def test_a_kernel_is_searched_for_once(counting, monkeypatch, known):
    monkeypatch.setattr(launching, "KNOWN", known)
    for programs in (3, 5, 7):
        launching.launch(counting, programs, NUMBERS, VARIANTS["the same"], num_warps=4)
    assert counting.searches == [((3,), {**VARIANTS["the same"], "num_warps": 4})]
    (compiled,) = launching._compiled.values()
    values = (*VARIANTS["the same"].values(),)
    assert compiled.launches == [((5, 1, 1), values), ((7, 1, 1), values)]


def test_hooks_before_a_launch_are_called_each_time(counting):
    for _ in range(3):
        launching.launch(counting, 3, NUMBERS, VARIANTS["the same"])
    assert len(counting.searches) == 1
    counting.add_pre_run_hook(lambda *args, **kwargs: None)
    for _ in range(2):
        launching.launch(counting, 3, NUMBERS, VARIANTS["the same"])
    assert len(counting.searches) == 3


def test_a_profiler_is_told_of_every_launch(counting, monkeypatch):
    for _ in range(2):
        launching.launch(counting, 3, NUMBERS, VARIANTS["the same"])
    (compiled,) = launching._compiled.values()
    monkeypatch.setattr(compiled, "run", None)  # not past the hooks
    hook = launching.knobs.runtime.launch_enter_hook
    tell = print
    hook.add(tell)
    try:
        launching.launch(counting, 5, NUMBERS, VARIANTS["the same"])
    finally:
        hook.remove(tell)
    assert [grid for grid, _ in compiled.launches] == [(3, 1, 1), (5, 1, 1)]


# Straight to the launcher: what it is given must be what Triton's own way gives it.


NOTE = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [2, 4], "fp4_padded": False}


def launcher(driver, noted, signature, notes, **scratch):
    """Triton's launcher of a compiled kernel, with `noted` in place of what it compiles in C."""
    made = object.__new__(driver.CudaLauncher)
    made.num_ctas = 1
    made.launch = driver.wrap_handle_tensordesc(noted, signature, notes)
    for kind in ("global", "profile"):
        setattr(made, f"{kind}_scratch_size", scratch.get(kind, 0))
        setattr(made, f"{kind}_scratch_align", 1)
    made.launch_cooperative_grid, made.launch_pdl = "cooperative", "dependent"
    return made


@pytest.fixture
def driver(monkeypatch):
    """Triton's module for NVIDIA's driver, which encodes nothing."""
    module = pytest.importorskip("triton.backends.nvidia.driver")
    active = types.SimpleNamespace(
        utils=types.SimpleNamespace(fill_tma_descriptor=lambda *values: ("encoded", *values))
    )
    monkeypatch.setattr(module.triton.runtime, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(launching, "KNOWN", True)
    launching._cuda_launcher.cache_clear()
    yield module
    launching._cuda_launcher.cache_clear()


def test_straight_to_the_launcher_is_what_triton_does(driver):
    noted, tensor = [], torch.zeros(6, 8)
    descriptor = Descriptor(tensor, [6, 8], [8, 1], [2, 4])
    signature = {"a": "i32", "b": "tensordesc<fp32[2, 4]>", "c": ("*fp32", "i32")}
    run = launcher(driver, lambda *given: noted.append(given), signature, [NOTE])
    compiled = types.SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    own = (5, 1, 1, "stream", "function", "metadata", None, None, None)
    run(*own, 3, descriptor, (tensor.data_ptr(), 7))
    straight = launching.straight_to(compiled, 5)
    (note,) = straight.notes
    place = launching.Place(tensor.data_ptr())
    expanded = launching.expand(launching.Described(place, [6, 8], [8, 1], "zero"), note)
    assert expanded[0][:2] == ("encoded", tensor.data_ptr())
    head = list(straight.head)
    assert head[launching.STREAM] is None
    head[launching.STREAM] = "stream"
    straight.start(*head, 3, *expanded, (tensor.data_ptr(), 7))
    by_triton, by_us = noted
    assert by_triton == by_us


def test_without_descriptors_the_launcher_is_the_compiled_one(driver):
    noted = []
    start = functools.partial(lambda *given: noted.append(given))  # no function of Python
    run = launcher(driver, start, {"a": "i32"}, None)
    compiled = types.SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    straight = launching.straight_to(compiled, 5)
    assert straight.start is start
    assert straight.notes == []
    run(5, 1, 1, None, "function", "metadata", None, None, None, 3)
    assert noted == [(*straight.head, 3)]


@pytest.mark.parametrize("kind", ["global", "profile"])
def test_memory_that_a_launch_asks_for_needs_triton(driver, kind):
    run = launcher(driver, print, {"a": "i32"}, None, **{kind: 8})
    compiled = types.SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    assert launching.straight_to(compiled, 5) is None


def test_launchers_that_we_do_not_know_need_triton(driver):
    without_notes = launcher(driver, print, {"a": "tensordesc<fp32[2, 4]>"}, None)
    wrapped = launcher(driver, print, {"a": "i32"}, None)
    wrapped.launch = lambda *given: print(*given)
    for run in (without_notes, wrapped):
        compiled = types.SimpleNamespace(run=run, function="function", packed_metadata="metadata")
        assert launching.straight_to(compiled, 5) is None


def unspecialized(size, stride, BLOCK: tl.constexpr):
    pass


def test_numbers_that_a_kernel_is_not_compiled_for_share_a_key():
    kernel = jit.JITFunction(unspecialized, do_not_specialize=["size"])

    def key(size, stride=16):
        given = {"size": size, "stride": stride, "BLOCK": 64}
        return launching.launch_key(kernel, 0, given, {})

    assert key(1) == key(16) == key(17) == key(-(2**31))
    assert len({key(1), key(2**31), key(True), key(1.5), key(1, stride=17)}) == 5


def test_descriptors_of_other_blocks_or_types_have_another_key():
    def key(dtype, block):
        descriptor = Descriptor(torch.zeros(6, 8, dtype=dtype), [6, 8], [8, 1], block)
        return launching.launch_key(KERNEL, 0, arguments((descriptor, 1)), {})

    one = key(torch.float32, [2, 4])
    assert one == key(torch.float32, [2, 4])
    assert len({one, key(torch.bfloat16, [2, 4]), key(torch.float32, [4, 4])}) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_launches_go_to_the_current_stream_and_into_graphs():
    def write(numbers, number):
        given = arguments(record(numbers, stride=2), number=number)
        launching.launch(KERNEL, 1, numbers, given, num_warps=1)

    numbers = torch.zeros(16, device="cuda")
    write(numbers, 1.0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        write(numbers, 2.0)
    side.synchronize()
    assert numbers[2].item() == 2.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write(numbers, 3.0)
    assert numbers[2].item() == 2.0
    graph.replay()
    assert numbers[2].item() == 3.0
