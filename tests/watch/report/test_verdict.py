"""What the report says of a run, and what it says it does not know."""

import json
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from watch.report_cases import LAYERS, STARTED, collapsing, loss, reading, write_run
from watch.store_cases import refuse_rows

from scaledot import cli
from scaledot.watch import Watch, crash, report
from scaledot.watch.alarms import Alarm, of_run
from scaledot.watch.reading import Scalar
from scaledot.watch.report import facts as facts_module
from scaledot.watch.report import judged
from scaledot.watch.report.history import read_history
from scaledot.watch.report.verdict import verdict_of
from scaledot.watch.report.words import moment
from scaledot.watch.store import RunReader, Store
from scaledot.watch.top.frame import frame_of
from scaledot.watch.top.history import History


def test_a_healthy_run_is_called_healthy(tmp_path):
    facts, verdict = report.examine(write_run(tmp_path / "r.vitals"))
    assert verdict.state == "healthy"
    assert verdict.headline == "None of 5 heads needs attention: all 60 steps were read."
    assert (facts.high, facts.closed, facts.broken) == (0, 0, 0)
    assert facts.remedies == []


def test_a_collapse_is_told_with_its_head_its_step_its_growth_and_the_learning_rate(tmp_path):
    def scalars(step):
        return {"loss": loss(step), "learning_rate": step / 1000}

    path = write_run(tmp_path / "r.vitals", range(90), ill=collapsing, scalars=scalars)
    facts, verdict = report.examine(path)
    assert verdict.state == "sick"
    # 4 * 2 ** ((step + 8) / 8) passes 100 at step 30: the leading head, eight steps before all.
    logits = RunReader(path).series("blocks.1.attn", 0, "max_logit")
    passed = int(logits.steps[np.flatnonzero(logits.values > 100)[0]])
    assert facts.start is not None
    assert (facts.start.layer, facts.start.head, facts.start.left) == ("blocks.1.attn", 0, passed)
    assert facts.start.left_by == "max_logit"
    assert facts.start.doubling == pytest.approx(8, rel=0.05)
    assert facts.rate_at_start == pytest.approx(passed / 1000)
    story = " ".join(verdict.sentences)
    assert f"It began in blocks.1.attn, head 0: at step {passed}" in story
    assert "doubling every 8 steps" in story
    assert f"The learning rate was {passed / 1000:g} then." in story
    assert facts.remedies[0].name == "qk-clip:100"
    assert facts.remedies[0].command == "scaledot run --remedy qk-clip:100 SCRIPT"


def test_the_sick_demo_is_called_sick_and_the_well_one_healthy(sick_demo, well_demo):
    facts, verdict = report.examine(sick_demo)
    assert verdict.state == "sick"
    assert verdict.since_step is not None
    assert verdict.since_step < 60
    assert facts.start is not None
    assert facts.closed >= 9  # of twelve
    assert any(alarm.grade == "act" for alarm in facts.alarms)
    facts, verdict = report.examine(well_demo)
    assert verdict.state == "healthy"
    assert facts.heads == 12


def test_the_numbers_are_those_of_the_store(sick_demo):
    facts, _ = report.examine(sick_demo)
    reader = RunReader(sick_demo)
    largest = max(float(series.values.max()) for series in reader.vital("max_logit").values())
    assert facts.peak is not None
    assert facts.peak.peak == largest
    for head in facts.worst:
        for vital in ("max_logit", "passes", "entropy_ratio"):
            series = reader.series(head.layer, head.head, vital)
            assert head.last[vital] == pytest.approx(series.values[-1], abs=1e-7)
            curve = head.curves[vital]
            at = np.searchsorted(series.steps, curve.steps)
            np.testing.assert_allclose(curve.numbers, series.values[at], atol=1e-7)
    losses = reader.scalars("loss").values
    assert facts.loss.averaged == 7
    assert facts.loss.final == pytest.approx(losses[-7:].mean())
    assert facts.alarms == reader.alarms()


def test_the_worst_heads_begin_with_those_that_alarms_name(sick_demo):
    facts, _ = report.examine(sick_demo)
    assert len(facts.worst) == 5
    grave = {
        (alarm.layer, head)
        for alarm in facts.alarms
        if alarm.grade == "act"
        for head in alarm.heads
    }
    assert (facts.worst[0].layer, facts.worst[0].head) in grave


