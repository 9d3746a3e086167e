"""Alarms on their way out: a run's store, the callback, `scaledot run`, `scaledot top`."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from watch.alarms.alarm_cases import judged, reading, runaway

from scaledot import Watch, cli
from scaledot.watch import run
from scaledot.watch.alarms import Judge, of_run
from scaledot.watch.alarms.heads import Scale
from scaledot.watch.alarms.telling import Telling
from scaledot.watch.store import RunReader, Store, schema

SOURCE = Path(run.__file__).parents[2]

# Scores are made to grow by hand, 15 % a step: what a learning rate far too high does.
SICK = """
import sys
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(24, 72, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(Attention(), Attention())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
try:
    for step in range(60):
        model(torch.randn(2, 19, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for layer in model:
                layer.qkv.weight[:48] *= 1.08
        if step == 30 and "crash" in sys.argv:
            raise RuntimeError("of the script's own")
        if step == 30 and "leave" in sys.argv:
            sys.exit(7)
finally:
    print("steps", step + 1)
"""


def _run(folder: Path, *options: str, script: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    (folder / "train.py").write_text(SICK)
    command = [sys.executable, "-m", "scaledot", "run", "--every", "1", "--store", "r.vitals"]
    return subprocess.run(
        [*command, *options, "train.py", *script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_prints_its_alarms_once_and_goes_on(tmp_path):
    done = _run(tmp_path, "--alarms", "alarms.jsonl")
    assert done.returncode == 0
    assert done.stdout == "steps 60\n"
    told = [line for line in done.stderr.splitlines() if "scaledot: warn" in line]
    assert len([line for line in told if "logits run away" in line]) == 1
    assert "scaledot run --remedy qk-clip:100 train.py" in told[0]
    kept = RunReader(tmp_path / "r.vitals")
    assert kept.judged
    lines = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert [(one["step"], one["kind"], one["layer"]) for one in lines] == [
        (one.step, one.kind, one.layer) for one in kept.alarms()
    ]
    assert {"step", "grade", "kind", "layer", "head", "value", "threshold", "words"} <= set(
        lines[0]
    )
    assert {one["layer"] for one in lines if one["kind"] == "collapse"} == {"0", "1"}


@pytest.mark.slow
def test_fail_on_ends_the_run_with_exit_code_3(tmp_path):
    done = _run(tmp_path, "--fail-on", "warn")
    assert done.returncode == 3
    steps = int(done.stdout.split()[1])
    assert steps < 60  # its `finally` ran
    assert "ended by --fail-on warn" in done.stderr
    assert "Traceback" not in done.stderr
    last = RunReader(tmp_path / "r.vitals").alarms()[-1]
    assert last.grade != "note"
    assert last.step == steps - 1


@pytest.mark.nightly
def test_a_remedy_is_applied_and_dry_run_only_says_so(tmp_path):
    most = {}
    for name, options in {"clipped": (), "dry": ("--dry-run",)}.items():
        folder = tmp_path / name
        folder.mkdir()
        done = _run(folder, "--remedy", "qk-clip:40", *options)
        assert done.returncode == 0, done.stderr
        assert "qk-clip" in done.stderr
        heads = RunReader(folder / "r.vitals").vital("max_logit")
        most[name] = max(float(series.values[-1].max()) for series in heads.values())
    assert most["clipped"] < 80  # it grows by 17 % after each clip, and batches differ
    assert most["dry"] > 300


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("how", "code"), [("crash", 1), ("leave", 7)])
def test_an_end_of_the_script_s_own_is_no_alarm(tmp_path, how, code):
    done = _run(tmp_path, "--fail-on", "act", "--alarm", "collapse=off", script=(how,))
    assert done.returncode == code
    assert ("RuntimeError: of the script's own" in done.stderr) == (how == "crash")
    crashed = RunReader(tmp_path / "r.vitals").attributes.more.get("crash", [])
    assert [one["kind"] for one in crashed] == (["exception"] if how == "crash" else [])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--alarm", "grwth=3"], "there is no alarm threshold 'grwth'"),
        (["--dry-run"], "--dry-run of what?"),
        (["--fail-on", "always"], "invalid choice: 'always'"),
    ],
)
def test_a_wrong_option_is_named_before_anything_runs(options, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    with contextlib.suppress(SystemExit):  # of the parser
        assert cli.main(["run", *options, "train.py"]) == 2
    assert said in capsys.readouterr().err


class _Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, 2, 3, 11, 8))
        self.size = 1.0

    def forward(self):
        query, key, value = self.qkv
        return F.scaled_dot_product_attention(query * self.size, key, value).square().mean()


def _trained(watch_options):
    torch.manual_seed(0)
    model = _Growing()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with Watch(model, every=1, **watch_options) as watch:
        for _ in range(60):
            model().backward()
            optimizer.step()
            model.size *= 1.08
    return watch


def test_the_watch_calls_back_once_an_alarm_and_keeps_them(tmp_path):
    seen = []
    watch = _trained({"on_alarm": seen.append, "store": tmp_path / "r.vitals"})
    assert [alarm.kind for alarm in seen if alarm.grade == "warn"][:1] == ["collapse"]
    assert len({(alarm.kind, alarm.grade) for alarm in seen}) == len(seen)
    assert watch.alarms == seen
    read = RunReader(tmp_path / "r.vitals").alarms()
    assert [replace(one, advice="") for one in read] == [replace(one, advice="") for one in seen]
    again = of_run(RunReader(tmp_path / "r.vitals"))
    assert [(a.step, a.kind, a.grade) for a in again] == [(a.step, a.kind, a.grade) for a in seen]


def test_alarms_can_be_switched_off_and_set(tmp_path):
    quiet = _trained({"alarms": False, "store": tmp_path / "r.vitals"})
    assert quiet.alarms == []
    reader = RunReader(tmp_path / "r.vitals")
    assert (reader.alarms(), reader.judged) == ([], False)
    assert of_run(reader) != []
    assert not any(a.kind == "collapse" for a in _trained({"alarms": {"collapse": 9.0}}).alarms)


def test_a_callback_that_fails_is_logged_and_training_goes_on(caplog):
    def fails(alarm):
        raise KeyError(alarm.kind)

    assert _trained({"on_alarm": fails}).step_number == 60
    assert "a receiver of alarms failed" in caplog.text


def test_a_store_from_before_alarms_is_read_and_continued(tmp_path):
    path = tmp_path / "old.vitals"
    with Store(path) as store:
        store.write([reading(0)])
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE alarm")
    database.close()
    assert RunReader(path).alarms() == []
    alarms = judged(reading(s, **runaway(s)) for s in range(60))
    with Store(path) as store:
        store.write([reading(1)])
        store.write_alarms(alarms)
    assert RunReader(path).alarms() == alarms
    assert schema.VERSION == 2


def test_a_follower_hears_of_new_alarms_only(tmp_path):
    alarms = judged(reading(s, **runaway(s)) for s in range(60))
    path = tmp_path / "r.vitals"
    with Store(path) as store:
        store.write([reading(0)])
        store.write_alarms(alarms[:1])
        assert store.flush()
        follower = RunReader(path).follow(from_start=False)
        assert follower.look().alarms == ()
        store.write_alarms(alarms[1:])
        assert store.flush()
        assert list(follower.look().alarms) == alarms[1:]
        assert follower.look().alarms == ()


def test_top_shows_the_gravest_alarm_in_words_and_as_data(tmp_path, capsys):
    path = tmp_path / "r.vitals"
    alarms = judged(reading(s, **runaway(s)) for s in range(80))
    with Store(path) as store:
        store.write([reading(79, **runaway(79))])
        store.write_alarms(alarms)
    assert cli.main(["top", "--once", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "act  step" in shown
    assert "logits run away" in shown
    assert cli.main(["top", "--json", str(path)]) == 0
    data = json.loads(capsys.readouterr().out)["alarms"]
    assert data[0]["grade"] == "act"
    assert {one["kind"] for one in data} == {alarm.kind for alarm in alarms}


def test_telling_notes_are_counted_and_not_printed(tmp_path):
    said = []
    telling = Telling(said.append, tmp_path / "none" / "alarms.jsonl")
    notes = [a for a in judged(reading(s, sink=0.9, passes=0.1) for s in range(9))]
    telling.tell(notes)
    assert telling.summary() == "alarms: 1 note"
    assert len(said) == 1
    assert "no alarms go to" in said[0]  # the folder is missing: said once, nothing fails
    telling.tell(notes)
    assert len(said) == 1


def test_a_question_about_the_scale_is_printed_though_it_is_a_note(tmp_path, capsys):
    judge, said = Judge(), []
    judge.scales["layer"] = Scale(1.0, 64)
    alarms = judged([reading(0, q_rms=0.6, k_rms=0.6, logit_std=2.7)], judge)
    Telling(said.append).tell(alarms)
    assert len(said) == 1
    assert said[0].startswith("note, step 0: layer: scale 1 where d_k = 64")
    with Store(tmp_path / "r.vitals") as store:
        store.write([reading(0)])
        store.write_alarms(alarms)
    assert cli.main(["top", "--once", str(tmp_path / "r.vitals")]) == 0
    assert "note step 0: layer: scale 1 where d_k = 64" in capsys.readouterr().out


def test_telling_ends_the_run_again_if_the_script_went_on():
    alarms = judged([reading(0, nonfinite=1)], Judge())
    telling = Telling(lambda line: None, fail_on="act")
    for _ in range(2):
        with pytest.raises(SystemExit, match="3"):
            telling.tell(alarms)
    with pytest.raises(SystemExit, match="3"):
        telling.check()
    telling.over = True
    telling.check()
