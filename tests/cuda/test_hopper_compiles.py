"""The Hopper kernel is compiled for its GPU on any machine, and what it rests on is looked up.

Its consumers wait for each other by named barriers whose numbers Triton does not use, and where
they are one team nothing in a tile of keys may make all of its warps meet (hopper/pipeline.py).
"""

import json
import os
import re
import subprocess
import sys

import pytest

from scaledot.backends import cuda

pytest.importorskip("scaledot.backends.cuda.hopper.launch")
if cuda.backend.TRITON != (3, 6):
    pytest.skip("Gluon is that of triton 3.6", allow_module_level=True)

# The interpreter is chosen for a whole process, and there the kernel would not be compiled.
COMPILE = """
import json, pathlib, subprocess, sys, tempfile
import triton
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from scaledot.backends.cuda.hopper.kernel import attend
from scaledot.backends.cuda.hopper.launch import Config, config_for

POINTERS = {"lse", "statistics", "squares", "key_squares", "sinks", "head_scale"}

def ptx_of(dtype, width, keys, values, moments, causal, packed, squares, softcap=False):
    config = config_for(width, keys, values=values, moments=moments, causal=causal)
    chosen = dict(zip((name.upper() for name in Config._fields), config))
    chosen |= dict(D=width, V=width, VALUES=values, STATISTICS=moments is not None)
    chosen |= dict(MOMENTS=moments or "none", RIGHT=causal, LEFT=packed, LENGTHS=False)
    factor = "row" if softcap else "no"
    chosen |= dict(PACKED=packed, SINKS=False, FACTOR=factor, SOFTCAP=softcap, NARROW=False)
    chosen |= dict(SQUARES=squares)
    team = 64 if config.consumers == 3 else 64 * config.consumers
    rows = {"q_desc": team, "k_desc": config.keys, "v_desc": config.keys}
    signature, constants = {}, {}
    for i, name in enumerate(attend.arg_names):
        if name in rows:
            block = [1, 1, rows[name], width]
            kind = gl.bfloat16 if dtype == "bf16" else gl.float16
            layout = gl.NVMMASharedLayout.get_default_for(block, kind)
            signature[name] = f"tensordesc<{dtype}{block},{layout!r}>"
        elif name in chosen:
            signature[name] = "constexpr"
            constants[(i,)] = chosen[name]
        elif name == "out":
            signature[name] = "*" + dtype
        elif name == "broken":
            signature[name] = "*i8"
        elif name in POINTERS:
            signature[name] = "*fp32"
        elif name in ("lengths", "cu_q", "cu_k"):
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in ("scale", "cap") else "i32"
    source = GluonASTSource(attend, signature, constants, {})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": team // 16})
    return config.consumers, config.turns, made.asm["ptx"], remarks(made.asm["ptx"])

def remarks(ptx):
    assembler = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [assembler, "-v", "-arch=sm_90a", source, "-o", source.with_suffix(".cubin")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr

print(json.dumps([ptx_of(*case) for case in json.loads(sys.argv[1])]))
"""

CASES = {
    "no statistics": ("bf16", 128, 4096, True, None, True, False, "no"),
    "all sums": ("bf16", 256, 4096, True, "all", True, False, "both"),
    "float16, packed, window": ("fp16", 64, 4096, True, "all", True, True, "query"),
    "in place": ("bf16", 64, 4096, True, "all", True, False, "both"),
    "in place, of 128 columns": ("bf16", 128, 16384, True, "none", False, False, "query"),
    "softcap": ("bf16", 64, 4096, True, None, True, False, "no", True),
    "three consumers": ("bf16", 64, 16384, True, "none", False, False, "query"),
    "four consumers": ("bf16", 128, 16384, False, "edges", True, False, "query"),
    "four consumers, in place": ("bf16", 256, 16384, False, "none", False, False, "query"),
}


def compiled(cases, cache):
    """(case, consumers, turns, lines of the kernel, the assembler's remarks) of each."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    told = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps([CASES[case] for case in cases])],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    for case, (*how, ptx, remarks) in zip(cases, json.loads(told.stdout), strict=True):
        yield case, *how, ptx.splitlines(), remarks


def meetings(lines):
    """(line, number) of the barriers that Triton itself put there: their numbers are constants."""
    found = [(i, re.search(r"\bbar(?:rier)?\.sync\s+(\d+)", line)) for i, line in enumerate(lines)]
    return [(i, int(match[1])) for i, match in found if match]


def during_a_turn(lines):
    """The lines between a consumer's turn, which comes with its keys, and its passing it on; how
    many turns there are. `lines` end with its last product."""
    inside, has_turn, turns = set(), False, 0
    for i, line in enumerate(lines):
        if re.search(r"bar\.sync %r\d+, 288", line):
            has_turn, turns = True, turns + 1
        elif re.search(r"bar\.arrive %r\d+, 288", line):
            has_turn = False
        if has_turn:
            inside.add(i)
    return inside, turns


QUICK = "in place"


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([QUICK], id=QUICK),
        pytest.param(
            [case for case in CASES if case != QUICK], id="all", marks=pytest.mark.nightly
        ),
    ],
)
def test_what_the_kernel_rests_on(tmp_path, cases):
    """Together, since to compile takes long. Whoever has the turn while a team meets waits for
    those who wait for the turn."""
    for case, consumers, turns, lines, remarks in compiled(cases, tmp_path):
        # Products one after the other, or registers not shared out as wished: half as fast.
        assert "Potential Performance Loss" not in remarks, (case, remarks)
        if case == "softcap":  # a minimum or maximum that drops NaN would make scores of it
            assert not [line for line in lines if re.search(r"\bmin\.f32", line)]
        met = meetings(lines)
        ours = set(range(4 if consumers == 3 else 2, 16))
        assert not ours & {number for _, number in met}, case
        if consumers == 3:  # each a team of its own
            continue
        products = [i for i, line in enumerate(lines) if "wgmma.mma_async" in line]
        assert len(products) > 20
        inside, taken = during_a_turn(lines[: products[-1]])
        assert bool(taken) == turns, case
        assert not inside & {i for i, _ in met}, case
        if "packed" not in case:  # where values have to be cleaned
            assert not [i for i, _ in met if products[0] < i < products[-1]], case
