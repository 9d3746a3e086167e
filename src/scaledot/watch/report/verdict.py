"""The verdict: one word, one line, and the sentences a colleague would write the morning after."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from scaledot.watch.alarms.alarm import Alarm, misses_division
from scaledot.watch.alarms.rules import RULES
from scaledot.watch.report.facts import Facts, edge
from scaledot.watch.report.remedy import CLOSING
from scaledot.watch.report.words import count, listed, moment, number, sentence, where
from scaledot.watch.top import health
from scaledot.watch.top.words import brief

State = Literal["broken", "sick", "watch", "healthy", "unknown"]

HIGH = RULES["growth.warn"].threshold
FEW = 20  # readings up to which the report says that they are few
KINDS = {  # a headline where the last reading shows no closed head
    "collapse": "Heads closed for a while in",
    "growth": "Logits grew for a while in",
    "start": "Logits were far too large from the start in",
    "saturation": "Heads were saturated for a while in",
    "fading": "Attention looks at everything alike in",
}
# What a rank says of a job whose other rank has gone: the consequence, not the cause.
PEER = re.compile(r"closed by peer|reset by peer|[Cc]onnection refused|NCCL.*remote process exited")
NAMES: dict[State, str] = {
    "broken": "Broken",
    "sick": "Sick",
    "watch": "Worth a look",
    "healthy": "Healthy",
    "unknown": "Not known",
}
TOO_LITTLE = "Too little seen"


@dataclass(frozen=True)
class Verdict:
    state: State
    headline: str
    sentences: list[str]  # what happened
    unknown: list[str]  # what the readings cannot tell
    since_step: int | None = None  # of what is not healthy
    too_little: bool = False  # not known, because too little was read

    @property
    def name(self) -> str:
        return TOO_LITTLE if self.too_little else NAMES[self.state]

    @property
    def since(self) -> str:
        """Goes behind the name."""
        return "" if self.since_step is None else f" since step {self.since_step:,}"


def verdict_of(facts: Facts) -> Verdict:
    state = _state(facts)
    sentences = [*_ending(facts), *map(_at_work, facts.at_work), *_story(facts, state)]
    headline, since = _headline(facts, state), _since(facts, state)
    too_little = state == "unknown" and facts.readings > 0 and not facts.enough
    return Verdict(state, headline, sentences, not_known(facts), since, too_little)


def by_grade(alarms: list[Alarm], grade: str) -> list[Alarm]:
    return [alarm for alarm in alarms if alarm.grade == grade]


def not_known(facts: Facts) -> list[str]:
    """What a reader should not read into the numbers."""
    said = []
    if facts.watched is not None and facts.watched[0] < facts.watched[1]:
        seen, total = facts.watched
        said.append(
            f"{seen} of {total} attention layers were watched; of the others nothing is known."
        )
    elif facts.readings and facts.watched is None:
        said.append("The store does not say which layers were watched.")
    if 0 < facts.readings < FEW and facts.evidence.enough:
        more = "" if facts.evidence.every is None else " `scaledot run --every 1` reads each."
        said.append(f"Only {facts.readings} steps were read: few for a trend.{more}")
    elif facts.evidence.gap > 1:
        said.append(
            f"Up to {facts.evidence.gap:,} steps lie between two readings: what came and went in "
            "between was not seen."
        )
    if facts.history.looked_at < facts.readings:
        said.append(
            f"Except for the largest logit, this report looks at {facts.history.looked_at:,} of "
            f"{facts.readings:,} readings, evenly chosen."
        )
    if facts.replaced:
        said.append(
            f"The file holds {count(facts.replaced, 'step')} more, of an earlier start with the "
            "same numbers; they are left out. A new --store keeps two runs apart."
        )
    if facts.dropped:
        verb = "was" if facts.dropped == 1 else "were"
        said.append(f"{count(facts.dropped, 'number')} {verb} dropped because {_disk(facts)}.")
    if facts.readings and not len(facts.loss.steps):
        said.append("The store holds no loss, so nothing is said about it.")
    if facts.readings and facts.cost is None:
        said.append("The store does not say what the watch cost: that takes some steps to measure.")
    if facts.history.phase == "eval":
        said.append("Only evaluation was read: a verdict on training cannot be given.")
    return said


def _state(facts: Facts) -> State:
    if facts.broken_since is not None or facts.loss.not_finite is not None:
        return "broken"
    if by_grade(facts.alarms, "act"):
        return "sick"
    if by_grade(facts.alarms, "warn") or facts.above or _scale(facts) is not None:
        return "watch"
    if not facts.enough or facts.cut_off or _failed(facts):
        return "unknown"
    return "healthy"


def _scale(facts: Facts) -> Alarm | None:
    """The note that the division by sqrt(d_k) is missing: to be looked at, whatever came of it."""
    return next(filter(misses_division, facts.alarms), None)


def _failed(facts: Facts) -> bool:
    """Whether the script itself ended with an error; what it was, the story tells."""
    return any(crash.kind == "exception" for crash in facts.crashes)


def _disk(facts: Facts) -> str:
    """Why numbers are lost."""
    if facts.disk is None:
        return "the disk refused to write" if facts.cut_off else "the disk was too slow"
    return "the disk was full" if facts.disk["full"] else "the disk refused to write"


def _headline(facts: Facts, state: State) -> str:
    if state == "unknown":
        if not facts.readings:
            return "The store holds no reading, so there is nothing to judge."
        if facts.history.phase != "train":
            return "Only evaluation was read."
        if facts.enough:
            end = "The script ended with an error"
            if facts.cut_off:
                end = f"{_disk(facts).capitalize()} and nothing more was written"
            return f"{end}; until then none of {count(facts.heads, 'head')} needed attention."
        if facts.evidence.enough and facts.watched is not None:
            seen, layers = facts.watched
            return f"{seen} of {layers} attention layers were watched: {facts.evidence}."
        return f"{facts.evidence.advice[0].upper()}{facts.evidence.advice[1:]}."
    if state == "broken":
        return _broken_headline(facts)
    if state == "healthy":
        return f"None of {count(facts.heads, 'head')} needs attention: {facts.evidence}."
    return _condition(facts)


def _since(facts: Facts, state: State) -> int | None:
    if state == "broken":
        steps = (facts.broken_since, facts.loss.not_finite)
        return min(step for step in steps if step is not None)
    if state in ("sick", "watch"):
        return _begun(facts)
    return None


def _begun(facts: Facts) -> int:
    """The first step that the story or an alarm of the same layer names."""
    steps = [alarm.since for alarm in _grave(facts)]
    if not steps:  # nothing was raised, yet what was read is not healthy
        steps = [one.step for one in (facts.most, _scale(facts)) if one is not None]
        high = facts.peak is not None and facts.peak.peak > HIGH
        steps += [facts.peak.peak_step] if high and facts.peak is not None else []
    head = facts.start
    if head is not None and head.left is not None:
        steps.append(head.left)
        steps += [
            alarm.since
            for alarm in facts.alarms
            if alarm.layer == head.layer and alarm.kind in CLOSING and alarm.grade != "note"
        ]
    return min(steps)


def _broken_headline(facts: Facts) -> str:
    if facts.broken_since is None:
        return "The loss is no number."
    if facts.loss.not_finite is None:
        return "Attention holds NaN or infinity."
    return "Attention holds NaN or infinity, and the loss is no number."


def _condition(facts: Facts) -> str:
    """How it stands at the end, in the words of the gravest alarm's kind."""
    grave = _grave(facts)
    if not grave:
        return _above(facts)
    kind = min(grave, key=lambda alarm: alarm.step).kind
    closed = kind != "growth" and facts.closed > 0
    concerned = facts.closed if closed else facts.high
    if kind == "start" and 2 * facts.closed >= facts.heads:
        kind = "collapse"
    if kind in CLOSING and concerned:
        verb = "has" if concerned == 1 else "have"
        what = "closed" if closed else f"logits above {edge('max_logit'):g}"
        return f"{concerned:,} of {count(facts.heads, 'head')} {verb} {what}."
    layers = list(dict.fromkeys(alarm.layer for alarm in grave if alarm.kind == kind))
    found = KINDS.get(kind, f"Alarms of the kind {kind!r} in")
    return f"{found} {listed([layer or 'the model' for layer in layers], 2)}."


