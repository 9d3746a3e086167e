"""Tiles of keys: what hides nothing, and the key that each row must see beside them."""

import pytest
import torch
import triton
import triton.language as tl

from scaledot.backends.cuda.arguments import Window
from scaledot.backends.cuda.visible import Sequence, key_tiles

BLOCK, ROWS = 16, 16


@triton.jit
def _tiles_kernel(
    found_ptr, row, row_end, seq, window, ONE_AFTER: tl.constexpr, BLOCK: tl.constexpr
):
    tiles = key_tiles(row, row_end, seq, window, False, BLOCK, ONE_AFTER)
    tl.store(found_ptr, tiles.begin)
    tl.store(found_ptr + 1, tiles.full)
    tl.store(found_ptr + 2, tiles.full_end)
    tl.store(found_ptr + 3, tiles.end)


def tiles_of(device, row, keys, diagonal, window, one_after):
    found = torch.zeros(4, dtype=torch.int32, device=device)
    seq = Sequence(0, 64, 0, keys, diagonal)
    _tiles_kernel[(1,)](found, row, row + ROWS, seq, window, one_after, BLOCK)
    return found.tolist()


def keys_seen(i, keys, diagonal, window):
    low = 0 if window.left is None else i + diagonal - window.left
    high = keys if window.right is None else i + diagonal + window.right + 1
    return range(max(low, 0), min(high, keys))


@pytest.mark.parametrize("one_after", [False, True])
@pytest.mark.parametrize("window", [Window(None, None), Window(None, 0), Window(37, 0)])
@pytest.mark.parametrize("keys", [15, 16, 33, 48])
def test_full_tiles_are_seen_by_all_rows_and_are_not_all_they_see(device, keys, window, one_after):
    for row in (0, 32):
        for diagonal in (-16, -1, 0, 15, 16):
            begin, full, full_end, end = tiles_of(device, row, keys, diagonal, window, one_after)
            assert begin <= full <= full_end
            assert (full - begin) % BLOCK == (full_end - begin) % BLOCK == 0
            for i in range(row, row + ROWS):
                seen = keys_seen(i, keys, diagonal, window)
                assert set(seen) <= set(range(begin, end))
                if full < full_end:
                    assert set(range(full, full_end)) <= set(seen)
                    assert max(seen) >= full_end or not one_after


def test_without_the_key_after_them_a_row_may_see_full_tiles_alone(device):
    everything = Window(None, None)
    assert tiles_of(device, 0, 48, 0, everything, False) == [0, 0, 48, 48]
    assert tiles_of(device, 0, 48, 0, everything, True) == [0, 0, 32, 48]
