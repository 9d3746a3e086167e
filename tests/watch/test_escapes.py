"""Names with escapes reach no terminal: run, check, lab and the words of errors.

The views of a store are in test_hostile_stores.py, the console and the logs in test_printable.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from watch.hostile_stores import raw_escapes

from scaledot import cli

NAME = "a\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9bb\u202ecba"
TRAIN = f"""
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module({NAME!r}, torch.nn.MultiheadAttention(8, 2, batch_first=True))
    def forward(self, x):
        (attention,) = self.children()
        return attention(x, x, x, need_weights=False)[0]
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.full((2, 5, 8), float("nan"))).sum().backward()
    optimizer.step()
raise ValueError({NAME!r})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.nightly
def test_a_run_tells_of_its_file_its_alarms_and_its_end_without_escapes(folder):
    script, store = f"{NAME}.py", f"{NAME}.vitals"
    Path(script).write_text(TRAIN)
    command = [sys.executable, "-m", "scaledot", "run", "--every", "1", "--store", store]
    done = subprocess.run(
        [*command, script, f"--note={NAME}"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ours = [line for line in done.stderr.splitlines() if line.startswith("scaledot: ")]
    said = "\n".join(ours)
    assert done.returncode == 1
    assert "vitals go to" in said
    assert "act, step" in said  # the alarm names the layer, and the command that was typed
    assert "see them: scaledot top $'a\\x1b]52" in said
    assert not raw_escapes(said)


@pytest.mark.parametrize(
    "arguments",
    [
        ["top", f"{NAME}.vitals"],
        ["report", f"{NAME}.vitals"],
        ["report", "run.vitals", "--html", f"{NAME}/page.html"],
        ["run", f"{NAME}.py"],
        ["run", "--store", f"{NAME}/x.vitals/y", "train.py"],
        ["run", "--alarm", f"{NAME}=1", "train.py"],
        ["run", "--remedy", NAME, "train.py"],
        ["check", NAME],
        ["check", f"{NAME}:build"],
        ["check", f"{NAME}.bin"],
        ["lab", "--no-browser", "--run", f"{NAME}.bin"],
        ["lab", "--export", f"{NAME}/x.html"],
        ["explain", "flashcards", "--anki", f"{NAME}/x.txt"],
        ["explain", NAME],
        [NAME],
        ["top", f"--{NAME}"],
    ],
    ids=range(16),
)
def test_an_error_echoes_what_was_typed_without_escapes(arguments, folder, capsys):
    Path(f"{NAME}.bin").write_text("no store")
    Path(f"{NAME}.py").touch()
    if "page.html" in arguments[-1]:
        from watch.hostile_stores import healthy

        healthy(Path("run.vitals"))
    if arguments == ["run", f"{NAME}.py"]:
        Path(f"{NAME}.py").unlink()
    try:
        status = cli.main(arguments)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert status in (1, 2)
    assert said.err
    assert not raw_escapes(said.out + said.err)