def _above(facts: Facts) -> str:
    """No alarm was raised; what was read is above the level of one all the same."""
    heads = count(facts.heads, "head")
    if facts.most is not None:
        had = round(facts.most.share * facts.heads)
        return f"{had:,} of {heads} had {facts.most.words} at step {facts.most.step:,}."
    if facts.peak is not None and facts.peak.peak > HIGH:
        return (
            f"The largest logit read was {number(facts.peak.peak)}; logits above {HIGH:,.0f} have "
            "ended trainings."
        )
    note = _scale(facts)
    assert note is not None
    return sentence(brief(note.words))


def _grave(facts: Facts) -> list[Alarm]:
    return by_grade(facts.alarms, "act") or by_grade(facts.alarms, "warn")


def _ending(facts: Facts) -> list[str]:
    """How the run ended, where that is worth a sentence."""
    said = []
    for crash in facts.crashes:
        at = f"at step {crash.step:,}"
        if crash.kind == "loss":
            said.append(f"The loss was no number {at}.")
        elif crash.kind == "interrupt":
            said.append(f"The run was stopped by hand {at}.")
        elif crash.kind == "signal":
            said.append(f"The run was terminated from outside ({crash.signal}) {at}.")
        else:
            said.append(f"The script ended {at} with {sentence(crash.words)}")
            if PEER.search(crash.words):
                said.append("Perhaps another rank ended first; then its traceback is in the log.")
    if facts.cut_off:
        after = "" if facts.last_step is None else f" after step {facts.last_step:,}"
        since = "" if facts.disk is None else f" since {moment(facts.disk['since'])}"
        said.append(f"Nothing was written{after}: {_disk(facts)}{since}. What came then is lost.")
    ended = any(crash.kind != "loss" for crash in facts.crashes)
    if facts.state == "silent" and not ended:
        after = "" if facts.last_step is None else f" after step {facts.last_step:,}"
        said.append(
            f"The run stopped writing{after} without a word: killed, out of memory, or the "
            "machine went down."
        )
    elif facts.state == "running" and not ended:
        said.append("The run is still being written; this is how it stands now.")
    return said


