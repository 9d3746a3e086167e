"""The page as one file: no server behind it, the library's numbers inside."""

import pytest
from lab_page import LESSONS, assert_numbers_of, opened
from playwright.sync_api import expect


def test_the_file_shows_the_librarys_numbers_without_a_server(chromium, exported):
    with opened(chromium, exported.as_uri()) as page:
        expect(page.page.locator("[data-canned]")).to_be_visible()
        for lesson in ("flow", "variance", "heads"):
            page.go(lesson)
            page.answered(lesson, LESSONS[lesson].arguments())
            assert_numbers_of(lesson, LESSONS[lesson].arguments(), page.numbers())
        page.go("variance")
        page.page.locator("#variance-d_k").press("ArrowRight")
        moved = LESSONS["variance"].arguments({"d_k": 128})
        page.answered("variance", moved)
        assert_numbers_of("variance", moved, page.numbers())
        expect(page.page.locator("[data-nearest]")).to_have_count(0)


@pytest.mark.nightly
def test_the_file_says_when_it_shows_the_nearest_numbers(chromium, exported):
    with opened(chromium, exported.as_uri()) as page:
        page.go("variance", d_k=128, scaled=True, seed=12345)
        expect(page.page.locator("[data-nearest]")).to_contain_text("seed = ")


@pytest.mark.nightly
def test_the_file_has_every_row_that_can_be_tried(chromium, exported):
    with opened(chromium, exported.as_uri()) as page:
        for lesson in ("vectors", "saturation", "jacobian"):
            page.go(lesson)
            for button in page.page.get_by_role("button", name="Try it").all():
                button.click()
                expect(page.page.locator("[data-nearest]")).to_have_count(0)


def test_the_files_race_and_cards_work(chromium, exported):
    with opened(chromium, exported.as_uri()) as page:
        page.go("race")
        page.page.locator('[data-race="step"]').click()
        expect(page.page.locator('[data-race="at"]')).to_have_text("step 1 of 200")
        page.go("flashcards", lang="hi")
        expect(page.page.locator("html")).to_have_attribute("lang", "hi-Latn")
        expect(page.page.locator(".card")).to_be_visible()
