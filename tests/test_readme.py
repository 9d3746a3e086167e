"""What the README shows runs, and what it points at is there."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|cpp|toml|txt|csv|svg|png))")


def text() -> str:
    return README.read_text() if README.exists() else ""


def fences(*languages: str) -> list[str]:
    return [textwrap.dedent(body) for _, name, body in FENCE.findall(text()) if name in languages]


def paths_of_tree(block: str) -> list[str]:
    """The first word of every line that names a file; deeper lines are inside the folder above."""
    found: list[str] = []
    above: list[tuple[int, str]] = []
    for line in block.splitlines():
        line = line.translate(str.maketrans("│├└─", "    "))
        word = line.strip().split(" ")[0]
        indent = len(line) - len(line.lstrip())
        if not FILE.fullmatch(word):
            continue
        while above and above[-1][0] >= indent:
            above.pop()
        path = "".join(folder for _, folder in above) + word
        found.append(path)
        if word.endswith("/"):
            above.append((indent, word))
    return found


def named_paths() -> list[str]:
    """In a tree of files, between backticks, and where links lead."""
    prose = FENCE.sub("", text())
    inline = [word for word in re.findall(r"`([^`\s]+)`", prose) if FILE.fullmatch(word)]
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose)]
    local = [
        link for link in links if link and "://" not in link and not link.startswith("mailto:")
    ]
    trees = [path for block in fences("", "text") for path in paths_of_tree(block)]
    return sorted({*inline, *local, *trees})


def test_readme_has_an_example():
    assert fences("python"), "README.md shows no python block"


@pytest.mark.parametrize("index", range(len(fences("python"))))
def test_python_block_runs(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what an example writes is not left behind
    torch.manual_seed(0)
    block = fences("python")[index]
    exec(compile(block, f"README.md, python block {index}", "exec"), {"__name__": "__main__"})


def test_readme_names_files():
    assert named_paths(), "README.md has no file map"


@pytest.mark.parametrize("path", named_paths())
def test_named_path_exists(path):
    places = [ROOT / path, ROOT / "src" / path, ROOT / "src/scaledot" / path]
    assert any(place.exists() for place in places), f"README.md names {path}, which is not there"


def test_tree_is_read_folder_by_folder():
    tree = "src/scaledot/\n  scale.py    rules\n  backends/   kernels\n    cpu/  tiles\ntests/\n"
    assert paths_of_tree(tree) == [
        "src/scaledot/",
        "src/scaledot/scale.py",
        "src/scaledot/backends/",
        "src/scaledot/backends/cpu/",
        "tests/",
    ]


def commands_of_make() -> list[str]:
    """What is typed after `make`: in a fence at a line's beginning, in prose between backticks."""
    both = README.read_text() + CONTRIBUTING.read_text()
    return sorted(set(re.findall(r"(?:^|`)make ([\w-]+)", both, re.MULTILINE)))


@pytest.mark.parametrize("target", commands_of_make())
def test_targets_of_make_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_paths_in_contributing_exist():
    named = re.findall(r"\btests/[\w/.]+", CONTRIBUTING.read_text())
    assert named
    assert [path for path in named if not (ROOT / path.rstrip(".")).exists()] == []
