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


def test_a_gpu_is_named_with_everything_around_it(monkeypatch):
    monkeypatch.setattr(provenance.torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(provenance.torch.backends.cudnn, "version", lambda: 91902)
    monkeypatch.setattr(provenance.torch.version, "cuda", "13.0")
    monkeypatch.setattr(provenance, "_driver", lambda: "580.1")
    versions = {"triton": "3.6.0"}
    monkeypatch.setattr(provenance, "_version", lambda name: versions.get(name, "none"))
    origin = provenance.collect(on_gpu=True, named="abc")
    assert (origin.gpu, origin.driver, origin.cuda) == ("A GPU", "580.1", "13.0")
    assert (origin.cudnn, origin.triton, origin.flash_attn_4) == ("9.19.2", "3.6.0", "none")
    assert origin.commit == "abc"
    assert provenance.collect().gpu == ""


def test_a_driver_that_cannot_be_asked_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance._driver() == "unknown"
    assert provenance._version("no such distribution") == "none"
    assert provenance._version("torch").startswith("2.")


def test_machine_and_versions_are_filled():
    origin = provenance.collect()
    assert origin.machine
    assert origin.cores >= 1
    assert origin.threads >= 1
    assert origin.scaledot == scaledot.__version__
    assert origin.date.endswith("Z")