def test_rows_that_are_no_number_are_named_with_their_step(tmp_path):
    def ill(step, layer):
        broken = [0, 0, 3] if layer == "blocks.0.attn" and step >= 33 else 0
        return {"nonfinite": broken}

    facts, verdict = report.examine(write_run(tmp_path / "r.vitals", ill=ill))
    assert (verdict.state, verdict.since_step) == ("broken", 33)
    assert (facts.broken, facts.broken_since) == (1, 33)
    assert (facts.worst[0].layer, facts.worst[0].head) == ("blocks.0.attn", 2)


def test_a_loss_that_is_no_number_is_named_with_its_step(tmp_path):
    def scalars(step):
        return {"loss": math.nan if step >= 41 else loss(step)}

    facts, verdict = report.examine(write_run(tmp_path / "r.vitals", scalars=scalars))
    assert (verdict.state, verdict.since_step) == ("broken", 41)
    assert "The first loss that is no number is that of step 41." in verdict.sentences
    assert any(one.startswith("Before it was no number, the loss was") for one in verdict.sentences)
    assert not any("The loss ended" in one for one in verdict.sentences)
    assert facts.loss.final is not None
    assert math.isfinite(facts.loss.final)


def test_a_store_without_readings_says_so(tmp_path, capsys):
    path = tmp_path / "empty.vitals"
    Store(path).close()
    facts, verdict = report.examine(path)
    assert (verdict.state, facts.readings) == ("unknown", 0)
    assert "holds no reading" in verdict.headline
    assert cli.main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 0
    assert "holds no reading" in capsys.readouterr().out
    assert "holds no reading" in (tmp_path / "page.html").read_text()


def test_one_reading_is_too_little_to_judge(tmp_path, capsys):
    path = write_run(tmp_path / "one.vitals", [0])
    _, verdict = report.examine(path)
    assert (verdict.state, verdict.headline) == (
        "unknown",
        "The only step was read; a trend needs 8.",
    )
    assert verdict.name == "Too little seen"
    assert cli.main(["report", str(path), "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert "Too little seen. The only step was read" in printed


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "holds no run yet"), (b"not a database, but some text", "not a run of scaledot")],
)
def test_a_foreign_file_is_refused_in_words(tmp_path, capsys, content, words):
    path = tmp_path / "foreign.vitals"
    path.write_bytes(content)
    assert cli.main(["report", str(path)]) == 1
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""


def test_a_missing_file_and_three_runs_are_refused(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "none.vitals")]) == 1
    assert "there is no run at" in capsys.readouterr().err
    assert cli.main(["report", "a", "b", "c"]) == 2
    assert "one run, or two" in capsys.readouterr().err


