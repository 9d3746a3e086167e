"""Output rows computed once more where a hidden value that is not finite has reached them.

A tensor core multiplies 0 and NaN to NaN, so a value that causality or a window hides breaks all
rows of a tile that another row of it sees. The pass says which rows came out broken; in each block
of rows that has one, and has a broken value in a tile of keys that hides something, the output is
computed anew, key by key, from the lse that the pass left. Its programs end at once where nothing
is broken. Each of them looks at many blocks of rows at once, since starting a program takes longer
than reading its bytes.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import constants, describe_call, heads_of, padded
from scaledot.backends.cuda.forward import add_seen_values, hides_broken_values
from scaledot.backends.cuda.launching import enter
from scaledot.backends.cuda.logits import LOG2E, entry
from scaledot.backends.cuda.replay import ONCE, Once
from scaledot.backends.cuda.tile import Closed, load_sink, store_output
from scaledot.backends.cuda.visible import Place, Tiles, blocks_of, find_rows, key_tiles
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

BLOCK_M, BLOCK_N, WARPS = 64, 64, 4
SPAN = 32  # blocks of a program; packed sequences end anywhere, so there it is one
# Rows and keys that a tile of the pass reaches beyond a block here: as many as a tile has at most.
MARGIN = tl.constexpr(256)
REGISTERS = 64  # of a thread, so that a multiprocessor holds many programs that end at once


class Cut(NamedTuple):
    """What is compiled into the kernel besides the call."""

    D: Any  # of query and key
    V: Any
    BLOCK_D: Any
    BLOCK_V: Any
    BLOCK_M: Any
    BLOCK_N: Any
    SPAN: Any


def repair(
    out: Tensor,
    lse: Tensor,
    broken: Tensor,
    inputs: Inputs,
    settings: Settings,
    launches: Once = ONCE,
    soon: bool = True,
) -> None:
    """Rows of `out` in place. broken [B, H, Q]: 1 where a row's sums of values are not finite.

    soon: the launch may be made while the one before it runs (launching.enter).
    """
    query, value = inputs.query, inputs.value
    assert value is not None
    batch, heads, queries, width = query.shape
    call = describe_call(inputs, settings)
    blocks = blocks_of(call, queries, BLOCK_M)
    span = 1 if inputs.cu_seqlens_q is not None else min(SPAN, 1 << (blocks - 1).bit_length())
    spans: int = -(-blocks // span)
    value_width = value.shape[-1]
    arguments: dict[str, Any] = {
        "call": call,
        "out": heads_of(out),
        "lse_ptr": lse,
        "broken_ptr": broken,
        "blocks": blocks,
        "spans": spans,
        "cut": Cut(
            **constants(
                D=width,
                V=value_width,
                BLOCK_D=padded(width),
                BLOCK_V=padded(value_width),
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
                SPAN=span,
            )
        ),
        "SOON": soon,
    }
    options: dict[str, Any] = {"num_warps": WARPS, "launch_pdl": soon}
    options |= {"maxnreg": REGISTERS} if query.is_cuda else {}
    if out.numel():
        launches.launch(_repair_kernel, batch * heads * spans, query, arguments, **options)


@triton.jit
def _repair_kernel(call, out, lse_ptr, broken_ptr, blocks, spans, cut, SOON: tl.constexpr):
    """One program: a span of blocks of a head's rows, as a rule none of them broken."""
    if SOON:
        enter(LAST=True)
    program = tl.program_id(0)
    head = (program // spans).to(tl.int64)  # b * H + h
    first = program % spans * cut.SPAN
    if cut.SPAN == 1:
        _repair_block(call, out, lse_ptr, broken_ptr, head, first, cut)
    else:
        rows = first * cut.BLOCK_M + tl.arange(0, cut.SPAN * cut.BLOCK_M)
        at = broken_ptr + head * call.queries + rows
        broken = tl.load(at, mask=rows < call.queries, other=0)
        if tl.max(broken.to(tl.int32), 0) > 0:
            for block in range(first, tl.minimum(first + cut.SPAN, blocks)):
                _repair_block(call, out, lse_ptr, broken_ptr, head, block, cut)


@triton.jit
def _repair_block(call, out, lse_ptr, broken_ptr, head, block, cut):
    """Compute BLOCK_M rows again where one of them is broken and a hidden value may be why."""
    b, h = head // call.heads, head % call.heads
    row, seq = find_rows(call, b, block, cut.BLOCK_M)
    row_end = tl.minimum(row + cut.BLOCK_M, seq.row_end)
    rows = row + tl.arange(0, cut.BLOCK_M)
    lines = head * call.queries + rows
    broken = tl.load(broken_ptr + lines, mask=rows < row_end, other=0) != 0
    if tl.max(broken.to(tl.int32), 0) > 0:  # Triton would compute both sides of an `and`
        place = Place(b, h, seq)
        tiles = key_tiles(row, row_end, seq, call.window, False, cut.BLOCK_N)
        # A value that no row here may see has come along with other rows of the pass's tile.
        first = tl.maximum(row - MARGIN, seq.row)
        last = tl.minimum(row_end + MARGIN, seq.row_end)
        around = key_tiles(first, last, seq, call.window, False, cut.BLOCK_N)
        # So has one of a key that no row at all sees, in the pass's first or last tile of keys.
        begin = tl.maximum(around.begin - MARGIN, seq.key)
        around = Tiles(begin, around.full, around.full_end, around.end + MARGIN)
        if hides_broken_values(around, call, place, cut):
            lse2 = tl.load(lse_ptr + lines, mask=broken, other=0.0) * LOG2E
            pivot = tl.where(tl.abs(lse2) < float("inf"), lse2, 0.0)
            acc, row_sum = add_seen_values(pivot, rows, row_end, tiles, call, place, cut)
            if call.sinks.ptr is not None:
                row_sum += tl.exp2(load_sink(entry(call.sinks, b, h), call.FLOAT) - pivot)
            sound = lse2 == lse2
            empty = (row_sum == 0.0) & sound
            row_sum = tl.where(sound, row_sum, float("nan"))
            closed = Closed(empty, tl.where(empty, 1.0, row_sum), lse2)
            store_output(call, out, b, h, rows, broken, acc, closed, cut.V)
