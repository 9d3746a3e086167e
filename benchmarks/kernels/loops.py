"""Loops of attention by themselves: what a schedule can give, before it is built into a kernel.

    python -m benchmarks.kernels.loops     # on a Hopper GPU, with cupy: as in docs/kernels.md
    python -m benchmarks.kernels.loops --only "d = 128"

Each loop is written in PTX, assembled by Triton's ptxas, and run by every multiprocessor. Nothing
is loaded in it, nothing is masked, and its numbers mean nothing; only its time does. A warpgroup
has 64 rows, in registers as the tensor cores have them: a thread has two columns of one row, the
same two of the other, the next two.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

TILES = 512  # a run
SHARED = 200 * 1024
PLAIN, STATISTICS, ALL = "l", "lptw", "lptwab"  # sums, as hopper/softmax.py calls them
KEYS, VALUES = 49152, 114688  # where they lie in shared memory; the query lies before them

HEAD = """
.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 room[];
.visible .entry loop(.param .u64 out, .param .u64 cycles, .param .u32 tiles, .param .f32 number)
.reqntid {threads} .minnctapersm 1
{{
.reg .b32 s<64>, t<64>, o<128>, u<64>, scale, pivot<2>, x, y;
.reg .b32 {sums};
.reg .b32 p<32>, top<2>, larger, thread, group, mine, other, many, tile, place, word;
.reg .b64 q_at, k_at, v_at, a_at, b_at, begin, end, out_at, cycles_at;
.reg .pred never, more, is_second;
ld.param.u64 out_at, [out]; ld.param.u64 cycles_at, [cycles]; ld.param.u32 many, [tiles];
ld.param.f32 scale, [number]; mov.f32 pivot0, scale; add.f32 pivot1, scale, scale;
mov.u32 thread, %tid.x; shr.u32 group, thread, 7; shfl.sync.idx.b32 group, group, 0, 31, -1;
add.u32 mine, group, 2; xor.b32 other, group, 1; add.u32 other, other, 2;
setp.eq.u32 is_second, group, 1; setp.eq.u32 never, many, 0;
shl.b32 place, thread, 2; mov.u32 word, room; add.u32 place, place, word; mov.u32 tile, thread;
FILL:
mul.lo.u32 word, tile, 2654435761; shr.u32 word, word, 7; and.b32 word, word, 0x807f807f;
or.b32 word, word, 0x3c003c00; st.shared.u32 [place], word;
add.u32 place, place, {step}; add.u32 tile, tile, {threads}; setp.lt.u32 more, tile, 45056;
@more bra FILL;
fence.proxy.async.shared::cta; bar.sync 0;
mov.u32 place, room; shl.b32 word, group, 14; add.u32 word, word, place; shr.u32 word, word, 4;
cvt.u64.u32 q_at, word; or.b64 q_at, q_at, 0x4000004000010000;
add.u32 word, place, {keys}; shr.u32 word, word, 4;
cvt.u64.u32 k_at, word; or.b64 k_at, k_at, 0x4000004000010000;
add.u32 word, place, {values}; shr.u32 word, word, 4;
cvt.u64.u32 v_at, word; or.b64 v_at, v_at, 0x4000004004000000;
"""
FOOT = """
add.u32 tile, tile, {each}; setp.lt.u32 more, tile, many; @more bra LOOP;
wgmma.wait_group.sync.aligned 0;
mov.u64 end, %clock64; sub.s64 end, end, begin; mov.f32 x, 0f00000000;
{use}
mov.u32 word, %ctaid.x; mul.lo.u32 word, word, {threads}; add.u32 word, word, thread;
mul.wide.u32 a_at, word, 4; add.s64 out_at, out_at, a_at; st.global.f32 [out_at], x;
setp.eq.u32 more, word, 0; @more st.global.u64 [cycles_at], end;
ret;
}}
"""
ACCUMULATORS = [f"sum_{kind}{row}{way}" for kind in "lpwab" for row in "01" for way in "01"]


class Loop:
    """The text of one, built line by line."""

    def __init__(self, ways: int = 1) -> None:
        self.lines: list[str] = []
        self.ways = ways
        self.tiles = 1  # in one turn of the loop

    def say(self, *lines: str) -> None:
        self.lines += lines

    def wait(self, left: int) -> None:
        self.say(f"wgmma.wait_group.sync.aligned {left};")

    def scores(self, into: str, keys: int, steps: Iterable[int]) -> None:
        """Some of the products of Q K^T, 16 columns each."""
        self.say("wgmma.fence.sync.aligned;")
        for i in steps:
            q, k = 2 * (i % 4) + 512 * (i // 4), 2 * (i % 4) + 1024 * (i // 4)
            self.say(f"add.s64 a_at, q_at, {q};", f"add.s64 b_at, k_at, {k};")
            where = f"{_registers(into, keys // 2)}, a_at, b_at, {int(i > 0)}, 1, 1, 0, 0"
            self.say(f"wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.bf16.bf16 {where};")
        self.say("wgmma.commit_group.sync.aligned;")

    def values(self, width: int, keys: int) -> None:
        """O += P V."""
        self.say("wgmma.fence.sync.aligned;")
        for i in range(keys // 16):
            a = "{" + ",".join(f"p{4 * i + j}" for j in range(4)) + "}"
            self.say(f"add.s64 b_at, v_at, {128 * i};")
            where = f"{_registers('o', width // 2)}, {a}, b_at, 1, 1, 1, 1"
            self.say(f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {where};")
        self.say("wgmma.commit_group.sync.aligned;")

    def softmax(self, s: str, part: range, sums: str) -> None:
        for start in part[::2]:
            row = start // 2 % 2
            pair = (start, start + 1)
            self.say(*(f"fma.rn.f32 u{i}, {s}{i}, scale, pivot{row};" for i in pair))
            self.say(*(f"ex2.approx.ftz.f32 {s}{i}, u{i};" for i in pair))
            for kind in sums:
                if kind == "t":
                    self.say(f"max.s32 larger, {s}{start}, {s}{start + 1};")
                    self.say(f"max.s32 top{row}, top{row}, larger;")
                    continue
                for i in pair:
                    total = f"sum_{kind}{row}{i % self.ways}"
                    factors = {"p": (s, s), "w": (s, "u"), "b": ("u", "u")}.get(kind)
                    if factors is None:
                        self.say(f"add.f32 {total}, {total}, {s if kind == 'l' else 'u'}{i};")
                    else:
                        one, two = factors
                        self.say(f"fma.rn.f32 {total}, {one}{i}, {two}{i}, {total};")

    def narrow(self, s: str, part: range) -> None:
        self.say(*(f"cvt.rn.bf16x2.f32 p{i // 2}, {s}{i + 1}, {s}{i};" for i in part[::2]))

    def text(self, groups: int) -> str:
        threads = 128 * groups
        words = set(re.findall(r"\w+", " ".join(self.lines)))
        begin = [f"mov.f32 {x}, 0f00000000;" for x in ACCUMULATORS]
        begin += [f"mov.b32 p{i}, thread;" for i in range(32)]
        begin += [f"mov.f32 {x}{i}, scale;" for x in "st" for i in range(64)]
        begin += [f"mov.f32 o{i}, scale;" for i in range(128)]
        begin += ["mov.b32 top0, 0; mov.b32 top1, 0;"]
        begin += ["@is_second bar.arrive 2, 256;"] * ("mine" in words)  # where they take turns
        begin += ["bar.sync 0;", "mov.u64 begin, %clock64; mov.u32 tile, 0;", "LOOP:"]
        used = [*ACCUMULATORS, *(f"{x}{i}" for x in "st" for i in range(64))]
        used += [f"o{i}" for i in range(128)]
        use = [f"add.f32 x, x, {name};" for name in used if name in words]
        whole = [*(f"p{i}" for i in range(32)), "top0", "top1"]
        use += [f"cvt.rn.f32.s32 y, {x}; add.f32 x, x, y;" for x in whole if x in words]
        sums = ", ".join(ACCUMULATORS)
        head = HEAD.format(threads=threads, step=4 * threads, sums=sums, keys=KEYS, values=VALUES)
        foot = FOOT.format(each=self.tiles, threads=threads, use="\n".join(use))
        return head + "\n".join([*begin, *self.lines]) + foot


def _registers(name: str, number: int) -> str:
    return "{" + ",".join(f"{name}{i}" for i in range(number)) + "}"


class Schedule(NamedTuple):
    name: str
    loop: Loop
    groups: int = 2  # warpgroups
    keys: int = 128  # of a tile; at d = 256 half of them


def products(width: int) -> Loop:
    loop, keys = Loop(), 64 if width == 256 else 128
    loop.scores("s", keys, range(width // 16))
    loop.values(width, keys)
    loop.wait(0)
    return loop


def softmax(sums: str) -> Loop:
    loop = Loop()
    loop.softmax("s", range(64), sums)
    loop.say("@never pmevent 1;")  # or tiles would overlap
    return loop


def attention(width: int, sums: str, ways: int = 1, groups: int = 2) -> Loop:
    """S_j, behind it P V of the tile before, then the softmax: as the kernel does it."""
    loop, keys = Loop(ways), 64 if width == 256 or groups == 4 else 128
    turns = width < 256 and groups == 2
    if turns:
        loop.say("bar.sync mine, 256;")
    loop.scores("s", keys, range(width // 16))
    loop.values(width, keys)
    if turns:
        loop.say("bar.arrive other, 256;")
    loop.wait(1)
    loop.softmax("s", range(keys // 2), sums)
    loop.wait(0)
    loop.narrow("s", range(keys // 2))
    return loop


def ahead(width: int, sums: str) -> Loop:
    """The next S, a few products at a time, within this softmax; then P V."""
    loop = Loop()
    loop.tiles = 2
    for s, following in (("s", "t"), ("t", "s")):
        loop.wait(0)  # here and not at the end: then nothing is serialised
        for part in range(4):
            steps = width // 64
            loop.scores(following, 128, range(part * steps, (part + 1) * steps))
            loop.say("@never pmevent 1;")
            loop.softmax(s, range(16 * part, 16 * part + 16), sums)
            loop.narrow(s, range(16 * part, 16 * part + 16))
            loop.say("@never pmevent 1;")
        loop.values(width, 128)
    return loop


def alone(width: int, sums: str) -> Loop:
    loop = Loop(2)
    loop.scores("s", 128, range(width // 16))
    loop.wait(0)
    loop.softmax("s", range(64), sums)
    return loop


def schedules() -> list[Schedule]:
    sums = {"plain": PLAIN, "statistics": STATISTICS, "all sums": ALL}
    found = [Schedule(f"softmax alone, {name}", softmax(kinds)) for name, kinds in sums.items()]
    for d in (64, 128, 256):
        found += [
            Schedule(f"d = {d}, products alone", products(d)),
            Schedule(f"d = {d}, plain", attention(d, PLAIN)),
        ]
        for name in ("statistics", "all sums"):
            found += [
                Schedule(f"d = {d}, {name}, one of each", attention(d, sums[name], 1)),
                Schedule(f"d = {d}, {name}, two of each", attention(d, sums[name], 2)),
            ]
        if d < 256:
            found += [
                Schedule(f"d = {d}, S ahead in pieces", ahead(d, STATISTICS)),
                Schedule(f"d = {d}, scores alone", alone(d, STATISTICS), 3),
            ]
        found += [Schedule(f"d = {d}, scores alone, four warpgroups", alone(d, STATISTICS), 4)]
    found += [
        Schedule(f"d = 64, {name}, four warpgroups", attention(64, sums[name], 2, 4), 4, 64)
        for name in sums
    ]
    return found


def assembled(schedule: Schedule) -> tuple[bytes, str]:
    """The machine code, and what the assembler has to say."""
    import triton

    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "loop.ptx", Path(folder) / "loop.cubin"
        source.write_text(schedule.loop.text(schedule.groups))
        told = subprocess.run(
            [assembler, "-v", "-arch=sm_90a", source, "-o", made], capture_output=True, text=True
        )
        if told.returncode:
            raise RuntimeError(told.stderr)
        return made.read_bytes(), told.stderr


def cycles(schedule: Schedule) -> float:
    """Of a tile of 128 rows x 128 keys, or 64 at d = 256; the median of five runs."""
    import cupy

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembled(schedule)[0])
        file.flush()
        loop = cupy.RawModule(path=file.name).get_function("loop")
        loop.max_dynamic_shared_size_bytes = SHARED
        out, taken = cupy.zeros(1 << 17, cupy.float32), cupy.zeros(1, cupy.int64)
        found = []
        for _ in range(5):
            arguments = (out, taken, cupy.uint32(TILES), cupy.float32(0.01))
            loop((132,), (128 * schedule.groups,), arguments, shared_mem=SHARED)
            found.append(int(taken[0]))
    return sorted(found)[2] / TILES * 2 / schedule.groups * 128 / schedule.keys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.loops", description=__doc__)
    parser.add_argument("--only", default="", help="schedules whose name has this in it")
    asked = parser.parse_args(arguments)
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no cupy, or no GPU for it
        print(f"no GPU, or no cupy: nothing was measured ({error})")
        return 2
    for schedule in schedules():
        if asked.only in schedule.name:
            print(f"{schedule.name:36s} {cycles(schedule):7.0f} cycles", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
