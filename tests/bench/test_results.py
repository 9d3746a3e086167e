"""The CSV: what is written is read, what is foreign is refused; and the tables made from it."""

import csv
import dataclasses
import io

import pytest
from rich.console import Console

from scaledot.bench import results, table
from scaledot.bench.bars import Bar
from scaledot.bench.results import Row

ROW = Row(
    date="2031-02-03T04:05:06Z",
    commit="0123456789ab-dirty",
    case="attention_with_vitals",
    shape="1x8x4096x64",
    causal=True,
    dtype="float32",
    device="cpu",
    threads=2,
    unit="ms",
    ours="attention_with_vitals",
    ours_median=130.0,
    ours_p20=128.5,
    ours_p80=133.25,
    peer="torch sdpa",
    peer_median=100.0,
    peer_p20=99.0,
    peer_p80=102.0,
    ratio=1.3,
    paired_ratio=1.29,
    quantity="ours / peer",
    measured=1.3,
    bar=Bar("<=", 1.5),
    goal=Bar("<=", 1.2),
    holds=True,
    repeats=11,
    machine="A processor, 3 GHz",
    cores=2,
    load=0.1,
    python="3.11.7",
    torch="2.13.0",
    scaledot="0.1.0",
)
SHORT = dataclasses.replace(ROW, shape="1x8x1024x64", measured=1.6, holds=False)
GOAL = dataclasses.replace(ROW, causal=False, measured=1.1)
TINY = dataclasses.replace(
    ROW,
    case="tiny_call",
    quantity="ours - peer, us",
    measured=12.34,
    bar=None,
    goal=None,
    holds=None,
)


def test_rows_come_back_as_they_went(tmp_path):
    file = tmp_path / "cpu.csv"
    results.append(file, [ROW, TINY])
    results.append(file, [SHORT])
    assert results.read(file) == [ROW, TINY, SHORT]
    with file.open(newline="") as lines:
        assert next(csv.reader(lines)) == results.HEADER
    assert len(file.read_text().splitlines()) == 4  # one header, three rows


def test_an_empty_file_gets_a_header(tmp_path):
    file = tmp_path / "cpu.csv"
    file.touch()
    results.append(file, [ROW])
    assert results.read(file) == [ROW]


def test_a_file_with_another_header_is_refused_and_left_alone(tmp_path):
    file = tmp_path / "cpu.csv"
    file.write_text("date,speed\n2031,7\n")
    with pytest.raises(ValueError, match=r"another header.*unknown: speed.*--out"):
        results.append(file, [ROW])
    with pytest.raises(ValueError, match="another header"):
        results.read(file)
    assert file.read_text() == "date,speed\n2031,7\n"


def test_columns_in_another_order_are_refused(tmp_path):
    file = tmp_path / "cpu.csv"
    file.write_text(",".join(reversed(results.HEADER)) + "\n")
    with pytest.raises(ValueError, match="another header"):
        results.append(file, [ROW])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv"):
        results.read(tmp_path / "nowhere.csv")


def test_the_latest_row_of_a_case_counts():
    newer = dataclasses.replace(ROW, date="2032-01-01T00:00:00Z", measured=1.15)
    other_peer = dataclasses.replace(ROW, peer="plain PyTorch")
    assert results.latest([ROW, SHORT, other_peer, newer]) == [newer, SHORT, other_peer]


@pytest.mark.parametrize(
    ("row", "word"),
    [(ROW, "pass"), (SHORT, "falls short"), (GOAL, "goal"), (TINY, "reported")],
)
def test_verdicts_in_words(row, word):
    assert table.verdict(row) == word


def test_markdown_has_a_line_for_each_row_and_its_origin():
    lines = table.as_markdown([ROW, SHORT, TINY]).splitlines()
    assert lines[0].startswith("| case | shape | causal |")
    assert lines[2] == (
        "| attention_with_vitals | 1x8x4096x64 | yes | 130 ms (128 to 133) | 100 ms (99 to 102) "
        "| torch sdpa | 1.3x | <= 1.5 | <= 1.2 | pass |"
    )
    assert lines[3].endswith("| 1.6x | <= 1.5 | <= 1.2 | falls short |")
    assert lines[4].endswith("| +12.3 us |  |  | reported |")
    assert len(lines) == 2 + 3 + 2
    assert "commit 0123456789ab-dirty, A processor, 3 GHz, 2 cores, 2 threads" in lines[-1]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_drawn_table_fits_and_judges(width):
    console = Console(file=io.StringIO(), width=width)
    console.print(table.as_rich([ROW, SHORT, GOAL, TINY], width))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    if width >= table.ROOMY:
        assert "130 ms (128 to 133)" in shown
        assert "falls short" in shown
