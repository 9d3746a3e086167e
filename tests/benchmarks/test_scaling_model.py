"""The formulas of benchmarks/scaling: bytes, FLOPs, bounds, and the laws they must keep."""

import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks/scaling").exists(), reason="benchmarks are not part of this copy"
)


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def model():
    from benchmarks.scaling import model

    return model


@pytest.fixture
def facts():
    from benchmarks.scaling import facts

    return facts


@pytest.fixture
def speeds(facts):
    return facts.measured()


def test_a_message_is_the_bytes_of_two_tensors(model):
    import torch

    work = model.Work(tokens=7 * 13, ranks=7, batch=3, heads=10, groups=5, width=11)
    key = torch.empty(3, 5, 13, 11, dtype=torch.bfloat16)
    assert work.message == 2 * key.nbytes
    assert work.gradient_message == 2 * key.float().nbytes


def test_a_block_is_two_products_of_matrices(model):
    work = model.Work(tokens=7 * 13, ranks=7, layout="all keys", batch=3, heads=10, width=11)
    multiply_adds = 3 * 10 * (13 * 13 * 11 + 13 * 13 * 11)
    assert work.block_flops == 2 * multiply_adds


@pytest.mark.parametrize("layout", ["all keys", "zigzag"])
def test_the_blocks_of_all_ranks_are_the_whole_work(model, layout):
    work = model.Work(tokens=1024, ranks=8, layout=layout)
    assert math.isclose(8 * 8 * work.block_flops, work.all_flops)


def test_zigzag_gives_every_rank_half_of_the_pairs_in_every_step(model):
    """Counted on the library's own layout: what the model takes for granted."""
    from scaledot.distributed.layout import cut

    ranks, tokens = 5, 40
    shards = cut(tokens, ranks, "zigzag")
    held = [[p for s in shard for p in range(s.start, s.start + s.length)] for shard in shards]
    local = tokens // ranks
    for rank in range(ranks):
        for owner in range(ranks):
            seen = sum(query >= key for query in held[rank] for key in held[owner])
            own_diagonal = local / 2 if rank == owner else 0
            assert seen == local**2 / 2 + own_diagonal


def test_the_bound_for_overlap_is_where_block_and_message_take_equally_long(model, facts):
    link = facts.Link("a link", 1e11, 0.5, 0.0, "")
    for causal in (False, True):
        least = model.enough_tokens(link, 3e14, heads=24, groups=6, causal=causal)
        layout = "zigzag" if causal else "all keys"
        work = model.Work(least * 4, 4, layout, heads=24, groups=6, width=96)
        assert math.isclose(work.block_flops / 3e14, link.seconds(work.message))


def test_backward_speed_is_what_both_passes_leave(facts, speeds):
    """Time of both = time of forward with vitals + time of backward, at n = 16384."""
    from scaledot.bench import results

    rows = results.latest(results.read(facts.GPU_CSV))
    named = {
        row.case: row.ours_median
        for row in rows
        if row.shape == "1x16x16384x128" and not row.causal and row.ours_median is not None
    }
    flops = 4 * 16 * 16384**2 * 128
    backward_ms = 2.5 * flops / speeds.backward[-1].flops * 1e3
    assert math.isclose(backward_ms + named["vitals_cost"], named["backward_cudnn"], rel_tol=2e-3)


def test_speeds_are_rows_of_the_file(facts, speeds):
    text = facts.GPU_CSV.read_text()
    for column in speeds:
        assert column
        for speed in column:
            assert f"{speed.date}," in text
            assert f",{speed.case},{speed.shape}," in text
            assert 1e14 < speed.flops < 1e15
    assert [speed.length for speed in speeds.forward] == sorted(s.length for s in speeds.forward)


def test_short_blocks_take_the_speed_of_the_next_shorter_row(facts, speeds):
    assert facts.at(speeds.forward, 5000).length == 4096
    assert facts.at(speeds.forward, 17).length == speeds.forward[0].length
    assert facts.at(speeds.forward, 1e9).length == speeds.forward[-1].length


def test_a_file_without_rows_says_what_to_type(facts, tmp_path):
    header = facts.GPU_CSV.read_text().partition("\n")[0]
    (tmp_path / "gpu.csv").write_text(header + "\n")
    with pytest.raises(ValueError, match="scaledot bench --gpu"):
        facts.measured(path=tmp_path / "gpu.csv")


@pytest.mark.parametrize("backward", [False, True])
def test_one_rank_alone_sends_and_loses_nothing(model, speeds, backward):
    make = model.backward_step if backward else model.forward_step
    work = model.Work(1 << 20, 1)
    seconds = model.ring_seconds(work, make(work, speeds))
    assert math.isclose(model.efficiency(work, speeds, seconds, backward=backward), 1.0)
    gathered = model.gather_seconds(work, speeds, backward=backward)
    assert math.isclose(model.efficiency(work, speeds, gathered, backward=backward), 1.0)


@pytest.mark.parametrize("backward", [False, True])
def test_overlap_gains_at_most_a_factor_of_two_and_never_loses(model, speeds, backward):
    make = model.backward_step if backward else model.forward_step
    for tokens in (1 << 17, 1 << 20):
        for ranks in (2, 8, 64, 1024):
            work = model.Work(tokens, ranks)
            step = make(work, speeds)
            overlapped, serial = model.ring_seconds(work, step), model.serial_seconds(work, step)
            assert overlapped < serial <= 2 * overlapped


def test_contiguous_shards_waste_half(model, speeds):
    for ranks in (2, 16, 1024):
        work = model.Work(1 << 30, ranks, "contiguous")
        step = model.forward_step(work, speeds)._replace(merge=0.0, transfer=0.0)
        share = model.efficiency(work, speeds, model.ring_seconds(work, step))
        assert math.isclose(share, ranks / (2 * ranks - 1), rel_tol=1e-6)


def test_a_ring_of_nodes_is_the_ring_inside_a_node_and_never_slower_outside(model, speeds, facts):
    for ranks in (2, 8, 16, 1024):
        work = model.Work(1 << 20, ranks)
        inner = model.forward_step(work, speeds, facts.NVLINK)
        outer = model.forward_step(work, speeds, facts.NETWORK)
        double = model.double_ring_seconds(work, inner, outer)
        single = model.ring_seconds(work, model.forward_step(work, speeds))
        assert double == single if ranks <= facts.NODE else double <= single


def test_a_reading_is_nineteen_numbers_a_head(model):
    from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
    from scaledot.watch.ranks import parcel

    assert len(FLOAT_FIELDS) + len(COUNT_FIELDS) == 19  # the page says so
    head = len(FLOAT_FIELDS) * 4 + len(COUNT_FIELDS) * 8
    start = parcel.SIZE + 8 * len(parcel.NUMBERS)
    assert model.reading_bytes(layers=3, heads=5) == start + 3 * (16 + 5 * head)


def test_a_collective_of_one_is_free_and_grows_with_ranks(model):
    assert model.collective_seconds(1, 1e9) == 0.0
    times = [model.collective_seconds(ranks, 1e6) for ranks in (2, 8, 16, 64, 1024)]
    assert times == sorted(times)
    assert times[0] > 0


def test_the_ring_needs_less_memory_the_more_ranks_there_are_and_the_all_gather_does_not(model):
    few, many = (model.memory(model.Work(1 << 20, ranks)) for ranks in (8, 128))
    assert math.isclose(few.ring, 16 * many.ring)
    assert math.isclose(few.ring_backward, 16 * many.ring_backward)
    keys = model.Work(1 << 20, 1).message
    assert many.gather > 2 * keys
    assert many.gather_backward > 8 * keys
