"""The package as others meet it: metadata, pins, what an import costs, what it must not contain."""

import ast
import contextlib
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import scaledot
from scaledot.watch.alarms import Alarm
from scaledot.watch.reading import Reading, RunAttributes, Scalar
from scaledot.watch.store import Store

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(line)
    for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"], "hatchling")
]
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))

LEFT_OUT = {"rich", "scaledot.lab", "scaledot.bench", "scaledot.cli"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "__import__"}


def test_base_dependencies_are_torch_numpy_and_rich():
    assert [Requirement(line).name for line in PROJECT["dependencies"]] == [
        "torch",
        "numpy",
        "rich",
    ]


def test_torch_2_11_and_python_3_11_are_enough():
    assert Requirement(PROJECT["dependencies"][0]).specifier.contains("2.11.0")
    assert PROJECT["requires-python"] == ">=3.11"


def test_licence_is_apache():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_installed_version_is_that_of_the_project():
    assert scaledot.__version__ == PROJECT["version"]
    with contextlib.suppress(metadata.PackageNotFoundError):  # it may run from its sources
        assert metadata.version("scaledot") == PROJECT["version"]


def test_changelog_has_this_version():
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_every_requirement_is_pinned_and_installed_as_pinned(requirement):
    pin = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin)
    installed = Version(metadata.version(requirement.name))
    assert installed.public == pin  # torch's own wheels add a local part: 2.13.0+cpu


def test_everything_a_requirement_brings_is_pinned():
    seen: set[str] = set()
    wanted = [requirement.name for requirement in REQUIREMENTS]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in seen:
            continue
        seen.add(name)
        for line in metadata.requires(name) or []:
            further = Requirement(line)
            if not further.marker or further.marker.evaluate({"extra": ""}):
                wanted.append(further.name)
    of_a_gpu = {name for name in seen if name.startswith(("nvidia-", "cuda-")) or name == "triton"}
    assert seen - of_a_gpu <= set(PINS)  # torch pins its own GPU libraries exactly


def test_package_says_it_is_typed():
    assert (ROOT / "src/scaledot/py.typed").exists()


@pytest.mark.slow
def test_attention_brings_in_torch_and_nothing_else_heavy():
    """Compared with a process that imports only torch."""
    used = "import scaledot; scaledot.attention, scaledot.nn, scaledot.Vitals"
    extra = _modules_after(used) - _modules_after("import torch")
    packages = {name.partition(".")[0] for name in extra}
    assert packages - set(sys.stdlib_module_names) == {"scaledot"}
    assert not LEFT_OUT & extra


@pytest.mark.parametrize("verb", ["", "run"])
def test_the_command_line_needs_no_torch_to_be_read(verb):
    words = [verb, "--help"] if verb else ["--help"]
    call = "import contextlib, scaledot.cli\nwith contextlib.suppress(SystemExit): "
    loaded = _modules_after(f"{call}scaledot.cli.main({words!r})\nNone")
    assert "scaledot" in loaded
    assert not {"torch", "numpy"} & loaded


@pytest.mark.slow
@pytest.mark.parametrize("words", [["report", "--json"], ["top", "--once"]])
def test_a_run_is_looked_at_without_torch(tmp_path, words):
    """It starts in a fraction of the time and takes a fraction of the memory."""
    path = tmp_path / "run.vitals"
    with Store(path, RunAttributes(more={"judged": True})) as store:
        vitals = scaledot.vitals(*torch.randn(2, 1, 3, 4, 8)).over_batch()
        store.write([Reading.of(vitals, step=0, layer="a")], [Scalar(0, "loss", 1.0)])
        # The report of a sick run names remedies.
        store.write_alarms(
            [Alarm(0, "act", "collapse", "a", 0, 1.0, 0.5, 0, None, "", "", heads=(0,))]
        )
    call = f"import scaledot.cli\nscaledot.cli.main({[*words, str(path)]!r})\nNone"
    loaded = _modules_after(call)
    assert "scaledot.watch.store.reader" in loaded
    assert "torch" not in loaded


def test_every_public_name_is_there_and_nothing_else():
    for name in scaledot.__all__:
        assert getattr(scaledot, name) is getattr(scaledot, name)
    assert set(scaledot.__all__) <= set(dir(scaledot))
    with pytest.raises(AttributeError, match="has no attribute 'attenton'"):
        _ = scaledot.attenton


@pytest.mark.slow
def test_parts_of_the_watch_need_no_import_of_their_own():
    done = "print(*(getattr(scaledot.watch, name).__name__ for name in scaledot.watch.__all__))"
    told = subprocess.run(
        [sys.executable, "-c", f"import scaledot; {done}"], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.split()[-1] == "scaledot.watch.store"


def test_import_prints_nothing_and_warns_of_nothing():
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:scaledot", "-c", "import scaledot"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_unpickles_or_evaluates(path):
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                assert not {name.name.partition(".")[0] for name in names} & UNSAFE_MODULES
            case ast.ImportFrom(module=str(module)):
                assert module.partition(".")[0] not in UNSAFE_MODULES
            case ast.Call(func=ast.Name(id=name)):
                assert name not in UNSAFE_CALLS
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch"))):
                raise AssertionError(f"{path.name}:{node.lineno} loads a pickle with torch.load")


def _modules_after(command: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{command}; import sys; print(); print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())
