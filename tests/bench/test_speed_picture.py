"""docs/speed.svg shows what the CSV says, and nothing else."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scaledot.bench import provenance, results
from scaledot.bench.clock import Samples
from scaledot.bench.gpu import cases
from scaledot.bench.outcome import Outcome

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "speed.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="docs are not part of this copy")


@pytest.fixture(scope="module")
def speed():
    spec = importlib.util.spec_from_file_location("speed", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A run whose times are the lengths in milliseconds, through the file; no FlexAttention."""
    origin = dataclasses.replace(provenance.collect(), gpu="A <GPU>", cudnn="9.19.0")
    file = tmp_path_factory.mktemp("results") / "gpu.csv"
    for case in cases.on_gpu():
        if case.measures == "time" and not case.workload.additive:
            samples = Samples((float(case.workload.length),))
            peer = None if case.apart else samples.times(2.0)
            results.append(file, [results.row(Outcome(case, samples, peer), origin)])
    return results.read(file)


@pytest.mark.skipif(
    not (ROOT / "benchmarks/results/gpu.csv").exists(), reason="no GPU was measured yet"
)
def test_the_picture_in_the_repository_is_that_of_the_file_in_it(speed):
    drawn = speed.picture(results.read(speed.CSV))
    assert speed.SVG.read_text(encoding="utf-8") == drawn, "run: python docs/speed.py"


def test_there_is_no_picture_without_a_file(speed):
    assert speed.CSV.exists() or not speed.SVG.exists()


def test_it_is_the_same_every_time_and_well_formed(speed, rows):
    drawn = speed.picture(rows)
    assert drawn == speed.picture(list(rows))
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert "A &lt;GPU&gt;" in drawn


def test_every_cell_has_a_panel_and_every_series_that_was_measured_a_line(speed, rows):
    drawn = speed.picture(rows)
    titles = re.findall(r"class='name'>([^<]+)<", drawn)
    assert titles == [f"d = {d}, {w}" for w in ("all keys", "causal") for d in (64, 128, 256)]
    labels = [series.label for series in speed.SERIES]
    shown = [label for label in labels if f">{label}</text>" in drawn]
    assert shown == [label for label in labels if label != "FlexAttention"]
    lines = re.findall(r"<g class='s\d'><path d='M[^']*L", drawn)
    assert len(lines) == 6 * len(shown)


def test_a_point_lies_where_its_speed_is(speed, rows):
    drawn = speed.picture(rows)
    ours = [row for row in rows if row.case == "own_cudnn" and row.shape == "16x32x1024x64"]
    speeds = {row.causal: row.ours_tflops for row in ours}
    assert speeds[False] == pytest.approx(4 * 16384 * 2048 * 1024 / 1.024 / 1e12, rel=1e-4)
    top = speed.STEP  # all of these times make less than one line of the grid
    down = speed.TOP + speed.HEIGHT * (1 - speeds[False] / top)
    across = speed.LEFT + speed.PANEL * 0.5 / 3
    assert f"<circle class='disc' cx='{across:.1f}' cy='{down:.1f}' r='3.6'/>" in drawn


def test_a_newer_row_counts(speed, rows):
    faster = [
        dataclasses.replace(row, date="2999-01-01T00:00:00Z", ours_tflops=399.0, commit="newer")
        for row in rows
        if row.case in ("own_cudnn", "own_fa4")
    ]
    without = [row for row in faster if row.case != "own_fa4"]
    assert speed.picture([*rows, *without]) == speed.picture(rows)  # lines of one run are compared
    drawn = speed.picture([*rows, *faster])
    assert drawn != speed.picture(rows)
    assert ", newer." in drawn  # beside the commits of what else is drawn
    assert ">400</text>" in drawn


def test_a_file_without_speeds_is_refused(speed):
    with pytest.raises(ValueError, match="scaledot bench --gpu"):
        speed.picture(results.read(ROOT / "benchmarks/results/cpu.csv"))
