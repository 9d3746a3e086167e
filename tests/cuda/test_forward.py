"""The portable kernel against dense float64: output, lse, and every number of a row."""

import math

import pytest
import torch
from dense_rows import attend

from scaledot.backends.cuda import arguments
from scaledot.backends.cuda.forward import Config, config_for, forward
from scaledot.backends.cuda.statistics import ROW_PLANES
from scaledot.backends.inputs import Inputs
from scaledot.problem import Settings

SMALL = Config(16, 16, 4, 1)  # many tiles of few numbers: edges everywhere, and quick to interpret
INF = math.inf
Q, K, D, V = 19, 35, 13, 11
WIDE = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def make(device, dtype=torch.float32, batch=1, heads=1, groups=1, size=(Q, K, D, V), **extra):
    queries, keys, width, value_width = size
    query = torch.randn(batch, heads, queries, width).to(device, dtype)
    key = torch.randn(batch, groups, keys, width).to(device, dtype)
    value = torch.randn(batch, groups, keys, value_width).to(device, dtype)
    extra = {name: t.to(device) for name, t in extra.items()}
    return Inputs(query, key, value, *[None] * 8)._replace(**extra)


def settings(**changes):
    plain = Settings(D**-0.5, False, 0.0, 0.0, None, None, False)
    return plain._replace(**changes)


def run(inputs, setting, config=SMALL, moments=True):
    """As the operator calls it, into memory full of NaN."""
    shape = (*inputs.query.shape[:3], inputs.value.shape[-1])
    out = inputs.query.new_full(shape, math.nan)
    lse, (statistics, *_) = forward(inputs, setting, out, True, moments, config)
    return out, lse, statistics


def assert_twin(found, wanted):
    """Bit for bit where the interpreter runs both; a compiler may fuse and order each its way."""
    if found.is_cuda:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found, wanted)


def assert_agrees(inputs, setting, config=SMALL, keep=None):
    """Each number within the rounding of the logits, which are of size `reach`."""
    out, lse, statistics = run(inputs, setting, config)
    want = attend(inputs, setting, keep)
    dtype = inputs.query.dtype
    eps = torch.finfo(WIDE[dtype]).eps
    assert lse.dtype == statistics.dtype == WIDE[dtype]
    assert out.dtype == dtype
    finite = want.planes[0].abs()[want.planes[0].isfinite()]
    reach = 4 + (finite.max().item() if finite.numel() else 0.0)
    logit = 8 * eps * reach  # how far a logit may be off
    largest = inputs.value.abs().max().item() if inputs.value.numel() else 1.0
    assert_near(out, want.out, 4 * (torch.finfo(dtype).eps + logit) * largest, "out")
    # A whole row at the type's lowest number: of its lse only the size is left.
    uniform = want.lse.isfinite() & (want.lse < -1e4)
    assert (lse[uniform] < -1e4).all()
    assert_near(lse[~uniform], want.lse[~uniform], logit, "lse")
    count = want.planes[6].clamp(min=1)
    for name, got, exact in zip(ROW_PLANES, statistics, want.planes, strict=True):
        bound = logit
        if name == "m2":
            bound = 4 * logit * (count * (exact + count)).sqrt().max().item() + logit
        assert_near(got, exact, bound, name)
    return out, lse, statistics


def assert_near(got, want, bound, name):
    got = got.double()
    same = (got == want) | (got.isnan() & want.isnan())
    error = torch.where(same, 0.0, (got - want).abs())
    assert (error <= bound).all(), f"{name}: {error.max():.3g} is above {bound:.3g}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"right": 0},
        {"left": 5, "right": 3, "bottom_right": True},
        {"softcap": 1.5, "right": 2},
        {"softcap": 1e9},
        {"scale": -0.4, "right": 0, "bottom_right": True},
    ],
    ids=str,
)
def test_every_number_of_a_row(device, dtype, changes):
    assert_agrees(make(device, dtype), settings(**changes))


