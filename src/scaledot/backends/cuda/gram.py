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
from scaledot.backends.cuda.launching import enter_beside, leave_beside
from scaledot.backends.cuda.replay import Once

WIDEST_PART = 128  # of a matrix
FARTHEST_HALF = tl.constexpr(8192.0)  # a centre of float16 keys; they end at 65504


class Plan(NamedTuple):
    """How programs are built for a width."""

    tokens: int  # at a time
    stages: int  # all but two are on their way: one is read, one has just been; 3 if centred
    warps: int
    programs: int  # that a multiprocessor holds at once
    most: dict[str, int]  # registers, so that it does (unasked, ptxas gives sm_80 32)
    width: int  # a power of two
    part: int  # rows and columns of a matrix, or of a quarter of it
    parts: int  # of a matrix that are computed


def plan_for(width: int) -> Plan:
    """By what the registers hold (compiled for sm_90: nothing is spilled in the straight loop)."""
    wide = padded(width)
    if wide <= 64:
        return Plan(64, 5, 4, 4, {"maxnreg": 128}, wide, wide, 1)
    if wide <= WIDEST_PART:
        return Plan(64, 5, 8, 2, {"maxnreg": 128}, wide, wide, 1)
    return Plan(32, 6, 8, 1, {"maxnreg": 255}, wide, WIDEST_PART, 3)


class Grams(NamedTuple):
    """Of the chunks of each head [B, G], one after the other, in float32."""

    matrices: Tensor  # parts of PART x PART numbers
    means: Tensor  # of WIDTH numbers
    squares: Tensor  # one number: the keys' squares as they are, summed


