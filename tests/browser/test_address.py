"""The state is in the address: links restore it, the back button works, files carry it out."""

import csv
import io
import time
import xml.etree.ElementTree as ElementTree

import pytest
from lab_page import LESSONS, PHONE, assert_numbers_of, opened
from PIL import Image
from playwright.sync_api import expect

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def page(chromium, lab):
    with opened(chromium, lab, accept_downloads=True) as page:
        yield page


def test_a_deep_link_restores_every_control(chromium, lab):
    given = "#v=1&lesson=variance&lang=hi&theme=dark&d_k=512&scaled=true&sigma_q=2&seed=5"
    with opened(chromium, lab + given) as page:
        arguments = LESSONS["variance"].arguments(
            {"d_k": 512, "scaled": True, "sigma_q": 2.0, "seed": 5}
        )
        page.answered("variance", arguments)
        assert_numbers_of("variance", arguments, page.numbers())
        root = page.page.locator("html")
        expect(root).to_have_attribute("lang", "hi-Latn")
        expect(root).to_have_attribute("data-theme", "dark")
        expect(page.page.locator("#variance-scaled")).to_be_checked()
        expect(page.page.locator("#variance-seed")).to_have_value("5")
        expect(page.page.locator('[data-control="d_k"]')).to_have_text("512")


def test_back_and_forward_go_from_panel_to_panel(page):
    page.go("variance")
    page.page.locator("#variance-d_k").press("ArrowRight")
    page.answered("variance", {"d_k": 128})
    page.page.get_by_role("link", name="Large scores saturate").first.click()
    page.answered("saturation", {"divisor": 1})
    assert page.page.evaluate("scrollY") == 0
    page.page.go_back()
    page.answered("variance", {"d_k": 128})
    expect(page.page.locator('[data-control="d_k"]')).to_have_text("128")
    page.page.go_forward()
    expect(page.page.locator("article")).to_have_attribute("data-lesson", "saturation")


def test_a_moved_control_is_in_the_address_and_in_the_copied_link(page):
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.go("saturation")
    page.page.fill("#saturation-scores", "7, 3")
    page.answered("saturation", {"scores": [7, 3]})
    page.page.wait_for_function("() => location.hash.includes('scores=7,3')")
    page.page.locator('[data-copy="link"]').click()
    expect(page.page.locator('[data-copy="link"] + [role="status"]')).not_to_be_empty()
    assert page.page.evaluate("navigator.clipboard.readText()") == page.page.url


def test_copy_as_python_is_the_lessons_code_for_this_view(page):
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.go("jacobian", scores=[7, 3], divisor=2)
    arguments = LESSONS["jacobian"].arguments({"scores": [7, 3], "divisor": 2})
    page.answered("jacobian", arguments)
    page.page.locator('[data-copy="python"]').click()
    expect(page.page.locator('[data-copy="python"] + [role="status"]')).not_to_be_empty()
    copied = page.page.evaluate("navigator.clipboard.readText()")
    assert copied == LESSONS["jacobian"].python(arguments)


@pytest.mark.nightly
def test_every_figure_can_be_saved(page):
    saved, last = 0, 0.0
    for lesson in LESSONS:
        page.go(lesson)
        for button in page.page.locator(".file").all():
            # Chromium drops more than ten downloads a second.
            page.page.wait_for_timeout(max(0.0, 110 - 1000 * (time.monotonic() - last)))
            last = time.monotonic()
            with page.page.expect_download() as started:
                button.click()
            name, content = started.value.suggested_filename, started.value.path().read_bytes()
            assert name.startswith(lesson)
            _check(name, content)
            saved += 1
    assert saved >= 60


def test_the_theme_follows_the_system_until_it_is_chosen(chromium, lab):
    with opened(chromium, lab, color_scheme="dark") as page:
        root = page.page.locator("html")
        expect(root).to_have_attribute("data-theme", "dark")
        page.page.locator("button.theme").click()
        expect(root).to_have_attribute("data-theme", "light")
        page.page.reload()
        expect(root).to_have_attribute("data-theme", "light")


def test_the_keyboard_reaches_the_lesson_first(page):
    page.page.keyboard.press("Tab")
    expect(page.page.locator(".skip")).to_be_focused()
    page.page.keyboard.press("Enter")
    expect(page.page.locator("main")).to_be_focused()


def test_the_page_fits_a_phone(chromium, lab):
    with opened(chromium, lab) as page:
        for width in (PHONE["width"], 320):
            page.page.set_viewport_size({"width": width, "height": 700})
            for lesson in (*LESSONS, "flashcards"):
                page.go(lesson)
                page.page.wait_for_timeout(30)
                beyond = page.page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert beyond <= 0, f"{lesson} at {width}"
        page.page.get_by_role("button", name="Lessons").click()
        page.page.get_by_role("link", name="Which divisor?").click()
        expect(page.page.locator("article")).to_have_attribute("data-lesson", "divisors")


def _check(name: str, content: bytes) -> None:
    if name.endswith(".svg"):
        root = ElementTree.fromstring(content)
        assert root.tag == f"{SVG}svg"
        assert len(list(root.iter(f"{SVG}text"))) > 0
        assert b"var(--" not in content  # it must keep its colours without our style sheet
    elif name.endswith(".png"):
        image = Image.open(io.BytesIO(content))
        image.load()
        assert image.width > 300
        assert len(image.convert("L").getcolors(256)) > 3, f"{name} is blank"
    else:
        rows = list(csv.reader(io.StringIO(content.decode())))
        assert len({len(row) for row in rows}) == 1, name
        assert len(rows) > 1 or "race" in name, name  # a race that has not begun has no rows
