"""The compiled kernel: one pass in C++ for what most calls are, float32 sums inside.

It is built from kernel.cpp when the package is installed from source and a C++ compiler is there
(hatch_build.py), once for each instruction set. Without it the tiles of plain torch operators serve
the same calls, more slowly; `scaledot.backend_for` says which.
"""

import ctypes
import functools
import math
import pathlib
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scaledot.backends.cpu.logits import Plan
from scaledot.backends.cpu.native.whole import is_whole
from scaledot.backends.cpu.tiles import Slab
from scaledot.backends.inputs import Inputs
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.problem import Problem, Settings

NOT_INSTALLED = "the compiled kernel is not installed: install from source with a C++ compiler"
FOLDER = pathlib.Path(__file__).parent
PANEL = 64  # keys of a packed panel, as in kernel.cpp
ROWS = 96  # rows of a unit of work, as there
LANES = 16  # widths are padded to whole vectors
BUILDS = {"AVX512": "kernel-avx512.so", "AVX2": "kernel-avx2.so"}


class Call(ctypes.Structure):
    """One slab of a call; field by field the struct of kernel.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "factor")),
        *((name, ctypes.c_void_p) for name in ("out", "sums", "moments")),
        *((f"query_{name}", ctypes.c_int64) for name in ("batch", "head", "row")),
        *((f"out_{name}", ctypes.c_int64) for name in ("batch", "head", "row")),
        *((name, ctypes.c_int64) for name in ("heads", "groups", "queries", "width")),
        *((name, ctypes.c_int64) for name in ("panels", "value_width", "value_room")),
        *((name, ctypes.c_int64) for name in ("batches", "start", "stop", "row", "row_end")),
        *((name, ctypes.c_int64) for name in ("first", "last", "offset", "left", "right")),
        ("statistics", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("query_norms", "key_norms", "floats", "counts")),
        *((name, ctypes.c_int64) for name in ("entries", "entry", "key_count")),
        ("mask", ctypes.c_void_p),
        *((f"mask_{name}", ctypes.c_int64) for name in ("batch", "head", "row", "key")),
        *((name, ctypes.c_void_p) for name in ("seen", "sinks", "scratch")),
        *((name, ctypes.c_int64) for name in ("tickets", "counter")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernel built for this processor, None where there is none."""
    if fault() is not None:
        return None
    loaded = ctypes.CDLL(str(_file()))
    loaded.scratch_size.restype = ctypes.c_int64
    loaded.scratch_size.argtypes = [ctypes.c_void_p]
    loaded.run.restype = None
    loaded.run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return loaded


def fault() -> str | None:
    """Why there is no kernel to load."""
    path = _file()
    if not path.exists():
        return NOT_INSTALLED
    if not is_whole(path):
        return f"the compiled kernel {path.name} is cut short: install scaledot again"
    return None


@functools.cache  # every call that the tiles serve asks
def _why_not() -> str:
    return fault() or NOT_INSTALLED


def _file() -> pathlib.Path:
    return FOLDER / BUILDS.get(torch.backends.cpu.get_cpu_capability(), "kernel-generic.so")


@functools.cache
def team() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch has loaded, if it has."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


def refuses(call: Inputs | Problem, settings: Settings) -> str | None:
    """Why the kernel cannot serve a call of finite numbers, None when it can."""
    if library() is None:
        return _why_not()
    if call.query.dtype == torch.float64:
        return "the compiled kernel computes in float32"
    if call.mask is not None and call.mask.dtype != torch.bool:
        return "the compiled kernel has no float mask"
    if settings.softcap or settings.dropout_p:
        return "the compiled kernel has no softcap and no dropout"
    if call.weight is not None:
        return "the compiled kernel has no additive score"
    if 0 in call.query.shape or 0 in call.key.shape:
        return "an empty tensor"
    return None


class Measured(NamedTuple):
    """What the kernel found besides the output; zeros where no statistics were asked for."""

    # The kernel writes all of them: every row and every entry lies in a slab.
    moments: Tensor  # [2, B, H, Q] float64: mean and squared deviations of each row's logits
    seen: Tensor  # [B, H, Q]: visible keys of each row, where there is a mask
    floats: Tensor  # [F, entries, H]
    counts: Tensor  # [C, entries, H]


