"""Where numbers come from."""

import shutil
import subprocess

import pytest

import scaledot
from scaledot.bench import provenance

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def _git(folder, *arguments: str) -> None:
    names = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    subprocess.run(["git", "-C", folder, *names, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    _git(tmp_path, "init")
    return package


@needs_git
def test_the_commit_is_named_and_edits_make_it_dirty(repository):
    _git(repository, "add", ".")
    _git(repository, "commit", "-m", "Begin")
    clean = provenance.commit(repository)
    assert len(clean) == 12
    (repository.parent / "results.csv").write_text("outside of the package")
    assert provenance.commit(repository) == clean
    (repository / "__init__.py").write_text("edited = True")
    assert provenance.commit(repository) == f"{clean}-dirty"


@needs_git
def test_a_package_that_the_repository_does_not_track_has_no_commit(repository):
    (repository.parent / "other").write_text("")
    _git(repository.parent, "add", "other")
    _git(repository, "commit", "-m", "Somebody else's")
    assert provenance.commit(repository) == "unknown"


def test_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit(provenance.PACKAGE) == "unknown"


def test_machine_and_versions_are_filled():
    origin = provenance.collect()
    assert origin.machine
    assert origin.cores >= 1
    assert origin.threads >= 1
    assert origin.scaledot == scaledot.__version__
    assert origin.date.endswith("Z")
