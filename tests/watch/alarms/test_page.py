"""docs/alarms.md and its picture are what the CSV says."""

from pathlib import Path

import pytest

STUDY = Path(__file__).parents[3] / "benchmarks" / "alarms"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    import page

    return page


def test_the_tables_and_the_picture_are_made_from_the_csv(page, tmp_path, monkeypatch):
    written, drawn = page.PAGE.read_text(encoding="utf-8"), page.SVG.read_text(encoding="utf-8")
    monkeypatch.setattr(page, "PAGE", tmp_path / "alarms.md")
    monkeypatch.setattr(page, "SVG", tmp_path / "alarms.svg")
    page.PAGE.write_text(written, encoding="utf-8")
    assert page.main() == 0
    assert page.PAGE.read_text(encoding="utf-8") == written, "run: benchmarks/alarms/page.py"
    assert page.SVG.read_text(encoding="utf-8") == drawn, "run: benchmarks/alarms/page.py"


def test_the_study_holds_what_the_page_says_of_it(page):
    rows = page.rates.read(page.CSV)
    assert len(rows) >= 60
    assert {row["optimizer"] for row in rows} == {"adamw", "sgd", "muon"}
    assert {row["set"] for row in rows} == {"tuned", "judged"}
    for row in rows:
        gain = float(row["gain"])
        assert row["label"] == ("sick" if gain >= 0.1 else "healthy" if gain < 0.05 else "between")
    sick, healthy = page.rates.labelled(rows, "judged")
    ours, loss = (page.rates.share(sick, f"step_{name}") for name in ("warn", "loss"))
    assert ours.low > loss.high  # the one claim that the bands bear out: the loss sees nothing
    assert healthy


def test_a_page_without_its_marks_is_refused(page):
    with pytest.raises(ValueError, match="lacks the marks <!-- runs -->"):
        page._filled("no marks", "runs", "table")
