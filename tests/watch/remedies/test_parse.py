"""The names of the remedies."""

import pytest

from scaledot.watch.remedies import REMEDIES, Remedy, RemedyError, parse


def test_name_and_number():
    assert parse("qk-clip:30") == Remedy("qk-clip", 30.0)
    assert parse(" softcap:2.5 ") == Remedy("softcap", 2.5)


@pytest.mark.parametrize("name", REMEDIES)
def test_every_name_reads_back_what_it_prints(name):
    assert parse(str(parse(name))) == parse(name)


def test_the_published_numbers_are_the_defaults():
    assert parse("qk-clip").value == 100.0
    assert parse("softcap").value == 50.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clip:100", "there is no remedy 'clip'; use one of qk-clip"),
        ("qk-clip:much", "'much' is no number; say for example qk-clip:100"),
        ("qk-clip:0", "must be a number above 0"),
        ("qk-clip:nan", "must be a number above 0"),
        ("log-n:1", "must be a number above 1"),
        ("sigma-reparam:3", "takes no number; say sigma-reparam"),
        ("", "there is no remedy ''"),
    ],
)
def test_mistakes_are_named(text, words):
    with pytest.raises(RemedyError, match=words):
        parse(text)
