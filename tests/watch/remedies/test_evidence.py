"""One source of truth: the rows of the benchmark. Page and package hold what is made of them."""

import importlib.util
from pathlib import Path

import pytest

from scaledot.watch.report import evidence as told

SCRIPT = Path(__file__).parents[3] / "benchmarks/remedies/evidence.py"
AGAIN = "type: python benchmarks/remedies/evidence.py --table"


@pytest.fixture(scope="module")
def evidence():
    if not SCRIPT.exists():
        pytest.skip("an installed package has no benchmarks")
    spec = importlib.util.spec_from_file_location("evidence", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_ships_the_rows_of_the_benchmark(evidence):
    assert evidence.SHIPPED.read_bytes() == evidence.RESULTS.read_bytes(), AGAIN
    assert told.FILES[0] == evidence.SHIPPED


def test_the_page_shows_the_rows_of_the_benchmark(evidence):
    assert evidence.table(evidence.rows()) in evidence.PAGE.read_text(), AGAIN


@pytest.mark.parametrize("name", ["qk-clip:100", "temperature:100"])
def test_the_report_tells_the_gain_that_was_measured(evidence, name, monkeypatch):
    """From the package's own file: an installed scaledot has no other."""
    monkeypatch.setattr(told, "FILES", told.FILES[:1])
    told._rows.cache_clear()
    losses = {(row["remedy"], row["seed"]): float(row["final_loss"]) for row in evidence.rows()}
    gains = [losses["none", seed] - loss for (one, seed), loss in losses.items() if one == name]
    words = told.evidence_for(name)
    told._rows.cache_clear()
    assert (
        f"it gained {sum(gains) / len(gains):.2f} on average and {min(gains):.2f} at least" in words
    )
