"""`scaledot explain`: every lesson in both languages, at any width, with the library's numbers."""

import functools
import io
import json
import math
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from scaledot import cli
from scaledot.lab import catalogue, experiments, explain, flashcards
from scaledot.lab.experiments import LESSONS, as_json
from scaledot.lab.explain import charts, race, telling, voice
from scaledot.lab.explain.voice import Voice

LANGUAGES = catalogue.languages()
SHORT = {"race": {"steps": 50}}  # a race of the default length is for people


@functools.cache
def measured(name: str):
    return LESSONS[name].run(**arguments(name))


def arguments(name: str) -> dict:
    return LESSONS[name].arguments(SHORT.get(name, {}))


def told(name: str, lang: str, width: int, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(file=stream, width=width, markup=False, emoji=False, highlight=False)
    words = Voice.of(lang, console)
    parts = telling.whole(words, LESSONS[name], arguments(name), measured(name))
    explain._print(console, parts)
    stream.seek(0)
    return stream.read()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_is_told_whole_and_fits(name, lang, width):
    text = told(name, lang, width)
    result, lesson = measured(name), LESSONS[name]
    code = lesson.python(arguments(name)).strip()
    assert code in "\n".join(line.rstrip() for line in text.splitlines())  # to be copied: unbroken
    prose = [
        line for line in text.splitlines() if line.strip() not in map(str.strip, code.split("\n"))
    ]
    assert max(map(len, prose)) <= min(width, telling.WIDEST)
    assert "…" not in text
    assert "\x1b" not in text
    flat = _flat(text)
    for key in (f"{name}.title", f"{name}.question", *catalogue.paragraphs(lang, name)):
        said = _flat(catalogue.text(lang, key, **as_json(result)))
        assert said in flat, key
    agreeing = sum(claim.agrees for claim in result.claims)
    assert flat.count(catalogue.text(lang, "explain.yes")) == agreeing
    assert flat.count(catalogue.text(lang, "explain.no")) == len(result.claims) - agreeing


def test_in_a_narrow_terminal_a_row_still_has_its_rule():
    lines = [line.split() for line in told("divisors", "en", 46).splitlines()]
    for rule in ("none", "√d_k", "d_k", "√d_model", "cosine"):
        assert any(line and line[0] == rule and line[-1].endswith("%") for line in lines), rule


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", LESSONS)
def test_without_unicode_every_sign_is_spelled(name, lang):
    text = told(name, lang, 80, encoding="ascii")
    assert text.isascii()
    assert text.count("?") == told(name, lang, 80).count("?")  # questions; no sign became one


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_can_be_told_wherever_its_controls_are(name):
    """Each control at every choice or at both ends, the others as they are."""
    lesson = LESSONS[name]
    for control in lesson.controls:
        for value in _everywhere(control):
            moved = lesson.arguments({**SHORT.get(name, {}), control.name: value})
            try:
                result = lesson.run(**moved)
            except ValueError:
                assert name in ("heads", "vectors")  # where two arguments must fit each other
                continue
            console = Console(file=io.StringIO(), width=80, markup=False)
            explain._print(console, telling.whole(Voice("hi"), lesson, moved, result))


def _everywhere(control) -> list:
    match control.kind:
        case "choice":
            return list(control.values)
        case "steps":
            return [control.values[0], control.values[-1]]
        case "range":
            return [control.low, control.high]
        case "toggle":
            return [False, True]
        case "text":
            return ["one", "a b c d e f g h i j k l"]
    return [[0.0], [-5.0, 1000.0, 3.5], [0.25] * control.length]


def test_the_text_follows_the_arguments(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["explain", "variance", "--d-k", "512", "--seed", "3"]) == 0
    result = experiments.variance(d_k=512, seed=3)
    assert f"standard deviation is {result.sd:.2f}" in _flat(capsys.readouterr().out)


@pytest.mark.parametrize("name", LESSONS)
def test_json_is_the_experiment(name, capsys):
    options = [
        word for pair in SHORT.get(name, {}).items() for word in (f"--{pair[0]}", str(pair[1]))
    ]
    assert cli.main(["explain", name, "--json", *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["lesson"] == name
    assert data["arguments"] == as_json(arguments(name))
    assert data["result"] == json.loads(json.dumps(as_json(measured(name))))
    assert data["python"] == LESSONS[name].python(arguments(name))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["saturation", "--scores", "7", "3", "-1"], {"scores": [7, 3, -1], "divisor": 1}),
        (["saturation", "--scores=-7,3", "--divisor", "8"], {"scores": [-7, 3], "divisor": 8}),
        (["layernorm", "--no-layernorm", "--qk-norm"], {"layernorm": False, "qk_norm": True}),
        (
            ["flow", "--sentence", "two words", "--rule", "dk"],
            {"sentence": "two words", "rule": "dk"},
        ),
        (["--json", "variance", "--sigma-q", "0.5"], {"sigma_q": 0.5, "d_k": 64}),
    ],
)
def test_options_are_the_controls(typed, expected, capsys):
    assert cli.main(["explain", *typed, "--json"]) == 0
    given = json.loads(capsys.readouterr().out)["arguments"]
    assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["varance"], "there is no lesson 'varance'; did you mean variance?"),
        (["xyzzy"], "there is no lesson 'xyzzy'; there are flow, vectors"),
        (["variance", "--d-kk", "64"], "did you mean --d-k?"),
        (["variance", "--d-k", "65"], "d_k must be one of 1, 2, 4"),
        (["variance", "--d-k", "wide"], "'wide' is no number"),
        (["flow", "--rule", "sqrt"], "rule must be one of none, sqrt_dk"),
        (["vectors", "--q", "1", "2", "3"], "q has 3 numbers but k has 2"),
        (["variance", "--lang", "fr"], "invalid choice: 'fr'"),
    ],
)
def test_a_wrong_call_says_what_to_type(typed, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain", *typed])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert message in printed.err
    assert "--help" in printed.err


@pytest.mark.parametrize("name", LESSONS)
def test_help_of_a_lesson_lists_its_controls(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain", name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for control in LESSONS[name].controls:
        assert f"--{control.name.replace('_', '-')}" in shown
        label = catalogue.text("en", f"{name}.control.{control.name}")
        assert voice.spelled(label) in _flat(shown)
    assert shown.isascii()  # argparse prints it before the terminal is known


@pytest.mark.parametrize("name", LESSONS)
def test_what_a_lesson_says_to_type_can_be_typed(name, capsys):
    """Its example of another value, and the lesson after it."""
    commands = re.findall(r"scaledot explain .*", told(name, "en", 120).split("try:")[-1])
    assert [command.split()[2] for command in commands] == [name, name, _after(name)]
    example = commands[0].strip().replace('"your own words"', "words").split()[1:]
    assert cli.main([*example, "--json", *(["--steps", "50"] if name == "race" else [])]) == 0
    assert json.loads(capsys.readouterr().out)["arguments"] != as_json(arguments(name))


@pytest.mark.parametrize("width", ["60", "120"])
@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_list_has_every_lesson_with_its_question(lang, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    assert cli.main(["explain", "--lang", lang]) == 0
    shown = capsys.readouterr().out
    places = [re.search(rf"^{name} ", shown, re.MULTILINE).start() for name in LESSONS]
    assert places == sorted(places)
    assert max(map(len, shown.splitlines())) <= int(width)
    for language in {"en", lang}:  # Hinglish has the English question below
        for name in LESSONS:
            assert catalogue.text(language, f"{name}.question") in _flat(shown)


def test_the_list_as_data(capsys):
    assert cli.main(["explain", "--json"]) == 0
    lessons = json.loads(capsys.readouterr().out)["lessons"]
    assert [lesson["name"] for lesson in lessons] == list(LESSONS)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_flashcards_are_shown_front_and_back(lang, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["explain", "flashcards", "--lang", lang]) == 0
    shown = _flat(capsys.readouterr().out)
    for card in flashcards.cards(lang):
        assert f"{_flat(card.front)} {_flat(card.back)}" in shown


def test_flashcards_as_data(capsys):
    assert cli.main(["explain", "flashcards", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["flashcards"]
    assert [card["front"] for card in shown] == [card.front for card in flashcards.cards("en")]


def test_anki_writes_the_file_or_says_why_not(tmp_path, capsys):
    path = tmp_path / "cards.txt"
    assert cli.main(["explain", "flashcards", "--lang", "hi", "--anki", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == flashcards.anki("hi")
    assert str(path) in capsys.readouterr().out
    assert cli.main(["explain", "flashcards", "--anki", str(tmp_path / "no" / "x")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_a_race_plays_in_a_terminal():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, markup=False)
    race.play(console, Voice.of("en", console), arguments("race"))
    text = shown.getvalue()
    assert "step 50 of 50" in text
    last = text.split("step 50 of 50")[-1]
    assert f"{measured('race').curves[-1].runners[1].loss:.3f}" in last
    assert re.search("[▁▂▃▄▅▆▇█]{20}", last)


def test_a_race_that_broke_has_no_shares_and_proves_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    options = ["--rules", "none", "--d-k", "16", "--rate", "3", "--steps", "50"]
    assert cli.main(["explain", "race", *options]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^none +never +nan +- +- +- *$", shown, re.MULTILINE)
    assert "This race cannot tell" in shown
    assert "nan%" not in shown


@pytest.mark.nightly
@pytest.mark.slow
def test_a_pipe_without_unicode_gets_plain_text():
    done = subprocess.run(
        [sys.executable, "-m", "scaledot", "explain", "divisors", "--lang", "hi"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "60", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "sqrt(d_k)" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("unicode", "plain"),
    [
        ("√d_k", "sqrt(d_k)"),
        ("√(d - 1)", "sqrt(d - 1)"),
        ("\u03c3_q² \u03c3_k²", "sigma_q^2 sigma_k^2"),
        ("“Q Kᵀ” ≤ ±1", '"Q K^T" <= +-1'),
        ("∂p/∂z = Σ p", "dp/dz = sum p"),
        ("phones 手机", "phones ??"),
    ],
)
def test_signs_are_spelled(unicode, plain):
    assert voice.spelled(unicode) == plain


def test_every_sign_of_the_catalogue_has_a_spelling():
    ours = {k: v for lang in LANGUAGES for k, v in catalogue.load(lang).items() if "page." not in k}
    for key, text in ours.items():
        assert voice.spelled(text).count("?") == text.count("?"), key


def test_a_histogram_is_highest_where_most_are():
    lines = _drawn(charts.Histogram((0.0, 1.0, 2.0, 3.0), (1, 4, 2), "title", height=4))
    assert lines[0] == "title"
    columns = ["".join(line[index : index + 1] for line in lines[1:5]) for index in (2, 6, 10)]
    assert [column.count("█") for column in columns] == [1, 4, 2]
    assert lines[-1].split() == ["0", "1", "2", "3"]


def test_a_histogram_wider_than_the_terminal_adds_neighbours_up():
    counts = tuple(range(200))
    lines = _drawn(charts.Histogram(tuple(range(201)), counts, "title"), width=60)
    assert max(map(len, lines)) <= 60
    assert lines[-1].split()[0] == "0"
    assert lines[-1].split()[-1] == "200"


def test_a_curve_on_its_theory_rises_and_marks_where_we_are():
    places = (1, 2, 4, 8)
    roots = [math.sqrt(place) for place in places]
    lines = _drawn(charts.Curve(places, roots, roots, "title", here=4))
    heights = {
        line.index(mark): height
        for height, line in enumerate(lines)
        for mark in "●◉"
        if mark in line
    }
    assert [heights[place] for place in sorted(heights)] == sorted(heights.values(), reverse=True)
    assert sum("◉" in line for line in lines) == 1


def test_a_heat_map_is_darkest_at_the_largest_number():
    lines = _drawn(charts.HeatMap(((0.1, 0.9), (0.5, 0.5)), ("a", "b"), "title"))
    assert re.search(r"a +░░0\.100 +██0\.900", lines[2])
    narrow = _drawn(charts.HeatMap(((1 / 12,) * 12,) * 12, ("token",) * 12, "title"), width=60)
    assert max(map(len, narrow)) <= 60


@pytest.mark.parametrize(
    ("numbers", "line"),
    [([4, 2, 0], "█▅▁"), ([1.0] * 50, "█" * 10), ([math.nan, 1.0], " █"), ([0.0, 0.0], "▁▁")],
)
def test_a_sparkline_goes_from_zero_to_the_largest(numbers, line):
    assert charts.sparkline(numbers, 10) == line


def _drawn(chart, width: int = 80) -> list[str]:
    shown = io.StringIO()
    Console(file=shown, width=width).print(chart)
    return [line.rstrip() for line in shown.getvalue().splitlines()]


def _after(name: str) -> str:
    names = [*LESSONS, "flashcards"]
    return names[names.index(name) + 1]


def _flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("lesson", "name", "asked", "taken"),
    [("variance", "samples", 2000, 1024), ("gradients", "rows", 3000, 640)],
)
def test_the_heading_names_what_was_taken(lesson, name, asked, taken, capsys):
    """Wide vectors come in fewer than asked for."""
    assert cli.main(["explain", lesson, "--d-k", "512", f"--{name}", str(asked)]) == 0
    heading = capsys.readouterr().out.replace(",", "").split("ython")[0]
    assert f"{name}={taken}" in heading
    assert f"{name}={asked}" not in heading
