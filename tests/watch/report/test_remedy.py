"""Which remedy the report suggests, and the evidence it gives for it."""

import pytest

from scaledot.watch.alarms import Alarm
from scaledot.watch.report import evidence
from scaledot.watch.report.remedy import remedies_for

ADVICE = "scaledot run --remedy qk-clip:100 train.py"


def _alarm(kind: str, grade: str = "warn", advice: str = ADVICE, step: int = 50) -> Alarm:
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


def test_a_grave_alarm_brings_the_remedy_that_it_advises(measured):
    measured()
    found = remedies_for([_alarm("collapse")])
    assert [one.name for one in found] == ["qk-clip:100"]
    assert found[0].command == ADVICE
    assert "qk-clip:100" in found[0].code
    assert found[0].promise
    assert found[0].evidence == "No measurement of qk-clip:100 comes with this installation."


def test_the_gravest_alarm_is_served_first(measured):
    measured()
    other = "scaledot run --remedy softcap:50 train.py"
    found = remedies_for([_alarm("growth"), _alarm("collapse", "act", other, step=70)])
    assert [one.name for one in found] == ["softcap:50", "qk-clip:100"]


@pytest.mark.parametrize(
    ("kind", "grade"), [("growth", "note"), ("sink", "note"), ("broken", "act")]
)
def test_notes_sinks_and_broken_rows_bring_none(kind, grade):
    assert remedies_for([_alarm(kind, grade)]) == []


def test_a_remedy_of_another_version_is_left_out(measured):
    measured()
    found = remedies_for([_alarm("collapse", advice="scaledot run --remedy moon-dust:7 train.py")])
    assert [one.name for one in found] == ["qk-clip:100"]  # what is proposed all the same


def test_evidence_compares_the_same_seeds(measured):
    measured("none,0,2.5", "none,1,2.7", "none,2,9", "qk-clip:100,0,2.0", "qk-clip:100,1,1.9")
    said = evidence.evidence_for("qk-clip:100")
    assert "2 seeds: final loss 1.95 instead of 2.60" in said
    assert "gained 0.65 on average and 0.50 at least" in said
    assert "No measurement of softcap:50" in evidence.evidence_for("softcap:50")
