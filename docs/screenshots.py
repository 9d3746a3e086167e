"""Makes docs/screens/*.png: the lab's home, two panels and the monitor, as a person sees them.

    python docs/screenshots.py          needs the built page, playwright and a Chromium

The monitor's run is a real one: the small training of `scaledot demo`, with a learning rate that
attention does not survive. SCALEDOT_CHROMIUM names another browser.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

SCREENS = Path(__file__).parent / "screens"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDTH = 1360
RUN_SIZE = {"steps": 90, "layers": 8, "width": 128, "heads": 8, "tokens": 64, "batch": 8}

# name -> (state in the address, colour scheme, height: the home shows the whole diagram)
SHOTS = {
    "home": ("", "light", 1400),
    "variance": ("#v=1&lesson=variance&d_k=128", "light", 1270),
    "divisors": ("#v=1&lesson=divisors", "dark", 1270),
}
MONITOR = "#v=1&lesson=monitor&field=entropy_ratio&step=34&layer=blocks.0.attention&head=4"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=SCREENS)
    folder = parser.parse_args().folder
    chromium = os.environ.get("SCALEDOT_CHROMIUM") or next(
        filter(None, map(shutil.which, BROWSERS)), ""
    )
    if not chromium:
        sys.exit("there is no Chromium; type: apt-get install chromium-headless-shell")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        run = Path(scratch) / "run.vitals"
        train(run)
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has none
        browser = playwright.chromium.launch(executable_path=chromium, args=sandbox)
        with serving(run) as address:
            for name, (state, scheme, height) in SHOTS.items():
                path = folder / f"{name}.png"
                shoot(browser, address + state, scheme, height, path, "[data-field]")
            path = folder / "monitor.png"
            shoot(browser, address + MONITOR, "light", 1180, path, "#head-title")
        browser.close()
    return 0


def train(run: Path) -> None:
    from scaledot.lab.training import Size, train

    train(size=Size(**RUN_SIZE), store=run)


@contextmanager
def serving(run: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "scaledot", "lab", "--no-browser", "--run", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().strip().partition("#")[0]
        finally:
            process.terminate()


def shoot(browser: Browser, address: str, scheme, height: int, path: Path, ready: str) -> None:
    size = {"width": WIDTH, "height": height}
    with browser.new_context(viewport=size, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector(ready)
        page.wait_for_timeout(800)  # arrows and charts are drawn after the numbers
        page.screenshot(path=path)
        print(path)


if __name__ == "__main__":
    sys.exit(main())
