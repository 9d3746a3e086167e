"""From the tensors of a call to a launch of the kernel."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from scaledot.backends.cuda.arguments import FARTHEST
from scaledot.backends.cuda.hopper.kernel import attend
from scaledot.backends.cuda.replay import ONCE, Once
from scaledot.backends.cuda.statistics import PLANES
from scaledot.backends.cuda.summary.places import MAX_CHUNKS
from scaledot.backends.inputs import Inputs
from scaledot.backends.layout import is_regular
from scaledot.problem import Settings

LOG2E = 1.4426950408889634
CACHE_BYTES = 32 * 2**20  # of keys and values that the L2 cache keeps, of its 50 MB
MOST_DEALT = 8192  # tiles that are dealt out on paper, to see who gets how much
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Config(NamedTuple):
    """How a program is built, in the kernel's order; docs/kernels.md says what was measured."""

    keys: int  # of a tile
    stages: int
    consumers: int
    turns: bool = False
    early: bool = False
    quarters: bool = False
    order: str = "lptwab"  # of the sums, see softmax.add_few
    at_once: int = 2
    in_place: bool = False  # full tiles of keys as one text for the assembler; with runs
    cut: int = 32  # exponentials in it, of a thread, before P V of the last tile is awaited
    run: int = 1  # full tiles of keys that are one chain of additions to two of the sums
    few: bool = True  # the first pivot is the largest of a few scores, not of a tile


def config_for(width: int, keys: int, *, values: bool, moments: str | None, causal: bool) -> Config:
    """By the widest of the tensors and what the pass sums: what was fastest of all that were timed
    (docs/kernels.md; `python -m benchmarks.kernels` looks again).

    moments: None without statistics. Three consumers keep the exponential units busy, but with all
    sums they spill, and a tile of 192 rows meets more masked tiles of keys. Four have 112 registers
    each, which is enough for scores alone.
    """
    narrow, wide = width <= 64, width > 128
    config = Config(128, 2, 2)
    if not values:
        if moments == "all" and wide:
            return config._replace(quarters=True, order="wpltba", at_once=4, run=8, few=False)
        if moments == "all":
            return config._replace(run=8)
        config = config._replace(consumers=4, run=8)
        if narrow or (causal and not wide):
            return config._replace(quarters=True)
        return config._replace(keys=64, order="tpwlab", at_once=1, in_place=True)
    if wide:
        return config._replace(keys=64, order="plwtab")
    config = config._replace(turns=True)
    if moments is None:
        if narrow:
            return config._replace(consumers=2 if causal and keys < 8192 else 3, early=causal)
        return config
    config = config._replace(in_place=True, run=8)
    if narrow and moments == "none" and keys >= 8192:
        return config._replace(consumers=3, early=True, order="pltwab", at_once=4)
    if narrow:
        return config._replace(order="lwtpab", at_once=1, cut=32)
    if moments == "all":
        return config._replace(order="lwtpab", at_once=4, cut=64)
    return config._replace(order="tpwlab", at_once=4, cut=24)


class Passed(NamedTuple):
    """What a pass leaves besides the output."""

    lse: Tensor  # [B, H, Q]
    rows: Tensor  # the planes of statistics.py; a tenth: of how many keys the moments are
    squares: Tensor | None  # B H Q numbers: of each row of the query, summed
    key_squares: Tensor | None  # some numbers of each head of the keys, as summary.fill takes them
    broken: Tensor | None  # B H Q bytes: which rows met a number that is not finite (repair.py)
    tile_rows: int
    read: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
    # by the kernel, query and key first; a launch beside it must not get their memory


