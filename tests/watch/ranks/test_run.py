"""`scaledot run` and torchrun, whichever starts the other: one file, one voice, one end."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scaledot import cli
from scaledot.watch.store import RunReader

SOURCE = Path(__file__).parents[3] / "src"
TRAIN = """
    import os, sys
    import torch
    from torch import distributed as dist, nn
    from torch.nn import functional as F

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    model = nn.parallel.DistributedDataParallel(nn.TransformerEncoder(layer, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    growth = float(sys.argv[1])
    for step in range(int(sys.argv[2])):
        # Only the second rank's logits grow.
        x = torch.randn(5, 7, 12) * (1 + growth * step * dist.get_rank())
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        open(f"steps{dist.get_rank()}", "w").write(str(step))
    dist.destroy_process_group()
"""
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(textwrap.dedent(TRAIN))


def _python(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )


def _assert_one_store_and_one_voice(done, name):
    assert done.returncode == 0, done.stderr
    assert [path.name for path in Path().glob("*.vitals*")] == [name]
    ours = [line for line in done.stderr.splitlines() if line.startswith("scaledot: ")]
    assert len(ours) == 2, done.stderr
    assert ours[0].startswith(f"scaledot: vitals go to {name}")
    assert (
        "2 of 2 attention layers watched; 2 ranks, 1 collective of 1,488 bytes a reading; all "
        "12 steps were read; " in ours[1]
    )
    run = RunReader(name)
    assert all(reading.value("rows").tolist() == [70] * 3 for reading in run.latest().readings)
    assert run.attributes.more["ranks"]["world"] == 2
    assert len(run.scalars("loss").steps) == 12


@pytest.mark.nightly
def test_scaledot_run_starts_torchrun(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    options = ["--every", "1", "--store", "run.vitals"]
    done = _python("-m", "scaledot", "run", *options, "-m", *TORCHRUN, "train.py", "0", "12")
    _assert_one_store_and_one_voice(done, "run.vitals")
    assert cli.main(["top", "--once", "run.vitals"]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # a long line is wrapped
    assert "2 ranks, 1 collective of 1,488 bytes a reading" in printed
    assert cli.main(["report", "run.vitals"]) == 0
    assert "2 ranks" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.slow
def test_torchrun_starts_scaledot_run_and_an_alarm_ends_all_ranks():
    """The alarm is one of the second rank's; it ends both after the same step."""
    options = ["--every", "1", "--store", "run.vitals", "--fail-on", "warn", "--alarms", "a.jsonl"]
    done = _python("-m", *TORCHRUN, "-m", "scaledot", "run", *options, "train.py", "30", "40")
    assert done.returncode == 1  # torchrun's own: a rank has failed
    assert "exitcode  : 3" in done.stderr, done.stderr
    assert done.stderr.count("scaledot: ended by --fail-on warn") == 1
    assert Path("steps0").read_text() == Path("steps1").read_text()
    assert int(Path("steps0").read_text()) < 38
    assert sorted(path.name for path in Path().glob("a*.jsonl")) == ["a.jsonl"]
    assert RunReader("run.vitals").alarms()
