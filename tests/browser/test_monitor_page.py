"""The monitor follows a run that is being written, and leads to the lessons."""

import csv
import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from lab_page import DESKTOP, PHONE, opened
from PIL import Image
from playwright.sync_api import expect
from served_lab import reading
from test_axe import violations

from scaledot.measure import COUNT_FIELDS, FLOAT_FIELDS
from scaledot.watch.alarms import Alarm
from scaledot.watch.reading import Reading, RunAttributes, Scalar
from scaledot.watch.store import Store

LAYERS = {"blocks.0.attn": 3, "blocks.1.attn": 5}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.vitals"


def write(store: Store, *steps: int, layers=LAYERS) -> None:
    """field f of head h at a step: step + f + h / 100, in every layer."""
    for step in steps:
        readings = [reading(step, layer, heads, step) for layer, heads in layers.items()]
        store.write(readings, [Scalar(step, "loss", 10 / (step + 1))])
    assert store.flush()


def value(step: int, field: str, head: int) -> float:
    return float(np.float32(step + FLOAT_FIELDS.index(field) + head / 100))


def written(number: float) -> str:
    """As JavaScript writes it."""
    return repr(number).removesuffix(".0")


def alarm(step: int, grade: str, layer: str, head: int | None) -> Alarm:
    words = f"{layer}: its scores run away"
    return Alarm(step, grade, "collapse", layer, head, 0.7, 0.5, step, None, words, "scaledot top")


def test_alarms_are_told_as_they_come_and_lead_to_their_head(chromium, lab_of, path):
    with Store(path, RunAttributes(command=("train.py",), model="Tiny")) as store:
        store.write_alarms([alarm(1, "note", "blocks.0.attn", 1)])
        write(store, 0, 1)
        address = f"{lab_of(path)}#v=1&lesson=monitor"
        with opened(chromium, address, bypass_csp=True) as page:
            told = page.page.locator("[data-grade]")
            expect(told).to_have_count(1)
            store.write_alarms([alarm(2, "act", "blocks.1.attn", 4)])
            write(store, 2, 3)
            expect(told).to_have_count(2)
            assert [one.get_attribute("data-grade") for one in told.all()] == ["act", "note"]
            expect(told.first).to_contain_text("blocks.1.attn: its scores run away")
            assert violations(page.page) == []
            told.first.locator("button").click()
            expect(page.page.locator("#head-title")).to_have_text("Head 4 of blocks.1.attn")
            expect(page.page.locator('[data-monitor="step"]')).to_have_text("2")


def test_it_follows_pauses_and_leads_to_the_lesson(chromium, lab_of, path):
    with Store(path, RunAttributes(command=("train.py",), model="Tiny")) as store:
        write(store, 0, 1)
        address = f"{lab_of(path)}#v=1&lesson=monitor&field=row_std"
        with opened(chromium, address, bypass_csp=True) as page:
            step = page.page.locator('[data-monitor="step"]')
            cell = page.page.locator('[role="gridcell"]')
            expect(step).to_have_text("1")
            write(store, 2, 3)
            expect(step).to_have_text("3")
            expect(cell).to_have_attribute("data-value", written(value(3, "row_std", 0)))

            # keys: one cell of the grid has the focus, Enter opens the head
            cell.focus()
            for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
                page.page.keyboard.press(key)
            expect(cell).to_have_attribute("aria-colindex", "3")
            expect(cell).to_have_attribute("data-value", written(value(3, "row_std", 2)))
            page.page.keyboard.press("Enter")
            expect(page.page.locator("#head-title")).to_have_text("Head 2 of blocks.1.attn")

            # paused: news arrive, the picture stays
            page.page.locator('[data-monitor="pause"]').click()
            write(store, 4, 5)
            expect(page.page.locator("#monitor-step")).to_have_attribute("max", "5")
            expect(step).to_have_text("3")
            page.page.locator("#monitor-step").press("ArrowLeft")
            expect(step).to_have_text("2")
            page.page.locator('[data-monitor="pause"]').click()
            expect(step).to_have_text("5")

            # another vital, then the lesson with this head's value, and back
            page.page.select_option("#monitor-field", "max_logit")
            expect(cell).to_have_attribute("data-value", written(value(5, "max_logit", 2)))
            link = page.page.locator('[data-link="saturation"]')
            expect(link).to_contain_text(f"{value(5, 'row_std', 2):.3g}")
            link.click()
            expect(page.page.locator("article")).to_have_attribute("data-lesson", "saturation")
            scores = [float(one) for one in page.page.input_value("#saturation-scores").split(",")]
            assert np.std(scores) == pytest.approx(value(5, "row_std", 2), abs=0.02)
            page.page.go_back()
            expect(page.page.locator("#head-title")).to_have_text("Head 2 of blocks.1.attn")
            cell.focus()
            page.page.keyboard.press("Escape")
            expect(page.page.locator("#head-title")).to_have_count(0)
    assert page.wrong == []


