"""The race, played: what the page draws is what the library runs. Cards, turned."""

import pytest
from lab_page import LESSONS, assert_numbers_of, opened
from playwright.sync_api import expect

from scaledot.lab import flashcards


@pytest.fixture
def page(chromium, lab):
    with opened(chromium, lab, accept_downloads=True) as page:
        yield page


def test_a_race_is_played_to_its_end(page):
    given = {"steps": 50, "d_k": 16, "seed": 3}
    page.go("race", **given)
    button = page.page.locator
    button('[data-race="play"]').click()
    button('[data-race="pause"]').click()
    button('[data-race="play"]').click()
    expect(button('[data-race="at"]')).to_have_text("step 50 of 50", timeout=30_000)
    arguments = LESSONS["race"].arguments(given)
    page.answered("race", arguments)  # the claims are about the whole
    shown = page.numbers()
    assert "curves.49.runners.0.loss" in shown
    assert_numbers_of("race", arguments, shown)


def test_a_race_goes_step_by_step_and_back_to_the_start(page):
    page.go("race", steps=50, d_k=16, rules="sqrt_dk")
    for step in (1, 2, 3):
        page.page.locator('[data-race="step"]').click()
        expect(page.page.locator('[data-race="at"]')).to_have_text(f"step {step} of 50")
    assert "curves.2.runners.0.loss" in page.numbers()
    page.page.locator('[data-race="reset"]').click()
    expect(page.page.locator('[data-race="at"]')).to_have_text("step 0 of 50")
    expect(page.page.locator(".standing")).to_have_count(0)


def test_a_run_that_broke_has_no_shares_and_proves_nothing(page):
    given = {"rules": "none", "d_k": 16, "rate": 3.0, "steps": 50}
    page.go("race", **given)
    page.page.locator('[data-race="play"]').click()
    page.answered("race", LESSONS["race"].arguments(given))
    expect(page.page.locator(".standing tbody td")).to_have_text(["NaN", *3 * ["\u2013"]])
    claim = page.page.locator(".claims tbody tr").first
    expect(claim).to_contain_text("This race cannot tell")
    expect(claim.locator(".badge")).to_have_count(0)


def test_cards_turn_with_space_and_move_with_arrows(page):
    cards = flashcards.cards("en")
    page.go("flashcards")
    card, place = page.page.locator(".card"), page.page.locator('[data-card="place"]')
    expect(place).to_have_text(f"1 / {len(cards)}")
    page.page.keyboard.press("Space")  # wherever the focus is: opened by its address, on main
    expect(card).to_have_attribute("aria-pressed", "true")
    card.focus()
    page.page.keyboard.press("Space")
    expect(card).to_have_attribute("aria-pressed", "false")
    page.page.keyboard.press("Space")
    expect(card).to_have_attribute("aria-pressed", "true")
    page.page.keyboard.press("ArrowRight")
    expect(card).to_have_attribute("aria-pressed", "false")
    expect(place).to_have_text(f"2 / {len(cards)}")
    page.page.keyboard.press("ArrowLeft")
    page.page.keyboard.press("ArrowLeft")
    expect(place).to_have_text(f"{len(cards)} / {len(cards)}")


def test_the_anki_file_is_the_librarys(page):
    page.go("flashcards", lang="hi")
    with page.page.expect_download() as started:
        page.page.locator('[data-card="anki"]').click()
    assert started.value.suggested_filename == "scaledot-hi.txt"
    assert started.value.path().read_text("utf-8") == flashcards.anki("hi")
