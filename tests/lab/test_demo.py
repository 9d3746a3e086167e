"""The demo: the experiments' numbers, in words and tables, or as data."""

import copy
import dataclasses
import io
import json
import os
import re
import resource
import string
import subprocess
import sys

import pytest
from rich.console import Console

from scaledot.lab import demo, drawing, terminal, words
from scaledot.lab.experiments import story

# The training at the end has tests of its own (test_training.py), and leaves no file here.
SHORT = ("--steps", "2", "--store", os.devnull + "/none.vitals")
CPU_SECONDS = 60  # the promise; counted in work done, since other jobs may share the cores


@pytest.fixture(scope="module")
def at_80_columns() -> str:
    return _scaledot_demo(COLUMNS="80").stdout


@pytest.mark.slow
def test_demo_fits_80_columns_without_colour(at_80_columns):
    assert max(map(len, at_80_columns.splitlines())) <= 80
    assert "\x1b" not in at_80_columns
    assert "…" not in at_80_columns  # nothing cut off


def test_demo_tells_every_lesson_in_order(at_80_columns):
    places = [at_80_columns.index(words.title(lesson.__name__)) for lesson in story.LESSONS]
    assert places == sorted(places)


def test_demo_ends_with_a_training(at_80_columns):
    training = at_80_columns.split(words.TRAINING)[-1]
    assert "3 of 3 attention layers watched" in training
    assert re.search(r"^ +1 +\d\.\d\d ", training, re.MULTILINE)
    assert "left no file: /dev/null" in training


def test_demo_shows_the_vital_signs_side_by_side(at_80_columns):
    table = at_80_columns.split("vital sign ")[-1]
    assert re.search(r"logit_std +\d+\.\d+ ✗ +[01]\.\d+ ✓ +0\.1 \.\. 4", table)


def test_demo_shows_the_right_weights_beside_the_wrong_claim(at_80_columns):
    assert re.search(r"1\.5 +4\.48 +0\.59 +0\.67412", at_80_columns)
    assert re.search(r"0\.99995 +0\.9999523", at_80_columns)
    assert "1 - 1.03e-10" in at_80_columns


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 100, 140])
def test_every_lesson_fits_its_terminal(lessons, width):
    shown = io.StringIO()
    console = Console(file=shown, width=width, markup=False, highlight=False)
    for number, lesson in enumerate(story.LESSONS, 1):
        name = lesson.__name__
        console.print(terminal.draw(number, name, getattr(lessons, name), width))
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_bars_are_ascii_where_only_ascii_prints():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=stream, width=80).print(drawing.Bar(0.5, 10))
    stream.seek(0)
    assert stream.read().strip() == "#####"


@pytest.mark.parametrize(
    ("share", "bar"), [(0, ""), (0.5, "█████"), (1, "██████████"), (0.55, "█████▌"), (2, "█" * 10)]
)
def test_a_bar_is_as_long_as_its_share(share, bar):
    shown = io.StringIO()
    Console(file=shown, width=80).print(drawing.Bar(share, 10))
    assert shown.getvalue().strip() == bar


@pytest.fixture(scope="module")
def data() -> dict:
    """What `scaledot demo --json` prints."""
    return json.loads(_scaledot_demo("--json").stdout)


@pytest.mark.nightly
@pytest.mark.slow
def test_json_equals_the_experiments(data, lessons):
    assert data["seed"] == 0
    assert list(data["lessons"]) == [lesson.__name__ for lesson in story.LESSONS]
    for name, lesson in copy.deepcopy(data["lessons"]).items():
        assert lesson.pop("title") == words.title(name)
        record = dataclasses.asdict(getattr(lessons, name))
        assert _without_words(lesson) == json.loads(json.dumps(record))


@pytest.mark.nightly
def test_json_says_each_claim_in_words(data):
    scaled = data["lessons"]["saturation"]["rows"][1]["weights"]
    assert scaled["verdict"] == "wrong"
    assert "lowest score" in scaled["why"]


def test_json_follows_the_seed(lessons, monkeypatch):
    monkeypatch.setattr(story, "LESSONS", (story.divisors,))
    other = demo.as_data(seed=1)["lessons"]["divisors"]["rules"][0]["top_p"]
    assert other != lessons.divisors.rules[0].top_p


def test_every_claim_has_words_and_all_words_are_used(lessons):
    findings = {
        finding.key
        for record in vars(lessons).values()
        for finding in demo._findings(record)
        if finding.claim is not None
    }
    assert findings == set(words.FINDINGS)
    assert set(words.LESSONS) == set(vars(lessons))


def test_a_word_template_names_fields_only(lessons):
    """No figure of ours is typed into a sentence on why; they are all looked up."""
    for key, saying in words.FINDINGS.items():
        literal = "".join(text for text, *_ in string.Formatter().parse(saying.why))
        typed = re.findall(r"\d*\.\d+", literal)
        assert not typed, (key, typed)


def test_demo_starts_with_its_progress_in_a_terminal():
    shown = io.StringIO()
    with demo._progress(Console(file=shown, force_terminal=True, width=80)) as progress:
        progress.add_task("the variance", total=2)
        progress.refresh()
    assert "measuring: the variance" in shown.getvalue()


def _scaledot_demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    before = _work_of_children()
    done = subprocess.run(
        [sys.executable, "-m", "scaledot", "demo", *SHORT, *arguments],
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=10 * CPU_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert _work_of_children() - before < CPU_SECONDS
    return done


def _work_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _without_words(value):
    if isinstance(value, dict):
        spoken = ("says", "verdict", "why")
        return {key: _without_words(item) for key, item in value.items() if key not in spoken}
    return [_without_words(item) for item in value] if isinstance(value, list) else value
