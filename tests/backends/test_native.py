"""The compiled kernel does what the tiles of torch operators do, faster."""

import math
import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conformance.agreement import assert_close_to_exact, assert_vitals_agree

import scaledot
from scaledot import reference
from scaledot.backends.cpu import native
from scaledot.backends.cpu.forward import forward
from scaledot.backends.inputs import Inputs
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS, ROW_FIELDS
from scaledot.problem import describe

SIZES = (63, 64, 65, 95, 96, 97, 511, 512, 513, 1025)  # panels, units of rows, tiles of keys
WIDTHS = (1, 3, 8, 16, 17, 64, 80, 128, 200)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_17)


def has_compiler() -> bool:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return compiler is not None and sys.platform.startswith("linux")


def is_installed() -> bool:
    try:
        return bool(metadata.version("scaledot"))
    except metadata.PackageNotFoundError:
        return False


needs_kernel = pytest.mark.skipif(
    native.library() is None,
    reason="NO COMPILED KERNEL: scaledot was installed without a C++ compiler; nothing tested here",
)


def test_kernel_is_built_where_a_compiler_was_there():
    """A package installed from source without its kernel is slow and says nothing about it."""
    if not (has_compiler() and is_installed()) or os.environ.get("SCALEDOT_NATIVE") == "0":
        pytest.skip("no C++ compiler, or scaledot runs from its sources without being installed")
    assert native.library() is not None, "reinstall scaledot: pip install -e ."


# --- the same as the tiles -----------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch):
    """served.compiled(f), served.tiled(f): f() by the kernel, and by the tiles."""
    ran = []
    run = native.run

    def spy(*arguments):
        ran.append(1)
        return run(*arguments)

    def compiled(function):
        ran.clear()
        with monkeypatch.context() as patch:
            patch.setattr(native, "run", spy)
            result = function()
        assert ran, "the kernel did not serve this call"
        return result

    def tiled(function):
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            return function()

    return SimpleNamespace(compiled=compiled, tiled=tiled)


def tensors(queries=97, keys=129, width=16, value_width=16, heads=2, key_heads=None, batch=1):
    groups = heads if key_heads is None else key_heads
    return (
        torch.randn(batch, heads, queries, width),
        torch.randn(batch, groups, keys, width),
        torch.randn(batch, groups, keys, value_width),
    )


def reach_of(query, key, keys, scale=None, **_):
    """The largest sum of absolute terms behind a logit; both sides round, hence twice."""
    if isinstance(scale, torch.Tensor):
        number = scale.abs().max().item()
    elif isinstance(scale, (int, float)):
        number = abs(scale)
    else:
        number = 1 / math.sqrt(query.shape[-1])
        number *= math.log(max(keys, 2)) if scale == "log_n" else 1.0
    norms = [t.float().norm(dim=-1).max().item() for t in (query, key)]
    return 2 * number * math.prod(norms)


def assert_agree(served, call, function=scaledot.attention_with_vitals, extra=(), **keywords):
    """Vitals, per head and per row, within what one logit's rounding explains; the output at most
    twice as far from float64 as the tiles', and rounding."""

    def with_vitals():
        return function(*call, *extra, per_row=True, **keywords)

    def scores_only():
        return scaledot.vitals(*call[:2], per_row=True, **keywords)

    query, key, _ = call
    keys = key.shape[0 if extra else -2]
    reach = reach_of(query, key, keys, **keywords)
    (out, vitals), (plain_out, plain) = served.compiled(with_vitals), served.tiled(with_vitals)
    names = (*FLOAT_FIELDS, *COUNT_FIELDS)
    expected = SimpleNamespace(
        **{name: getattr(plain, name) for name in names},
        passes=plain.passes,
        per_row=plain.per_row,
        reach=reach,
        keys=keys,
    )
    assert_vitals_agree(vitals, expected, per_row=True)
    for name in COUNT_FIELDS:
        assert torch.equal(getattr(vitals, name), getattr(plain, name)), name
    assert out.dtype == plain_out.dtype
    assert out.stride() == plain_out.stride()
    packed = {"cu_seqlens": extra} if extra else {}
    exact = reference.attention_with_vitals(*call, **packed, **keywords)[0]
    assert_close_to_exact(out, exact, plain_out)
    if not extra:
        assert_vitals_agree(served.compiled(scores_only), expected, per_row=True)


