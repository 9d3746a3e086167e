"""A real Chromium on a real lab: what a person would see.

`lab` is the address of a server in a process of its own, `page` a tab. When a test is over, a
console error or a request to anywhere but the loopback address has failed it. Without a Chromium
every test here is skipped, and the summary says so in capitals.
"""

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from scaledot.lab.server.page import FOLDER, INDEX
from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.reading import Reading, RunAttributes, Scalar
from scaledot.watch.store import Store

sys.path.insert(0, str(Path(__file__).parent))
import find_chromium

LAB = [sys.executable, "-m", "scaledot", "lab"]
ONE_CORE = {**os.environ, "OMP_NUM_THREADS": "1"}
LOOPBACK = {"127.0.0.1", "localhost"}
INSIDE = {"data", "blob", "about", "file"}  # addresses that reach no network
_skipped: list[str] = []


def _why_not() -> str | None:
    """What is missing for these tests; None: nothing."""
    if not (FOLDER / INDEX).is_file():
        return "THE PAGE IS NOT BUILT (type: make page)"
    if find_chromium.find() is None:
        return f"NO CHROMIUM (type: make browser, or set {find_chromium.VARIABLE})"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.slow)
    if reason and mine:
        _skipped.append(f"{len(mine)} BROWSER TESTS DID NOT RUN: {reason}")
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _skipped:
        terminalreporter.write_sep("!", line, red=True, bold=True)


@pytest.fixture(scope="session")
def chromium() -> Iterator:
    """One browser for all tests (Playwright's sync Browser); each test opens its own contexts."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium.find(),
            # For root, as in containers, Chromium's sandbox does not start. It sees only our page.
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab() -> Iterator[str]:
    """http://127.0.0.1:PORT/TOKEN/ of a server without a run."""
    with running_lab() as address:
        yield address


@pytest.fixture(scope="session")
def lab_url(lab: str) -> str:
    return lab


@pytest.fixture
def lab_of() -> Iterator[Callable[[Path], str]]:
    """lab_of(run) -> address of a server that watches that run and ends with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda run: stack.enter_context(running_lab("--run", str(run)))


@pytest.fixture(scope="module")
def lasting_lab_of() -> Iterator[Callable[[Path], str]]:
    """The same for servers that several tests of a file ask: to start one takes seconds."""
    with contextlib.ExitStack() as stack:
        yield lambda run: stack.enter_context(running_lab("--run", str(run)))


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Path:
    """The page as one file, written by `scaledot lab --export`: by one worker for both."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path, part = folder / "exported.html", folder / "exported.part.html"
    try:
        part.touch(exist_ok=False)
    except FileExistsError:
        _wait_until(path.exists, 120)
        return path
    subprocess.run([*LAB, "--export", str(part)], env=ONE_CORE, check=True, capture_output=True)
    return part.rename(path)


def _wait_until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the other worker has not written it in time"
        time.sleep(0.1)


@pytest.fixture
def new_page(chromium, lab_of) -> Iterator["Tabs"]:
    """new_page(viewport=..., color_scheme=...) -> a tab; the options are a Playwright context's.

    Servers of `lab_of` outlive the tabs: a page whose server ends first rightly complains.
    """
    tabs = Tabs(chromium)
    yield tabs
    tabs.close()
    assert not tabs.problems


@pytest.fixture
def page(new_page):
    """A tab as wide as a desk's."""
    return new_page(viewport={"width": 1280, "height": 900})


@pytest.fixture
def monitored_run(tmp_path: Path) -> Iterator["WrittenRun"]:
    """A run that is being written: `path`, `layers`, and `write()` for the next step."""
    run = WrittenRun(tmp_path / "run.vitals")
    yield run
    run.close()


@contextlib.contextmanager
def running_lab(*arguments: str) -> Iterator[str]:
    """`scaledot lab` in a process of its own, as for a person; gives its address, no state."""
    with subprocess.Popen(
        [*LAB, "--no-browser", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ONE_CORE,
    ) as process:
        try:
            assert process.stdout
            assert process.stderr
            line = process.stdout.readline()
            assert line.startswith("http://127.0.0.1:"), f"{line!r} {process.stderr.read()}"
            yield line.strip().partition("#")[0]
        finally:
            process.terminate()


class Tabs:
    """Opens tabs and keeps what went wrong in them."""

    def __init__(self, browser) -> None:
        self.problems: list[str] = []
        self._browser = browser
        self._contexts = []

    def __call__(self, **options):
        context = self._browser.new_context(**options)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        page.on("request", lambda request: self._request(request.url))
        page.on("websocket", lambda socket: self._request(socket.url))
        page.on("requestfailed", self._failure)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    def _console(self, said) -> None:
        if said.type in ("error", "warning"):
            self.problems.append(f"console {said.type}: {said.text}")

    def _request(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in INSIDE and parts.hostname not in LOOPBACK:
            self.problems.append(f"request off loopback: {url}")

    def _failure(self, request) -> None:
        """A request that the page itself gave up, as it left, is no failure."""
        if request.failure != "net::ERR_ABORTED":
            self.problems.append(f"request failed: {request.url} ({request.failure})")


class WrittenRun:
    """Four layers of six heads; the first head of `blocks.2.attn` grows until it saturates."""

    def __init__(self, path: Path, layers: dict[str, int] | None = None) -> None:
        self.path = path
        self.layers = layers or {f"blocks.{number}.attn": 6 for number in range(4)}
        self.step = -1
        self._store = Store(
            path, RunAttributes(command=("train.py",), model="GPT, 1.2M parameters")
        )
        self._store.note("coverage", f"{len(self.layers)} of {len(self.layers)} layers watched")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, steps: int = 1) -> int:
        """So many further steps, on the disk when this returns; the last step's number."""
        for _ in range(steps):
            self.step += 1
            readings = [self._reading(layer, heads) for layer, heads in self.layers.items()]
            scalars = [
                Scalar(self.step, "loss", 4 * math.exp(-self.step / 50)),
                Scalar(self.step, "watch_cost", 0.004),
            ]
            self._store.write(readings, scalars)
        assert self._store.flush()
        return self.step

    def keep_writing(self, every: float = 0.1) -> None:
        """A step after each pause, until the test is over."""

        def work() -> None:
            while not self._stop.wait(every):
                self.write()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def value(self, layer: str, head: int, field: str) -> float:
        """What the last step's reading says."""
        return float(self._reading(layer, self.layers[layer]).value(field)[head])

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)
        self._store.close()

    def _reading(self, layer: str, heads: int) -> Reading:
        spread = 1 + np.arange(heads) / 10 + self.step / 1000
        if layer == "blocks.2.attn":
            spread[0] += self.step / 5
        share = 1 / (1 + np.exp(3 - spread))  # of the weight that one key takes
        named = {
            "max_logit": 4 * spread,
            "logit_std": spread,
            "row_std": spread,
            "entropy": 3 * (1 - share),
            "entropy_ratio": 1 - share,
            "sum_p2": share,
            "top_p": share,
            "saturated": np.where(share > 0.9, share, 0),
            "q_rms": np.sqrt(spread),
            "k_rms": np.sqrt(spread),
        }
        floats = [named.get(name, np.zeros(heads)) for name in FLOAT_FIELDS]
        counts = [np.full(heads, 0 if name == "nonfinite" else 64) for name in COUNT_FIELDS]
        return Reading(
            self.step, "train", time.time(), layer, np.stack(floats), np.stack(counts).astype(int)
        )
