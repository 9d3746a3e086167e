"""Nothing jumps while a panel loads: Chromium's layout shift of each panel, opened by its address.

The bar is 0.05; the bound is 0.1, because on a busy machine a panel is shown before its numbers
have come, and then what follows them may move.
"""

import pytest
from lab_page import DESKTOP, PANELS, PHONE
from playwright.sync_api import expect

BOUND = 0.1
QUIET_MS = 400  # after the numbers, for whatever comes late

# Before anything of the page runs. Without a key or a click every shift counts.
WATCH = """
    window.shifts = [];
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) {
            if (!entry.hadRecentInput) window.shifts.push({
                value: entry.value,
                at: entry.sources.map(({ node }) => node?.outerHTML?.slice(0, 80)),
            });
        }
    }).observe({ type: "layout-shift", buffered: true });
"""


def shifted(page, address: str) -> tuple[float, list]:
    """All that moved, and what."""
    page.goto("about:blank")  # another hash alone would not load the page
    page.goto(address)
    page.wait_for_selector("article:not([aria-busy])")
    page.wait_for_timeout(QUIET_MS)
    found = page.evaluate("window.shifts")
    return sum(one["value"] for one in found), found


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("lang", "viewport"), [("en", DESKTOP), ("hi", PHONE)], ids=["en-desktop", "hi-phone"]
)
def test_no_panel_jumps_while_it_loads(new_page, lab, viewport, lang):
    page = new_page(viewport=viewport)
    page.add_init_script(WATCH)
    found = {panel: shifted(page, f"{lab}#v=1&lesson={panel}&lang={lang}") for panel in PANELS}
    assert {panel: one for panel, one in found.items() if one[0] > BOUND} == {}


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_monitor_does_not_jump_while_it_loads(new_page, lab_of, monitored_run, viewport):
    monitored_run.write(40)
    page = new_page(viewport=viewport)
    page.add_init_script(WATCH)
    state = "#v=1&lesson=monitor&field=row_std&layer=blocks.2.attn&head=0"
    total, found = shifted(page, lab_of(monitored_run.path) + state)
    assert total <= BOUND, found


def test_the_words_do_not_wait_for_ever_for_the_numbers(new_page, lab):
    page = new_page(viewport=DESKTOP)
    page.route_web_socket("**/api/ask", lambda socket: None)  # open, and silent
    page.goto(lab)
    expect(page.locator("h1")).to_be_visible()
    expect(page.locator("article")).to_have_attribute("aria-busy", "true")


def test_a_jump_is_seen(new_page, lab):
    """The measurement itself: a block pushed into the page must count."""
    page = new_page(viewport=DESKTOP)
    page.add_init_script(WATCH)
    before, _ = shifted(page, lab)
    page.evaluate(
        """() => {
            const block = document.createElement("div");
            block.style.height = "300px";
            document.querySelector("main").prepend(block);
        }"""
    )
    page.wait_for_function("(n) => window.shifts.length > n", arg=0)
    after = sum(one["value"] for one in page.evaluate("window.shifts"))
    assert after > before + BOUND
