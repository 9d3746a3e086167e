"""docs/scaling.md, its picture and its CSV are what the script makes of what was measured."""

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks/scaling").exists(), reason="benchmarks are not part of this copy"
)


@pytest.fixture(scope="module")
def scaling():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks import scaling
        from benchmarks.scaling import measure, page, picture, rows, study, tables  # noqa: F401

        yield scaling


@pytest.fixture(scope="module")
def found(scaling):
    return scaling.rows.read()


def test_page_picture_and_rows_are_what_the_script_makes(scaling, tmp_path):
    page = scaling.page
    files = {"scaling.csv": scaling.rows.CSV, "scaling.md": page.PAGE, "scaling.svg": page.SVG}
    written = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    for name, text in written.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert page.main(*(tmp_path / name for name in files)) == 0
    for name, text in written.items():
        made = (tmp_path / name).read_text(encoding="utf-8")
        assert made == text, f"{name} is old; run: python -m benchmarks.scaling"


def test_measured_rows_survive_and_computed_ones_are_made_anew(scaling, found, tmp_path):
    rows = scaling.rows
    kept = dataclasses.replace(found[0], kind="measured", seconds=1.25, p20=1.0, p80=2.0, load=0.5)
    stale = dataclasses.replace(found[0], seconds=99.0)
    rows.write([stale, kept], tmp_path / "scaling.csv")
    for name in ("scaling.md", "scaling.svg"):
        (tmp_path / name).write_text((ROOT / "docs" / name).read_text(encoding="utf-8"))
    scaling.page.main(*(tmp_path / f"scaling.{end}" for end in ("csv", "md", "svg")))
    again = rows.read(tmp_path / "scaling.csv")
    assert rows.measured(again) == [kept]
    assert stale not in again
    assert "1250.0 (1000.0 to 2000.0)" in (tmp_path / "scaling.md").read_text(encoding="utf-8")


def test_the_played_ring_is_near_the_formula_everywhere(found):
    pairs = {}
    for row in found:
        if row.form == "ring" and row.kind != "measured" and not row.case:
            key = (row.question, row.direction, row.layout, row.tokens, row.ranks)
            pairs.setdefault(key, {})[row.kind] = row.seconds
    assert len(pairs) > 100
    for both in pairs.values():
        assert both["simulated"] == pytest.approx(both["model"], rel=0.02)


def test_every_table_of_the_page_is_one_of_the_script(scaling):
    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    for name in scaling.tables.TABLES:
        assert text.count(f"<!-- {name} -->") == 1
    inside = False
    for line in text.splitlines():
        inside = (inside or line.startswith("<!-- ")) and not line.startswith("<!-- /")
        assert inside or not line.startswith("|"), f"typed by hand: {line}"


def test_a_page_without_its_marks_is_refused(scaling):
    with pytest.raises(ValueError, match="lacks the marks <!-- weak -->"):
        scaling.page.filled("no marks", "weak", "table")


def test_other_columns_are_refused(scaling, tmp_path):
    (tmp_path / "scaling.csv").write_text("kind,speed\nmodel,1\n")
    with pytest.raises(ValueError, match="other columns"):
        scaling.rows.read(tmp_path / "scaling.csv")


def test_the_picture_shows_every_length_in_both_directions(scaling, found):
    drawn = scaling.picture.picture(found)
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    for series in scaling.picture.SERIES:
        assert series.label in drawn
    lines = 2 * 2 * len(scaling.picture.SERIES)  # ring and ring of rings, forward and backward
    assert drawn.count("<g class='s") == lines + len(scaling.picture.SERIES)  # and the legend
    fewer = [row for row in found if row.tokens != 1_048_576]
    assert scaling.picture.picture(fewer) != drawn


def test_a_picture_of_nothing_says_what_to_type(scaling):
    with pytest.raises(ValueError, match=r"python -m benchmarks\.scaling"):
        scaling.picture.picture([])


def test_more_gpus_than_half_are_below_half(scaling):
    """The number of the page is the border: one node more and it is passed."""
    from benchmarks.scaling import facts, model

    speeds = facts.measured()
    most = scaling.study.most_at_half(speeds, 1_048_576, "ring", backward=False)
    for ranks, above in ((most, True), (most + facts.NODE, False)):
        work = model.Work(1_048_576, ranks)
        seconds = scaling.study.form_seconds(work, speeds, False)["ring"]
        assert (model.efficiency(work, speeds, seconds) >= 0.5) is above


@pytest.mark.slow
@pytest.mark.nightly
def test_two_ranks_send_what_the_model_says(scaling):
    """Counted in two processes: the ring's messages and the all-gather, forward and backward."""
    from benchmarks.scaling.measure import BATCH, GROUPS, HEADS, WIDTH
    from benchmarks.scaling.model import Work

    tokens = 128
    found = {(row.form, row.direction): row for row in scaling.measure.measure(2, tokens, 1)}
    assert set(found) == {
        (form, way) for form in scaling.measure.WAYS for way in ("forward", "both")
    }
    work = Work(tokens, 2, batch=BATCH, heads=HEADS, groups=GROUPS, width=WIDTH)
    for (form, direction), row in found.items():
        # float32 here: keys have twice the bytes of the model's bfloat16, gradients the same.
        keys, hops = 2 * work.message, 2 if form != "all_gather" else 1
        expected = keys if direction == "forward" else 2 * keys + hops * work.gradient_message
        assert expected <= row.sent_bytes < expected + 256  # the ranks ask for their lengths
        assert row.seconds > 0
