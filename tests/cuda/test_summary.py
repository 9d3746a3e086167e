"""The kernel that makes vitals of row numbers, against `measure.summarise` on the same numbers."""

import itertools
import math

import pytest
import torch

from scaledot import measure
from scaledot.backends.inputs import Inputs

summary = pytest.importorskip("scaledot.backends.cuda.summary")
keys_module = pytest.importorskip("scaledot.backends.cuda.summary.keys")
ONCE = pytest.importorskip("scaledot.backends.cuda.replay").ONCE


def make_inputs(device, shape, **tensors):
    """Inputs of (B, H, G, Q, K, D) with whatever else is named."""
    batch, heads, groups, queries, keys, width = shape
    dtype = tensors.pop("dtype", torch.float32)
    empty = dict.fromkeys(Inputs._fields)
    empty["query"] = torch.randn(batch, heads, queries, width).to(device, dtype)
    empty["key"] = torch.randn(batch, groups, keys, width).to(device, dtype)
    return Inputs(**{**empty, **tensors})


def make_planes(device, shape, dtype=torch.float32, far=0.0):
    """Planes that a forward kernel could have written; some rows empty, some broken."""
    batch, heads, _, queries, keys, _ = shape
    full = (batch, heads, queries)
    count = torch.randint(1, keys + 1, full).to(dtype)
    top_p = torch.rand(full, dtype=dtype).pow(0.01)
    planes = torch.stack(
        [
            torch.randn(full, dtype=dtype) * 3 + far,
            torch.randn(full, dtype=dtype) + far,
            torch.rand(full, dtype=dtype) * count.log(),
            top_p,
            top_p.square(),
            torch.rand(full, dtype=dtype),
            count,
            torch.randn(full, dtype=dtype) + far,
            torch.rand(full, dtype=dtype) * count,
        ]
    )
    kind = torch.arange(math.prod(full)).view(full) % 7
    planes[0, kind == 2] = -math.inf
    planes[1, kind == 2] = -math.inf
    planes[2:, kind == 2] = 0.0
    planes[:6, kind == 5] = math.nan
    planes[7:, kind == 5] = math.nan
    return planes.contiguous().to(device)


def expected(planes, inputs):
    """`measure.summarise` on the same rows, in float64, sequence by sequence."""
    query, key = inputs.query.double().cpu(), inputs.key.double().cpu()
    planes = planes.double().cpu()
    repeats = query.shape[1] // key.shape[1]
    rows, keys = [(0, query.shape[2])], [(0, key.shape[2])]
    if inputs.cu_seqlens_q is not None:
        rows = _pairs(inputs.cu_seqlens_q)
        keys = _pairs(inputs.cu_seqlens_k)
    found = []
    for (row, row_end), (first, last) in zip(rows, keys, strict=True):
        inside = torch.arange(first, last)[None, None, :].expand(*key.shape[:2], -1)
        counted = torch.ones_like(inside, dtype=torch.bool)
        if inputs.key_lengths is not None:
            counted = inside < inputs.key_lengths.cpu()[:, None, None]
        part, own = key[:, :, first:last], query[:, :, row:row_end]
        rms, entries = measure.root_mean_square(part, part.norm(dim=-1), counted)
        max_logit, lse, entropy, top_p, sum_p2, first_p, count, mean, m2 = planes[..., row:row_end]
        off = None
        if inputs.sinks is not None:
            off = (inputs.sinks.double().cpu().unsqueeze(-1) - lse).exp()
        measured = measure.Rows(
            count.long(),
            max_logit,
            lse,
            entropy,
            top_p,
            sum_p2,
            first_p,
            off,
            mean,
            m2,
            max_logit.isnan(),
        )
        found.append(
            measure.summarise(
                measured,
                own,
                own.norm(dim=-1),
                rms.repeat_interleave(repeats, 1),
                entries.repeat_interleave(repeats, 1),
            )
        )
    floats, counts = zip(*found, strict=True)
    return torch.cat(floats, 1), torch.cat(counts, 1)


def _pairs(ends):
    ends = ends.tolist()
    return list(itertools.pairwise(ends))


def assert_same(found, wanted, rtol=3e-7):
    floats, counts = (tensor.cpu() for tensor in found)
    vitals = dict(zip(measure.MADE_FIELDS, floats, strict=True))
    floats = floats[: len(measure.FLOAT_FIELDS)]
    torch.testing.assert_close(floats.double(), wanted[0], rtol=rtol, atol=0.0, equal_nan=True)
    assert torch.equal(counts, wanted[1])
    fields = {name: vitals[name] for name in measure.FLOAT_FIELDS}
    fields |= zip(measure.COUNT_FIELDS, counts, strict=True)
    assert torch.equal(vitals["passes"], measure.Vitals(**fields).passes)  # the same bits


