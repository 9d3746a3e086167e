"""The run that benchmarks/remedies measures in full, in small: and the verb that a person types."""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scaledot.lab.training import Size
from scaledot.watch.store import RunReader

ROOT = Path(__file__).parents[3]
SMALL = Size(steps=200, layers=2, width=64, heads=4, tokens=64, batch=8)
LIMIT = 30


@pytest.fixture(scope="module")
def evidence():
    path = ROOT / "benchmarks/remedies/evidence.py"
    spec = importlib.util.spec_from_file_location("evidence", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@pytest.mark.slow
def test_a_sick_run_is_better_with_the_clip(evidence):
    sick, clipped = (
        {name: float(value) for name, value in evidence.one(remedy, 0, SMALL).items()
         if name in ("final_loss", "max_logit", "last_max_logit", "clips")}
        for remedy in ("none", f"qk-clip:{LIMIT}")
    )  # fmt: skip
    assert sick["max_logit"] > 200
    assert clipped["max_logit"] < 2 * LIMIT  # one step's growth above it
    assert clipped["clips"] > 0
    assert sick["final_loss"] - clipped["final_loss"] > 0.1


def test_the_page_shows_the_table_of_the_results(evidence):
    assert evidence.table(evidence.rows()) in evidence.PAGE.read_text()


SCRIPT = """
    import torch
    from watched_models import TinyGPT, language_loss
    torch.manual_seed(0)
    model = TinyGPT()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = torch.arange(14).view(2, 7)
    for layer in model.layers:
        layer.drop.p = 0.0
    for step in range(3):
        language_loss(model(tokens), tokens).backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.one_case
@pytest.mark.parametrize("dry_run", [False, True])
def test_the_verb_clips_a_script(tmp_path, dry_run):
    script, store = tmp_path / "train.py", tmp_path / "run.vitals"
    script.write_text(textwrap.dedent(SCRIPT))
    flags = ["--remedy", "qk-clip:1", *(["--dry-run"] if dry_run else []), "--every", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "scaledot", "run", *flags, "--store", str(store), str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    verb = "would scale" if dry_run else "scales"
    assert f"qk-clip:1 {verb} layers.0.attn since step 0" in done.stderr
    largest = RunReader(store).heads("layers.0.attn", "max_logit").values.max(1).tolist()
    assert largest[0] > 2
    did = "(dry run): would have clipped" if dry_run else "has clipped"
    assert f"scaledot: qk-clip:1 {did} " in done.stderr
    if dry_run:
        assert largest == [largest[0]] * 3
    else:
        assert largest[1:] == pytest.approx([1.0, 1.0], rel=1e-6)