def test_without_a_name_the_newest_run_here_is_reported(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "here.vitals")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report"]) == 0
    assert "here.vitals" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    path = write_run(tmp_path / "r.vitals", range(5))
    assert cli.main(["report", str(path), "--html", str(tmp_path / "no" / "page.html")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_low_coverage_few_readings_and_rare_readings_are_admitted(tmp_path):
    few = write_run(tmp_path / "few.vitals", range(9), coverage="2 of 9 attention layers watched")
    facts, verdict = report.examine(few)
    assert facts.watched == (2, 9)
    assert verdict.headline == ("2 of 9 attention layers were watched: all 9 steps were read.")
    assert (verdict.state, verdict.name) == ("unknown", "Too little seen")
    assert any("of the others nothing is known" in line for line in verdict.unknown)
    assert any("Only 9 steps were read" in line for line in verdict.unknown)
    rare = write_run(tmp_path / "rare.vitals", range(0, 3000, 50))
    assert any("Up to 50 steps lie between" in line for line in report.examine(rare)[1].unknown)


def test_a_starved_run_is_not_called_healthy(tmp_path, capsys):
    """Steps 0, 1 and 307 of 400, none of them ill."""
    path = write_run(tmp_path / "r.vitals", [0, 1, 307], alive=400)
    facts, verdict = report.examine(path)
    assert (verdict.state, verdict.name) == ("unknown", "Too little seen")
    said = "3 of 400 steps were read, at most 306 apart; --every 5 reads more."
    assert verdict.headline == said
    assert cli.main(["report", str(path)]) == 0
    assert f"Too little seen. {said}" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["report", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"]["state"] == "unknown"
    assert data["verdict"]["enough_was_read"] is False
    assert (data["steps"]["number"], data["steps"]["largest_gap"]) == (400, 306)
    assert facts.evidence.read == 3


def test_the_gap_between_readings_stands_in_the_verdict(tmp_path):
    path = write_run(tmp_path / "r.vitals", range(0, 400, 10))
    assert report.examine(path)[1].headline == (
        "None of 5 heads needs attention: 40 of 391 steps were read, at most 10 apart."
    )


def test_the_layer_that_was_read_least_decides(tmp_path):
    path = tmp_path / "r.vitals"
    with Store(path) as store:
        for step in range(60):
            names = ("a", "b") if step in (0, 1, 40) else ("a",)
            store.write([reading(step, name, 2) for name in names])
    _, verdict = report.examine(path)
    assert verdict.headline.startswith("3 of 60 steps were read, at most 39 apart")


@pytest.mark.parametrize(
    ("ill", "words"),
    [
        (lambda step: {"max_logit": 2000.0}, "The largest logit read was 2,000"),
        (
            lambda step: {"max_logit": 200.0, "sum_p2": 0.93} if step == 5 else {},
            "5 of 5 heads had closed at step 5.",
        ),
        (lambda step: {"sum_p2": 0.96} if step == 30 else {}, "5 of 5 heads had closed at step 30"),
        (
            lambda step: {"row_std": 9.0, "logit_std": 12.0} if step > 40 else {},
            "5 of 5 heads had logits that are far too large (row_std above 8) at step 41.",
        ),
    ],
    ids=["logit", "closed", "one-hot", "wide"],
)
def test_no_run_is_healthy_whose_heads_once_were_not(tmp_path, ill, words):
    """No alarm was raised: it did not grow, or did not last."""
    path = write_run(tmp_path / "r.vitals", judged=True, ill=lambda step, layer: ill(step))
    facts, verdict = report.examine(path)
    assert facts.alarms == []
    assert verdict.state == "watch"
    assert verdict.since_step is not None
    assert words in verdict.headline


def test_a_missing_division_is_never_healthy_and_half_a_scale_may_be(tmp_path):
    for scale, state in ((1.0, "watch"), (1 / 64, "healthy")):
        path = write_run(
            tmp_path / f"{scale}.vitals",
            ill=lambda step, layer: {"q_rms": 0.6, "k_rms": 0.55},
            scales={layer: [scale, 64] for layer, _ in LAYERS},
        )
        facts, verdict = report.examine(path)
        assert {(one.kind, one.grade) for one in facts.alarms} == {("scale", "note")}
        assert verdict.state == state
    path = tmp_path / "1.0.vitals"
    assert "is the division by sqrt(d_k) missing?" in report.examine(path)[1].headline


def test_the_cost_of_the_whole_run_and_of_the_steady_state_are_named(tmp_path, capsys):
    steady = {"share": 0.004, "every": 90, "startup": 0.1234}
    path = write_run(
        tmp_path / "r.vitals", scalars=lambda step: {"watch_cost": 0.05}, steady=steady
    )
    assert cli.main(["report", str(path), "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost["share_of_step_time"] == pytest.approx(0.05)
    assert (cost["steady_share"], cost["steady_every"]) == (0.004, 90)
    assert cost["startup_seconds"] == 0.1234
    assert cli.main(["report", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the watch cost 5 % of the whole run (early readings included), 0.4 %" in printed
    assert "when steady, every 90 steps, and 0.12 s once, at the start" in printed


@pytest.mark.parametrize("steady", [7, {"share": "x"}, {"share": math.inf, "every": None}])
def test_a_foreign_note_of_the_cost_is_none(tmp_path, steady):
    path = write_run(tmp_path / "r.vitals", range(9), steady=steady, alive="soon")
    facts, _ = report.examine(path)
    assert facts.steady_cost is facts.startup is None
    assert facts.evidence.steps == 9


def test_top_and_the_report_count_the_same_heads(tmp_path):
    def ill(step, layer):
        return {"logit_std": 0.02, "row_std": 0.02}

    path = write_run(tmp_path / "r.vitals", [0, 1, 307], ill=ill, alive=400)
    facts, verdict = report.examine(path)
    frame = frame_of(History(path), "passes")
    assert (facts.outside, facts.outside_heads) == (frame.ill, frame.ill_heads)
    assert facts.evidence == frame.evidence
    line = "5 of 5 heads stood outside a healthy band: row_std 5, logit_std 5."
    assert any(said.endswith(line) for said in verdict.sentences)


def test_a_single_closed_head_that_does_not_grow_is_healthy(tmp_path):
    def ill(step, layer):
        return {"sum_p2": [0.99, 0.2, 0.2]} if layer == "blocks.0.attn" else {}

    facts, verdict = report.examine(write_run(tmp_path / "r.vitals", ill=ill))
    assert (verdict.state, facts.closed) == ("healthy", 1)
    assert any("one-hot by right" in sentence for sentence in verdict.sentences)


def test_a_head_without_rows_is_not_measured_rather_than_closed(tmp_path):
    def ill(step, layer):
        if layer != "blocks.0.attn":
            return {}
        return {"rows": [64, 0, 64], "max_logit": [7, -np.inf, 7], "sum_p2": [0.2, 0, 0.2]}

    facts, verdict = report.examine(write_run(tmp_path / "r.vitals", ill=ill))
    assert (verdict.state, facts.closed) == ("healthy", 0)
    assert math.isnan(facts.history.last("passes")[1])


def test_a_continued_run_is_judged_by_what_replaced_the_repeated_steps(tmp_path):
    path = write_run(tmp_path / "r.vitals", range(60), ill=collapsing)
    write_run(path, range(20, 80))  # went back to a checkpoint before it began
    facts, _ = report.examine(path)
    assert (facts.segments, facts.last_step, facts.readings) == (2, 79, 80)
    assert (facts.high, facts.closed) == (0, 0)


def test_a_judged_run_keeps_its_own_alarms(tmp_path):
    path = write_run(tmp_path / "r.vitals", range(90), ill=collapsing, judged=True)
    facts, verdict = report.examine(path)
    assert facts.alarms == []  # the rules were asked then, and said nothing
    assert verdict.state == "watch"  # yet what was read is above the level of a warning
    unjudged = write_run(tmp_path / "u.vitals", range(90), ill=collapsing)
    facts, _ = report.examine(unjudged)
    assert facts.alarms == of_run(RunReader(unjudged))
    assert "judged now" in facts.judged


def _alarm(step, layer="blocks.1.attn", kind="collapse", **more):
    words = dict(value=1e3, threshold=1e3, rate=None, words="a head closes", advice="")
    named = {"grade": "act", "head": 0, "since": step, "heads": (0,), **words, **more}
    return Alarm(step=step, kind=kind, layer=layer, **named)


def test_a_continuation_is_not_judged_by_the_alarms_and_the_crash_that_it_replaced(tmp_path):
    path = tmp_path / "r.vitals"
    ended = [crash.Crash("exception", 60, "ValueError: bad batch", STARTED + 60)]
    write_run(path, range(60), ill=collapsing, judged=True, crash=crash.as_note(ended))
    with Store(path) as store:  # a judged run whose alarms are those of two of its steps
        store.note("judged", True)
        store.write([], [Scalar(10, "loss", 3.0)])
        store.write_alarms([_alarm(12), _alarm(45)])
    write_run(path, range(20), judged=True)
    facts, verdict = report.examine(path)
    assert facts.alarms == []
    assert RunReader(path).alarms() == []
    assert facts.crashes == []
    assert (verdict.state, facts.readings) == ("healthy", 20)
    write_run(path, range(20, 40), judged=True)  # of a run that goes on nothing is lost
    assert report.examine(path)[0].readings == 40


def test_alarms_before_the_continuation_stay(tmp_path):
    path = tmp_path / "r.vitals"
    with Store(path) as store:
        store.write_alarms([_alarm(12), _alarm(45)])
    write_run(path, range(60), judged=True)
    assert [one.step for one in RunReader(path).alarms()] == []
    with Store(path) as store:
        store.write_alarms([_alarm(12), _alarm(45)])
        store.write([], [Scalar(0, "loss", 3.0)])
    write_run(path, range(30, 60), judged=True)
    assert [one.step for one in report.examine(path)[0].alarms] == [12]


def test_what_the_watch_cost_is_not_taken_from_a_run_that_was_replaced(tmp_path):
    path = write_run(tmp_path / "r.vitals", scalars=lambda step: {"watch_cost": 0.25})
    write_run(path, range(20))
    assert report.examine(path)[0].cost is None


def test_another_model_in_the_same_store_takes_the_layers_with_it(tmp_path):
    path = write_run(tmp_path / "r.vitals", layers=[("old.attn", 4)])
    write_run(path, range(20))
    facts, _ = report.examine(path)
    assert [layer.name for layer in facts.history.layers] == [name for name, _ in LAYERS]
    assert (facts.readings, facts.last_step) == (20, 19)


def test_a_long_run_without_alarms_is_judged_by_some_of_its_readings(tmp_path, monkeypatch):
    path = write_run(tmp_path / "r.vitals", range(200), ill=collapsing)
    reader = RunReader(path)
    monkeypatch.setattr(judged, "MOST", 5 * 100)
    alarms, origin = judged.alarms_of(reader, read_history(reader))
    assert origin.startswith("judged now, from 100 of 200 readings")
    act = [alarm for alarm in alarms if alarm.grade == "act"]
    assert {alarm.layer for alarm in act} == {layer for layer, _ in LAYERS}


def test_a_thinned_run_keeps_its_peaks_and_its_last_reading(tmp_path):
    def ill(step, layer):
        return {"max_logit": 777.0 if step == 501 else 7.0, "sum_p2": step / 2000}

    path = write_run(tmp_path / "r.vitals", range(1000), ill=ill)
    whole, thin = read_history(RunReader(path)), read_history(RunReader(path), most_others=5 * 100)
    assert (whole.looked_at, thin.looked_at, thin.readings) == (1000, 100, 1000)
    assert np.nanmax(thin.spread("max_logit")) == 777
    np.testing.assert_array_equal(thin.last("passes"), whole.last("passes"))


def test_a_run_that_was_killed_and_one_that_is_written_are_told_apart(tmp_path):
    path = tmp_path / "r.vitals"
    store = Store(path)
    write_run(tmp_path / "other.vitals", range(3))
    store.flush()
    assert facts_module.read(path).state == "running"
    assert facts_module.read(path, now=time.time() + 3600).state == "silent"
    store.close()
    assert facts_module.read(path).state == "ended"


@pytest.mark.parametrize(
    ("full", "why"), [(True, "the disk was full"), (False, "the disk refused to write")]
)
def test_a_disk_that_refused_to_the_end_is_named_and_the_run_is_not_healthy(
    tmp_path, monkeypatch, full, why
):
    path = write_run(tmp_path / "r.vitals")
    store = Store(path)
    layers = dict(LAYERS)
    store.write([reading(60, layer, layers[layer]) for layer in layers])
    assert store.flush()
    refuse_rows(monkeypatch, full)
    for step in range(61, 400):
        store.write([reading(step, layer, layers[layer], max_logit=step) for layer in layers])
    assert not store.flush()
    store.close()
    facts, verdict = report.examine(path)
    assert facts.cut_off
    assert verdict.state == "unknown"
    assert verdict.headline == (
        f"{why.capitalize()} and nothing more was written; until then none of 5 heads needed "
        "attention."
    )
    assert facts.disk is not None
    since = moment(facts.disk["since"])
    assert f"Nothing was written after step 60: {why} since {since}." in verdict.sentences[0]
    assert f"678 numbers were dropped because {why}." in verdict.unknown
    assert "too slow" not in " ".join(verdict.unknown)


def test_a_terminated_run_is_not_said_to_be_written_and_top_agrees(tmp_path):
    path = tmp_path / "r.vitals"
    write_run(tmp_path / "other.vitals", range(3))
    with Store(path) as store:
        now = time.time()
        store.write([replace(reading(step, "a", 1), time=now + step) for step in range(3)])
        store.flush()
        for later, state in ((5, "running"), (20, "silent")):  # a second between readings
            seen = now + 2 + later
            assert facts_module.read(path, now=seen).state == state
            assert frame_of(History(path), "passes", now=seen).state == state
        ended = crash.Crash("signal", 3, "terminated from outside (SIGHUP)", now + 2.5)
        store.note(crash.NOTE, crash.as_note([ended]))
        store.flush()
        facts = facts_module.read(path, now=now + 4)
        assert (facts.state, frame_of(History(path), "passes", now=now + 4).state) == (
            "silent",
            "silent",
        )
        said = verdict_of(facts).sentences
        assert said[0] == "The run was terminated from outside (SIGHUP) at step 3."
        assert not any("still being written" in one or "without a word" in one for one in said)
        store.write([replace(reading(9, "a", 1), time=now + 9)])  # it had a handler and went on
        store.flush()
        facts = facts_module.read(path, now=now + 10)
        assert facts.state == "running"
        assert not any("still being written" in one for one in verdict_of(facts).sentences)


def test_the_headline_begins_where_the_story_begins(tmp_path):
    path = write_run(tmp_path / "r.vitals", range(90), ill=collapsing)
    facts, verdict = report.examine(path)
    named = [facts.start.left]
    named += [one.since for one in facts.alarms if one.layer == facts.start.layer]
    assert verdict.since_step == min(named)


@pytest.mark.parametrize("words", ["closed by peer", "reset by peer"])
def test_a_crash_by_another_rank_s_end_points_to_it(tmp_path, words):
    notes = crash.as_note([crash.Crash("exception", 57, f"RuntimeError: Connection {words}", 0.0)])
    _, verdict = report.examine(write_run(tmp_path / "r.vitals", crash=notes))
    assert "Perhaps another rank ended first" in verdict.sentences[1]


def test_the_end_is_named_with_its_step(tmp_path):
    notes = crash.as_note([crash.Crash("exception", 57, "ValueError: bad batch", STARTED + 57)])
    path = write_run(tmp_path / "r.vitals", crash=notes)
    facts, verdict = report.examine(path)
    assert [one.step for one in facts.crashes] == [57]
    assert verdict.sentences[0] == "The script ended at step 57 with ValueError: bad batch."
    assert verdict.state == "unknown"  # not healthy, whatever the heads were
    assert verdict.headline == (
        "The script ended with an error; until then none of 5 heads needed attention."
    )


def test_steps_that_were_written_again_are_told(tmp_path):
    path = write_run(tmp_path / "r.vitals")
    write_run(path, range(12))
    facts, verdict = report.examine(path)
    assert (facts.segments, facts.replaced, facts.last_step) == (2, 60, 11)
    assert any("holds 60 steps more" in said for said in verdict.unknown)
    write_run(tmp_path / "s.vitals")
    write_run(tmp_path / "s.vitals", range(60, 70))
    assert report.examine(tmp_path / "s.vitals")[0].replaced == 0


def test_a_run_stopped_by_hand_may_be_healthy(tmp_path):
    notes = crash.as_note([crash.Crash("interrupt", 57, "KeyboardInterrupt", STARTED + 57)])
    _, verdict = report.examine(write_run(tmp_path / "r.vitals", crash=notes))
    assert verdict.state == "healthy"


def test_json_says_what_the_report_says(sick_demo, capsys):
    assert cli.main(["report", str(sick_demo), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    facts, verdict = report.examine(sick_demo)
    assert data["verdict"]["state"] == verdict.state
    assert data["verdict"]["sentences"] == verdict.sentences
    assert data["start"]["layer"] == facts.start.layer
    assert data["start"]["step"] == facts.start.left
    assert [head["layer"] for head in data["worst"]] == [head.layer for head in facts.worst]
    assert data["loss"]["final"] == facts.loss.final
    assert len(data["alarms"]["list"]) == len(facts.alarms)
    assert data["remedies"][0]["name"] == "qk-clip:100"


def test_json_holds_no_number_that_json_does_not_know(tmp_path, capsys):
    path = write_run(tmp_path / "r.vitals", scalars=lambda step: {"loss": math.inf})
    assert cli.main(["report", str(path), "--json"]) == 0

    def refuse(constant):
        raise AssertionError(constant)

    data = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert data["loss"]["not_finite_at"] == 0
    assert data["loss"]["final"] is None


def test_the_terminal_has_the_verdict_first_and_the_command_to_type(sick_demo, capsys):
    assert cli.main(["report", str(sick_demo)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].startswith("✖ Sick since step")
    assert "--remedy qk-clip:100" in printed
    assert "--html report.html" in printed


def test_what_the_watch_wrote_is_reported_without_a_change(tmp_path):
    import torch
    from torch.nn import functional as F

    path = tmp_path / "w.vitals"
    weight = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.125)
    with Watch(every=1, store=path):
        for _ in range(8):
            query = torch.randn(1, 2, 5, 8) @ weight
            F.scaled_dot_product_attention(query, query, query).mean().backward()
            optimizer.step()
    facts, verdict = report.examine(path)
    assert (facts.readings, facts.heads) == (8, 2)
    assert facts.rate_at(3) == 0.125
    assert facts.coverage
    assert verdict.state in ("healthy", "watch")
