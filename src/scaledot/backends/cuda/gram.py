"""Mean and variance of all logits of a head without the logits, from Gram matrices.

Where every row sees every key, the sums that the vitals need are sums of matrices. With z = s q.k,
the means q', k' and the centred Gram matrices A = sum (q - q')(q - q')^T, B likewise of the keys,
n rows and m keys:

    mean of z                    s q'.k'
    sum over rows of m2_i        s^2 (tr(A B) + n q'^T B q')       m2_i: about the row's own mean
    sum over rows of mean_i      about the head's mean, squared: s^2 k'^T A k'

so the spread over all pairs is the second line plus m times the third. That costs 4 (n + m) d^2
operations against attention's 4 n m d. Everything is centred before it is squared, so a large
common part of the keys, which moves no probability, costs no digits either.

A row that holds NaN or inf is left out: its logits are broken, and it counts nowhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # read at a time
PROGRAMS = 264  # two for each multiprocessor of a Hopper GPU
HEAD_MOMENTS = 5


def head_moments(query: Tensor, key: Tensor, scale: float, head_scale: Tensor | None) -> Tensor:
    """[5, B, H] float32: mean of z, m2 of z, sum of the rows' variances, sums of q^2 and of k^2.

    query [B, H, Q, D], key [B, G, K, D] of a call in which every row sees every key.
    """
    batch, heads, _, width = query.shape
    groups = key.shape[1]
    padded = max(triton.next_power_of_2(width), 16)
    of_queries = _gram_matrices(query, padded)
    of_keys = _gram_matrices(key, padded)
    out = torch.empty(HEAD_MOMENTS, batch, heads, dtype=torch.float32, device=query.device)
    _combine[(batch * heads,)](
        *of_queries,
        *of_keys,
        out,
        head_scale,
        scale,
        batch,
        heads,
        heads // groups,
        groups,
        of_queries[0].shape[1],
        of_keys[0].shape[1],
        0 if head_scale is None or head_scale.shape[0] == 1 else head_scale.stride(0),
        WIDTH=padded,
        COLUMNS=min(padded, 64),
        num_warps=8,
    )
    return out


def _gram_matrices(rows: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """Of chunks of rows: centred Gram matrices [heads, chunks, D, D], and for each column its mean
    [heads, chunks, 2, D], the number of rows beside it."""
    batch, heads, number, width = rows.shape
    columns = min(padded, 128)
    slices = padded // columns
    chunks = max(min(-(-number // (4 * ROWS)), PROGRAMS // (batch * heads * slices)), 1)
    shape = (batch * heads, chunks)
    grams = torch.empty(*shape, padded, padded, dtype=torch.float32, device=rows.device)
    means = torch.empty(*shape, 2, padded, dtype=torch.float32, device=rows.device)
    _gram_chunks[(batch * heads * chunks * slices,)](
        rows,
        grams,
        means,
        heads,
        number,
        width,
        chunks,
        *rows.stride(),
        WIDTH=padded,
        COLUMNS=columns,
        ROWS=ROWS,
        num_warps=4 if padded <= 64 else 8,
    )
    return grams, means


@triton.jit
def _gram_chunks(
    rows_ptr,
    grams_ptr,
    means_ptr,
    heads,
    number,
    width,
    chunks,
    stride_b,
    stride_h,
    stride_n,
    stride_d,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    SLICES: tl.constexpr = WIDTH // COLUMNS
    program = tl.program_id(0)
    part = program % SLICES
    chunk = (program // SLICES) % chunks
    head = (program // SLICES) // chunks
    start_of_head = (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h
    rows_ptr += start_of_head
    size = tl.cdiv(tl.cdiv(number, chunks), ROWS) * ROWS
    first = chunk * size
    last = tl.minimum(first + size, number)
    d = tl.arange(0, WIDTH)
    c = part * COLUMNS + tl.arange(0, COLUMNS)

    # Counted from the mean of the first rows: any point near the middle of all rows would do.
    x, whole = _load(rows_ptr, first, last, d, width, stride_n, stride_d, ROWS)
    present = tl.sum(whole.to(tl.float32), 0)
    centre = tl.sum(x, 0) / tl.maximum(present, 1.0)
    y, _ = _load(rows_ptr, first, last, c, width, stride_n, stride_d, ROWS)
    kept = tl.sum(tl.where(whole[:, None], y, 0.0), 0)
    centre_c = kept / tl.maximum(present, 1.0)

    gram = tl.zeros([WIDTH, COLUMNS], tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    total_c = tl.zeros([COLUMNS], tl.float32)
    count = 0.0
    for row in range(first, last, ROWS):
        x, whole = _load(rows_ptr, row, last, d, width, stride_n, stride_d, ROWS)
        x = tl.where(whole[:, None], x - centre[None, :], 0.0)
        if SLICES == 1:
            y = x
        else:
            y, _ = _load(rows_ptr, row, last, c, width, stride_n, stride_d, ROWS)
            y = tl.where(whole[:, None], y - centre_c[None, :], 0.0)
        total += tl.sum(x, 0)
        total_c += tl.sum(y, 0)
        count += tl.sum(whole.to(tl.float32), 0)
        kind: tl.constexpr = rows_ptr.dtype.element_ty
        gram = tl.dot(tl.trans(x).to(kind), y.to(kind), gram, input_precision="ieee")
    number_of = tl.maximum(count, 1.0)
    gram -= total[:, None] * (total_c / number_of)[None, :]
    place = (head * chunks + chunk).to(tl.int64)
    grams_ptr += place * WIDTH * WIDTH
    tl.store(grams_ptr + d[:, None] * WIDTH + c[None, :], gram)
    means_ptr += place * 2 * WIDTH
    tl.store(means_ptr + c, centre_c + total_c / number_of)
    tl.store(means_ptr + WIDTH + c, count + tl.zeros([COLUMNS], tl.float32))


@triton.jit
def _load(rows_ptr, row, last, d, width, stride_n, stride_d, ROWS: tl.constexpr):
    """[ROWS, ...] in float32, zeros where a row is not all finite, and which rows are."""
    n = row + tl.arange(0, ROWS)
    inside = (n < last)[:, None] & (d < width)[None, :]
    at = rows_ptr + n.to(tl.int64)[:, None] * stride_n + d[None, :] * stride_d
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    whole = (tl.sum(x * 0.0, 1) == 0.0) & (n < last)
    return tl.where(whole[:, None], x, 0.0), whole


@triton.jit
def _combine(
    q_grams_ptr,
    q_means_ptr,
    k_grams_ptr,
    k_means_ptr,
    out_ptr,
    head_scale_ptr,
    scale,
    batch,
    heads,
    group,
    groups,
    q_chunks,
    k_chunks,
    stride_scale,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head = tl.program_id(0)
    entry, own = head // heads, head % heads
    key_head = entry * groups + own // group
    q_grams_ptr += head.to(tl.int64) * q_chunks * WIDTH * WIDTH
    k_grams_ptr += key_head.to(tl.int64) * k_chunks * WIDTH * WIDTH
    q_means_ptr += head.to(tl.int64) * q_chunks * 2 * WIDTH
    k_means_ptr += key_head.to(tl.int64) * k_chunks * 2 * WIDTH
    d = tl.arange(0, WIDTH)
    q_mean, rows = _mean(q_means_ptr, q_chunks, d, WIDTH)
    k_mean, columns = _mean(k_means_ptr, k_chunks, d, WIDTH)
    product = 0.0
    seen_by_mean = 0.0
    between = 0.0
    q_squares = tl.sum(q_mean * q_mean * rows, 0)
    k_squares = tl.sum(k_mean * k_mean * columns, 0)
    for column in range(0, WIDTH, COLUMNS):
        c = column + tl.arange(0, COLUMNS)
        a = _gram(q_grams_ptr, q_means_ptr, q_chunks, d, c, WIDTH)
        b = _gram(k_grams_ptr, k_means_ptr, k_chunks, d, c, WIDTH)
        diagonal = d[:, None] == c[None, :]
        q_mean_c, _ = _mean(q_means_ptr, q_chunks, c, WIDTH)
        k_mean_c, _ = _mean(k_means_ptr, k_chunks, c, WIDTH)
        product += tl.sum(tl.sum(a * b, 1), 0)
        seen_by_mean += tl.sum(tl.sum(b * q_mean[:, None] * q_mean_c[None, :], 1), 0)
        between += tl.sum(tl.sum(a * k_mean[:, None] * k_mean_c[None, :], 1), 0)
        q_squares += tl.sum(tl.sum(tl.where(diagonal, a, 0.0), 1), 0)
        k_squares += tl.sum(tl.sum(tl.where(diagonal, b, 0.0), 1), 0)
    if head_scale_ptr is not None:
        scale = scale * tl.load(head_scale_ptr + entry.to(tl.int64) * stride_scale + own)
        scale = scale.to(tl.float32)
    n = tl.max(rows, 0)
    m = tl.maximum(tl.max(columns, 0), 1.0)
    mean = scale * tl.sum(q_mean * k_mean, 0)
    within = scale * scale * tl.maximum(product + n * seen_by_mean, 0.0)
    spread = within + m * scale * scale * tl.maximum(between, 0.0)
    stride = batch * heads
    tl.store(out_ptr + head, mean)
    tl.store(out_ptr + stride + head, spread)
    tl.store(out_ptr + 2 * stride + head, within / m)
    tl.store(out_ptr + 3 * stride + head, q_squares)
    tl.store(out_ptr + 4 * stride + head, k_squares)


@triton.jit
def _mean(means_ptr, chunks, d, WIDTH: tl.constexpr):
    """Over all chunks, and the number of rows (the same in every column)."""
    total = tl.zeros_like(d).to(tl.float32)
    count = tl.zeros_like(d).to(tl.float32)
    for chunk in range(chunks):
        rows = tl.load(means_ptr + (2 * chunk + 1) * WIDTH + d)
        total += rows * tl.load(means_ptr + 2 * chunk * WIDTH + d)
        count += rows
    return total / tl.maximum(count, 1.0), count


@triton.jit
def _gram(grams_ptr, means_ptr, chunks, d, c, WIDTH: tl.constexpr):
    """The centred Gram matrix of all chunks, by Chan's rule."""
    mean_d, _ = _mean(means_ptr, chunks, d, WIDTH)
    mean_c, _ = _mean(means_ptr, chunks, c, WIDTH)
    gram = tl.load(grams_ptr + d[:, None] * WIDTH + c[None, :]) * 0.0
    for chunk in range(chunks):
        gram += tl.load(grams_ptr + (chunk * WIDTH + d[:, None]) * WIDTH + c[None, :])
        rows = tl.load(means_ptr + (2 * chunk + 1) * WIDTH + c)
        off_d = tl.load(means_ptr + 2 * chunk * WIDTH + d) - mean_d
        off_c = tl.load(means_ptr + 2 * chunk * WIDTH + c) - mean_c
        gram += off_d[:, None] * (off_c * rows)[None, :]
    return gram