@needs_kernel
@pytest.mark.parametrize("keys", SIZES)
@pytest.mark.parametrize("queries", SIZES)
def test_agrees_at_every_length_around_its_blocks(served, queries, keys):
    call = tensors(queries, keys, 8, 5, heads=1)
    assert_agree(served, call)
    assert_agree(served, call, is_causal=True)
    assert_agree(served, call, is_causal=True, causal_align="bottom_right")


@needs_kernel
@pytest.mark.parametrize("value_width", WIDTHS)
@pytest.mark.parametrize("width", WIDTHS)
def test_agrees_at_every_width(served, width, value_width):
    assert_agree(served, tensors(13, 67, width, value_width))


@needs_kernel
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (7, 5), (5, 7), (1, 1025)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_on_few_rows_and_keys(served, sizes, is_causal):
    assert_agree(served, tensors(*sizes, 3, 3), is_causal=is_causal)


@needs_kernel
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(
    "window", [(0, 0), (1, 0), (3, 5), (64, None), (None, 63), (700, 2), (2, 700)], ids=str
)
def test_agrees_in_every_window(served, window, align):
    for sizes in [(97, 97), (65, 1025), (1025, 65)]:
        assert_agree(served, tensors(*sizes, 8, 8), window=window, causal_align=align)


@needs_kernel
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_with_key_lengths(served, is_causal, align):
    """Some rows see nothing: their length is 0, or the diagonal leaves them out."""
    lengths = torch.tensor([0, 1, 64, 64, 65, 513, 600])
    call = tensors(97, 600, 8, 3, batch=7)
    assert_agree(served, call, key_lengths=lengths, is_causal=is_causal, causal_align=align)


@needs_kernel
def test_rows_that_see_nothing_are_zero_and_nowhere(served):
    call = tensors(129, 7, 8, 8)
    words = {"is_causal": True, "causal_align": "bottom_right"}
    assert_agree(served, call, **words)
    out, vitals = served.compiled(
        lambda: scaledot.attention_with_vitals(*call, per_row=True, **words)
    )
    assert (out[:, :, :122] == 0).all()
    assert (out[:, :, 122:] != 0).all()
    assert vitals.rows.tolist() == [[7, 7]]
    assert (vitals.per_row.lse[:, :, :122] == -math.inf).all()