SHAPES = [
    (2, 3, 3, 13, 11, 5),
    (1, 6, 2, 255, 3, 16),
    (1, 2, 1, 257, 65, 24),
    (3, 1, 1, 1, 1, 1),
    (1, 1, 1, 1031, 700, 64),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sinks", [False, True])
def test_vitals_are_those_of_measure(device, shape, sinks):
    sink = torch.randn(1, shape[1]).to(device) if sinks else None
    inputs = make_inputs(device, shape, sinks=sink)
    planes = make_planes(device, shape)
    found = summary.summarise(planes, inputs)
    assert found[0].dtype == torch.float32
    assert_same(found, expected(planes, inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_type_of_entry_is_squared(device, dtype):
    shape = (2, 4, 2, 67, 71, 40)
    inputs = make_inputs(device, shape, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    planes = make_planes(device, shape, dtype=wide)
    found = summary.summarise(planes, inputs)
    assert found[0].dtype == wide
    assert_same(found, expected(planes, inputs), rtol=1e-13 if wide == torch.float64 else 3e-7)


def test_keys_end_at_their_lengths_and_padding_is_not_read(device):
    shape = (4, 2, 2, 7, 83, 9)
    lengths = torch.tensor([83, 0, 1, 64], dtype=torch.int32, device=device)
    inputs = make_inputs(device, shape, key_lengths=lengths)
    planes = make_planes(device, shape)
    wanted = expected(planes, inputs)
    for entry, length in enumerate(lengths.tolist()):
        inputs.key[entry, :, length:] = math.nan
    assert_same(summary.summarise(planes, inputs), wanted)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_packed_rows_belong_to_their_sequences(device, kind):
    shape = (1, 4, 2, 700, 311, 12)
    inputs = make_inputs(
        device,
        shape,
        sinks=torch.randn(1, 4).to(device),
        cu_seqlens_q=torch.tensor([0, 3, 3, 650, 700], dtype=kind, device=device),
        cu_seqlens_k=torch.tensor([0, 300, 301, 301, 311], dtype=kind, device=device),
    )
    planes = make_planes(device, shape)
    found = summary.summarise(planes, inputs)
    assert found[0].shape == (14, 4, 4)
    assert_same(found, expected(planes, inputs))


def test_sinks_of_each_batch_entry_are_its_own(device):
    shape = (3, 2, 2, 5, 4, 3)
    inputs = make_inputs(device, shape, sinks=torch.randn(3, 2).to(device))
    planes = make_planes(device, shape)
    assert_same(summary.summarise(planes, inputs), expected(planes, inputs))


def test_layouts_of_query_and_key_do_not_matter(device):
    shape = (2, 6, 2, 37, 41, 8)
    inputs = make_inputs(device, shape)
    planes = make_planes(device, shape)
    wanted = summary.summarise(planes, inputs)
    strided = inputs._replace(
        query=inputs.query.transpose(1, 3).contiguous().transpose(1, 3),
        key=torch.stack([inputs.key, inputs.key * math.nan], -1)[..., 0],
    )
    found = summary.summarise(planes, strided)
    # A compiler may read other strides by other threads, and so add in another order.
    torch.testing.assert_close(found[0], wanted[0], rtol=3e-7, atol=0.0, equal_nan=True)
    expanded = inputs._replace(key=inputs.key[:1, :1].expand(inputs.key.shape))
    found = summary.summarise(planes, expanded)
    assert_same(found, expected(planes, expanded))


def test_nothing_cancels_far_from_zero(device):
    """A spread of 1 around 1e6: in float32 a difference of squares would leave nothing of it."""
    shape = (1, 2, 2, 777, 50, 4)
    inputs = make_inputs(device, shape)
    planes = make_planes(device, shape, far=1e6)
    found = summary.summarise(planes, inputs)
    assert_same(found, expected(planes, inputs), rtol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_squares_may_leave_float32(device, size, dtype):
    shape = (1, 2, 1, 9, 10, 16)
    inputs = make_inputs(device, shape)
    inputs = inputs._replace(
        query=(inputs.query * size).to(dtype), key=(inputs.key * size).to(dtype)
    )
    planes = make_planes(device, shape)
    found = summary.summarise(planes, inputs)
    assert_same(found, expected(planes, inputs))


def test_entries_that_are_not_finite_are_left_out(device):
    shape = (1, 2, 1, 9, 10, 16)
    inputs = make_inputs(device, shape)
    inputs.query[0, 0, 0, 3] = math.inf
    inputs.query[0, 1, 1, :] = math.nan
    inputs.key[0, 0, 4, 5] = -math.inf
    planes = make_planes(device, shape)
    found = summary.summarise(planes, inputs)
    wanted = expected(planes, inputs)
    assert wanted[1][5].unique().tolist() == [10 * 16 - 1]
    assert_same(found, wanted)


def test_a_head_without_rows_reports_nothing(device):
    shape = (1, 2, 2, 5, 7, 3)
    inputs = make_inputs(device, shape)
    planes = make_planes(device, shape)
    planes[:2, 0, 1] = -math.inf
    planes[2:, 0, 1] = 0.0
    floats, counts = summary.summarise(planes, inputs)
    assert floats[0, 0, 1] == -math.inf
    assert floats[1:12, 0, 1].tolist() == [0.0] * 11
    assert counts[:5, 0, 1].tolist() == [0] * 5
    assert_same((floats, counts), expected(planes, inputs))


@pytest.mark.parametrize(
    "shape",
    [(0, 2, 2, 3, 3, 2), (2, 0, 0, 3, 3, 2), (1, 2, 1, 0, 3, 2), (1, 2, 1, 3, 0, 2)],
)
def test_empty_dimensions(device, shape):
    inputs = make_inputs(device, shape)
    batch, heads, _, queries, keys, _ = shape
    planes = torch.zeros(9, batch, heads, queries, device=device)
    planes[:2] = -math.inf
    floats, counts = summary.summarise(planes, inputs)
    assert floats.shape == (14, batch, heads)
    assert counts.shape == (6, batch, heads)
    assert (floats[0] == -math.inf).all()
    assert (floats[1:12] == 0).all()
    assert (floats[13] == 0).all()
    assert (counts[:5] == 0).all()
    assert (counts[5] == keys * 2).all()


def test_planes_after_the_last_of_the_contract_are_not_read(device):
    shape = (2, 3, 1, 300, 11, 5)
    inputs = make_inputs(device, shape)
    planes = make_planes(device, shape)
    wanted = summary.summarise(planes, inputs)
    more = torch.cat([planes, torch.full_like(planes[:2], math.nan)])
    found = summary.summarise(more, inputs)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0.0, atol=0.0)


def test_two_runs_give_the_same_bits(device):
    shape = (2, 4, 2, 600, 33, 16)
    inputs = make_inputs(device, shape)
    planes = make_planes(device, shape)
    first = summary.summarise(planes, inputs)
    second = summary.summarise(planes, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def row_squares(inputs):
    """As the forward kernel leaves them: summed in float32, whatever they are."""
    return inputs.query.float().square().sum(-1)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("packed", [False, True])
def test_squares_of_the_forward_kernel_serve_or_the_query_is_read_after_all(device, size, packed):
    shape = (1, 4, 2, 700, 311, 12) if packed else (2, 4, 2, 300, 41, 24)
    ends = {}
    if packed:
        ends["cu_seqlens_q"] = torch.tensor([0, 3, 3, 650, 700], device=device)
        ends["cu_seqlens_k"] = torch.tensor([0, 300, 301, 301, 311], device=device)
    inputs = make_inputs(device, shape, **ends)
    inputs = inputs._replace(query=inputs.query * size)
    inputs.query[0, 0, 1, 3] = math.inf  # counted by these planes: entries are taken one by one
    inputs.query[0, 1, 5, :] = math.nan  # not counted
    planes = make_planes(device, shape)
    planes[0, 0, 1, 5] = math.nan
    found = summary.summarise(planes, inputs, row_squares(inputs))
    assert_same(found, expected(planes, inputs))


def test_squares_of_the_forward_kernel_are_used(device):
    shape = (1, 2, 2, 70, 7, 3)
    inputs = make_inputs(device, shape)
    planes = make_planes(device, shape)
    told = torch.full(shape[:2] + shape[3:4], 12.0, device=device)
    floats, _ = summary.summarise(planes, inputs, told)
    assert floats[11].tolist() == [[2.0, 2.0]]


def sums_of_keys(inputs, parts):
    """As the kernels of the moments leave them: of some keys each, in float32."""
    squares = inputs.key.float().square().sum(-1)
    return (
        torch.cat([part.sum(-1) for part in squares.flatten(0, 1).split(parts, -1)])
        .view(-1, squares.shape[0] * squares.shape[1])
        .mT.contiguous()
    )


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("broken", [None, math.nan, -math.inf])
def test_squares_of_keys_serve_or_the_keys_are_read_after_all(device, size, broken):
    shape = (2, 4, 2, 9, 41, 24)
    inputs = make_inputs(device, shape)
    inputs = inputs._replace(key=inputs.key * size)
    if broken is not None:
        inputs.key[1, 0, 30, 3] = broken  # an entry that is left out
    planes = make_planes(device, shape)
    found = summary.summarise(planes, inputs, None, sums_of_keys(inputs, 16))
    wanted = expected(planes, inputs)
    assert len(wanted[1][5].unique()) == (1 if broken is None else 2)
    assert_same(found, wanted)


def test_squares_of_keys_are_used(device):
    shape = (1, 4, 2, 70, 7, 3)
    inputs = make_inputs(device, shape)
    told = torch.tensor([21.0, 63.0, 84.0, 252.0], device=device)  # two sums for each key head
    floats, counts = summary.summarise(make_planes(device, shape), inputs, None, told)
    assert floats[12].tolist() == [[2.0, 2.0, 4.0, 4.0]]
    assert counts[5].tolist() == [[21] * 4]


@pytest.mark.parametrize("most", [1, 3, 256])
def test_keys_are_squared_in_a_launch_of_their_own(device, monkeypatch, most):
    """Any layout; some programs take several tiles, the last of which may not be whole."""
    monkeypatch.setattr(keys_module, "MAX_CHUNKS", most)
    monkeypatch.setattr(keys_module, "ENTRIES", 64)
    for key in (torch.randn(2, 3, 37, 5), torch.randn(37, 2, 3, 16).permute(1, 2, 0, 3)):
        key = key.to(device)
        sums = summary.square_keys(key, ONCE, beside=False).view(2, 3, -1)
        assert sums.shape[2] <= most
        torch.testing.assert_close(sums.sum(2), key.square().sum((2, 3)))


@pytest.mark.parametrize(("held", "chunks"), [(5, 3), (4, 2)])
def test_a_program_measures_several_tiles_where_there_are_many(device, monkeypatch, held, chunks):
    monkeypatch.setattr(summary, "HELD", held)
    monkeypatch.setattr(summary, "_cut", summary._cut.__wrapped__)
    shape = (1, 2, 1, 1031, 7, 3)
    inputs = make_inputs(device, shape)
    planes = make_planes(device, shape)
    cut = summary._cut(inputs.query.shape, inputs.key.shape, None, True, 0)
    assert cut.parts[0] == chunks
    assert_same(summary.summarise(planes, inputs), expected(planes, inputs))


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 2, 1, 2050, 7, 3)])
def test_few_rows_are_measured_without_a_launch_before(device, monkeypatch, shape, sinks, few):
    """Squares told: with several warps a head, or in chunks where the rows are not few."""
    monkeypatch.setattr(summary, "FEW_ROWS", shape[3] if few else shape[3] - 1)
    monkeypatch.setattr(summary, "_cut", summary._cut.__wrapped__)
    sink = torch.randn(1, shape[1]).to(device) if sinks else None
    inputs = make_inputs(device, shape, sinks=sink)
    planes = make_planes(device, shape)
    cut = summary._cut(inputs.query.shape, inputs.key.shape, None, False, 1)
    assert bool(cut.chunk_programs) != few
    assert cut.head_warps == (
        1 if not few else 16 if shape[3] > 2048 else 4 + 4 * (shape[3] > 1024)
    )
    found = summary.summarise(planes, inputs, row_squares(inputs), sums_of_keys(inputs, 16))
    assert_same(found, expected(planes, inputs))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_few_rows_whose_squares_left_float32(device, size):
    shape = (2, 4, 2, 300, 41, 24)
    inputs = make_inputs(device, shape)
    inputs = inputs._replace(query=inputs.query * size, key=inputs.key / size)
    inputs.key[1, 0, 30, 3] = math.inf
    planes = make_planes(device, shape)
    found = summary.summarise(planes, inputs, row_squares(inputs), sums_of_keys(inputs, 16))
    assert_same(found, expected(planes, inputs))
