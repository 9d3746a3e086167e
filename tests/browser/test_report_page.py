"""The page of `scaledot report` as a person opens it: from disk, light, dark, on a telephone."""

import time
from pathlib import Path

import pytest
from browser.test_axe import violations
from watch.report_cases import collapsing, write_large, write_run

from scaledot import cli

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")

    def scalars(step):
        return {"loss": 4 / (1 + step) ** 0.2, "learning_rate": 3e-2, "watch_cost": 0.004}

    sick = write_run(folder / "sick.vitals", range(90), ill=collapsing, scalars=scalars)
    well = write_run(folder / "well.vitals", range(90), scalars=scalars)
    made = {"sick": [sick], "well": [well], "two": [sick, well]}
    for name, runs in made.items():
        assert cli.main(["report", *map(str, runs), "--html", str(folder / f"{name}.html")]) == 0
    return {name: folder / f"{name}.html" for name in made}


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["sick", "well", "two"])
def test_no_page_violates_a_rule_or_is_wider_than_its_window(
    new_page, pages, name, theme, viewport
):
    page = new_page(viewport=viewport, color_scheme=theme, bypass_csp=True)
    page.goto(pages[name].as_uri())
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_says_the_verdict_first_and_its_policy_holds(page, pages):
    page.goto(pages["sick"].as_uri())
    assert page.locator("h1").inner_text().startswith("✖ Sick since step")
    broken = page.evaluate("[...document.images].filter((image) => !image.naturalWidth).length")
    assert broken == 0


def test_every_section_is_on_paper(page, pages):
    page.goto(pages["sick"].as_uri())
    page.emulate_media(media="print", color_scheme="dark")
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == "rgb(255, 255, 255)"
    for heading in page.locator("h2").all():
        assert heading.is_visible()


@pytest.mark.nightly
def test_the_page_of_a_large_run_opens_quickly(page, tmp_path):
    path = write_large(tmp_path / "large.vitals")
    target = tmp_path / "large.html"
    assert cli.main(["report", str(path), "--html", str(target)]) == 0
    took = []
    for _ in range(3):
        began = time.perf_counter()
        page.goto(target.as_uri(), wait_until="load")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => done()))")
        took.append(time.perf_counter() - began)
    assert min(took) < 2, took
