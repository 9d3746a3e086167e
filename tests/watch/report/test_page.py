"""The page: well-formed, complete in itself, and its numbers are the store's."""

import re
import time
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from watch.report_cases import LAYERS, collapsing, write_large, write_run

from scaledot import cli
from scaledot.watch import report
from scaledot.watch.report import compare, page
from scaledot.watch.report.markup import element, joined
from scaledot.watch.store import RunReader

VOID = {"meta", "br", "img"}
MOST_BYTES = 3_000_000
MOST_SECONDS = 2.0


class Outline(HTMLParser):
    """Checks that what is opened is closed, and keeps what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.headings: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("h1", "h2", "h3"):
            self.headings.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    def of(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def sick_page(sick_demo) -> str:
    return page.page(*report.examine(sick_demo))


@pytest.fixture(scope="module")
def both_page(sick_demo, well_demo) -> str:
    return compare.compare_page(report.examine(sick_demo), report.examine(well_demo))


@pytest.fixture(params=["sick_page", "both_page"])
def any_page(request) -> str:
    return request.getfixturevalue(request.param)


def test_every_element_is_closed_and_even_an_xml_parser_reads_it(any_page):
    Outline(any_page)
    body = any_page[any_page.index("<body>") : any_page.index("</html>")]
    ElementTree.fromstring(
        body.replace("<br>", "<br/>").replace(' class="ramp">', ' class="ramp"/>')
    )


def test_the_page_fetches_nothing(any_page):
    outline = Outline(any_page)
    names = {name for name, _ in outline.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for _, attributes in outline.tags:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert attributes.get(name, "data:").startswith("data:")
    assert "url(" not in any_page
    assert "@import" not in any_page
    assert "http://" not in any_page
    assert "https://" not in any_page
    policy = [tag["content"] for tag in outline.of("meta") if "http-equiv" in tag]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_pictures_tables_and_headings_can_be_heard(any_page):
    outline = Outline(any_page)
    assert outline.headings[0] == "h1"
    assert outline.headings.count("h1") == 1
    for before, after in zip(outline.headings, outline.headings[1:], strict=False):
        assert int(after[1]) <= int(before[1]) + 1
    pictures = outline.of("svg")
    assert len(pictures) > 10
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert all("alt" in picture for picture in outline.of("img"))
    assert len(outline.of("caption")) == len(outline.of("table")) > 0
    assert outline.of("html")[0]["lang"] == "en"


def test_the_verdict_comes_first_and_the_sections_follow(sick_page):
    text = re.sub(r"<style>.*?</style>", "", sick_page, flags=re.S)
    titles = re.findall(r"<h[12]>(.*?)</h[12]>", text)
    plain = [re.sub(r"<[^>]+>", "", title) for title in titles]
    assert plain[0].startswith("✖ Sick since step")
    assert plain[1:] == [
        "What happened",
        "Every head over time",
        "The five heads to look at first",
        "Alarms",
        "Suggested remedy",
        "What was watched, and what is not known",
        "The run",
    ]


def test_the_numbers_of_the_page_are_those_of_the_store(sick_demo, sick_page):
    reader = RunReader(sick_demo)
    shown = [float(tag["value"]) for tag in Outline(sick_page).of("data")]
    facts, _ = report.examine(sick_demo)
    largest = max(float(series.values.max()) for series in reader.vital("max_logit").values())
    assert largest in shown
    assert float(reader.scalars("loss").values[-7:].mean()) == pytest.approx(facts.loss.final)
    assert facts.loss.final in shown
    for head in facts.worst:
        row = [
            reader.series(head.layer, head.head, name).values for name in ("max_logit", "passes")
        ]
        expected = [row[0][0], row[0].max(), row[0][-1], row[1][-1]]
        found = [min(shown, key=lambda value, want=want: abs(value - want)) for want in expected]
        assert found == pytest.approx(expected, abs=1e-7)


def test_alarms_are_told_in_their_own_words(sick_demo, sick_page):
    text = "".join(Outline(sick_page).text)
    facts, _ = report.examine(sick_demo)
    grave = [alarm for alarm in facts.alarms if alarm.grade == "act"]
    assert grave
    assert all(alarm.words in text for alarm in grave)


def test_names_from_a_store_are_text_and_never_markup(tmp_path):
    bad = '<img src=x onerror="alert(1)">&amp;'
    path = write_run(tmp_path / "r.vitals", layers=[(bad, 2), ("b", 1)], note=f"<b>{bad}</b>")
    outline = Outline(page.page(*report.examine(path)))
    assert all(tag.get("src", "data:").startswith("data:") for tag in outline.of("img"))
    assert not any("onerror" in attributes for _, attributes in outline.tags)
    assert bad in "".join(outline.text)


def test_markup_escapes_what_is_not_markup():
    inner = element("code", "a < b & c")
    assert inner == "<code>a &lt; b &amp; c</code>"
    assert joined(inner, None, ["<", inner]) == f"{inner}&lt;{inner}"
    assert element("p", inner, class_='x"y', title=None) == f'<p class="x&quot;y">{inner}</p>'


@pytest.mark.parametrize("steps", [[0], [0, 1], range(3)])
def test_short_runs_have_a_page(tmp_path, steps):
    Outline(page.page(*report.examine(write_run(tmp_path / "r.vitals", steps))))


def test_layers_of_unequal_heads_and_broken_numbers_have_a_page(tmp_path):
    def ill(step, layer):
        if step < 30:
            return {}
        none = {"rows": 0, "max_logit": float("-inf"), "sum_p2": 0, "nonfinite": 4}
        return none if layer == "blocks.1.attn" else {"max_logit": -3.0}

    path = write_run(tmp_path / "r.vitals", ill=ill, scalars=lambda step: {})
    facts, verdict = report.examine(path)
    assert verdict.state == "broken"
    Outline(page.page(facts, verdict))


def test_two_runs_are_compared_on_the_same_scales(
    sick_demo, well_demo, both_page, capsys, tmp_path
):
    sick, well = report.examine(sick_demo)[0], report.examine(well_demo)[0]
    rows = {row.name: row for row in compare.rows_of(sick, well)}
    assert rows["final loss"].difference == pytest.approx(well.loss.final - sick.loss.final)
    assert rows["largest logit read"].a == sick.peak.peak
    assert rows["closed heads"].b == 0
    assert compare.differing(sick, well)["highest learning rate"] == ("0.03", "0.001")
    text = "".join(Outline(both_page).text)
    assert "Sick" in text
    assert "Healthy" in text
    target = tmp_path / "two.html"
    assert cli.main(["report", str(sick_demo), str(well_demo), "--html", str(target)]) == 0
    assert "B - A" in capsys.readouterr().out
    assert target.read_text(encoding="utf-8") == both_page


def test_equal_runs_differ_in_nothing(tmp_path):
    runs = [report.examine(write_run(tmp_path / f"{name}.vitals")) for name in "ab"]
    assert compare.differing(runs[0][0], runs[1][0]) == {}
    assert all(row.difference == 0 for row in compare.rows_of(runs[0][0], runs[1][0]))
    assert "The stores name no difference" in compare.compare_page(*runs)


def test_comparing_a_run_with_an_empty_store_works(tmp_path):
    from scaledot.watch.store import Store

    Store(tmp_path / "empty.vitals").close()
    runs = [
        report.examine(write_run(tmp_path / "r.vitals")),
        report.examine(tmp_path / "empty.vitals"),
    ]
    Outline(compare.compare_page(*runs))
    assert compare.compare_data(*runs)["b"]["steps"]["readings"] == 0


def test_a_page_is_seen_whole_or_not_at_all(tmp_path, monkeypatch):
    run = report.examine(write_run(tmp_path / "r.vitals", range(4)))
    target = tmp_path / "page.html"
    target.write_text("older")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        report.write_page([run], target)
    assert target.read_text() == "older"
    assert [path.name for path in tmp_path.glob("*page*")] == ["page.html"]


@pytest.mark.nightly
def test_a_long_run_of_a_large_model_makes_a_small_page_quickly(tmp_path):
    """10,000 steps of 32 x 32 heads, every one of them read, judged anew: the slowest way."""
    path = write_large(tmp_path / "large.vitals")
    target = tmp_path / "large.html"
    warm = write_run(tmp_path / "r.vitals", range(90), ill=collapsing)
    report.examine(warm)  # loads what is loaded late, as torch is before the clock runs
    took = []
    for _ in range(3):
        began = time.process_time()  # of this process alone: the machine may be busy with others
        run = report.examine(path)
        size = report.write_page([run], target)
        took.append(time.process_time() - began)
    facts, verdict = run
    assert (facts.readings, facts.heads) == (10_000, 1024)
    assert facts.start is not None
    assert (facts.start.layer, facts.start.head) == ("model.layers.1.self_attn", 5)
    assert verdict.state != "healthy"
    assert size == target.stat().st_size < MOST_BYTES
    assert min(took) < MOST_SECONDS, took


def test_the_layers_of_the_cases_are_those_of_the_page(tmp_path):
    facts, _ = report.examine(write_run(tmp_path / "r.vitals"))
    assert [(layer.name, layer.heads) for layer in facts.history.layers] == list(LAYERS)
