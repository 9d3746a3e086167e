"""What a Hopper program works on: the call, its tiles of rows, and which keys each may see.

Gluon's aggregates are records that the compiler takes apart; a field of constexpr type is a choice
made at compile time, and what it does not choose leaves no trace in the kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Plan:
    """What is fixed when the kernel is compiled."""

    D: gl.constexpr  # width of query and key in shared memory, a power of two
    V: gl.constexpr  # of value
    KEYS: gl.constexpr  # of a tile
    STAGES: gl.constexpr  # tiles of keys, and of values, in shared memory
    CONSUMERS: gl.constexpr  # warpgroups that compute
    ROWS: gl.constexpr  # of a tile: 64 a consumer
    TEAM: gl.constexpr  # rows of the consumers that share their code, see kernel.py
    TOGETHER: gl.constexpr  # all consumers are one team
    TURNS: gl.constexpr  # consumers take turns at the tensor cores
    EARLY: gl.constexpr  # P V is awaited before the exponentials, not after
    QUARTERS: gl.constexpr  # the exponentials of a tile in four parts, one after the other
    ORDER: gl.constexpr  # of the sums that a score joins, see softmax.add_few
    AT_ONCE: gl.constexpr  # scores that join one sum before the next
    IN_PLACE: gl.constexpr  # full tiles of keys as one text for the assembler, see in_place.py
    CUT: gl.constexpr  # exponentials in it before P V is awaited
    RUN: gl.constexpr  # full tiles of keys that are one chain of additions to l and a
    FEW: gl.constexpr  # a row's first pivot is the largest of a few scores, not of a tile
    VALUES: gl.constexpr  # False: scores only
    STATISTICS: gl.constexpr
    MOMENTS: (
        gl.constexpr
    )  # summed of "all" tiles of keys, of all but the full ones ("edges"), of "none"
    RIGHT: gl.constexpr  # a row ends at the diagonal, or `right` keys after it
    LEFT: gl.constexpr
    LENGTHS: gl.constexpr  # a batch entry has a number of keys of its own
    PACKED: gl.constexpr  # the one batch entry holds sequences
    SINKS: gl.constexpr
    FACTOR: gl.constexpr  # scores are scaled one by one: "no", "head", "row", "log_n"
    SOFTCAP: gl.constexpr
    NARROW: gl.constexpr  # value's width is less than V
    SQUARES: gl.constexpr  # of the "query"'s rows are wanted, of "both" query and keys, or "no"
    HIDES: gl.constexpr  # some of the values may be hidden from a row of their tile
    STEADY: gl.constexpr  # pivots stay where they are in full tiles
    dtype: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        D,
        V,
        KEYS,
        STAGES,
        CONSUMERS,
        TURNS,
        EARLY,
        QUARTERS,
        ORDER,
        AT_ONCE,
        IN_PLACE,
        CUT,
        RUN,
        FEW,
        VALUES,
        STATISTICS,
        MOMENTS,
        RIGHT,
        LEFT,
        LENGTHS,
        PACKED,
        SINKS,
        FACTOR,
        SOFTCAP,
        NARROW,
        SQUARES,
        dtype,
    ):
        self.D = gl.constexpr(D)
        self.V = gl.constexpr(V)
        self.KEYS = gl.constexpr(KEYS)
        self.STAGES = gl.constexpr(STAGES)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.ROWS = gl.constexpr(64 * CONSUMERS)
        # A team has a power of two of warps: two or four consumers are one, three are three.
        self.TEAM = gl.constexpr(64 if CONSUMERS == 3 else 64 * CONSUMERS)
        self.TOGETHER = gl.constexpr(CONSUMERS != 3)
        self.TURNS = gl.constexpr(TURNS)
        self.EARLY = gl.constexpr(EARLY)
        self.QUARTERS = gl.constexpr(QUARTERS)
        self.ORDER = gl.constexpr(ORDER)
        self.AT_ONCE = gl.constexpr(AT_ONCE)
        steady = dtype == gl.bfloat16
        self.IN_PLACE = gl.constexpr(IN_PLACE and STATISTICS and steady)
        self.CUT = gl.constexpr(CUT)
        self.RUN = gl.constexpr(RUN if STATISTICS and steady else 1)
        # Only the first tile's values are cleaned, see walk.clean: it must not be one more tile.
        cleans = LENGTHS or PACKED
        self.FEW = gl.constexpr(FEW and steady and not LEFT and not cleans)
        self.VALUES = gl.constexpr(VALUES)
        self.STATISTICS = gl.constexpr(STATISTICS)
        self.MOMENTS = gl.constexpr(MOMENTS)
        self.RIGHT = gl.constexpr(RIGHT)
        self.LEFT = gl.constexpr(LEFT)
        self.LENGTHS = gl.constexpr(LENGTHS)
        self.PACKED = gl.constexpr(PACKED)
        self.SINKS = gl.constexpr(SINKS)
        self.FACTOR = gl.constexpr(FACTOR)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.NARROW = gl.constexpr(NARROW)
        self.SQUARES = gl.constexpr(SQUARES)
        self.HIDES = gl.constexpr(VALUES and (RIGHT or LEFT))
        self.STEADY = gl.constexpr(steady)
        self.dtype = gl.constexpr(dtype)


@aggregate
class Tile:
    """Rows [row, row + ROWS) of a sequence of one head, and the tiles of keys they meet."""

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor  # within the sequence
    queries: gl.tensor  # of the sequence
    keys: gl.tensor
    first_query: gl.tensor  # where the sequence begins in a packed tensor, else 0
    first_key: gl.tensor
    offset: gl.tensor  # the diagonal passes through (row, row + offset)
    start: gl.tensor  # tiles of keys: some row may see a key of [start, stop), at least one tile
    full_start: gl.tensor  # every row sees every key of [full_start, full_stop): "full" tiles
    full_stop: gl.tensor
    stop: gl.tensor
    careful: gl.tensor  # 1: no tile counts as full, so that pivots may move in all

    @gluon.constexpr_function
    def __init__(
        self,
        batch,
        head,
        row,
        queries,
        keys,
        first_query,
        first_key,
        offset,
        start,
        full_start,
        full_stop,
        stop,
        careful,
    ):
        self.batch = batch
        self.head = head
        self.row = row
        self.queries = queries
        self.keys = keys
        self.first_query = first_query
        self.first_key = first_key
        self.offset = offset
        self.start = start
        self.full_start = full_start
        self.full_stop = full_stop
        self.stop = stop
        self.careful = careful


@aggregate
class Call:
    """Sizes and addresses of a call, the same for every tile."""

    out: gl.tensor
    lse: gl.tensor
    statistics: gl.tensor
    squares: gl.tensor
    key_squares: gl.tensor
    broken: gl.tensor  # [B, H, Q]: 1 where a row met a number that is not finite (repair.py)
    lengths: gl.tensor
    cu_q: gl.tensor
    cu_k: gl.tensor
    sinks: gl.tensor
    head_scale: gl.tensor
    batch: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads that share a key head
    queries: gl.tensor
    keys: gl.tensor
    sequences: gl.tensor
    value_width: gl.tensor
    out_batch: gl.tensor  # strides of the output, in eights of an element
    out_head: gl.tensor
    out_row: gl.tensor
    sink_batch: gl.tensor  # strides of one value a head; 0 where the batch shares them
    scale_batch: gl.tensor
    scale: gl.tensor  # times log2 e, so that e^z is one exp2
    cap: gl.tensor
    left: gl.tensor
    right: gl.tensor
    bottom_right: gl.tensor  # 1: the diagonal ends in the last key, 0: it starts in the first
    section: gl.tensor  # heads whose keys and values stay in the L2 cache together
    block: gl.tensor  # tiles of keys in a block of moments.py
    plan: Plan

    @gluon.constexpr_function
    def __init__(
        self,
        out,
        lse,
        statistics,
        squares,
        key_squares,
        broken,
        lengths,
        cu_q,
        cu_k,
        sinks,
        head_scale,
        batch,
        heads,
        group,
        queries,
        keys,
        sequences,
        value_width,
        out_batch,
        out_head,
        out_row,
        sink_batch,
        scale_batch,
        scale,
        cap,
        left,
        right,
        bottom_right,
        section,
        block,
        plan,
    ):
        self.out = out
        self.lse = lse
        self.statistics = statistics
        self.squares = squares
        self.key_squares = key_squares
        self.broken = broken
        self.lengths = lengths
        self.cu_q = cu_q
        self.cu_k = cu_k
        self.sinks = sinks
        self.head_scale = head_scale
        self.batch = batch
        self.heads = heads
        self.group = group
        self.queries = queries
        self.keys = keys
        self.sequences = sequences
        self.value_width = value_width
        self.out_batch = out_batch
        self.out_head = out_head
        self.out_row = out_row
        self.sink_batch = sink_batch
        self.scale_batch = scale_batch
        self.scale = scale
        self.cap = cap
        self.left = left
        self.right = right
        self.bottom_right = bottom_right
        self.section = section
        self.block = block
        self.plan = plan

    @gluon.jit
    def blocks(self):
        """Tiles of rows of a head. A packed sequence begins a tile of its own."""
        blocks = gl.cdiv(self.queries, self.plan.ROWS)
        if self.plan.PACKED:
            blocks += self.sequences
        return blocks

    @gluon.jit
    def end(self, ends, sequence, tokens):
        """Within the tensor, whatever stands there."""
        return gl.minimum(gl.maximum(gl.load(ends + sequence), 0), tokens).to(gl.int32)

    @gluon.jit
    def rounds(self):
        """In a round, every program takes one tile or none."""
        heads = self.batch * self.heads
        if self.plan.RIGHT and not self.plan.PACKED:
            sections = gl.cdiv(heads, self.section)
            return sections * gl.cdiv(self.section * self.blocks(), gl.num_programs(0))
        else:
            return gl.cdiv(heads * self.blocks(), gl.num_programs(0))

    @gluon.jit
    def place(self, round):
        """The program's tile of a round: (b * heads + h, block of rows, whether there is one).

        Neighbouring programs work on the same heads, so that keys and values come from the cache.
        Where rows see unequally many keys, heads are taken in sections that fit into it; in each,
        rows that see most come first, and every other round is dealt out backwards: forwards alone,
        the first program would get the longest rows of each round.
        """
        heads = self.batch * self.heads
        blocks = self.blocks()
        programs = gl.num_programs(0)
        program = gl.program_id(0)
        if self.plan.RIGHT and not self.plan.PACKED:
            rounds = gl.cdiv(self.section * blocks, programs)
            first = round // rounds * self.section
            size = gl.minimum(self.section, heads - first)
            if (round & 1) == 1:
                program = programs - 1 - program
            index = round % rounds * programs + program
            return first + index % size, blocks - 1 - index // size, index < size * blocks
        else:
            index = round * programs + program
            return index // blocks, index % blocks, index < heads * blocks

    @gluon.jit
    def tile(self, entry, block, careful):
        plan = self.plan
        batch = entry // self.heads
        head = entry - batch * self.heads
        queries = self.queries
        keys = self.keys
        first_query = entry * 0
        first_key = entry * 0
        if plan.LENGTHS:
            length = gl.load(self.lengths + batch)
            keys = gl.minimum(gl.maximum(length, 0), keys).to(gl.int32)
        if plan.PACKED:
            # Sequence i may start at block cu_q[i] // ROWS + i: enough room for all before it.
            low = entry * 0
            high = self.sequences
            while high - low > 1:
                middle = (low + high) // 2
                begins = self.end(self.cu_q, middle, self.queries) // plan.ROWS + middle
                if begins <= block:
                    low = middle
                else:
                    high = middle
            if low > 0:  # the first sequence begins with the first token
                first_query = self.end(self.cu_q, low, self.queries)
                first_key = self.end(self.cu_k, low, self.keys)
            last = gl.minimum(low + 1, self.sequences)
            queries = gl.maximum(self.end(self.cu_q, last, self.queries) - first_query, 0)
            keys = gl.maximum(self.end(self.cu_k, last, self.keys) - first_key, 0)
            block -= first_query // plan.ROWS + low
        row = block * plan.ROWS
        offset = self.bottom_right * (keys - queries)
        last_row = gl.minimum(row + plan.ROWS, queries) - 1
        first = entry * 0
        stop = keys
        full_first = entry * 0
        full_stop = keys
        if plan.RIGHT:
            stop = gl.minimum(stop, gl.maximum(last_row + offset + self.right + 1, 0))
            full_stop = gl.minimum(full_stop, gl.maximum(row + offset + self.right + 1, 0))
        if plan.LEFT:
            first = gl.minimum(gl.maximum(row + offset - self.left, 0), keys)
            full_first = gl.maximum(last_row + offset - self.left, 0)
        start = first // plan.KEYS
        stop = gl.maximum(gl.cdiv(stop, plan.KEYS), start + 1)
        full_start = gl.minimum(gl.maximum(gl.cdiv(full_first, plan.KEYS), start), stop)
        if plan.STEADY:  # each row has met a key before the first full tile
            full_stop = gl.maximum(full_stop - 1, 0)
        full_stop = gl.minimum(gl.maximum(full_stop // plan.KEYS, full_start), stop)
        if plan.MOMENTS == "edges":  # only whole blocks of keys
            full_stop = full_stop // self.block * self.block
        if careful != 0:
            full_start = start
            full_stop = start
            if plan.FEW:  # first a tile in which all is hidden: pivots come from those after it
                stop += 1
        return Tile(
            batch,
            head,
            row,
            queries,
            keys,
            first_query,
            first_key,
            offset,
            start,
            full_start,
            full_stop,
            stop,
            careful + entry * 0,
        )

    @gluon.jit
    def some_are_blind(self, tile):
        """Whether a row of the tile may see no key at all: the first, or with a window the last."""
        blind = tile.keys <= 0
        if self.plan.RIGHT:
            blind = blind | (tile.row + tile.offset + self.right < 0)
        if self.plan.LEFT:
            last_row = gl.minimum(tile.row + self.plan.ROWS, tile.queries) - 1
            blind = blind | (last_row + tile.offset - self.left >= tile.keys)
        return blind

    @gluon.jit
    def reach(self, tile, row):
        """Row i may see the keys [low_i, high_i)."""
        low = row * 0
        high = low + tile.keys
        if self.plan.RIGHT:
            end = gl.maximum(row + tile.offset + self.right + 1, 0)
            high = gl.minimum(high, end)
        if self.plan.LEFT:
            low = gl.minimum(gl.maximum(row + tile.offset - self.left, 0), high)
        return low, high
