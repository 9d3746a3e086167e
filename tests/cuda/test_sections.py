"""How a causal call shares its tiles out: by sections of heads that the cache holds."""

import pytest

launch = pytest.importorskip("scaledot.backends.cuda.hopper.launch")

PROGRAMS = 132
MIB = 2**20
# heads, blocks of rows, bytes of a head's keys and values: what the benchmark runs, and odd ones.
CALLS = [
    (128, 32, MIB),
    (32, 86, 4 * MIB),
    (64, 32, 2 * MIB),
    (16, 128, 8 * MIB),
    (32, 32, 4 * MIB),
    (8, 128, 16 * MIB),
    (48, 32, MIB),
    (39, 16, MIB),
    (28, 24, 3 * MIB // 2),
    (1, 1, 1),
    (512, 1, 0),  # one key for all of them
    (7, 1000, 100 * MIB),
    (5000, 40, MIB),
]


@pytest.mark.parametrize("call", CALLS)
def test_sections_fit_the_cache_or_fill_two_rounds(call):
    heads, blocks, size = call
    section = launch.section_size(heads, blocks, PROGRAMS, size)
    assert 1 <= section <= heads
    least = -(-2 * PROGRAMS // blocks)
    assert section * size <= launch.CACHE_BYTES or section <= max(least, 1) or section == heads


@pytest.mark.parametrize("call", [call for call in CALLS if call[0] * call[1] > 4 * PROGRAMS])
def test_programs_get_nearly_equal_shares(call):
    heads, blocks, size = call
    section = launch.section_size(heads, blocks, PROGRAMS, size)
    longest = launch._longest(heads, blocks, PROGRAMS, section)
    even = heads * sum(range(2, blocks + 2)) / PROGRAMS
    assert even <= longest <= 1.1 * even
