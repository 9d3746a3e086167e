"""A file is written whole, under a name that nobody can guess, and through no link."""

import os
import stat
from pathlib import Path

import pytest

from scaledot import atomic_file
from scaledot.atomic_file import write_atomically

OTHER = "not to be touched"


def test_the_whole_content_takes_the_place_of_the_old_file(tmp_path):
    target = tmp_path / "page.html"
    target.write_text("old")
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_link_that_waits_under_a_guessed_name_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text(OTHER)
    monkeypatch.setattr(atomic_file.secrets, "token_hex", lambda size: "guessed")
    (tmp_path / ".page.html.guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "page.html", b"new")
    assert victim.read_text() == OTHER


def test_a_link_in_the_files_own_place_is_replaced_not_followed(tmp_path):
    victim, target = tmp_path / "victim", tmp_path / "page.html"
    victim.write_text(OTHER)
    target.symlink_to(victim)
    write_atomically(target, b"new")
    assert victim.read_text() == OTHER
    assert target.read_bytes() == b"new"


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    target = tmp_path / "page.html"
    target.write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, b"new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_the_mode_is_that_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "page.html", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o640


def _writers(folder: Path):
    from scaledot.lab import explain
    from scaledot.lab.server import export
    from scaledot.watch import report

    yield "report --html", lambda: report.write_page([], folder / "a")
    yield "explain --anki", lambda: explain._write_anki(folder / "b", "en")
    yield "lab --export", lambda: export.write(folder / "c", {}, "en")


def test_every_command_that_writes_a_page_does_it_this_way(tmp_path, monkeypatch):
    """With links under the names that could be guessed, nothing is written through one."""
    from scaledot.lab.server import export
    from scaledot.watch.report import compare

    victim = tmp_path / "victim"
    victim.write_text(OTHER)
    for name in "abc":
        for guess in (f".{name}.{os.getpid()}", f".{name}.{os.getpid()}.tmp", f".{name}.tmp"):
            (tmp_path / guess).symlink_to(victim)
    monkeypatch.setattr(compare, "compare_page", lambda *runs: "page")
    monkeypatch.setattr(export, "canned", lambda lang: {})
    monkeypatch.setattr(export, "one_file", lambda page, data: "page")
    for what, write in _writers(tmp_path):
        write()
        assert victim.read_text() == OTHER, what
    assert all((tmp_path / name).stat().st_size for name in "abc")
