"""What looks like a secret is hidden before it is kept."""

import sys

import pytest

from scaledot.watch import watch
from scaledot.watch.reading import RunAttributes
from scaledot.watch.redact import redact, redact_text

SECRET = "s3cr3t-of-mine"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", f"--token={SECRET}"],
        ["train.py", "--token", SECRET],
        ["train.py", "--hf-token", SECRET, "--lr", "3e-4"],
        ["train.py", "--password", SECRET],
        ["train.py", "-password", SECRET],
        ["train.py", "--password", f"-{SECRET}"],
        ["train.py", "--api-key", SECRET],
        ["train.py", "--apiKey", SECRET],
        ["train.py", "--api_key", SECRET],
        ["train.py", f"WANDB_API_KEY={SECRET}"],
        ["train.py", f"wandb.api_key={SECRET}", "+trainer.steps=5"],
        ["train.py", f"+hub.auth_token='{SECRET}'"],
        ["train.py", f"--data=https://me:{SECRET}@data.example/set"],
        ["train.py", f"https://{SECRET}@data.example/set"],
        ["train.py", f"https://data.example/set?x=1&token={SECRET}"],
        ["train.py", "--header", f"Authorization: Bearer {SECRET}"],
        ["train.py", f'{{"hub": {{"token": "{SECRET}"}}}}'],
        ["train.py", f"--aws-secret-access-key={SECRET}"],
    ],
)
def test_a_secret_does_not_stay_in_a_command(arguments):
    kept = redact(arguments)
    assert len(kept) == len(arguments)
    assert kept[0] == "train.py"
    assert SECRET not in " ".join(kept)
    assert "***" in " ".join(kept)


@pytest.mark.parametrize(
    "key",
    ["hf_" + "aB3" * 11, "ghp_" + "aB3" * 12, "sk-proj-" + "aB3" * 12, "AKIA" + "A1B2" * 4],
)
def test_a_key_of_a_known_form_is_hidden_wherever_it_stands(key):
    assert key not in redact_text(f"401 for {key} at the hub")


@pytest.mark.parametrize(
    "argument",
    [
        "--max-tokens=512",
        "--max_token=512",
        "--tokens=1e9",
        "--tokenizer=gpt2",
        "--pad-token=<pad>",
        "--key=value",
        "--author=me",
        "--num-heads=8",
        "https://data.example/set",
        "model@v2",
        "--passes=2",
        "C:\\data\\train",
        "--monkey=banana",
    ],
)
def test_what_is_no_secret_stays(argument):
    assert redact(["train.py", argument, "next"]) == ("train.py", argument, "next")


def test_an_option_without_a_value_hides_no_other_option():
    assert redact(["a.py", "--use-auth-token", "--lr", "3e-4"])[2:] == ("--lr", "3e-4")


def test_the_attributes_of_a_run_and_its_alarms_name_no_secret(monkeypatch):
    arguments = ["train.py", "--token", SECRET, f"--url=https://me:{SECRET}@host/x"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "orig_argv", ["python", *arguments])
    assert SECRET not in " ".join(RunAttributes.here().command)
    assert SECRET not in " ".join(watch._command())
    assert watch._command()[:2] == ["train.py", "--token"]