def run(
    plan: Plan,
    out: Tensor | None,
    sums: Tensor,
    query_norms: Tensor,
    key_norms: Tensor,
) -> Measured:
    """Fills `out` [B, H, Q, V] and `sums` [5 or 2, B, H, Q] (row_max, row_sum, weighted, ...).

    The logits' moments come from the pass, not from Gram matrices: compiled, two multiply-adds a
    score cost less than the products of matrices.
    """
    kernel = library()
    assert kernel is not None
    shape = (plan.batch, plan.heads, plan.queries)
    entries = len(plan.slabs) if plan.packed else plan.batch
    statistics = sums.shape[0] > 2
    found = Measured(
        torch.empty(2 if statistics else 0, *shape, dtype=torch.float64),
        torch.empty(shape if plan.mask is not None else (0,), dtype=torch.int64),
        torch.empty(len(FLOAT_FIELDS), entries, plan.heads, dtype=torch.float32),
        torch.empty(len(COUNT_FIELDS), entries, plan.heads, dtype=torch.int64),
    )
    query = plan.inputs.query.float()
    if query.stride(-1) != 1:
        query = query.contiguous()
    panels = -(-plan.keys // PANEL)
    keys = _pack_keys(plan.inputs.key.float(), panels)
    value = None if out is None else _pad_values(plan, panels)
    rows = (plan.batch, plan.groups, plan.repeats, plan.queries)
    factor = torch.empty(rows, dtype=torch.float32)
    if isinstance(plan.factor, Tensor):
        factor.copy_(plan.factor.squeeze(-1))
    else:
        factor.fill_(plan.factor)
    sinks = _sinks(plan)
    place = out
    if out is not None and (out.dtype != torch.float32 or out.stride(-1) != 1):
        place = torch.zeros(out.shape, dtype=torch.float32)
    for index, part in enumerate(plan.slabs):
        call = _describe(plan, part, query, keys, value, factor, place, sums, found)
        call.query_norms, call.key_norms = query_norms.data_ptr(), key_norms.data_ptr()
        call.panels, call.entries = panels, entries
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.entry = index if plan.packed else part.start
        units = math.ceil((part.row_end - part.row) / ROWS) * plan.heads * (part.stop - part.start)
        threads = max(min(torch.get_num_threads(), units), 1)
        size = kernel.scratch_size(ctypes.addressof(call))
        scratch = torch.empty(threads, size, dtype=torch.float32)
        call.scratch = scratch.data_ptr()
        kernel.run(team(), threads, ctypes.addressof(call))
    if out is not None and place is not None and place is not out:
        out.copy_(place)
    return found


def _pack_keys(keys: Tensor, panels: int) -> Tensor:
    """[B, G, K, D] as [B, G, panels, D, 64], zeros after the last key."""
    missing = panels * PANEL - keys.shape[2]
    keys = F.pad(keys, (0, 0, 0, missing)) if missing else keys
    return keys.unflatten(2, (panels, PANEL)).transpose(-1, -2).contiguous()


def _pad_values(plan: Plan, panels: int) -> Tensor:
    """[B, G, 64 * panels, whole vectors], zeros after the last key and the last column."""
    value = plan.inputs.value
    assert value is not None
    missing, spare = panels * PANEL - plan.keys, -value.shape[-1] % LANES
    value = value.float()
    return (F.pad(value, (0, spare, 0, missing)) if missing or spare else value).contiguous()


def _sinks(plan: Plan) -> Tensor | None:
    """One a head of each batch entry, [B, H]."""
    sinks = plan.inputs.sinks
    return None if sinks is None else sinks.float().expand(plan.batch, plan.heads).contiguous()


def _describe(
    plan: Plan,
    part: Slab,
    query: Tensor,
    keys: Tensor,
    value: Tensor | None,
    factor: Tensor,
    out: Tensor | None,
    sums: Tensor,
    found: Measured,
) -> Call:
    call = Call()
    call.query, call.keys, call.factor = query.data_ptr(), keys.data_ptr(), factor.data_ptr()
    call.sums = sums.data_ptr()
    call.query_batch, call.query_head, call.query_row, _ = query.stride()
    if value is not None and out is not None:
        call.values, call.out = value.data_ptr(), out.data_ptr()
        call.value_width, call.value_room = out.shape[-1], value.shape[-1]
        call.out_batch, call.out_head, call.out_row, _ = out.stride()
    call.batches, call.heads, call.groups = plan.batch, plan.heads, plan.groups
    call.queries, call.width = plan.queries, plan.width
    call.start, call.stop, call.row, call.row_end = part[:4]
    call.first, call.last, call.offset, left, right = part.diagonal
    call.left = -1 if left is None else left
    call.right = -1 if right is None else right
    call.statistics, call.key_count = int(sums.shape[0] > 2), plan.keys
    call.moments, call.seen, call.floats, call.counts = (tensor.data_ptr() for tensor in found)
    mask = plan.inputs.mask
    if mask is not None:
        strides = [
            0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True)
        ]
        call.mask = mask.data_ptr()
        call.mask_batch, call.mask_head, call.mask_row, call.mask_key = strides
    return call
