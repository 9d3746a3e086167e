"""Two warps that sum the squares of query and keys while they are in shared memory, half each.

In the consumers these sums took up to a tenth of a call: what is computed once for each tile of
rows has to be fetched anew each time, instruction by instruction. Here everybody waits for them who
waits for a buffer, so what counts is how soon these warps hand one back: hence two of them, four
loads on their way at a time, and the query's rows only when the keys are back. A partition each:
one of two warps would need a named barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from scaledot.backends.cuda.hopper.pipeline import (
    KEYS_BACK,
    hand_back_keys,
    in_round,
    key_readers,
    meet,
    stage_of,
    wait_full,
)
from scaledot.backends.cuda.hopper.tasks import missed_rounds

LINE = gl.constexpr(64)  # entries of 128 bytes: a row of a block of columns, swizzled within itself
FOUR = gl.constexpr(4)  # lines that a warp loads at once: 16 bytes a thread
PART = gl.constexpr(16)  # rows of the query that a warp takes after each tile of keys
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))
IN_PLACE = gl.constexpr(",".join(["=r"] * 16 + [str(i) for i in range(16)] + ["r"] * 8))
SQUARED = gl.constexpr(",".join(["=f"] * 8 + [str(i) for i in range(8)] + ["r"] * 4))


@gluon.jit
def square_0(call, pipe):
    if call.plan.SQUARES != "no":
        _square_half(call, pipe, 0)


@gluon.jit
def square_1(call, pipe):
    if call.plan.SQUARES != "no":
        _square_half(call, pipe, 1)


@gluon.jit
def _square_half(call, pipe, HALF: gl.constexpr):
    """It reads every tile of keys as a consumer does, most of them without a look."""
    plan = call.plan
    ROWS: gl.constexpr = plan.ROWS // 2
    step = 0
    careful = 0
    missed = -1
    while missed != 0:
        for round in range(call.rounds()):
            entry, block, there = call.place(round)
            if there and in_round(missed, round):
                tile = call.tile(entry, block, careful)
                number = tile.stop - tile.start
                for back in range(number):
                    wait_full(pipe.k_full, step, plan)
                    if plan.SQUARES == "both":
                        _square_keys(call, tile, tile.stop - 1 - back, pipe, step, HALF)
                    # The next keys wait for these, and after the last the next query for this one.
                    row = HALF * ROWS + gl.minimum(back * PART, ROWS)
                    if back == number - 1:
                        _square_query(call, tile, row, (HALF + 1) * ROWS, pipe)
                    hand_back_keys(step, 1, plan)
                    if back != number - 1:
                        stop = gl.minimum(row + PART, (HALF + 1) * ROWS)
                        _square_query(call, tile, row, stop, pipe)
                    step += 1
        wait_full(pipe.k_full, step, plan)
        meet("sync", KEYS_BACK + stage_of(step, plan), 1, key_readers(plan))
        step += 1
        missed = missed_rounds(pipe, careful, plan)
        careful += 1


@gluon.jit
def _square_query(call, tile, first, stop, pipe):
    """Of each row [first, stop) of the tile the sum of its squares."""
    plan = call.plan
    BLOCKS: gl.constexpr = plan.D // LINE  # of columns, one after the other in memory
    NEXT: gl.constexpr = plan.TEAM // FOUR
    nought = call.keys >> 31  # a number of keys has no sign
    entry = (tile.batch * call.heads + tile.head).to(gl.int64)
    at = call.squares + entry * call.queries + tile.first_query
    none = gl.zeros([FOUR, LINE], gl.float32, LAYOUT)
    for row in range(first, stop, 4 // BLOCKS * FOUR):
        q = in_lines(pipe.q.index(row // plan.TEAM), plan.TEAM * plan.D)
        lines = row % plan.TEAM // FOUR
        # Four lines by four: of as many blocks of columns as there are, then of the next rows.
        a, b, c, d = load_four(
            q,
            lines,
            lines + 1 % BLOCKS * NEXT + 1 // BLOCKS,
            lines + 2 % BLOCKS * NEXT + 2 // BLOCKS,
            lines + 3 % BLOCKS * NEXT + 3 // BLOCKS,
            nought,
        )
        if BLOCKS == 4:
            _store_rows(at, tile, row, add(add(add(add(none, a), b), c), d))
        elif BLOCKS == 2:
            _store_rows(at, tile, row, add(add(none, a), b))
            _store_rows(at, tile, row + FOUR, add(add(none, c), d))
        else:
            _store_rows(at, tile, row, add(none, a))
            _store_rows(at, tile, row + FOUR, add(none, b))
            _store_rows(at, tile, row + 2 * FOUR, add(none, c))
            _store_rows(at, tile, row + 3 * FOUR, add(none, d))


@gluon.jit
def _store_rows(at, tile, row, squares):
    sums = of_lines(squares)
    place = tile.row + row + gl.arange(0, FOUR, sums.type.layout)
    gl.store(at + place, sums, mask=place < tile.queries)


@gluon.jit
def _square_keys(call, tile, j, pipe, step, HALF: gl.constexpr):
    """Of half of tile j of the keys one sum, if it lies where the rows do; by the first head that
    shares it."""
    plan = call.plan
    mine = (j * plan.KEYS // plan.ROWS == tile.row // plan.ROWS) & (tile.careful == 0)
    if mine & (tile.head % call.group == 0):
        k = in_lines(pipe.k.index(stage_of(step, plan)), plan.KEYS * plan.D)
        squares = gl.zeros([FOUR, LINE], gl.float32, LAYOUT)
        LINES: gl.constexpr = plan.KEYS * plan.D // (FOUR * LINE) // 2
        nought = call.keys >> 31  # of a constant number the compiler would make no loop
        for i in range(HALF * LINES, (HALF + 1) * LINES + nought, 4):
            a, b, c, d = load_four(k, i, i + 1, i + 2, i + 3, nought)
            squares = add(add(add(add(squares, a), b), c), d)
        head = (tile.batch * call.heads + tile.head) // call.group
        at = (head.to(gl.int64) * gl.cdiv(call.keys, plan.KEYS) + j) * 2 + HALF
        gl.store(call.key_squares + at, gl.sum(of_lines(squares), 0))


@gluon.jit
def add(squares, x):
    """Those of four lines. Of the eight numbers of a thread the first two are sums, of its entries
    by turns; the others are not looked at."""
    return gl.inline_asm_elementwise(
        squares_text(x.dtype), SQUARED, [squares, x], dtype=gl.float32, is_pure=True, pack=8
    )


@gluon.constexpr_function
def squares_text(dtype):
    """Two entries a word."""
    text = "{ .reg .f32 low, high; .reg .b16 half, other;"
    for word in ("$16", "$17", "$18", "$19"):
        if dtype == gl.bfloat16:
            text += f"shl.b32 low, {word}, 16; and.b32 high, {word}, 0xffff0000;"
        else:
            text += f"mov.b32 {{half, other}}, {word};"
            text += "cvt.f32.f16 low, half; cvt.f32.f16 high, other;"
        text += "fma.rn.f32 $0, low, low, $0; fma.rn.f32 $1, high, high, $1;"
    return text + "}"


@gluon.jit
def of_lines(squares):
    """[4]"""
    first, second = gl.split(squares.reshape([FOUR, LINE // 8, 4, 2]))
    return gl.sum(first_of_four(first) + first_of_four(second), 1)


@gluon.jit
def first_of_four(x):
    """[4, 8, 4] -> [4, 8]"""
    x, _ = gl.split(x.reshape([FOUR, LINE // 8, 2, 2]))
    return gl.split(x)[0]


@gluon.jit
def load_four(lines, a, b, c, d, nought):
    """All on their way before the first is used: the assembler moves nothing past an event, even
    one that never comes."""
    nowhere = gl.full([FOUR, LINE], 0, gl.int32, LAYOUT) + nought
    a = lines.index(a).load(LAYOUT)
    b = lines.index(b).load(LAYOUT)
    c = lines.index(c).load(LAYOUT)
    d = lines.index(d).load(LAYOUT)
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; setp.ne.b32 never, $32, 0; @never pmevent 1; }",
        IN_PLACE,
        [a, b, c, d, nowhere],
        dtype=(a.dtype, b.dtype, c.dtype, d.dtype),
        is_pure=False,
        pack=8,
    )


@gluon.jit
def in_lines(buffer, ENTRIES: gl.constexpr):
    """[n, FOUR, LINE]: a buffer as it lies in memory, one block of columns after the other."""
    shape: gl.constexpr = [ENTRIES // (FOUR * LINE), FOUR, LINE]
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return buffer._reinterpret(buffer.dtype, shape, layout)
