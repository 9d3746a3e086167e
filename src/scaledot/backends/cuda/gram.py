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

Two launches: Gram matrices of chunks of rows, queries and keys side by side; then one program a
head that adds the chunks up by Chan's rule and multiplies. Widths end at 128: a wider matrix does
not fit into the registers of one program, and the wider the head, the cheaper are sums inside the
pass. A row that holds NaN or inf is left out: its logits are broken, and it counts nowhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # read at a time
WIDEST = 128
PROGRAMS = 264  # two for each multiprocessor of a Hopper GPU
HEAD_MOMENTS = 6


def head_moments(query: Tensor, key: Tensor, scale: float, head_scale: Tensor | None) -> Tensor:
    """[6, B, H] float32: mean of z, m2 of z, sum of the rows' variances, sums of q^2 and of k^2,
    and the number of rows in them.

    query [B, H, Q, D], key [B, G, K, D] of a call in which every row sees every key.
    """
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    if head_scale is not None:  # one number for all heads is a view that repeats
        head_scale = head_scale.contiguous()
    padded = max(int(triton.next_power_of_2(width)), 16)
    assert padded <= WIDEST
    all_heads = batch * (heads + groups)
    chunks = min(PROGRAMS // all_heads, -(-max(queries, keys) // (4 * ROWS)))
    chunks = max(chunks, 1)
    device = query.device
    grams = torch.empty(all_heads, chunks, padded, padded, dtype=torch.float32, device=device)
    means = torch.empty(all_heads, chunks, padded, dtype=torch.float32, device=device)
    counts = torch.empty(all_heads, chunks, dtype=torch.float32, device=device)
    _gram_chunks[(all_heads * chunks,)](
        query,
        key,
        grams,
        means,
        counts,
        batch * heads,
        heads,
        groups,
        queries,
        keys,
        width,
        chunks,
        *query.stride(),
        *key.stride(),
        WIDTH=padded,
        ROWS=ROWS,
        num_warps=4 if padded <= 64 else 8,
    )
    out = torch.empty(HEAD_MOMENTS, batch, heads, dtype=torch.float32, device=device)
    _combine[(batch * heads,)](
        grams,
        means,
        counts,
        out,
        head_scale,
        scale,
        batch,
        heads,
        groups,
        chunks,
        0 if head_scale is None or head_scale.shape[0] == 1 else head_scale.stride(0),
        WIDTH=padded,
        CHUNKS=int(triton.next_power_of_2(chunks)),
        num_warps=8,
    )
    return out


@triton.jit
def _gram_chunks(
    query_ptr,
    key_ptr,
    grams_ptr,
    means_ptr,
    counts_ptr,
    query_heads,
    heads,
    groups,
    queries,
    keys,
    width,
    chunks,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    chunk = program % chunks
    head = program // chunks
    if head < query_heads:
        entry, own = head // heads, head % heads
        rows_ptr = query_ptr + entry.to(tl.int64) * stride_qb + own.to(tl.int64) * stride_qh
        number, stride_n, stride_d = queries, stride_qn, stride_qd
    else:
        entry, own = (head - query_heads) // groups, (head - query_heads) % groups
        rows_ptr = key_ptr + entry.to(tl.int64) * stride_kb + own.to(tl.int64) * stride_kh
        number, stride_n, stride_d = keys, stride_kn, stride_kd
    size = tl.cdiv(tl.cdiv(number, chunks), ROWS) * ROWS
    first = tl.minimum(chunk * size, number)
    last = tl.minimum(first + size, number)
    d = tl.arange(0, WIDTH)
    kind: tl.constexpr = query_ptr.dtype.element_ty

    # Counted from the mean of the first rows: any point near the middle of all rows would do.
    x, whole = _load(rows_ptr, first, last, d, width, stride_n, stride_d, ROWS)
    centre = tl.sum(x, 0) / tl.maximum(tl.sum(whole.to(tl.float32), 0), 1.0)

    gram = tl.zeros([WIDTH, WIDTH], tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    count = 0.0
    for start in range(first, last, ROWS):
        x, whole = _load(rows_ptr, start, last, d, width, stride_n, stride_d, ROWS)
        x = tl.where(whole[:, None], x - centre[None, :], 0.0)
        total += tl.sum(x, 0)
        count += tl.sum(whole.to(tl.float32), 0)
        narrow = x.to(kind)
        gram = tl.dot(tl.trans(narrow), narrow, gram, input_precision="ieee")
    shift = total / tl.maximum(count, 1.0)
    gram -= total[:, None] * shift[None, :]  # about the mean of the chunk itself
    place = (head * chunks + chunk).to(tl.int64)
    tl.store(grams_ptr + place * WIDTH * WIDTH + d[:, None] * WIDTH + d[None, :], gram)
    tl.store(means_ptr + place * WIDTH + d, centre + shift)
    tl.store(counts_ptr + place, count)


@triton.jit
def _load(rows_ptr, start, last, d, width, stride_n, stride_d, ROWS: tl.constexpr):
    """[ROWS, WIDTH] in float32, zeros where a row is not all finite; which rows are."""
    n = start + tl.arange(0, ROWS)
    inside = (n < last)[:, None] & (d < width)[None, :]
    at = rows_ptr + n.to(tl.int64)[:, None] * stride_n + d[None, :] * stride_d
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    whole = (tl.sum(x * 0.0, 1) == 0.0) & (n < last)
    return tl.where(whole[:, None], x, 0.0), whole


@triton.jit
def _combine(
    grams_ptr,
    means_ptr,
    counts_ptr,
    out_ptr,
    head_scale_ptr,
    scale,
    batch,
    heads,
    groups,
    chunks,
    stride_scale,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    head = tl.program_id(0)
    entry, own = head // heads, head % heads
    key_head = batch * heads + entry * groups + own // (heads // groups)
    queries = head.to(tl.int64) * chunks
    keys = key_head.to(tl.int64) * chunks
    q_mean, n = _mean(means_ptr, counts_ptr, queries, chunks, WIDTH, CHUNKS)
    k_mean, m = _mean(means_ptr, counts_ptr, keys, chunks, WIDTH, CHUNKS)
    a = _gram(grams_ptr, means_ptr, counts_ptr, queries, chunks, q_mean, WIDTH)
    b = _gram(grams_ptr, means_ptr, counts_ptr, keys, chunks, k_mean, WIDTH)
    d = tl.arange(0, WIDTH)
    product = tl.sum(tl.sum(a * b, 1), 0)
    seen_by_mean = tl.sum(tl.sum(b * q_mean[None, :], 1) * q_mean, 0)
    between = tl.sum(tl.sum(a * k_mean[None, :], 1) * k_mean, 0)
    diagonal = d[:, None] == d[None, :]
    q_squares = n * tl.sum(q_mean * q_mean, 0) + tl.sum(tl.sum(tl.where(diagonal, a, 0.0), 1), 0)
    k_squares = m * tl.sum(k_mean * k_mean, 0) + tl.sum(tl.sum(tl.where(diagonal, b, 0.0), 1), 0)
    if head_scale_ptr is not None:
        scale = scale * tl.load(head_scale_ptr + entry.to(tl.int64) * stride_scale + own)
        scale = scale.to(tl.float32)
    columns = tl.maximum(m, 1.0)
    within = scale * scale * tl.maximum(product + n * seen_by_mean, 0.0)
    spread = within + columns * scale * scale * tl.maximum(between, 0.0)
    stride = batch * heads
    tl.store(out_ptr + head, scale * tl.sum(q_mean * k_mean, 0))
    tl.store(out_ptr + stride + head, spread)
    tl.store(out_ptr + 2 * stride + head, within / columns)
    tl.store(out_ptr + 3 * stride + head, q_squares)
    tl.store(out_ptr + 4 * stride + head, k_squares)
    tl.store(out_ptr + 5 * stride + head, n)


@triton.jit
def _mean(means_ptr, counts_ptr, place, chunks, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Of the rows of all chunks, and how many they are."""
    d = tl.arange(0, WIDTH)
    chunk = tl.arange(0, CHUNKS)
    present = chunk < chunks
    rows = tl.load(counts_ptr + place + chunk, mask=present, other=0.0)
    at = means_ptr + (place + chunk)[:, None] * WIDTH + d[None, :]
    means = tl.load(at, mask=present[:, None], other=0.0)
    number = tl.sum(rows, 0)
    return tl.sum(means * rows[:, None], 0) / tl.maximum(number, 1.0), number


@triton.jit
def _gram(grams_ptr, means_ptr, counts_ptr, place, chunks, mean, WIDTH: tl.constexpr):
    """The Gram matrix of all chunks, about their common mean."""
    d = tl.arange(0, WIDTH)
    gram = tl.zeros([WIDTH, WIDTH], tl.float32)
    for chunk in range(chunks):
        at = (place + chunk) * WIDTH
        gram += tl.load(grams_ptr + at * WIDTH + d[:, None] * WIDTH + d[None, :])
        rows = tl.load(counts_ptr + place + chunk)
        off = tl.load(means_ptr + at + d) - mean
        gram += (off * rows)[:, None] * off[None, :]
    return gram