def _at_work(note: dict[str, Any]) -> str:
    """What a reader must know of healthy numbers: something kept them so."""
    if note["since"] is None:
        refused = listed(note.get("refused", ()), 3)
        did = f"was refused in {refused}" if refused else "was installed and had nothing to do"
        return f"{note['spec']} {did}."
    did = "tried without a change" if note["dry_run"] else "at work"
    layers = f" ({listed(note['layers'], 3)})" if note["layers"] else ""
    return f"{note['spec']} was {did} since step {note['since']:,}{layers}."


def _story(facts: Facts, state: State) -> list[str]:
    if not facts.readings:
        return []
    said = []
    if facts.loss.not_finite is not None:
        said.append(f"The first loss that is no number is that of step {facts.loss.not_finite:,}.")
    if facts.broken_since is not None:
        heads = facts.broken or "some"
        said.append(
            f"Rows with NaN or infinity were first read at step {facts.broken_since:,}; at the "
            f"last reading {heads} of {count(facts.heads, 'head')} had them."
        )
    if state in ("sick", "watch", "broken"):
        said += _start(facts)
    elif facts.peak is not None:
        said.append(
            f"The largest logit read was {number(facts.peak.peak)} "
            f"({where(facts.peak.layer, facts.peak.head)}, step {facts.peak.peak_step:,})."
        )
    said += _now(facts, state)
    if facts.loss.final is not None:
        lost = facts.loss.not_finite is not None or any(c.kind == "loss" for c in facts.crashes)
        began = "Before it was no number, the loss was" if lost else "The loss ended at"
        mean = f" (mean of the last {facts.loss.averaged:,} that were kept)"
        said.append(f"{began} {number(facts.loss.final)}{mean if facts.loss.averaged > 1 else ''}.")
        if facts.loss.calls > 1:
            said.append(
                f"Each loss is the mean of up to {facts.loss.calls} backward calls in a step, for "
                f"they were not divided by their number; {facts.loss.calls} such calls add up to "
                f"{number(facts.loss.calls * facts.loss.final)}."
            )
    return said


def _start(facts: Facts) -> list[str]:
    head = facts.start
    if head is None or head.left is None:
        return []
    what = (
        f"its largest logit passed {edge('max_logit'):g}"
        if head.left_by == "max_logit"
        else f"its softmax closed (passes fell below {edge('passes'):g})"
    )
    said = [f"It began in {where(head.layer, head.head)}: at step {head.left:,} {what} for good."]
    if facts.rate_at_start is not None:
        said.append(f"The learning rate was {number(facts.rate_at_start)} then.")
    grew = (
        f"Its largest logit grew from {number(head.first)} to {number(head.peak)} at step "
        f"{head.peak_step:,}"
    )
    if head.doubling is not None:
        grew += f", doubling every {count(max(1, round(head.doubling)), 'step')} on the way out"
    return [*said, f"{grew}."]


def _now(facts: Facts, state: State) -> list[str]:
    said = []
    if facts.high or facts.closed or state != "healthy":
        were = "was" if facts.closed == 1 else "were"
        said.append(
            f"At the last reading {facts.high:,} of {count(facts.heads, 'head')} had logits above "
            f"{edge('max_logit'):g}, and {facts.closed:,} {were} closed."
        )
    if facts.outside:
        stood = "stood" if said else "stood at the last reading"
        said.append(
            f"{facts.outside_heads:,} of {count(facts.heads, 'head')} {stood} outside a healthy "
            f"band: {health.listed(facts.outside)}."
        )
    if state == "healthy" and (facts.high or facts.closed):
        said.append(
            "Single heads of that kind are normal where nothing grows: heads that look "
            "at one key are one-hot by right."
        )
    return said
