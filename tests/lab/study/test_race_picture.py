"""docs/race.svg shows what the CSV says, and nothing else."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scaledot.lab.study import rows as records
from scaledot.lab.study.rows import RaceRow

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs" / "race.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="docs are not part of this copy")


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("race_picture", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows():
    """Every rule at two widths, two optimizers, two rates, three seeds; one rule never arrives."""
    zeros = {
        field.name: 0.0 for field in dataclasses.fields(RaceRow) if field.type is float
    }  # fmt: skip
    return [
        RaceRow(
            **{**zeros, "rate": rate, "accuracy": 1.0},
            rule=rule, d_k=d_k, optimizer=optimizer, seed=seed, steps=400,
            steps_to_90=None if rule == "none" else int(100 * (1 + 9 * rate)) + seed,
            device="A <GPU>", torch="2",
        )
        for rule in ("none", "sqrt_dk", "dk", "sqrt_dmodel", "cosine")
        for d_k in (64, 128)
        for optimizer in ("sgd", "adam")
        for rate in (0.0, 0.1)
        for seed in (0, 1, 2)
    ]  # fmt: skip


@pytest.mark.skipif(
    not (ROOT / "benchmarks/results/race.csv").exists(), reason="the study has not run yet"
)
def test_the_picture_in_the_repository_is_that_of_the_file_in_it(drawing):
    drawn = drawing.picture(records.read(drawing.CSV, RaceRow))
    assert drawing.SVG.read_text(encoding="utf-8") == drawn, "run: python docs/race.py"


def test_there_is_no_picture_without_a_file(drawing):
    assert drawing.CSV.exists() or not drawing.SVG.exists()


def test_it_is_well_formed_and_names_everything(drawing, rows):
    drawn = drawing.picture(rows)
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert "A &lt;GPU&gt;" in drawn
    assert "median and range of 3 seeds" in drawn
    for series in drawing.SERIES:
        assert f">{series.label}</text>" in drawn


def test_a_rule_that_never_arrives_has_no_line(drawing, rows):
    lines = re.findall(r"<g class='s(\d)'><path d='M[^']*L", drawing.picture(rows))
    assert sorted(lines) == [n for n in "1234" for _ in range(4)]  # four panels; s0 is "none"


def test_a_mark_lies_at_its_median_and_a_bar_spans_the_seeds(drawing, rows):
    drawn = drawing.picture(rows)
    top = drawing.TOP
    across = drawing.LEFT + drawing.PANEL * 0.25 + 3.0 * (1 - 2)
    low, middle, high = (drawing._down(top, steps, 400) for steps in (100, 101, 102))
    assert f"cx='{across:.1f}' cy='{middle:.1f}'" in drawn
    assert f"M{across:.1f} {low:.1f}V{high:.1f}" in drawn


def test_no_rows_say_what_to_run(drawing):
    with pytest.raises(ValueError, match=r"python -m scaledot\.lab\.study"):
        drawing.picture([])
