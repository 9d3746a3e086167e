"""Ranks that start at the same moment with nothing cached: nobody fails, all get the same numbers.

The CPU kernel is built when scaledot is installed, so at run time there is nothing to race for.
Triton compiles at run time into a folder that ranks share; it compiles for a GPU without one.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import spawn
from torch import distributed as dist

import scaledot
from scaledot.backends.cpu import native
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS

SOURCE = Path(__file__).parents[2] / "src"
HOPPER = ("cuda", 90, 32)


def fresh(home):
    """An account in which nothing was ever run."""
    cleared = dict.fromkeys(("TRITON_CACHE_MANAGER", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR"), "")
    return {
        **{name: value for name, value in cleared.items() if name in os.environ},
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "xdg"),
        "TRITON_CACHE_DIR": str(home / "triton"),
        "TRITON_INTERPRET": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def everything(seed=5):
    torch.manual_seed(seed)
    call = (torch.randn(2, 3, 97, 16), torch.randn(2, 3, 131, 16), torch.randn(2, 3, 131, 8))
    out, vitals = scaledot.attention_with_vitals(*call, is_causal=True)
    return [out, *(getattr(vitals, name) for name in (*FLOAT_FIELDS, *COUNT_FIELDS))]


def compiled():
    """The digest of one of scaledot's kernels, made for a Hopper GPU; whether it was cached."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from scaledot.backends.cuda.summary import keys

    pointers = {"key_ptr": "*bf16", "sums_ptr": "*fp32"}
    sizes = {"KEYS": 16, "WIDTH": 16, "BESIDE": False}
    kernel = keys.squares_kernel
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(sizes, "constexpr")
    hits = []
    knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
    source = ASTSource(kernel, signature, constexprs=sizes)
    made = compile(source, target=GPUTarget(*HOPPER), options={"num_warps": 4})
    digest = hashlib.sha256(made.asm["cubin"] + made.asm["ptx"].encode()).hexdigest()
    return digest, hits[-1]


# --- what a rank does -----------------------------------------------------------------------------


def attend_and_compile(rank, world):
    dist.barrier()  # nobody is ahead
    numbers = everything()
    written = [str(path) for path in Path(os.environ["HOME"]).rglob("*")]
    from scaledot.backends.cuda import moments  # noqa: F401  takes seconds, and not the same

    dist.barrier()
    return numbers, written, compiled()


def compile_beside_a_rank_that_dies(rank, world):
    """Rank 0 is killed with the machine code written and not yet in its place."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    if rank == 0:
        replace = os.replace

        def die(source, target):
            if str(target).endswith(".cubin"):
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        os.replace = die
        compiled()
    while not list(cache.glob("*/tmp.pid_*/*.cubin")):
        time.sleep(0.05)
    time.sleep(0.2)
    left = sorted(path.name for path in cache.rglob("*") if path.is_file())
    return left, compiled(), compiled()


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_four_ranks_with_empty_caches_get_the_same_numbers_and_kernels(tmp_path):
    pytest.importorskip("triton")
    found = spawn(attend_and_compile, 4, environment=fresh(tmp_path))
    expected = everything()
    for numbers, written, _ in found:
        for got, want in zip(numbers, expected, strict=True):
            assert torch.equal(got, want)
        assert written == []  # attention on a CPU has no cache that could be cold
    digests = [digest for _, _, (digest, _) in found]
    assert len(set(digests)) == 1
    assert sum(not hit for *_, (_, hit) in found) > 1, "they did not start together"
    left = [path.name for path in (tmp_path / "triton").rglob("*")]
    assert not any(name.startswith("tmp.") for name in left)
    (again,) = spawn(attend_and_compile, 1, environment=fresh(tmp_path))
    assert again[2] == (digests[0], True)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_rank_killed_while_it_compiles_leaves_no_broken_kernel(tmp_path):
    pytest.importorskip("triton")
    environment = fresh(tmp_path)
    found = spawn(compile_beside_a_rank_that_dies, 2, may_die=(0,), environment=environment)
    left, (digest, cached), again = found[1]
    assert found[0] is None
    assert "squares_kernel.ptx" in left  # it had come far
    assert "__grp__squares_kernel.json" not in left  # but what says «complete» was not there
    assert not cached
    assert again == (digest, True)


# --- the CPU kernel's file ------------------------------------------------------------------------


def kernel_file():
    if native.fault() is not None:
        pytest.skip(f"NO COMPILED KERNEL: {native.fault()}")
    return native._file()


def test_a_kernel_file_that_is_all_there_is_whole():
    assert native.is_whole(kernel_file())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_kernel_file_cut_short_is_not_loaded(tmp_path, monkeypatch, share):
    """The system's loader would take it, and the process would die of SIGBUS."""
    whole = kernel_file().read_bytes()
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native._file().write_bytes(whole[: int(share * len(whole))])
    assert native.library.__wrapped__() is None
    assert "cut short: install scaledot again" in native.fault()
    native._file().write_bytes(whole)
    assert native.library.__wrapped__() is not None


def test_a_file_that_the_linker_had_not_finished_is_not_loaded(tmp_path, monkeypatch):
    """Its size may be right already: the header is written last."""
    size = kernel_file().stat().st_size
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native._file().write_bytes(bytes(size))
    assert native.library.__wrapped__() is None


BROKEN = """
import pathlib, sys
from scaledot.backends.cpu import native
native.FOLDER = pathlib.Path(sys.argv[1])
import scaledot, torch
call = [torch.ones(1, 1, 5, 4)] * 3
print(scaledot.attention_with_vitals(*call)[1].rows.item())
print(scaledot.backend_for(*call, vitals=True).how)
"""


@pytest.mark.slow
def test_a_process_with_half_a_kernel_computes_without_it(tmp_path):
    whole = kernel_file()
    (tmp_path / whole.name).write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows, how = done.stdout.splitlines()
    assert rows == "5"
    assert "tiles" in how
    assert "cut short" in how