@needs_kernel
@pytest.mark.parametrize("key_heads", [1, 2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_on_grouped_heads(served, key_heads, is_causal):
    call = tensors(97, 97, 8, 5, heads=6, key_heads=key_heads, batch=2)
    assert_agree(served, call, enable_gqa=True, is_causal=is_causal)


@needs_kernel
@pytest.mark.parametrize(
    "scale",
    ["log_n", "dk", "none", 0.0, -0.5, torch.tensor([0.5, -0.1, 2.0])],
    ids=["log_n", "dk", "none", "zero", "negative", "per_head"],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_at_every_scale(served, scale, is_causal):
    call = tensors(97, 130, 8, 8, heads=3, batch=2)
    assert_agree(served, call, scale=scale, is_causal=is_causal)


@needs_kernel
@pytest.mark.parametrize(
    "shape",
    [(600,), (97, 1), (97, 600), (2, 1, 97, 600), (3, 97, 600), (2, 3, 1, 600), (1, 3, 97, 1)],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, "log_n"])
def test_agrees_under_a_bool_mask(served, shape, is_causal, scale):
    """Some rows see nothing: the mask leaves few keys, or hides a row as a whole."""
    call = tensors(97, 600, 8, 5, heads=3, batch=2)
    mask = torch.rand(shape) > 0.8
    assert_agree(served, call, attn_mask=mask, is_causal=is_causal, scale=scale)
    strided = (torch.rand(*shape, 2) > 0.5)[..., 0]
    assert_agree(served, call, attn_mask=strided, is_causal=is_causal, scale=scale)


@needs_kernel
@pytest.mark.parametrize(
    "sinks", [[0.0, 1.5, -2.0], [50.0, -50.0, 300.0], [-math.inf, 0.0, 3.0]], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_with_learned_sinks(served, sinks, is_causal):
    call = tensors(97, 600, 8, 5, heads=3, batch=2)
    assert_agree(served, call, sinks=torch.tensor(sinks), is_causal=is_causal)
    mask = torch.rand(97, 600) > 0.9
    assert_agree(served, call, sinks=torch.tensor(sinks), attn_mask=mask, is_causal=is_causal)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_on_sixteen_bit_inputs(served, dtype, is_causal):
    call = [t.to(dtype) for t in tensors(97, 130, 17, 8)]
    assert_agree(served, call, is_causal=is_causal)


@needs_kernel
@pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_on_large_logits(served, size, is_causal):
    query, key, value = tensors(97, 1025, 8, 8)
    query *= size / (query @ key.mT).abs().max() * math.sqrt(8)
    assert_agree(served, (query, key, value), is_causal=is_causal)
    drift = torch.linspace(0, 1, 1025).unsqueeze(-1)  # each tile is far above the one before
    assert_agree(served, (query.abs(), key.abs() * drift, value), is_causal=is_causal)


@pytest.mark.parametrize(
    "sizes", [(1e10, 1), (1e20, 1), (1e36, 1), (1e7, 1e7), (1e10, 1e10)], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_logits_whose_squares_overflow_are_measured_all_the_same(sizes, is_causal):
    """Whoever serves: the kernel counts in float32 and must know its limits."""
    query, key, value = tensors(65, 130, 8, 8)
    call = (query * sizes[0], key * sizes[1], value)
    out, vitals = scaledot.attention_with_vitals(*call, is_causal=is_causal)
    exact, expected = reference.attention_with_vitals(*call, is_causal=is_causal)
    assert torch.equal(vitals.nonfinite, expected.nonfinite)
    for name in ("max_logit", "logit_std", "row_std", "q_rms"):
        got, want = getattr(vitals, name).double(), getattr(expected, name)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@needs_kernel
def test_agrees_on_packed_sequences(served):
    query, key, value = (torch.randn(700, 2, 8) for _ in range(3))
    ends_q = torch.tensor([0, 1, 1, 64, 161, 161, 700])
    ends_k = torch.tensor([0, 2, 65, 65, 161, 600, 700])
    for words in ({}, {"is_causal": True}, {"window": (3, 1), "causal_align": "bottom_right"}):
        assert_agree(
            served,
            (query, key, value),
            scaledot.attention_varlen_with_vitals,
            (ends_q, ends_k),
            **words,
        )


LAYOUTS = {
    "tokens_first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "width_not_last": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every_second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded_heads": lambda t: t[:, :1].expand(t.shape),
    "expanded_rows": lambda t: t[:, :, :1].expand(t.shape),
}


@needs_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_agrees_on_strided_inputs(served, layout, which):
    call = list(tensors(97, 67, 8, 8, batch=2))
    call[which] = LAYOUTS[layout](call[which])
    assert_agree(served, call, is_causal=True)


def parts_of(call, **keywords):
    problem = describe(*call, **keywords)
    return Inputs(*problem[: len(Inputs._fields) - 1], None), problem.settings


@needs_kernel
@pytest.mark.parametrize("value_width", [3, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [1, 2])
def test_output_is_written_in_place_and_nothing_beside_it(served, value_width, dtype, step):
    call = [t.to(dtype) for t in tensors(97, 67, 8, value_width, batch=2)]
    inputs, settings = parts_of(call, is_causal=True)
    plain = torch.zeros(2, 2, 97, value_width, dtype=dtype)
    served.compiled(lambda: forward(inputs, settings, plain, True, False))
    room = torch.full((2, 4, 103, step * value_width + 5), math.nan, dtype=dtype)
    place = room[:, 1:3, 2:99, 3 : 3 + step * value_width : step]
    place.zero_()
    served.compiled(lambda: forward(inputs, settings, place, True, False))
    assert torch.equal(place, plain)
    assert room.isfinite().sum() == place.numel()


@needs_kernel
@pytest.mark.parametrize("is_causal", [False, True])
def test_statistics_do_not_change_the_output(served, is_causal):
    for sizes in [(97, 129), (513, 1025)]:
        call = tensors(*sizes)
        with_vitals, alone = (
            served.compiled(function)
            for function in (
                lambda call=call: scaledot.attention_with_vitals(*call, is_causal=is_causal)[0],
                lambda call=call: scaledot.attention(*call, is_causal=is_causal, backend="cpu"),
            )
        )
        torch.testing.assert_close(with_vitals, alone, rtol=1e-6, atol=1e-6)


@needs_kernel
def test_output_without_statistics_agrees_with_the_tiles(served):
    for sizes in [(1, 1), (65, 63), (97, 1025)]:
        call = tensors(*sizes)
        for words in ({}, {"is_causal": True}, {"window": (5, 3)}):

            def attend(call=call, words=words):
                return scaledot.attention(*call, **words, backend="cpu")

            torch.testing.assert_close(
                served.compiled(attend), served.tiled(attend), rtol=2e-6, atol=2e-6
            )


# --- bit by bit ----------------------------------------------------------------------------------


def everything(call, **keywords):
    """Every number that a call gives, in a list."""
    out, vitals = scaledot.attention_with_vitals(*call, per_row=True, **keywords)
    alone = scaledot.attention(*call, backend="cpu", **keywords)
    rows = [getattr(vitals.per_row, name) for name in ROW_FIELDS]
    return [out, alone, *(getattr(vitals, n) for n in (*FLOAT_FIELDS, *COUNT_FIELDS)), *rows]


def assert_bitwise_equal(one, two):
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def threads():
    """Sets the number of threads, and sets it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize(
    "keywords", [{}, {"is_causal": True}, {"window": (100, 3)}, {"scale": "log_n"}], ids=str
)
def test_results_do_not_depend_on_the_number_of_threads(served, threads, keywords):
    call = tensors(513, 600, 17, 8, heads=3, batch=2)
    threads(1)
    alone = served.compiled(lambda: everything(call, **keywords))
    for number in (2, 3, 5, 8):
        threads(number)
        for _ in range(3):
            assert_bitwise_equal(served.compiled(lambda: everything(call, **keywords)), alone)


@needs_kernel
@pytest.mark.parametrize("sizes", [(7, 5, 3, 3), (65, 63, 17, 8), (97, 513, 16, 16)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("filler", [math.nan, math.inf, 1e38])
def test_nothing_around_the_inputs_is_read(served, sizes, is_causal, filler):
    """The same numbers at the same strides, in buffers filled with 0 and with something else."""
    call = tensors(*sizes)

    def embedded(number):
        views = []
        for tensor in call:
            batch, heads, tokens, width = tensor.shape
            room = torch.full((batch + 2, heads + 2, tokens + 7, width + 5), number)
            view = room[1:-1, 1:-1, 3:-4, 2:-3]
            views.append(view.copy_(tensor))
        return views

    quiet, loud = (
        served.compiled(lambda number=number: everything(embedded(number), is_causal=is_causal))
        for number in (0.0, filler)
    )
    assert_bitwise_equal(loud, quiet)


@needs_kernel
@pytest.mark.parametrize("filler", [math.nan, 1e38])
def test_rows_of_other_sequences_are_not_mixed_in(served, filler):
    """Large or bad numbers in the keys that one entry cannot see change nothing for it."""
    query, key, value = tensors(65, 513, 8, 8, batch=2)
    lengths = torch.tensor([500, 500])

    def measure():
        return scaledot.attention_with_vitals(query, key, value, key_lengths=lengths)[0]

    quiet = served.compiled(measure)
    value[:, :, 500:] = filler
    loud = measure()  # NaN values are for the tiles
    torch.testing.assert_close(loud, quiet, rtol=1e-5, atol=1e-5)


def test_thread_setting_is_left_alone():
    before = torch.get_num_threads()
    scaledot.attention_with_vitals(*tensors())
    assert torch.get_num_threads() == before


# --- builds --------------------------------------------------------------------------------------


def load(file, patch):
    """The build in `file`, as `native.library` would load it."""
    patch.setattr(native, "BUILDS", {torch.backends.cpu.get_cpu_capability(): file})
    loaded = native.library.__wrapped__()
    if loaded is None:
        pytest.skip(f"NO {file}: scaledot was installed without it")
    return loaded


@needs_kernel
@pytest.mark.parametrize("file", ["kernel-generic.so", "kernel-avx2.so", "kernel-avx512.so"])
def test_every_build_that_this_processor_runs_agrees(served, monkeypatch, file):
    needs = {"kernel-avx2.so": ("AVX2", "AVX512"), "kernel-avx512.so": ("AVX512",)}
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in needs.get(file, (capability,)):
        pytest.skip(f"this processor ({capability}) cannot run {file}")
    loaded = load(file, monkeypatch)
    monkeypatch.setattr(native, "library", lambda: loaded)
    for sizes in [(1, 1, 1, 1), (97, 65, 17, 3), (64, 513, 64, 64), (191, 1025, 8, 80)]:
        for words in ({}, {"is_causal": True}, {"window": (70, 5), "causal_align": "bottom_right"}):
            assert_agree(served, tensors(*sizes), **words)
    query, key, value = tensors(97, 600, 8, 8)
    assert_agree(served, (query * 1000, key, value), is_causal=True)


def test_fields_of_a_call_are_those_of_the_source():
    """Names, order, and which are pointers."""
    source = Path(native.__file__).with_name("kernel.cpp").read_text()
    body = re.search(r"^struct Call \{\n(.*?)^\};", source, re.MULTILINE | re.DOTALL)
    assert body is not None
    code = re.sub(r"//[^\n]*", "", body.group(1))
    code = re.sub(r"\bint64_t \w+\(.*?\{.*?\}", "", code, flags=re.DOTALL)  # methods
    found = []
    for statement in code.split(";"):
        words = re.fullmatch(r"\s*(?:const )?(float|double|u?int\d+_t)\b(.*)", statement, re.DOTALL)
        if words is None:
            assert not statement.strip(), f"not understood: {statement}"
            continue
        for name in words.group(2).split(","):
            found.append((name.replace("*", "").strip(), "*" in name))
    pointer = native.ctypes.c_void_p
    assert found == [(name, kind is pointer) for name, kind in native.Call._fields_]


def test_block_sizes_are_those_of_the_source():
    source = Path(native.__file__).with_name("kernel.cpp").read_text()
    for name in ("PANEL", "ROWS"):
        assert f"constexpr int {name} = {getattr(native, name)};" in source


# --- who is served -------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize(
    "keywords",
    [
        {"attn_mask": torch.zeros(129)},
        {"softcap": 5.0},
        {"dropout_p": 0.1},
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_tiles_serve_what_the_kernel_has_not(monkeypatch, keywords):
    monkeypatch.setattr(native, "run", lambda *_: pytest.fail("the kernel cannot do this"))
    scaledot.attention_with_vitals(*tensors(), **keywords)


@needs_kernel
@pytest.mark.parametrize("which", [0, 1], ids=["query", "key"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_tiles_serve_numbers_that_are_not_finite_or_overflow(monkeypatch, which, bad):
    call = tensors()
    call[which][0, 0, 3, 2] = bad
    if bad == 1e30:
        call[1 - which][0, 0, 5, 2] = bad
    monkeypatch.setattr(native, "run", lambda *_: pytest.fail("the kernel wants finite numbers"))
    vitals = scaledot.attention_with_vitals(*call)[1]
    assert vitals.nonfinite.sum() > 0


@needs_kernel
def test_float64_is_for_the_tiles(monkeypatch):
    monkeypatch.setattr(native, "run", lambda *_: pytest.fail("the kernel sums in float32"))
    scaledot.attention_with_vitals(*(t.double() for t in tensors()))


def test_without_the_kernel_every_call_is_still_served(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    assert "tiles" in scaledot.backend_for(*tensors(), vitals=True).how
    out, vitals = scaledot.attention_with_vitals(*tensors())
    assert out.isfinite().all()
    assert vitals.rows.tolist() == [[97, 97]]


HIDES = {
    "minus infinity": -math.inf,
    "the lowest value": torch.finfo(torch.float32).min,
    "half of it": torch.finfo(torch.float32).min / 2,
}


def hiding_mask(keys, *shape, value=-math.inf):
    """0 and `value`; the second row of each may see nothing."""
    hidden = torch.rand(*shape, keys) > 0.7
    hidden[..., 0] = False
    if hidden.shape[-2] > 1:
        hidden[..., 1, :] = True
    return torch.zeros(hidden.shape).masked_fill(hidden, value)


@needs_kernel
@pytest.mark.parametrize("value", HIDES.values(), ids=HIDES)
@pytest.mark.parametrize("shape", [(7, 1, 97), (1, 97), (7, 1, 1), (97,)], ids=str)
def test_float_masks_that_only_hide_are_served_as_bool_masks(served, monkeypatch, shape, value):
    query, key, _ = tensors(97, 131, 8, 8, batch=7)
    mask = hiding_mask(131, *shape, value=value)

    def measure():
        return scaledot.vitals(query, key, mask, per_row=True)

    expected = scaledot.vitals(query, key, mask == 0, per_row=True)
    found = served.compiled(measure)
    for name in (*FLOAT_FIELDS, *COUNT_FIELDS):
        assert_bitwise_equal(getattr(found, name), getattr(expected, name))
    assert "compiled" in str(scaledot.backend_for(query, key, attn_mask=mask))
    with monkeypatch.context() as patch:  # as it is: a bias
        patch.setattr("scaledot.backends.cpu.forward.with_bool_mask", lambda call, _: call)
        tiled = served.tiled(measure)
    for name in COUNT_FIELDS:
        assert torch.equal(getattr(found, name), getattr(tiled, name)), name
    for name in FLOAT_FIELDS:
        torch.testing.assert_close(getattr(found, name), getattr(tiled, name), rtol=1e-4, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize("value", [-3.0, -1e4, -1e30, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("place", [(-1, -1), (3, 5)], ids=str)
def test_a_mask_that_also_adds_stays_a_bias(served, value, place):
    query, key, _ = tensors(13, 67, 8, 8)
    mask = hiding_mask(67, 13)
    mask[place] = value
    found = served.tiled(lambda: scaledot.vitals(query, key, mask))
    assert "float mask" in str(scaledot.backend_for(query, key, attn_mask=mask))
    if math.isfinite(value):
        hidden = scaledot.vitals(query, key, mask.masked_fill(mask != 0, -math.inf))
        assert not torch.equal(found.pairs, hidden.pairs)


@needs_kernel
def test_log_n_counts_the_keys_that_a_finite_value_hides(served):
    query, key, _ = tensors(13, 67, 8, 8)
    mask = hiding_mask(67, 13, value=torch.finfo(torch.float32).min)
    mask[1] = 0.0
    found = scaledot.vitals(query, key, mask, scale="log_n")
    exact = scaledot.vitals(query.double(), key.double(), mask, scale="log_n")
    torch.testing.assert_close(found.max_logit.double(), exact.max_logit, rtol=1e-5, atol=1e-5)


@needs_kernel
def test_float16_masks_of_finite_values_do_not_hide_what_is_above_them(served):
    query, key = torch.full((1, 1, 2, 1), 400.0), torch.full((1, 1, 3, 1), -400.0)
    mask = torch.tensor([0.0, 0.0, torch.finfo(torch.float16).min]).half()
    found = scaledot.vitals(query.half(), key.half(), mask, scale=1.0)
    exact = scaledot.vitals(query.double(), key.double(), mask.double(), scale=1.0)
    assert found.rows.tolist() == exact.rows.tolist()


@needs_kernel
def test_scores_alone_make_no_lse(served):
    query, key, _ = tensors(13, 67, 8, 8)
    for per_row, sizes in ((False, [0]), (True, [1, 2, 13])):
        problem = describe(query, key, None, scores_only=True, wants_vitals=True, per_row=per_row)
        inputs = Inputs._make((*problem[: len(Inputs._fields) - 1], None))
        found = forward(inputs, problem.settings, None, True, per_row)
        assert list(found.lse.shape) == sizes


@needs_kernel
@pytest.mark.parametrize("case", ["whole", "causal", "lengths", "packed", "mask", "sinks"])
def test_nothing_is_read_that_the_kernel_has_not_written(monkeypatch, case):
    """New memory holds NaN and large counts."""
    query, key, value = tensors(97, 131, 8, 8, batch=3)
    words = {
        "whole": {},
        "causal": {"is_causal": True, "causal_align": "bottom_right", "window": (3, None)},
        "lengths": {"key_lengths": torch.tensor([0, 1, 131])},
        "packed": {},
        "mask": {"attn_mask": torch.rand(3, 1, 97, 131) > 0.99},
        "sinks": {"sinks": torch.randn(query.shape[1])},
    }[case]

    def measured():
        if case == "packed":
            ends = torch.tensor([0, 0, 50, 97]), torch.tensor([0, 20, 20, 131])
            packed = (part[0].transpose(0, 1) for part in (query, key, value))
            return scaledot.attention_varlen_with_vitals(*packed, *ends, per_row=True)
        return scaledot.attention_with_vitals(query, key, value, per_row=True, **words)

    out, expected = measured()
    empty = torch.empty

    def filled(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(math.nan if made.is_floating_point() else 2**40)

    monkeypatch.setattr(torch, "empty", filled)
    found_out, found = measured()
    assert_bitwise_equal(found_out, out)
    for name in (*FLOAT_FIELDS, *COUNT_FIELDS):
        assert_bitwise_equal(getattr(found, name), getattr(expected, name))
    for ours, theirs in zip(found.per_row, expected.per_row, strict=True):
        assert_bitwise_equal(ours, theirs)