def test_the_heat_map_is_saved_in_three_forms_with_the_same_heads(chromium, lab_of, path):
    with Store(path, RunAttributes(command=("train.py",), model="Tiny & <small>")) as store:
        write(store, 0, 1, 2)
    state = "#v=1&lesson=monitor&field=row_std&step=1"
    with opened(chromium, lab_of(path) + state, accept_downloads=True) as page:
        page.page.wait_for_selector("canvas[data-frames]")
        files = {}
        for kind in ("PNG", "SVG", "CSV"):
            with page.page.expect_download() as started:
                page.page.locator('[data-figure="monitor-row_std"] .file', has_text=kind).click()
            assert started.value.suggested_filename == f"monitor-row_std.{kind.lower()}"
            files[kind] = started.value.path().read_bytes()

    rows = list(csv.DictReader(io.StringIO(files["CSV"].decode())))
    heads = [(layer, head) for layer, count in LAYERS.items() for head in range(count)]
    assert [(row["layer"], int(row["head"])) for row in rows] == heads
    assert [float(row["row_std"]) for row in rows] == pytest.approx(
        [value(1, "row_std", head) for _, head in heads]
    )

    drawing = ElementTree.fromstring(files["SVG"])
    texts = [text.text or "" for text in drawing.iter(f"{SVG}text")]
    title = drawing.find(f"{SVG}title")
    assert title is not None
    assert title.text == texts[0] == "row_std of every head at step 1"
    assert texts[1].startswith("Tiny & <small>")
    assert set(LAYERS) < set(texts)
    assert {"layer", "head", *map(str, range(5))} < set(texts)
    fills = [rect.get("fill", "") for rect in drawing.iter(f"{SVG}rect")]
    cells = [fill for fill in fills if fill.startswith("rgb")][: len(heads)]
    assert cells == _pixels(files["PNG"])


def _pixels(png: bytes) -> list[str]:
    """The colours of all heads, read from the picture a little inside of each cell's lower left."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    wide, tall = image.width / max(LAYERS.values()), image.height / len(LAYERS)
    return [
        "rgb({},{},{})".format(*image.getpixel((int((head + 0.2) * wide), int((row + 0.8) * tall))))
        for row, heads in enumerate(LAYERS.values())
        for head in range(heads)
    ]


def test_a_dead_run_is_not_called_healthy(chromium, lab_of, path):
    counts = np.zeros((len(COUNT_FIELDS), max(LAYERS.values())), np.int64)
    counts[COUNT_FIELDS.index("nonfinite")] = 8  # no row is left: every one holds NaN
    with Store(path, RunAttributes(command=("train.py",), model="Tiny")) as store:
        write(store, 0)
        for layer, heads in LAYERS.items():
            floats = np.zeros((len(FLOAT_FIELDS), heads))
            store.write([Reading(1, "train", 1.0, layer, floats, counts[:, :heads])], [])
        assert store.flush()
    state = "#v=1&lesson=monitor&field=passes&layer=blocks.0.attn&head=1"
    with opened(chromium, lab_of(path) + state, bypass_csp=True) as page:
        expect(page.page.locator('[data-monitor="alarms"]')).to_contain_text("8 heads outside")
        expect(page.page.locator(".reading")).to_contain_text("passes NaN or infinite")
        expect(page.page.locator("section.head")).to_contain_text("hold NaN or infinity")
        expect(page.page.locator("section.head h3")).to_have_count(0)
        assert violations(page.page) == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory, lasting_lab_of):
    """The address of a run of three steps that is over."""
    path = tmp_path_factory.mktemp("monitor") / "run.vitals"
    with Store(path, RunAttributes(command=("train.py",), model="Tiny")) as store:
        write(store, 0, 1, 2)
    return lasting_lab_of(path)


@pytest.mark.parametrize(("theme", "lang"), [("light", "hi"), ("dark", "en")])
def test_it_violates_no_rule_of_axe(chromium, finished, theme, lang):
    state = f"#v=1&lesson=monitor&lang={lang}&theme={theme}&layer=blocks.0.attn&head=1"
    with opened(chromium, finished + state, bypass_csp=True) as page:
        page.page.wait_for_selector("#head-title")
        for viewport in (DESKTOP, PHONE):
            page.page.set_viewport_size(viewport)
            assert violations(page.page) == []
            assert page.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
