"""From the key press to the changed number: at most 50 ms, 95 times of 100."""

import pytest
from lab_page import LESSONS, opened

LIMIT_MS = 50
PRESSES = 24
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
    watcher.observe(document.querySelector("main"),
        { subtree: true, childList: true, characterData: true, attributes: true,
          attributeFilter: ["data-value"] });
}"""


def sliders(lesson: str) -> list[str]:
    kinds = ("steps", "range")
    return [
        one.name for one in LESSONS[lesson].controls if one.kind in kinds and one.name != "seed"
    ]


@pytest.mark.parametrize("lesson", [name for name in LESSONS if name != "race" and sliders(name)])
def test_a_slider_answers_in_time(chromium, lab, lesson):
    with opened(chromium, lab) as page:
        page.go(lesson)
        page.answered(lesson, LESSONS[lesson].arguments())
        slider = page.page.locator(f"#{lesson}-{sliders(lesson)[0]}")
        slider.focus()
        for key in ("ArrowRight", "ArrowLeft", "ArrowLeft", "ArrowRight"):  # a first, warm lap
            slider.press(key)
            page.page.wait_for_timeout(60)
        page.page.evaluate(CLOCK)
        rounds = []
        while len(rounds) < ROUNDS and not any(_p95(waits) < LIMIT_MS for waits in rounds):
            rounds.append(_round(page, slider))
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


def _round(page, slider) -> list[float]:
    page.page.evaluate("window.waits.length = 0")
    for press in range(PRESSES):
        slider.press("ArrowRight" if press % 2 else "ArrowLeft")
        page.page.wait_for_function("(n) => window.waits.length >= n", arg=press + 1)
    return sorted(page.page.evaluate("window.waits"))


def _p95(waits: list[float]) -> float:
    return waits[round(0.95 * (len(waits) - 1))]