def forward(
    inputs: Inputs,
    settings: Settings,
    out: Tensor | None,
    statistics: bool,
    moments: str = "all",
    block: int = 0,
    config: Config | None = None,
    *,
    lse: Tensor | None = None,
    rows: Tensor | None = None,
    launches: Once = ONCE,
) -> Passed:
    """`out` filled, but for tokens of no sequence. moments: of "all" keys; of those at the "edges"
    of whole blocks of `block` keys (moments.py); of "none". lse and rows are made where they are
    not given."""
    query, key, value = inputs.query, _usable(inputs.key), inputs.value
    query = _usable(query)
    value = key if value is None else _usable(value)
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    if lse is None:
        lse = query.new_empty((batch, heads, queries), dtype=torch.float32)
    moments = moments if statistics else "none"
    planes = planes_of(moments) if statistics else 0
    if rows is None:
        rows = launches.room(query, planes * lse.numel(), torch.float32).view(planes, *lse.shape)
    squares = launches.room(query, lse.numel(), torch.float32) if statistics else None
    value_width = value.shape[-1]
    d, v = _padded(width), _padded(value_width)
    config = config or config_for(
        max(d, v),
        keys,
        values=out is not None,
        moments=moments if statistics else None,
        causal=settings.right is not None,
    )
    tile_rows = 64 * config.consumers
    team = 64 if config.consumers == 3 else tile_rows  # rows, as Plan has it
    packed = inputs.cu_seqlens_q is not None
    sequences = inputs.cu_seqlens_q.shape[0] - 1 if inputs.cu_seqlens_q is not None else 0
    blocks = -(-queries // tile_rows) + sequences
    programs = min(blocks * batch * heads, _multiprocessors(query.device.index))
    key_squares = None
    if moments == "all" and statistics and _squares_keys(inputs, config):
        tiles = 2 * -(-keys // config.keys)
        key_squares = launches.room(query, batch * groups * tiles, torch.float32)
    broken = None
    if out is not None and (settings.left is not None or settings.right is not None):
        broken = launches.room(query, lse.numel(), torch.int8)
    sinks, head_scale = _side_by_side(inputs.sinks), _side_by_side(inputs.head_scale)
    strides = (0, 0, 0) if out is None else [out.stride(i) // 8 for i in range(3)]
    section = 1
    if settings.right is not None and not packed:
        key_bytes = keys * (d + v) * 2 * groups // heads  # of one head; those of a group share
        section = section_size(batch * heads, blocks, programs, key_bytes)
    arguments = (
        lse if out is None else out,
        lse,
        rows if statistics else lse,
        lse if squares is None else squares,
        lse if key_squares is None else key_squares,
        lse if broken is None else broken,
        lse if inputs.key_lengths is None else inputs.key_lengths,
        lse if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q,
        lse if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k,
        lse if sinks is None else sinks,
        lse if head_scale is None else head_scale,
        batch,
        heads,
        heads // groups,
        queries,
        keys,
        sequences,
        value_width,
        *strides,
        _batch_stride(sinks),
        _batch_stride(head_scale),
        float(settings.scale * LOG2E),
        float(settings.softcap),
        min(settings.left or 0, FARTHEST),
        min(settings.right or 0, FARTHEST),
        int(settings.bottom_right),
        section,
        max(block // config.keys, 1),
    )
    constants = (
        d,
        v,
        *config,
        out is not None,
        statistics,
        moments,
        settings.right is not None,
        settings.left is not None,
        inputs.key_lengths is not None,
        packed,
        inputs.sinks is not None,
        _factor(inputs, settings),
        settings.softcap > 0.0,
        value_width < v,
        "no" if squares is None else "query" if key_squares is None else "both",
    )
    described = (
        _describe(query, [1, 1, team, d]),
        _describe(key, [1, 1, config.keys, d]),
        _describe(value, [1, 1, config.keys, v]),
    )
    named = dict(zip(attend.arg_names, (*described, *arguments, *constants), strict=True))
    launches.launch(attend, programs, query, named, num_warps=team // 16)
    read = query, key, value, sinks, head_scale
    return Passed(lse, rows, squares, key_squares, broken, tile_rows, read)


def _squares_keys(inputs: Inputs, config: Config) -> bool:
    """Whether the pass does: each tile of rows the keys of its own place, which some row sees."""
    keys = inputs.key.shape[2]
    counted = inputs.key_lengths is None and inputs.cu_seqlens_k is None
    if not counted or keys != inputs.query.shape[2]:
        return False
    return 2 * -(-keys // config.keys) <= MAX_CHUNKS


def planes_of(moments: str) -> int:
    """How many `forward` fills with statistics."""
    return PLANES + (moments == "edges")


def section_size(heads: int, blocks: int, programs: int, key_bytes: int) -> int:
    """Heads that a causal call works on at a time (`Call.place`).

    As many as the cache holds, at least two rounds of tiles; or somewhat fewer, where all programs
    then get the same share of the work.
    """
    most = max(CACHE_BYTES // max(key_bytes, 1), -(-2 * programs // blocks))
    return _evenest(heads, blocks, programs, -(-heads // most))


@functools.lru_cache(4096)
def _evenest(heads: int, blocks: int, programs: int, fewest: int) -> int:
    """fewest: sections."""
    sizes = list(dict.fromkeys(-(-heads // n) for n in range(fewest, 2 * fewest)))[:4]
    if len(sizes) == 1 or blocks == 1 or heads * blocks > MOST_DEALT:
        return sizes[0]
    return min(sizes, key=lambda size: _longest(heads, blocks, programs, size))


def _longest(heads: int, blocks: int, programs: int, size: int) -> int:
    """Tiles of keys that the busiest program meets, rows dealt out as `Call.place` does."""
    met = [0] * programs
    rounds = -(-size * blocks // programs)
    for section, first in enumerate(range(0, heads, size)):
        mine = min(size, heads - first)
        for index in range(mine * blocks):
            turn, program = divmod(index, programs)
            if (section * rounds + turn) & 1:
                program = programs - 1 - program
            met[program] += blocks + 1 - index // mine  # and one to begin and to end
    return max(met)


def _describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    layout = _layout(*block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), _steps(tensor), block, layout)


def _steps(tensor: Tensor) -> list[int]:
    """Strides; that of a dimension of one entry means nothing, but must be a multiple of 8."""
    steps = [s if n > 1 else 8 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return [*steps[:3], 1]


def _factor(inputs: Inputs, settings: Settings) -> str:
    """How scores are scaled: by one positive number in the exponent's FMA, or one by one."""
    if inputs.head_scale is not None:
        return "head"
    if settings.log_n:
        return "log_n"
    if settings.softcap or settings.scale <= 0.0:
        return "row"
    return "no"


def _padded(width: int) -> int:
    return max(1 << (width - 1).bit_length(), 64)


def _usable(tensor: Tensor) -> Tensor:
    """As the tensor memory accelerator takes it: rows without gaps, 16-byte steps, none of 0."""
    return tensor if is_regular(tensor) else tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def _layout(batch: int, heads: int, rows: int, width: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([batch, heads, rows, width], DTYPES[dtype])


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _side_by_side(per_head: Tensor | None) -> Tensor | None:
    """[B|1, H] whose heads lie next to each other."""
    return per_head if per_head is None or per_head.stride(1) == 1 else per_head.contiguous()


def _batch_stride(per_head: Tensor | None) -> int:
    return 0 if per_head is None or per_head.shape[0] == 1 else per_head.stride(0)
