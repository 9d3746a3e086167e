"""The rectangles of two shards, against every pair looked at one by one."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaledot.distributed.blocks import Sight, blocks
from scaledot.distributed.layout import Segment, cut, of_lengths, tokens_of

SIDE = st.none() | st.integers(0, 12)
LAYOUT = st.sampled_from(["contiguous", "zigzag"])


def positions(shard):
    return torch.cat([torch.arange(s.start, s.start + s.length) for s in shard])


def seen_by(rows, keys, sight):
    """Which pairs of positions the rule allows."""
    distance = keys.unsqueeze(0) - rows.unsqueeze(1) - sight.offset
    seen = torch.ones_like(distance, dtype=torch.bool)
    if sight.left is not None:
        seen &= distance >= -sight.left
    if sight.right is not None:
        seen &= distance <= sight.right
    return seen


@given(
    queries=st.integers(0, 23),
    keys=st.integers(0, 23),
    ranks=st.integers(1, 4),
    layout=LAYOUT,
    left=SIDE,
    right=SIDE,
    offset=st.integers(-9, 9),
    data=st.data(),
)
@settings(max_examples=300)
def test_the_blocks_cover_what_is_seen_and_nothing_else(
    queries, keys, ranks, layout, left, right, offset, data
):
    sight = Sight(left, right, offset)
    rows = cut(queries, ranks, layout)[data.draw(st.integers(0, ranks - 1))]
    columns = cut(keys, ranks, layout)[data.draw(st.integers(0, ranks - 1))]
    covered = torch.zeros(tokens_of(rows), tokens_of(columns), dtype=torch.int64)
    for block in blocks(rows, columns, sight):
        place = (slice(*block.rows), slice(*block.keys))
        height, width = covered[place].shape
        assert height
        assert width
        assert block.sight.left is None or block.sight.left >= 0
        assert block.sight.right is None or block.sight.right >= 0
        # The kernels know two diagonals: from the first corner and to the last one.
        assert block.sight.offset in (0, width - height)
        covered[place] += seen_by(torch.arange(height), torch.arange(width), block.sight).long()
    expected = seen_by(positions(rows), positions(columns), sight)
    assert torch.equal(covered, expected.long())


def test_a_causal_zigzag_takes_one_call_a_round():
    shards = cut(64, 4, "zigzag")
    causal = Sight(None, 0, 0)
    for rank in range(4):
        work = []
        for owner in range(4):
            found = blocks(shards[rank], shards[owner], causal)
            assert len(found) == 1
            (top, bottom), (first, last), sight = found[0]
            work.append((bottom - top) * (last - first) / (1 if sight.right is None else 2))
        assert work == [128.0] * 4  # the same for every rank, in every round


@given(tokens=st.integers(0, 200), ranks=st.integers(1, 9), layout=LAYOUT)
def test_a_cut_is_a_partition_and_its_lengths_say_it_all(tokens, ranks, layout):
    shards = cut(tokens, ranks, layout)
    everything = torch.cat([positions(shard) for shard in shards])
    assert torch.equal(everything.sort().values, torch.arange(tokens))
    lengths = [tokens_of(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= (1 if layout == "contiguous" else 2)
    assert of_lengths(lengths, layout, "tokens") == shards


def test_contiguous_shards_may_be_of_any_length():
    assert of_lengths([3, 0, 5], "contiguous", "tokens") == [
        (Segment(0, 3),),
        (Segment(3, 0),),
        (Segment(3, 5),),
    ]
