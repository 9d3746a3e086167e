"""The command line: what each call prints, and with which status it ends."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import scaledot
from scaledot import cli


def _fails(capsys, *arguments: str) -> str:
    """What a wrong call says; it must end with status 2 and leave standard output empty."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_no_argument_prints_help(capsys):
    assert cli.main([]) == 0
    assert "usage: scaledot VERB" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_verb(capsys, flag):
    with pytest.raises(SystemExit) as ended:
        cli.main([flag])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {verb} " in shown for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_listed_verb_exists_and_has_help(capsys, verb):
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "--help"])
    assert ended.value.code == 0
    assert f"usage: scaledot {verb}" in capsys.readouterr().out


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"scaledot {scaledot.__version__}\n"


def test_unknown_verb_names_the_nearest_and_what_to_type(capsys):
    message = _fails(capsys, "dmo")
    assert "there is no verb 'dmo'; did you mean demo?" in message
    assert "type: scaledot --help" in message


def test_unknown_verb_far_from_any_suggests_none(capsys):
    message = _fails(capsys, "xyzzy")
    assert "there is no verb 'xyzzy'\n" in message
    assert "type: scaledot --help" in message


def test_unknown_option_names_the_nearest_and_what_to_type(capsys):
    message = _fails(capsys, "demo", "--sed", "3")
    assert "did you mean --seed?" in message
    assert "type: scaledot demo --help" in message


def test_unknown_option_before_a_verb_is_refused(capsys):
    assert "--verbose" in _fails(capsys, "--verbose", "demo")


@pytest.mark.parametrize("seed", ["x", "-1", "1.5", str(2**64)])
def test_a_seed_that_is_none_is_refused(capsys, seed):
    assert f"{seed!r} is no seed; use a whole number" in _fails(capsys, "demo", f"--seed={seed}")


def test_the_status_of_a_verb_is_the_status_of_the_command(monkeypatch):
    _install(monkeypatch, lambda args: 7)
    assert cli.main(["demo"]) == 7


def test_ctrl_c_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    _install(monkeypatch, interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "scaledot demo: stopped\n"


@pytest.mark.slow
def test_a_reader_that_leaves_early_causes_no_traceback():
    command = "import scaledot.cli, sys; sys.exit(scaledot.cli.main(['demo']))"
    with subprocess.Popen(
        [sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=600) == 1


def test_a_terminal_without_unicode_gets_a_question_mark():
    command = (
        "import sys, types, scaledot.cli as cli;"
        "verb = types.SimpleNamespace(add_arguments=id, run=lambda args: print(chr(0x221a)));"
        "cli.importlib.import_module = lambda name: verb;"
        "sys.exit(cli.main(['demo']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "?\n", "")


def test_help_imports_neither_rich_nor_the_lab():
    command = (
        "import sys, scaledot.cli; scaledot.cli.main([]);"
        "print([name for name in ('rich', 'scaledot.lab') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stderr


def test_module_runs_like_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "scaledot", "dmo"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "did you mean demo?" in done.stderr


def _install(monkeypatch, run) -> None:
    module = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: module)
