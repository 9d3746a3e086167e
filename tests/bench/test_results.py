"""The CSV: what is written is read, what is foreign is refused; and the tables made from it."""

import csv
import dataclasses
import io
from pathlib import Path

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
ON_GPU = dataclasses.replace(
    ROW,
    quantity="speed, ours / peer",
    measured=0.9844,
    goal=Bar(">=", 0.98),
    gpu="A GPU",
    driver="580.1",
    cuda="13.0",
    cudnn="9.19.0",
    triton="3.6.0",
    flash_attn_4="none",
    ours_tflops=601.4,
    peer_tflops=611.2,
)
ABSENT = dataclasses.replace(
    ON_GPU,
    peer="FA4",
    peer_median=None,
    peer_p20=None,
    peer_p80=None,
    peer_tflops=None,
    ratio=None,
    paired_ratio=None,
    measured=None,
    holds=None,
    note="FA4: ImportError: No module named 'flash_attn'",
)
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


def test_rows_of_a_gpu_have_more_columns(tmp_path):
    file = tmp_path / "gpu.csv"
    results.append(file, [ON_GPU])
    results.append(file, [ABSENT])
    assert results.read(file) == [ON_GPU, ABSENT]
    assert file.read_text().startswith(",".join([*results.HEADER, "gpu", "driver"]))


def test_rows_of_a_cpu_may_follow_those_of_a_gpu_and_not_the_other_way(tmp_path):
    file = tmp_path / "gpu.csv"
    results.append(file, [ON_GPU])
    results.append(file, [ROW])
    assert results.read(file) == [ON_GPU, ROW]
    other = tmp_path / "cpu.csv"
    results.append(other, [ROW])
    with pytest.raises(ValueError, match=r"another header.*missing: gpu, .*unknown: none"):
        results.append(other, [ON_GPU])
    assert results.read(other) == [ROW]


def test_the_file_in_the_repository_is_read():
    rows = results.read(Path(__file__).parents[2] / "benchmarks/results/cpu.csv")
    assert rows
    assert all(row.gpu == "" and row.measured is not None for row in rows)


def test_data_for_json_has_the_columns_of_its_file():
    assert list(ROW.as_data()) == results.HEADER
    assert list(ON_GPU.as_data()) == results.GPU_HEADER


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
    [
        (ROW, "pass"),
        (SHORT, "falls short"),
        (GOAL, "goal"),
        (TINY, "reported"),
        (ON_GPU, "goal"),
        (dataclasses.replace(ON_GPU, bar=None, holds=None), "goal"),
        (dataclasses.replace(ON_GPU, bar=None, holds=None, measured=0.97), "reported"),
        (ABSENT, "not there"),
        (dataclasses.replace(ABSENT, holds=False), "not there"),
    ],
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


def test_markdown_of_a_gpu_has_speeds_and_says_who_is_not_there():
    lines = table.as_markdown([ON_GPU, ABSENT]).splitlines()
    assert lines[2] == (
        "| attention_with_vitals | 1x8x4096x64 | yes | 130 ms (128 to 133), 601 TFLOP/s "
        "| 100 ms (99 to 102), 611 TFLOP/s | torch sdpa | 0.984x | <= 1.5 | >= 0.98 | goal |"
    )
    assert lines[3].endswith(
        "|  | FA4 | not there: FA4: ImportError: No module named 'flash_attn' | <= 1.5 | >= 0.98 "
        "| not there |"
    )
    assert "A GPU, driver 580.1, CUDA 13.0, cuDNN 9.19.0, triton 3.6.0" in lines[-1]


def test_a_summary_has_one_line_a_case():
    console = Console(file=io.StringIO(), width=120)
    worse = dataclasses.replace(ON_GPU, measured=0.91, holds=False)
    console.print(table.summary([ON_GPU, worse, ABSENT, TINY]))
    head, _, vitals, tiny = (
        " ".join(line.split()) for line in console.file.getvalue().splitlines() if line.strip()
    )
    assert head == "case bars hold fall short not there goals from to"
    assert vitals == "attention_with_vitals 3 1 1 1 1 of 3 0.910x 0.984x"
    assert tiny == "tiny_call 0 0 0 0 0 of 0 +12.3 us +12.3 us"


@pytest.mark.parametrize("width", [60, 80, 200, 220])
@pytest.mark.parametrize("more", [[], [ON_GPU, ABSENT]], ids=["cpu", "gpu"])
def test_the_drawn_table_fits_and_judges(width, more):
    console = Console(file=io.StringIO(), width=width)
    console.print(table.as_rich([ROW, SHORT, GOAL, TINY, *more], width))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    if width >= (table.ROOMY_ON_GPU if more else table.ROOMY):
        assert "130 ms (128 to 133)" in shown
        assert "falls short" in shown
        assert ("not there: FA4: ImportError" in shown) == bool(more)
