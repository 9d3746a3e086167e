"""Mean and scatter matrix of each chunk of keys, and their squares summed, from one reading.

With the mean k' of some keys, their scatter matrix is sum_j (k_j - k')(k_j - k')^T. Keys are
centred before they are multiplied, so a large common part of them, which moves no probability,
costs no digits. A matrix wider than 128 would not fit into a program's registers; as it is
symmetric, three of its quarters are enough: above on the left and on the right, below on the right.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaledot.backends.cuda.arguments import padded, strides
from scaledot.backends.cuda.replay import Once

WIDEST_PART = 128  # of a matrix
FARTHEST_HALF = tl.constexpr(8192.0)  # a centre of float16 keys; they end at 65504


class Plan(NamedTuple):
    """How programs are built for a width."""

    tokens: int  # at a time
    stages: int  # of which all but one are on their way
    warps: int
    programs: int  # that a multiprocessor holds at once
    most: dict[str, int]  # registers, so that it does
    width: int  # a power of two
    part: int  # rows and columns of a matrix, or of a quarter of it
    parts: int  # of a matrix that are computed


def plan_for(width: int) -> Plan:
    """By what the registers hold (compiled for sm_90: next to nothing is spilled in the loops)."""
    wide = padded(width)
    if wide <= 64:
        return Plan(64, 3, 4, 4, {"maxnreg": 128}, wide, wide, 1)
    if wide <= WIDEST_PART:
        return Plan(64, 3, 8, 2, {"maxnreg": 128}, wide, wide, 1)
    return Plan(16, 6, 8, 1, {}, wide, WIDEST_PART, 3)


class Grams(NamedTuple):
    """Of the chunks of each head [B, G], one after the other, in float32."""

    matrices: Tensor  # parts of PART x PART numbers
    means: Tensor  # of WIDTH numbers
    squares: Tensor  # one number: the keys' squares as they are, summed


def measure(key: Tensor, plan: Plan, chunk: int, launches: Once) -> Grams:
    """One launch. The last chunk of a head ends with its keys."""
    batch, groups, keys = key.shape[:3]
    chunks = -(-keys // chunk)
    programs = batch * groups * chunks
    matrix = plan.parts * plan.part * plan.part
    grams = Grams(
        launches.room(key, programs * matrix, torch.float32),
        launches.room(key, programs * plan.width, torch.float32),
        launches.room(key, programs, torch.float32),
    )
    in_steps = strides_in_steps("k", key, "bhnd")
    arguments: dict[str, Any] = {
        "key_ptr": key,
        "matrices_ptr": grams.matrices,
        "means_ptr": grams.means,
        "squares_ptr": grams.squares,
        "groups": groups,
        **in_steps,
        "keys": keys,
        "chunk": chunk,
        "chunks": chunks,
        "WIDTH": plan.width,
        "PART": plan.part,
        "FILLED": key.shape[-1] == plan.width,
        "TOKENS": plan.tokens,
        "LANES": min(32 * plan.warps * 8 // plan.part, plan.tokens),
        "STAGES": stages_for(plan.stages, key, in_steps),
    }
    options = {"num_warps": plan.warps, "num_stages": 1, **plan.most}
    launches.launch(measure_keys, programs, key, arguments, **options)
    return grams


def strides_in_steps(name: str, tensor: Tensor, letters: str) -> dict[str, int]:
    """Strides and width in STEPs of 8 numbers where they allow that: then 16 bytes are read at
    once, even if Triton cannot see that a stride is a multiple of 16."""
    named = strides(name, tensor, letters)
    *outer, inner = named
    lengths = {each: named[each] for each in outer} | {"width": tensor.shape[-1]}
    step = 8 if named[inner] == 1 and not any(n % 8 for n in lengths.values()) else 1
    return {each: n // step for each, n in lengths.items()} | {inner: named[inner], "STEP": step}


def stages_for(stages: int, tensor: Tensor, in_steps: dict[str, int]) -> int:
    """None ahead where rows cannot be copied 16 bytes at a time: see the traps of kernels.md."""
    return stages if in_steps["STEP"] == 8 and tensor.data_ptr() % 16 == 0 else 1


@triton.jit
def measure_keys(
    key_ptr,
    matrices_ptr,
    means_ptr,
    squares_ptr,
    groups,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    width,
    keys,
    chunk,
    chunks,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    FILLED: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program a chunk. x and y are the left and the right half of what is wider than PART."""
    WIDE: tl.constexpr = WIDTH > PART
    place = tl.program_id(0).to(tl.int64)
    head, index = place // chunks, (place % chunks).to(tl.int32)
    keys_ptr = key_ptr + ((head // groups) * stride_kb + (head % groups) * stride_kh) * STEP
    start = index * chunk
    stop = tl.minimum(start + chunk, keys)
    step = (stride_kn, stride_kd)
    d = tl.arange(0, PART)
    n = start + tl.arange(0, TOKENS)
    raw = load_tokens(keys_ptr, n, n < stop, d, width, step, STEP)
    x_centre = centre_of(raw, n < stop)
    xx = tl.zeros([PART, PART], tl.float32)
    none = tl.zeros([LANES, PART], tl.float32)
    x_sums = none, none
    squares = tl.zeros([LANES, PART // 8], tl.float32)
    e, y_centre, xy, yy, y_sums = PART + d, x_centre, xx, xx, x_sums
    if WIDE:
        raw = load_tokens(keys_ptr, n, n < stop, e, width, step, STEP)
        y_centre = centre_of(raw, n < stop)
    whole = start + (stop - start) // TOKENS * TOKENS
    for at in tl.range(start, whole, TOKENS, num_stages=STAGES):
        n = at + tl.arange(0, TOKENS)
        raw = load_all_tokens(keys_ptr, n, d, width, step, STEP, FILLED)
        x = raw - x_centre.to(raw.dtype)[None, :]
        x_sums, squares = _add(x_sums, squares, raw, x, LANES)
        if WIDE:
            raw = load_all_tokens(keys_ptr, n, e, width, step, STEP, FILLED)
            y = raw - y_centre.to(raw.dtype)[None, :]
            y_sums, squares = _add(y_sums, squares, raw, y, LANES)
            xy = tl.dot(tl.trans(x), y, xy)
            yy = tl.dot(tl.trans(y), y, yy)
        xx = tl.dot(tl.trans(x), x, xx)
    if whole < stop:
        n = whole + tl.arange(0, TOKENS)
        there = (n < stop)[:, None]
        raw = load_tokens(keys_ptr, n, n < stop, d, width, step, STEP)
        x = tl.where(there, raw - x_centre.to(raw.dtype)[None, :], 0.0)
        x_sums, squares = _add(x_sums, squares, raw, x, LANES)
        if WIDE:
            raw = load_tokens(keys_ptr, n, n < stop, e, width, step, STEP)
            y = tl.where(there, raw - y_centre.to(raw.dtype)[None, :], 0.0)
            y_sums, squares = _add(y_sums, squares, raw, y, LANES)
            xy = tl.dot(tl.trans(x), y, xy)
            yy = tl.dot(tl.trans(y), y, yy)
        xx = tl.dot(tl.trans(x), x, xx)

    # About the mean of the chunk itself: of the numbers that were multiplied, rounded as they were.
    number = (stop - start).to(tl.float32)
    x_sum = tl.sum(x_sums[1], 0)
    x_shift = x_sum / number
    matrix_ptr = matrices_ptr + place * ((2 * (WIDTH // PART) - 1) * PART * PART)
    entries = d[:, None] * PART + d[None, :]
    tl.store(matrix_ptr + entries, xx - x_sum[:, None] * x_shift[None, :])
    tl.store(means_ptr + place * WIDTH + d, tl.sum(x_sums[0], 0) / number)
    if WIDE:
        y_sum = tl.sum(y_sums[1], 0)
        y_shift = y_sum / number
        matrix_ptr += PART * PART
        tl.store(matrix_ptr + entries, xy - x_sum[:, None] * y_shift[None, :])
        matrix_ptr += PART * PART
        tl.store(matrix_ptr + entries, yy - y_sum[:, None] * y_shift[None, :])
        tl.store(means_ptr + place * WIDTH + e, tl.sum(y_sums[0], 0) / number)
    tl.store(squares_ptr + place, tl.sum(squares))


@triton.jit
def place_in_parts(program, WIDTH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr):
    """(head, part, row, e, d) of a program that works on ROWS rows of a head's parts.

    row [ROWS]: of all parts, one below the other; e [ROWS] and d [PART]: of the whole matrix.
    """
    STEPS: tl.constexpr = (2 * (WIDTH // PART) - 1) * PART // ROWS
    head, first_row = program // STEPS, (program % STEPS).to(tl.int32) * ROWS
    part = first_row // PART  # above on the left, above on the right, below on the right
    row = first_row + tl.arange(0, ROWS)
    e = part // 2 * PART + row % PART
    d = (part + 1) // 2 * PART + tl.arange(0, PART)
    return head, part, row, e, d


@triton.jit
def load_tokens(tokens_ptr, n, mask, d, width, step, STEP: tl.constexpr):
    """[TOKENS, PART]: entries d of the tokens n, zeros where the mask [TOKENS] is not set."""
    at = tokens_ptr + (n.to(tl.int64) * step[0])[:, None] * STEP + d[None, :] * step[1]
    return tl.load(at, mask=mask[:, None] & (d < width * STEP)[None, :], other=0.0)


@triton.jit
def load_all_tokens(tokens_ptr, n, d, width, step, STEP: tl.constexpr, FILLED: tl.constexpr):
    """The same of tokens that are all there. FILLED: they are as wide as their tile is, too."""
    at = tokens_ptr + (n.to(tl.int64) * step[0])[:, None] * STEP + d[None, :] * step[1]
    if FILLED:
        return tl.load(at)
    return tl.load(at, mask=(n >= 0)[:, None] & (d < width * STEP)[None, :], other=0.0)


@triton.jit
def centre_of(keys, inside):
    """[PART]: from where keys [TOKENS, PART] are counted, zeros where they are not `inside`.

    Their mean where all keys lie on one side of zero, rounded like them, so that what is left of a
    key has as few bits as the key (or is rounded, if it lies far from the others). Elsewhere zero,
    and in float16 where what is left might be too large.
    """
    values = keys.to(tl.float32)
    present = tl.sum(inside.to(tl.float32), 0)
    mean = tl.sum(values, 0) / present
    apart = tl.sum(tl.where(inside[:, None], tl.abs(values - mean[None, :]), 0.0), 0) / present
    centre = tl.where(tl.abs(mean) > 4.0 * apart, mean, 0.0)
    if keys.dtype == tl.float16:
        centre = tl.where(tl.abs(centre) > FARTHEST_HALF, 0.0, centre)
    return centre.to(keys.dtype).to(tl.float32)


@triton.jit
def _add(sums, squares, raw, kept, LANES: tl.constexpr):
    """Tokens [TOKENS, PART] join the sums of them and of what was kept of them; their squares.

    What is summed is in one thread, so nothing is exchanged.
    """
    wide = raw.to(tl.float32)
    own = tl.sum(tl.reshape(wide * wide, [raw.shape[0], raw.shape[1] // 8, 8]), 2)
    sums = sums[0] + _by_lane(wide, LANES), sums[1] + _by_lane(kept.to(tl.float32), LANES)
    return sums, squares + _by_lane(own, LANES)


@triton.jit
def _by_lane(values, LANES: tl.constexpr):
    """[TOKENS, n] to [LANES, n]."""
    return tl.sum(tl.reshape(values, [values.shape[0] // LANES, LANES, values.shape[1]]), 0)


@triton.jit
def in_columns(numbers, kind: tl.constexpr):
    """[PART] to [PART, 16]: what is the sum of its columns of 16-bit numbers, for a product.

    A product has no fewer columns; three are filled.
    """
    first = numbers.to(kind)
    rest = numbers - first.to(tl.float32)
    second = rest.to(kind)
    third = (rest - second.to(tl.float32)).to(kind)
    column = tl.arange(0, 16)[None, :]
    split = tl.where(column == 0, first[:, None], tl.where(column < 3, third[:, None], 0.0))
    return tl.where(column == 1, second[:, None], split)
