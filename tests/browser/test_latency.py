"""From the key press to the changed number: at most 50 ms, 95 times of 100. Thirty frames a second.

These tests measure time, so nothing else runs beside them.
"""

import pytest
from lab_page import LESSONS, opened
from playwright.sync_api import expect
from test_monitor_page import write

from scaledot.watch.reading import RunAttributes
from scaledot.watch.store import Store

pytestmark = pytest.mark.nightly

LIMIT_MS = 50
PRESSES = 24
WARM = 4  # presses before the clock counts
ROUNDS = 3  # one must hold: browser, server and test share two cores with whoever else is there

# Inside the page, where the clock starts with the event and stops with the change in the document.
CLOCK = """() => {
    window.waits = [];
    let pressed = 0;
    addEventListener("keydown", (event) => { pressed = event.timeStamp; }, true);
    const watcher = new MutationObserver((changes) => {
        if (!pressed) return;
        const number = changes.some((change) => {
            const at = change.target;
            return (at.nodeType === 1 ? at : at.parentElement)?.closest(".figures [data-field]");
        });
        if (!number) return;
        window.waits.push(performance.now() - pressed);
        pressed = 0;
    });
    watcher.observe(document.body,
        { subtree: true, childList: true, characterData: true, attributes: true,
          attributeFilter: ["data-value"] });
}"""


def sliders(lesson: str) -> list[str]:
    kinds = ("steps", "range")
    return [
        one.name for one in LESSONS[lesson].controls if one.kind in kinds and one.name != "seed"
    ]


@pytest.fixture(scope="module")
def clocked(chromium, lab):
    with opened(chromium, lab) as page:
        page.page.evaluate(CLOCK)
        yield page


@pytest.mark.parametrize("lesson", [name for name in LESSONS if name != "race" and sliders(name)])
def test_a_slider_answers_in_time(clocked, lesson):
    clocked.go(lesson)
    clocked.answered(lesson, LESSONS[lesson].arguments())
    slider = clocked.page.locator(f"#{lesson}-{sliders(lesson)[0]}")
    slider.focus()
    _round(clocked, slider, WARM)
    rounds = []
    while len(rounds) < ROUNDS and not any(_p95(waits) < LIMIT_MS for waits in rounds):
        rounds.append(_round(clocked, slider, PRESSES))
    assert _p95(rounds[-1]) < LIMIT_MS, rounds


def test_the_first_paint_comes_within_a_second(chromium, lab):
    with opened(chromium, lab) as page:
        page.page.reload()
        page.page.wait_for_selector("article:not([aria-busy])")
        paints = page.page.evaluate(
            "performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime)"
        )
        assert paints
        assert paints[0] < 1000


def test_a_large_model_is_drawn_thirty_times_a_second(chromium, lab_of, tmp_path):
    path = tmp_path / "run.vitals"
    layers = {f"blocks.{layer}.attn": 96 for layer in range(96)}
    with Store(path, RunAttributes(command=("train.py",), model="Large")) as store:
        write(store, *range(12), layers=layers)
    with opened(chromium, f"{lab_of(path)}#v=1&lesson=monitor&field=row_std") as page:
        expect(page.page.locator('[data-monitor="step"]')).to_have_text("11")
        frames = page.page.evaluate(
            """async () => {
                const slider = document.getElementById("monitor-step");
                const canvas = document.querySelector("canvas");
                const before = Number(canvas.dataset.frames);
                const began = performance.now();
                for (let moved = 0; performance.now() - began < 1500; moved++) {
                    slider.value = String(moved % 11);
                    slider.dispatchEvent(new Event("input", { bubbles: true }));
                    await new Promise(requestAnimationFrame);
                }
                const seconds = (performance.now() - began) / 1000;
                return (Number(canvas.dataset.frames) - before) / seconds;
            }"""
        )
        assert frames >= 30


def _round(page, slider, presses: int) -> list[float]:
    page.page.evaluate("window.waits.length = 0")
    for press in range(presses):
        slider.press("ArrowRight" if press % 2 else "ArrowLeft")
        page.page.wait_for_function("(n) => window.waits.length >= n", arg=press + 1)
    return sorted(page.page.evaluate("window.waits"))


def _p95(waits: list[float]) -> float:
    return waits[round(0.95 * (len(waits) - 1))]
