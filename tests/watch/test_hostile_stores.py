"""A stranger's store: every viewer ends soon, takes little memory, and shows text as text.

All cases of `hostile_stores` take some minutes: python tests/watch/hostile_stores.py
"""

import html
import json
import re
import sys
from pathlib import Path

import pytest
from watch.hostile_stores import COMMAND, HOSTILE, MEGABYTES, open_all, raw_escapes, view

SECONDS = 5.0  # of computing: what else the machine does is no fault of a viewer
SHORT = (  # one of each kind
    "view_chunk_3",
    "trigger",
    "content_[[[[[[[[[[[[[[[[",
    "attribute_crash_38",
    "attributes_of_escapes",
    "segments_of_many_streams",
    "segments_two_thousand",
    "chunks_a_hundred_thousand",
    "alarms_long",
    "alarm_of_another_kind",
    "part_zip_bomb",
    "steps_at_the_ends",
    "vitals_infinite",
    "losses_at_the_ends",
    "layers_a_thousand",
    "layers_nine_thousand_wide",
    "heads_thirty_thousand",
    "repeated_many_layers",
    "names_of_escapes",
    "a_pipe",
    "pages_of_noise",
)

EVERY_TIME = ("view_chunk_3", "trigger", "part_zip_bomb", "a_pipe")
NIGHTLY = pytest.mark.nightly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures with fork and wait4")


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize(
    "store", [name if name in EVERY_TIME else pytest.param(name, marks=NIGHTLY) for name in SHORT]
)
def test_viewers_end_soon_with_little_memory_and_in_words(store):
    for one in open_all([store]):
        assert not one.trouble, one.output[-2000:]
        assert one.seconds < SECONDS, one
        assert one.megabytes < MEGABYTES[one.viewer], one
        assert one.output, one


@pytest.fixture
def store(tmp_path):
    """Makes the store of a case."""

    def make(name: str) -> Path:
        path = tmp_path / "run.vitals"
        HOSTILE[name](path)
        return path

    return make


@pytest.mark.parametrize("case", ["names_of_escapes", "names_of_lines", "names_of_markup"])
def test_names_of_a_store_act_in_no_channel(store, case, tmp_path, capsys):
    path, page = store(case), tmp_path / "page.html"
    from scaledot import cli

    for arguments in (
        ["top", "--once", str(path)],
        ["top", "--json", str(path)],
        ["report", str(path), "--html", str(page)],
        ["report", str(path), str(path), "--html", str(tmp_path / "two.html")],
        ["report", "--json", str(path)],
    ):
        assert cli.main(arguments) == 0
        said = capsys.readouterr()
        assert not raw_escapes(said.out + said.err), arguments
        assert f"\n  {COMMAND}" not in said.out  # no line of the store's making
    view("monitor", path, page)
    assert not raw_escapes(capsys.readouterr().out)
    for written in (page, tmp_path / "two.html"):
        text = written.read_text(encoding="utf-8")
        assert not raw_escapes(text)
        assert "<img src=x" not in text
        assert text.count("<script") == 0


def test_no_word_of_a_store_is_in_a_command(store, tmp_path, capsys):
    from scaledot import cli

    path, page = store("names_of_commands"), tmp_path / "page.html"
    assert cli.main(["report", str(path), "--html", str(page)]) == 0
    said = capsys.readouterr().out
    advised = said[said.index("To try next:") :]
    assert "scaledot run --remedy qk-clip:100 SCRIPT" in advised
    assert COMMAND not in advised
    commands = re.findall("<pre>(.*?)</pre>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert commands
    assert not [one for one in commands if "curl" in html.unescape(one)]
    for verb in ("top", "report"):
        assert cli.main([verb, "--json", str(path)]) == 0
        found = json.loads(capsys.readouterr().out)
        alarms = found["alarms"] if verb == "top" else found["alarms"]["list"]
        assert {one["kind"] for one in alarms} >= {"collapse", "fading", COMMAND}
        assert not [one for one in alarms if COMMAND in one["advice"]]
    assert found["remedies"]
    assert COMMAND not in json.dumps(found["remedies"])