@pytest.mark.parametrize("queries", [1, 16, 17])
@pytest.mark.parametrize("keys", [1, 16, 33])
def test_lengths_around_a_tile(device, queries, keys):
    inputs = make(device, torch.float16, size=(queries, keys, 16, 16))
    for changes in ({"right": 0, "bottom_right": True}, {"left": 0}):
        assert_agrees(inputs, settings(**changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_of_zero_makes_all_keys_alike(device, dtype):
    _, _, statistics = assert_agrees(make(device, dtype), settings(scale=0.0, right=0))
    assert (statistics[8] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_of_each_head_of_either_sign(device, dtype):
    inputs = make(
        device, dtype, batch=2, heads=2, head_scale=torch.tensor([[0.3, -0.2], [-0.6, 0.0]])
    )
    assert_agrees(inputs, settings(scale=0.7, left=9))


@pytest.mark.parametrize("masked", [False, True])
def test_log_n_counts_what_the_row_sees(device, masked):
    extra = {"mask": torch.rand(1, 1, Q, K) > 0.4} if masked else {}
    for dtype in (torch.float32, torch.float16):
        assert_agrees(make(device, dtype, **extra), settings(log_n=True, right=0))


@pytest.mark.parametrize("shape", [(2, 2, Q, K), (1, 2, 1, K), (2, 1, Q, 1)])
def test_bool_masks_of_every_broadcast_shape(device, shape):
    mask = torch.rand(shape) > 0.3
    mask[:, :, min(5, shape[2] - 1)] = False  # with shape[2] == 1: nobody sees anything
    assert_agrees(make(device, batch=2, heads=2, mask=mask), settings(right=7))


@pytest.mark.parametrize("changes", [{}, {"softcap": 3.0}, {"right": 0}], ids=str)
def test_biases_that_hide_and_biases_that_say_hidden(device, changes):
    bias = torch.randn(1, 1, Q, K)
    bias[..., 3] = -INF
    bias[:, :, 7] = -INF
    lowest = torch.finfo(torch.float32).min
    bias[:, :, 9] = lowest  # as many models write «masked»: the output is uniform, no row counts
    bias[:, :, 10, 5:] = lowest
    out, _, statistics = assert_agrees(make(device, mask=bias), settings(**changes))
    assert (out[:, :, 7] == 0).all()
    assert not (out[:, :, 9] == 0).any()
    assert (statistics[6][:, :, 9] == 0).all()
    for dtype in (torch.bfloat16, torch.float16):
        low = bias.clamp(min=torch.finfo(dtype).min).masked_fill(bias == -INF, -INF).to(dtype)
        assert_agrees(make(device, dtype, mask=low), settings(**changes))


@pytest.mark.parametrize("changes", [{}, {"right": 0, "bottom_right": True}, {"left": 3}], ids=str)
def test_keys_past_their_length_are_never_read(device, changes):
    lengths = torch.tensor([0, 17, 16])
    inputs = make(device, batch=3, key_lengths=lengths)
    clean = assert_agrees(inputs, settings(**changes))
    for b, length in enumerate(lengths.tolist()):
        inputs.key[b, :, length:] = math.nan
        inputs.value[b, :, length:] = math.nan
    for got, want in zip(run(inputs, settings(**changes)), clean, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "changes", [{}, {"right": 0}, {"left": 7, "right": 1, "bottom_right": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences_do_not_see_each_other(device, changes, dtype):
    rows = torch.tensor([0, 2, 2, 19, 19, 19])
    keys = torch.tensor([0, 9, 12, 34, 34, K])  # sequences without rows, without keys
    inputs = make(device, dtype, cu_seqlens_q=rows, cu_seqlens_k=keys.int())
    assert_agrees(inputs, settings(**changes))


def test_tokens_of_no_sequence_see_nothing(device):
    ends = torch.tensor([0, 3, 12])
    inputs = make(device, cu_seqlens_q=ends, cu_seqlens_k=ends)
    out, lse, statistics = assert_agrees(inputs, settings())
    assert (out[:, :, 12:] == 0).all()
    assert (lse[:, :, 12:] == -INF).all()
    assert (statistics[6][:, :, 12:] == 0).all()


def test_the_first_sequence_begins_with_the_first_token(device):
    ends, begun = torch.tensor([0, 9, 12]), torch.tensor([4, 9, 12])
    inputs = make(device, cu_seqlens_q=ends, cu_seqlens_k=ends)
    other = inputs._replace(cu_seqlens_q=begun.to(device), cu_seqlens_k=begun.to(device))
    for got, want in zip(run(other, settings()), run(inputs, settings()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_are_one_more_outcome(device, dtype):
    sinks = torch.tensor([[1.0, -INF], [300.0, -300.0]])
    inputs = make(device, dtype, batch=2, heads=2, sinks=sinks)
    assert_agrees(inputs, settings(right=0))
    assert_agrees(inputs, settings(softcap=2.0))


@pytest.mark.parametrize("sink", [INF, math.nan])
def test_a_sink_that_is_no_number_shows_where_a_key_is_seen(device, sink):
    inputs = make(device, heads=2, sinks=torch.tensor([[sink, 0.0]]))
    out, lse, statistics = run(inputs, settings(right=0))
    want = attend(inputs, settings(right=0))
    assert (want.bad[:, 0]).any()
    assert torch.equal(statistics[0].isnan(), want.bad)
    assert out[want.bad].isnan().all()
    assert lse[want.bad].isnan().all()
    blind = inputs._replace(mask=torch.zeros(1, 1, 1, 1, device=device).bool())
    out, lse, _ = run(blind, settings())
    assert (out == 0).all()
    assert (lse == -INF).all()


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize(("dtype", "softcap"), [(torch.bfloat16, 0.0), (torch.float32, 5.0)])
def test_what_is_no_number_breaks_the_rows_that_see_it(device, dtype, bad, softcap):
    inputs = make(device, dtype)
    inputs.key[0, 0, 17, 0] = bad
    inputs.query[..., 0] = inputs.query[..., 0].abs() + 0.1  # logits of the sign of `bad`
    out, _, statistics = run(inputs, settings(right=0, softcap=softcap))
    for name, plane in zip(ROW_PLANES, statistics, strict=True):
        if name != "count":
            assert plane[:, :, 17:].isnan().all(), name
            assert plane[:, :, :17].isfinite().all(), name
    if math.isnan(bad):
        assert out[:, :, 17:].isnan().all()
    assert out[:, :, :16].isfinite().all()  # rows of tiles that do not hold the key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_far_beyond_what_one_fma_keeps(device, dtype):
    """The short step is off by a residual of the pivot: such rows are done again."""
    inputs = make(device, dtype, size=(20, 50, 16, 5))
    big = 3e4 if dtype == torch.float16 else 133120.0
    inputs.query.fill_(big)
    inputs.key.fill_(big)
    for changes in ({"right": 0, "bottom_right": True}, {"scale": -0.37}):
        out, _, statistics = run(inputs, settings(**changes))
        want = attend(inputs, settings(**changes))
        assert_near(out, want.out, 4 * torch.finfo(dtype).eps * 4, "out")
        assert_near(statistics[2], want.planes[2], 1e-5, "entropy")
        assert_near(statistics[3], want.planes[3], 1e-5, "top_p")


def with_a_key(inputs, index, logit):
    """The queries alike in one entry, and one key whose logits are about `logit`."""
    inputs.query[..., 0] = 4.0
    inputs.key[..., 0] = 0.0
    inputs.key[:, :, index] = 0.0
    inputs.key[:, :, index, 0] = logit * D**0.5 / 4
    return inputs


@pytest.mark.parametrize(
    ("index", "logit"),
    [(3, 8), (3, 38), (20, 46), (3, 100), (3, 1000), (3, -100), (34, 100)],
)
def test_a_key_far_above_or_below_the_row_s_pivot(device, index, logit):
    """Tiles that hide nothing keep the pivot of the last tile; rows that outgrow it, and p2 does
    so before l, are done again."""
    inputs = with_a_key(make(device, torch.bfloat16), index, logit)
    for changes in ({}, {"right": 0, "bottom_right": True}):
        _, _, statistics = assert_agrees(inputs, settings(**changes))
        without = run(inputs, settings(**changes), moments=False)[2]
        assert_near(without[:7], statistics[:7].double(), 2e-7 * (16 + abs(logit)), "no moments")
        out = torch.full_like(inputs.value[:, :, :Q], math.nan)
        forward(inputs, settings(**changes), out, False, config=SMALL)
        want = attend(inputs, settings(**changes)).out
        assert_near(out, want, 0.02 * inputs.value.abs().max().item(), "out alone")


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_logits_close_together_far_above_the_pivot_keep_their_variance(device, noise):
    """The last key, which rows see first, is far below all others."""
    inputs = make(device, torch.bfloat16, size=(Q, 2049, D, V))
    inputs.query[..., 0] = 4.0
    inputs.key[..., 1:] = noise
    inputs.key[..., 0] = 0.0
    inputs.key[:, :, -1, 0] = -29.0 * D**0.5 / 4
    _, _, statistics = assert_agrees(inputs, settings(), Config(16, 128, 4, 1))
    want = attend(inputs, settings()).planes
    assert_near(statistics[8] / want[8], torch.ones_like(want[8]), 1e-4, "m2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [None, 2.0])
@pytest.mark.parametrize("changes", [{}, {"right": 0, "bottom_right": True}, {"left": 3}])
def test_the_output_does_not_hang_on_vitals(device, dtype, sinks, changes):
    """More queries than keys, so that some rows see nothing."""
    inputs = make(device, dtype, size=(K, Q, D, V))
    if sinks is not None:
        inputs = inputs._replace(sinks=torch.full((1, 1), sinks, device=device, dtype=dtype))
    want, lse, _ = run(inputs, settings(**changes))
    out = torch.full_like(want, math.nan)
    alone, _ = forward(inputs, settings(**changes), out, False, config=SMALL)
    assert_twin(out, want)
    assert_twin(alone, lse)
    assert (out != 0).any()


@pytest.mark.parametrize("sinks", [None, 2.0])
@pytest.mark.parametrize("changes", [{}, {"right": 0}, {"right": 3, "bottom_right": True}])
def test_pivots_of_the_edges_where_one_tile_does_not_set_them(device, monkeypatch, sinks, changes):
    """As in wide calls; what is steady after them is the same."""
    inputs = make(device, torch.bfloat16)
    if sinks is not None:
        inputs = inputs._replace(sinks=torch.full((1, 1), sinks, device=device))
    with_pivots = run(inputs, settings(**changes))
    monkeypatch.setattr("scaledot.backends.cuda.forward.PIVOTS_WIDEST", 0)
    found = assert_agrees(inputs, settings(**changes))
    torch.testing.assert_close(found[1], with_pivots[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 9, 17])
@pytest.mark.parametrize("value_width", [1, 5])
def test_rows_that_zeros_fill_up(device, width, value_width, monkeypatch):
    """As on a GPU: rows of odd widths are copied, and read in whole pieces of 16 bytes."""
    monkeypatch.setattr(arguments, "_must_align", lambda tensor: tensor.element_size() == 2)
    inputs = make(device, torch.bfloat16, size=(Q, K, width, value_width))
    assert arguments.filled_width(inputs.query) > width
    assert_agrees(inputs, settings(scale=width**-0.5))
    # A mask is no such row: what follows its one column is another row's, or nobody's.
    column = torch.randn(1, 1, Q, 1, device=device).to(torch.bfloat16)
    assert_agrees(inputs._replace(mask=column), settings(scale=width**-0.5))


def test_a_value_that_only_the_pivot_makes_too_large(device):
    """2^40 times a bfloat16 of 1e30 leaves float32; the mean of the values does not."""
    inputs = with_a_key(make(device, torch.bfloat16), 3, 30)
    inputs.value.mul_(1e30)
    out, _, _ = run(inputs, settings())
    assert out.isfinite().all()
    want = attend(inputs, settings()).out
    assert_near(out, want, 0.02 * want.abs().max().item(), "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sink", [30.0, 80.0, 200.0])
def test_a_sink_far_above_keys_of_which_the_first_are_the_largest(device, dtype, sink):
    """The sink is the pivot then, and beside it the keys' probabilities may be nothing at all."""
    inputs = make(device, dtype, heads=2, sinks=torch.tensor([[sink, -sink]]))
    inputs = with_a_key(inputs, 3, 8)
    assert_agrees(inputs, settings())
    assert_agrees(inputs, settings(right=0))
    scores_only = forward(inputs._replace(value=None), settings(), None, True, True, SMALL)[1]
    assert_near(
        scores_only.statistics[0], attend(inputs, settings()).planes[0], 1e-5 * sink, "max_logit"
    )


def test_a_constant_of_a_row_changes_no_moment(device):
    """The pivot follows the row, so m2 keeps its digits however far the logits are from zero."""
    inputs = make(device, size=(Q, K, D, V))
    bias = torch.full((1, 1, Q, 1), 3000.0)
    moved = inputs._replace(mask=bias.to(device))
    want = attend(moved, settings()).planes[8]
    got = run(moved, settings())[2][8]
    assert_near(got, want, 2e-2 * want.max().item(), "m2")  # float32 logits of 3000 hold 2^-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_logits_far_below_zero(device, dtype):
    """flashinfer#4267, pytorch#196678: a finite start of the maximum, padded keys that score 0."""
    inputs = make(device, dtype, size=(9, 21, 16, 5))
    inputs.query.fill_(40.0)
    inputs.key.copy_(-40.0 - torch.rand(inputs.key.shape))
    assert_agrees(inputs, settings(scale=2.0))


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
def test_layouts_of_the_inputs_and_the_output(device, layout):
    inputs = make(device, batch=2, heads=2, groups=2, size=(5, K, D, V))

    def lay(tensor):
        if layout == "transposed":
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "strided":
            return torch.stack([tensor, tensor + 1], -1)[..., 0]
        if layout == "expanded":
            return tensor[:1, :1].expand_as(tensor)
        flat = torch.cat([tensor.new_zeros(3), tensor.flatten()])
        return flat[3:].view(tensor.shape)

    laid = inputs._replace(
        query=lay(inputs.query),
        key=lay(inputs.key),
        value=lay(inputs.value),
        mask=lay(torch.randn(2, 2, 5, K, device=device)),
    )
    assert_agrees(laid, settings(right=0))
    if layout != "expanded":
        out, plain = lay(inputs.query.new_zeros(2, 2, 5, V)), inputs.query.new_zeros(2, 2, 5, V)
        for place in (out, plain):
            forward(laid, settings(), place, False, config=SMALL)
        assert_twin(out, plain)


@pytest.mark.parametrize(
    "size", [(0, 5, 4, 3), (5, 0, 4, 3), (5, 7, 0, 3), (5, 7, 4, 0), (5, 1, 1, 1)], ids=str
)
def test_sizes_of_zero_and_one(device, size):
    inputs = make(device, size=size)
    if size[0]:
        assert_agrees(inputs, settings())
    else:
        out, lse, statistics = run(inputs, settings())
        assert (out.shape, lse.shape, statistics.shape) == (
            (1, 1, 0, 3),
            (1, 1, 0),
            (9, 1, 1, 0),
        )
    none = make(device, batch=0)
    assert run(none, settings())[2].shape == (9, 0, 1, Q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_only_and_statistics_without_moments(device, dtype):
    inputs = make(device, dtype)
    setting = settings(right=0, softcap=2.0)
    out, lse, statistics = run(inputs, setting)
    for only in (inputs, inputs._replace(value=None)):
        found, (planes, *_) = forward(only, setting, None, True, True, SMALL)
        assert_twin(found, lse)
        assert_twin(planes, statistics)
    _, _, planes = run(inputs, setting, moments=False)
    assert planes.shape == statistics.shape
    assert_twin(planes[:7], statistics[:7])
    bare = torch.empty_like(out)
    found, (nothing, *squares, _) = forward(inputs, setting, bare, False, config=SMALL)
    assert_twin(bare, out)
    assert_twin(found, lse)
    assert nothing.numel() == 0
    assert squares == [None, None]


def test_every_query_head_reads_its_own_key_head(device):
    """onnx PR 7274: groups are interleaved, not tiled."""
    assert_agrees(make(device, heads=6, groups=3, size=(5, 7, 8, 4)), settings())


@pytest.mark.parametrize("widths", [(300, 40), (40, 300), (512, 512)])
def test_wide_heads_with_the_table_s_own_tiles(device, widths):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make(device, dtype, heads=1, size=(5, 18, *widths))
        assert_agrees(inputs, settings(), config_for(inputs.query, max(widths)))


def test_many_small_heads_in_any_order(device, monkeypatch):
    """Heads share a group of programs; the last group is smaller than the others."""
    monkeypatch.setattr("scaledot.backends.cuda.forward.L2_SHARE", 4 * 18 * 12 * 4)
    inputs = make(device, batch=2, heads=3, groups=3, size=(18, 18, 8, 4))
    assert_agrees(inputs, settings(right=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_dropout_is_the_same_in_every_cut_and_keeps_the_mean(device, dtype, rate):
    """Zero scores give p = 1 / K, so the output of an identity of values shows what was kept."""
    seed = torch.tensor(987654321012345)
    inputs = make(device, dtype, batch=2, heads=2, size=(Q, 32, 8, 32), seed=seed)
    inputs.query.zero_()
    inputs.value.copy_(torch.eye(32).expand_as(inputs.value))
    setting = settings(dropout_p=rate)
    out, _, statistics = run(inputs, setting)
    again = run(inputs, setting, Config(32, 16, 4, 1))[0]
    assert torch.equal(out > 0, again > 0)
    kept = out > 0
    share = kept.double().mean().item()
    spread = math.sqrt(rate * (1 - rate) / kept.numel())
    assert abs(share - (1 - rate)) <= 4 * spread
    if rate < 1.0:
        p = torch.full(out[kept].shape, 1 / 32 / (1 - rate), dtype=torch.float64, device=device)
        assert_near(out[kept], p, 8 * torch.finfo(dtype).eps * p[0].item(), "p")
        assert not torch.equal(kept[0, 0], kept[0, 1])
        assert not torch.equal(kept[0, 0], kept[1, 0])
        other = inputs._replace(seed=inputs.seed + 1)
        assert not torch.equal(run(other, setting)[0] > 0, kept)
    plain = run(inputs, settings())[2]
    assert_twin(statistics, plain)  # the vitals are of the probabilities before dropout


@pytest.mark.parametrize("width", [17, 9, 40])
@pytest.mark.parametrize("value_width", [8, 16, 24])
def test_narrow_values_beside_keys_that_are_not_aligned(device, width, value_width):
    """Triton 3.6 would read 16 values of 16 bits from the wrong place of shared memory."""
    inputs = make(device, torch.float16, heads=3, size=(67, 63, width, value_width))
    assert_agrees(inputs, settings(scale=width**-0.5), config=None)


def squares_of(inputs, setting, config=SMALL, moments=True):
    shape = (*inputs.query.shape[:3], inputs.value.shape[-1])
    out = inputs.query.new_full(shape, math.nan)
    return forward(inputs, setting, out, True, moments, config)[1][1:3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{"right": 0}, {"scale": -0.3}], ids=str)
@pytest.mark.parametrize(("heads", "queries", "keys"), [(1, K, Q), (2, K, K), (4, 18, 35)])
def test_squares_of_rows_and_of_all_keys(device, dtype, changes, heads, queries, keys):
    """Also where the query heads of a key head must share its keys, or some have none to square."""
    inputs = make(device, dtype, 2, heads, max(heads // 2, 1), (queries, keys, D, V))
    inputs = inputs._replace(key=inputs.key.transpose(1, 2).contiguous().transpose(1, 2))
    squares, key_squares = squares_of(inputs, settings(**changes))
    assert_near(squares, inputs.query.double().square().sum(-1), 1e-4, "rows")
    wanted = inputs.key.double().square().sum((-1, -2))
    assert key_squares.numel() % wanted.numel() == 0
    found = key_squares.double().view(*wanted.shape, -1).sum(-1)
    assert_near(found / wanted, torch.ones_like(wanted), 1e-6, "keys")


def test_keys_are_squared_only_where_all_count_and_programs_suffice(device, monkeypatch):
    short = make(device, torch.bfloat16, size=(Q, 2 * 16, D, V))
    assert squares_of(short, settings())[1] is not None
    assert squares_of(short, settings(), moments=False)[1] is None
    assert squares_of(make(device, torch.bfloat16), settings())[1] is None  # 35 keys, 32 rows
    lengths = torch.tensor([9], device=device)
    assert squares_of(short._replace(key_lengths=lengths), settings())[1] is None
    ends = torch.tensor([0, 9, Q], device=device)
    assert squares_of(short._replace(cu_seqlens_q=ends, cu_seqlens_k=ends), settings())[1] is None
    monkeypatch.setattr("scaledot.backends.cuda.forward.MOST_KEY_SQUARES", 1)
    squares, key_squares = squares_of(short, settings())
    assert squares is not None
    assert key_squares is None
    assert squares_of(make(device), settings()) == (None, None)  # float32 is summed more exactly


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 49), (17, 16), (33, 1), (33, 49)])
@pytest.mark.parametrize(
    "changes", [{}, {"right": 0}, {"right": 0, "bottom_right": True}, {"right": 20}], ids=str
)
def test_the_pivots_of_one_tile_serve_every_row(device, queries, keys, changes):
    """Rows that see no key, and tiles at the diagonal after the one that gives the pivots."""
    sinks = torch.tensor([[0.3, -INF]])
    for extra, tile in (({}, (32, 16)), ({"sinks": sinks}, (16, 32))):
        inputs = make(device, torch.bfloat16, heads=2, size=(queries, keys, D, V), **extra)
        assert_agrees(inputs, settings(**changes), Config(*tile, 4, 1))


@pytest.mark.parametrize("kind", ["all", "causal", "window", "bool", "bias", "lengths"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_row_whose_logits_are_all_minus_infinity_is_none_that_sees_nothing(device, dtype, kind):
    """Row 4 sees keys, row 5 of some kinds does not."""
    extra, changes = {}, {}
    if kind == "causal":
        changes = {"right": 0}
    if kind == "window":
        changes = {"left": 2, "right": 1}
    if kind in ("bool", "bias"):
        seen = torch.rand(1, 1, Q, K) > 0.5
        seen[..., 20] = True
        seen[:, :, 5] = False
        bias = torch.zeros(seen.shape).masked_fill(~seen, -INF).to(dtype)
        extra = {"mask": seen if kind == "bool" else bias}
    if kind == "lengths":
        extra = {"key_lengths": torch.tensor([3])}
    inputs = make(device, dtype, **extra)
    inputs = inputs._replace(key=inputs.key.abs())
    for wants_vitals in (True, False):
        inputs.query[:, :, 4:6] = 1.0
        out = inputs.query.new_full((1, 1, Q, V), math.nan)
        forward(inputs, settings(**changes), out, wants_vitals, config=SMALL)
        sound = out.clone()
        assert sound.isfinite().all()
        inputs.query[:, :, 4:6] = -INF
        lse, (rows, *_) = forward(inputs, settings(**changes), out, wants_vitals, config=SMALL)
        broken = [4] if extra.get("mask") is not None else [4, 5]
        others = [row for row in range(Q) if row not in broken]
        assert out[:, :, broken].isnan().all()
        assert lse[:, :, broken].isnan().all()
        assert torch.equal(out[:, :, others], sound[:, :, others])
        if wants_vitals:
            assert rows[0][:, :, broken].isnan().all()
            assert (rows[6][:, :, broken] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_takes_all_of_a_row_whose_logits_are_minus_infinity(device, dtype):
    inputs = make(device, dtype, sinks=torch.zeros(1, 1))
    inputs.key.abs_()
    inputs.query[:, :, 4] = -INF
    out, _, _ = run(inputs, settings())
    assert (out[:, :, 4] == 0).all()
