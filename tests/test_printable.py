"""Text of strangers is shown and does not act."""

import io
import logging
import shlex
import subprocess
import sys
import unicodedata

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text
from watch.hostile_stores import ESCAPE, raw_escapes

from scaledot import cli, terminal
from scaledot.printable import complain, make_visible, one_line, printable, typed

ACTING = ("Cc", "Cf", "Zl", "Zp", "Cs")


def test_every_control_and_format_character_of_unicode_becomes_one_visible_character():
    for code in range(sys.maxunicode + 1):
        one = chr(code)
        if unicodedata.category(one) in ACTING:
            assert unicodedata.category(one_line(one)) == "So", hex(code)
            assert len(one_line(one)) == 1
            assert printable(one) == (one if one in "\n\t" else one_line(one))


def test_letters_of_every_script_stay():
    text = "blocks.0 √d_k Ω 漢字 हिन्दी עברית é e\u0301 👍🏽 ☺️\u00a0…"
    assert printable(text) == text
    assert one_line(text) == text


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "-rf",
        "--html",
        "$(touch x)",
        "`x`;&|",
        "'quoted'",
        "it's\\n",
        "a\nb",
        ESCAPE,
        "é\udcff",
    ],
)
def test_a_suggested_path_is_one_word_of_a_shell_and_the_same_file(name, tmp_path):
    word = typed(name)
    assert not raw_escapes(word)
    assert not word.startswith("-")
    echoed = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert echoed.stdout.removeprefix(b"./") == name.encode("utf-8", "surrogateescape")


def test_a_plain_path_stays_as_it_is():
    assert typed("runs/a.vitals") == "runs/a.vitals"
    assert shlex.split(typed("my run.vitals")) == ["my run.vitals"]


def _screen(draw, monkeypatch) -> str:
    """What reaches a terminal that knows colours."""
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "60"), ("LINES", "20")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = terminal.Console()
    console.file = io.StringIO()
    draw(console)
    return console.file.getvalue()


def test_a_console_shows_the_text_and_keeps_its_own_colours(monkeypatch):
    def draw(console):
        table = Table()
        table.add_column(ESCAPE)
        table.add_row(ESCAPE, Text(ESCAPE, "red"))
        console.print(table, Text.assemble((ESCAPE, "bold")), ESCAPE)

    written = _screen(draw, monkeypatch)
    assert "\x1b[31m" in written  # red is rich's own
    assert "\x1b]52" not in written
    assert "\x1b]8;;" not in written
    assert not {"\x07", "\x9b", "\u202e"} & set(written)


def test_a_live_view_shows_the_text_too(monkeypatch):
    def draw(console):
        with Live(Text(f"name {ESCAPE}"), console=console, screen=True, auto_refresh=False) as live:
            live.refresh()

    written = _screen(draw, monkeypatch)
    assert "\x1b[?1049h" in written  # the screen that rich asked for
    assert "\x1b]52" not in written
    assert not {"\x07", "\x9b", "\u202e"} & set(written)


def test_what_is_replaced_keeps_its_width(monkeypatch):
    def draw(console):
        console.print(Text("\x1b" * 200), no_wrap=True, overflow="crop")

    assert _screen(draw, monkeypatch) == "␛" * 60 + "\n"


def test_a_complaint_is_as_many_lines_as_it_was_given(capsys):
    complain("scaledot top", f"there is no {ESCAPE}\nscaledot top: healthy", "type: this")
    said = capsys.readouterr().err
    assert said.count("\n") == 2
    assert not raw_escapes(said)


def test_a_wrong_argument_is_echoed_without_escapes(capsys):
    for arguments in (["top", f"--{ESCAPE}"], [ESCAPE], ["top", "--vital", f"{ESCAPE}\nx"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        said = capsys.readouterr().err
        assert said
        assert not raw_escapes(said)


def test_a_log_line_and_its_traceback_hold_no_escapes():
    stream = io.StringIO()
    logger = logging.getLogger("scaledot.test-of-printable")
    logger.propagate = False
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    make_visible(logger)
    make_visible(logger)
    logger.warning("the sink %s failed: %d", ESCAPE, 5)
    try:
        raise ValueError(ESCAPE)
    except ValueError:
        logger.exception("it failed")
    logger.warning("%s", _Wordless())
    logger.removeHandler(handler)
    assert "the sink ␛" in stream.getvalue()
    assert "Traceback" in stream.getvalue()
    assert not raw_escapes(stream.getvalue())
    assert len(logger.filters) == 1


def test_the_watch_logs_through_this_filter():
    import scaledot.watch  # noqa: F401

    record = logging.makeLogRecord({"msg": "%s", "args": (ESCAPE,)})
    assert logging.getLogger("scaledot.watch").filter(record)
    assert not raw_escapes(record.getMessage())


class _Wordless:
    """Has no words where logging asks for them, and must not end a training."""

    calls = 0

    def __str__(self) -> str:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("no words")
        return "words"