def measure(key: Tensor, plan: Plan, chunk: int, launches: Once, beside: bool) -> Grams:
    """One launch. The last chunk of a head ends with its keys. beside: launching.enter_beside."""
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
        "CENTRED_STAGES": stages_for(min(plan.stages, 3), key, in_steps),
        "BESIDE": beside,
    }
    options = {"num_warps": plan.warps, "num_stages": 1, "launch_pdl": beside, **plan.most}
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
    CENTRED_STAGES: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """One program a chunk. x and y are the left and the right half of what is wider than PART.

    Where keys are counted from zero, as most are, products read them where they arrive, and their
    squares stand on the diagonal. Elsewhere what is left of them goes back to shared memory first.
    """
    if BESIDE:
        enter_beside()
    WIDE: tl.constexpr = WIDTH > PART
    place = tl.program_id(0).to(tl.int64)
    head, index = place // chunks, (place % chunks).to(tl.int32)
    keys_ptr = key_ptr + ((head // groups) * stride_kb + (head % groups) * stride_kh) * STEP
    start = index * chunk
    stop = tl.minimum(start + chunk, keys)
    step = (stride_kn, stride_kd)
    d = tl.arange(0, PART)
    e = PART + d
    n = start + tl.arange(0, TOKENS)
    raw = load_tokens(keys_ptr, n, n < stop, d, width, step, STEP)
    x_centre = centre_of(raw, n < stop)
    y_centre = x_centre
    if WIDE:
        raw = load_tokens(keys_ptr, n, n < stop, e, width, step, STEP)
        y_centre = centre_of(raw, n < stop)
    ones = tl.full([TOKENS, 16], 1.0, tl.float32).to(raw.dtype)  # a product has no fewer columns
    xx = tl.zeros([PART, PART], tl.float32)
    xy, yy = xx, xx
    x_sums = tl.zeros([PART, 16], tl.float32)
    y_sums = x_sums
    squares = tl.zeros([LANES, PART // 8], tl.float32)
    whole = start + (stop - start) // TOKENS * TOKENS
    straight = tl.max(tl.maximum(tl.abs(x_centre), tl.abs(y_centre)), 0) == 0.0
    straight_stop = uniform(tl.where(straight, whole, start))
    # Sums come last, and are awaited: so no product is left that still reads what is overwritten
    # next (see the traps of kernels.md).
    for at in tl.range(start, straight_stop, TOKENS, num_stages=STAGES):
        n = at + tl.arange(0, TOKENS)
        x = load_all_tokens(keys_ptr, n, d, width, step, STEP, FILLED)
        xx = tl.dot(tl.trans(x), x, xx)
        if WIDE:
            y = load_all_tokens(keys_ptr, n, e, width, step, STEP, FILLED)
            xy = tl.dot(tl.trans(x), y, xy)
            yy = tl.dot(tl.trans(y), y, yy)
            y_sums += _summed(y, ones)
        x_sums += _summed(x, ones)
    straight_squares = _trace(xx, d)
    if WIDE:
        straight_squares += _trace(yy, d)
    x_kept, y_kept = x_sums, y_sums  # of what was multiplied; rounded, where it was
    for at in tl.range(straight_stop, stop, TOKENS, num_stages=CENTRED_STAGES):
        n = at + tl.arange(0, TOKENS)
        there = (n < stop).to(raw.dtype)[:, None]
        raw = load_tokens(keys_ptr, n, n < stop, d, width, step, STEP)
        x = raw - there * x_centre.to(raw.dtype)[None, :]
        xx = tl.dot(tl.trans(x), x, xx)
        x_kept += _summed(x, ones)
        squares = _add_squares(squares, raw, LANES)
        x_sums += _summed(raw, ones)
        if WIDE:
            raw = load_tokens(keys_ptr, n, n < stop, e, width, step, STEP)
            y = raw - there * y_centre.to(raw.dtype)[None, :]
            xy = tl.dot(tl.trans(x), y, xy)
            yy = tl.dot(tl.trans(y), y, yy)
            y_kept += _summed(y, ones)
            squares = _add_squares(squares, raw, LANES)
            y_sums += _summed(raw, ones)

    # About the mean of the chunk itself: of the numbers that were multiplied.
    number = (stop - start).to(tl.float32)
    x_sum = _first_column(x_kept)
    x_shift = x_sum / number
    matrix_ptr = matrices_ptr + place * ((2 * (WIDTH // PART) - 1) * PART * PART)
    entries = d[:, None] * PART + d[None, :]
    tl.store(matrix_ptr + entries, xx - x_sum[:, None] * x_shift[None, :])
    tl.store(means_ptr + place * WIDTH + d, _first_column(x_sums) / number)
    if WIDE:
        y_sum = _first_column(y_kept)
        y_shift = y_sum / number
        matrix_ptr += PART * PART
        tl.store(matrix_ptr + entries, xy - x_sum[:, None] * y_shift[None, :])
        matrix_ptr += PART * PART
        tl.store(matrix_ptr + entries, yy - y_sum[:, None] * y_shift[None, :])
        tl.store(means_ptr + place * WIDTH + e, _first_column(y_sums) / number)
    tl.store(squares_ptr + place, tl.sum(squares) + straight_squares)
    if BESIDE:
        leave_beside()


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
def uniform(number):
    """The same integer, and ptxas sees that it is one for all threads of a warp (REDUX).

    A loop whose end it takes for each thread's own has no uniform registers: each product then
    waits for its addresses to be moved there.
    """
    return tl.max(tl.zeros([32], tl.int32) + number, 0)


@triton.jit
def load_tokens(tokens_ptr, n, mask, d, width, step, STEP: tl.constexpr):
    """[TOKENS, PART]: entries d of the tokens n, zeros where the mask [TOKENS] is not set."""
    at = tokens_ptr + (n.to(tl.int64) * step[0])[:, None] * STEP + d.to(tl.int64)[None, :] * step[1]
    return tl.load(at, mask=mask[:, None] & (d < width * STEP)[None, :], other=0.0)


@triton.jit
def load_all_tokens(tokens_ptr, n, d, width, step, STEP: tl.constexpr, FILLED: tl.constexpr):
    """The same of tokens that are all there. FILLED: they are as wide as their tile is, too."""
    at = tokens_ptr + (n.to(tl.int64) * step[0])[:, None] * STEP + d.to(tl.int64)[None, :] * step[1]
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
def _summed(tokens, ones):
    """[PART, 16], each column the sum of tokens [TOKENS, PART].

    A number of imprecise additions, which 16-bit products do not look at, keeps Triton from adding
    up all steps in the tensor cores, which cut off: these few sums are rounded.
    """
    return tl.dot(tl.trans(tokens), ones, max_num_imprecise_acc=16)


@triton.jit
def _add_squares(squares, tokens, LANES: tl.constexpr):
    """Those of tokens [TOKENS, PART] join [LANES, PART / 8]: what is summed is in one thread."""
    wide = tokens.to(tl.float32)
    own = tl.sum(tl.reshape(wide * wide, [tokens.shape[0], tokens.shape[1] // 8, 8]), 2)
    return squares + tl.sum(tl.reshape(own, [own.shape[0] // LANES, LANES, own.shape[1]]), 0)


@triton.jit
def _trace(matrix, d):
    return tl.sum(tl.where(d[:, None] == d[None, :], matrix, 0.0))


@triton.jit
def _first_column(sums):
    """[PART] of [PART, 16] with equal columns."""
    return tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, sums, 0.0), 1)


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
