"""A frame as lines of text: verdict first, then the map, the worst heads, and what it costs."""

import textwrap

import numpy as np
from rich.text import Text

from scaledot.printable import one_line
from scaledot.watch import reading
from scaledot.watch.alarms.alarm import is_loud
from scaledot.watch.top import curve, health, heat, words
from scaledot.watch.top.frame import Frame, Head

LEAST_WORST = 5  # heads; more where there is more room
MOST_WORST = 20
ASCII = str.maketrans("▼▲·░▒▓…▁▂▃▄▅▆▇█←→", "v^.-+#~_.,-:=+#<>")
COLOURS = {"act": "bold red", "warn": "bold yellow", "note": "bold"}
LONGEST_CAUSE = 60  # characters
KEYS = "←→ vital  e eval  q quit"


def draw(
    frame: Frame, width: int, height: int | None, keys: str = KEYS, ascii_only: bool = False
) -> list[Text]:
    """Lines of at most `width` columns, at most `height` of them; None: as many as it takes."""
    # The worst heads are worth more than a third alarm where there is little room.
    top = [_title(frame), _verdict(frame), *_alarms(frame, 1 if height and height < 30 else 3)]
    bottom = [*_cost(frame, width, 1 if height is not None and height < 30 else 3)]
    if not frame.rows:
        lines = [*top, Text(""), *_nothing(frame), Text(""), *bottom, Text(keys, "dim")]
    else:
        room = _room(frame, height, len(top) + len(bottom) + 3)
        gap = [Text("")] if room.airy else []
        chart = heat.draw(frame.rows, frame.vital, width, room.map)
        bottom.append(Text("   ".join(filter(None, (keys, _legend(frame, chart)))), "dim"))
        lines = [*top, *gap, _vital(frame, chart, width), *chart.lines, *gap]
        lines += [*_worst(frame, width, room.worst), *gap, *bottom]
    for line in lines:
        line.plain = one_line(line.plain)  # a name with a newline would forge a line
        line.truncate(width, overflow="ellipsis")
        if ascii_only:
            line.plain = line.plain.translate(ASCII)
    return lines if height is None else lines[:height]


class _room:
    """How the height is shared: the map first, then the worst heads, then air between them."""

    def __init__(self, frame: Frame, height: int | None, taken: int) -> None:
        wanted = len(frame.rows) + 1
        heads = min(len(frame.worst), MOST_WORST)
        least = min(heads, LEAST_WORST)
        if height is None:
            self.map, self.worst, self.airy = wanted, min(heads, 10), True
            return
        free = height - taken
        self.map = max(2, min(wanted, free - least))
        self.worst = max(0, min(heads, free - self.map))
        if self.worst > least + 3:
            self.worst -= 3
        self.airy = free - self.map - self.worst >= 3


def _title(frame: Frame) -> Text:
    name = frame.path.replace("\\", "/").rpartition("/")[2]
    line = Text.assemble(("scaledot top ", "dim"), (name, "bold"), "   ").append_text(_state(frame))
    facts = ["evaluation"] if frame.phase == "eval" else []
    facts += [] if frame.step is None else [f"step {frame.step:,}"]
    named = ((reading.LOSS, "loss"), (reading.LEARNING_RATE, "lr"))
    facts += [f"{word} {frame.scalars[n]:.4g}" for n, word in named if n in frame.scalars]
    return line.append("".join(f"   {fact}" for fact in facts))


def _state(frame: Frame) -> Text:
    quiet = "" if frame.quiet_for is None else words.ago(frame.quiet_for)
    if frame.state == "waiting":
        return Text("waiting for the first reading", "yellow")
    if frame.state == "ended" and not frame.cause:
        return Text(f"ended {quiet} ago" if quiet else "ended", "dim")
    if frame.state in ("ended", "silent") and frame.cause:
        cause = textwrap.shorten(frame.cause, LONGEST_CAUSE, placeholder=" …")
        return Text(f"ended {quiet} ago by {cause}" if quiet else f"ended by {cause}", "bold red")
    if frame.state == "silent":
        return Text(f"SILENT for {quiet}: hung, killed or paused", "bold red")
    return Text(f"running, read {quiet} ago", "green")


def _verdict(frame: Frame) -> Text:
    if not frame.rows:
        return Text(frame.command, "dim")
    heads = f"{words.count(frame.heads, 'head')} in {words.count(len(frame.rows), 'layer')}: "
    if not frame.ill_heads:
        inside = ("all inside the healthy bands", "" if _too_little(frame) else "green")
        return Text.assemble(heads, inside, _too_little(frame))
    # A band alone is no verdict: a healthy model starts outside of some.
    loud = frame.ill.get("nonfinite") or any(alarm.grade != "note" for alarm in frame.alarms)
    outside = (f"{frame.ill_heads:,} outside a band", "bold red" if loud else "yellow")
    return Text.assemble(heads, outside, _too_little(frame), f": {health.listed(frame.ill)}")


def _too_little(frame: Frame) -> str:
    """What the report says of the same."""
    if frame.phase != "train" or not frame.evidence.steps or frame.evidence.enough:
        return ""
    return ", too little seen"


def _alarms(frame: Frame, most: int) -> list[Text]:
    """The gravest in words; of notes there are too many to be read here."""
    loud = [alarm for alarm in frame.alarms if is_loud(alarm)]
    lines = []
    for place, alarm in enumerate(loud[:most], 1):
        more = f"(+{len(loud) - most}) " if place == most < len(loud) else ""
        grade = (f"{alarm.grade:<4} ", COLOURS[alarm.grade])
        lines.append(Text.assemble(grade, f"{more}step {alarm.step:,}: {words.brief(alarm.words)}"))
    return lines


def _vital(frame: Frame, chart: heat.Map, width: int) -> Text:
    """Its name and band; what else there is to say, as far as it fits whole."""
    band = health.band_words(frame.band)
    healthy = f"healthy: {band}" if band else "no band"
    line = Text.assemble((f" {frame.vital} ", "bold reverse"), (f"  {healthy}", "bold"))
    if chart.layers_a_cell > 1 or chart.heads_a_cell > 1:
        line.append(f"   a cell: the worst of {_cell_words(chart)}")
    for words_ in (frame.band.words, chart.pattern):
        if words_ and len(line) + 3 + len(words_) <= width:
            line.append(f"   {words_}", "dim")
    return line


def _cell_words(chart: heat.Map) -> str:
    counts = (chart.layers_a_cell, "layer"), (chart.heads_a_cell, "head")
    return " x ".join(words.count(number, noun) for number, noun in counts if number > 1)


def _legend(frame: Frame, chart: heat.Map) -> str:
    parts = [f"{heat.BELOW} below {heat.ABOVE} above band"] if health.has_band(frame.vital) else []
    if not chart.numbers:
        parts.append(f"{heat.SHADES} towards its edge" if parts else f"{heat.SHADES} least to most")
    return "   ".join(parts)


def _worst(frame: Frame, width: int, number: int) -> list[Text]:
    shown = frame.worst[:number]
    if not shown:
        return []
    _, names = words.short_layers([row.layer for row in frame.rows])
    short = dict(zip((row.layer for row in frame.rows), names, strict=True))
    labels = [f"{short[head.layer]} h{head.head}" for head in shown]
    # Somebody is always the worst; that alone is no reason to worry.
    called = "worst heads" if any(head.since is not None for head in shown) else "nearest edge"
    label = min(max(*map(len, labels), len(called)), width // 3)
    bars = max(8, min(48, (width - label - 30) // 2))
    steps = f"step {shown[0].steps[0]:,} to {shown[0].steps[-1]:,}"
    title = f"{called:<{label}}  was    now  {words.cut(steps, bars):<{bars}}"
    lines = [Text(f"{title}  {'outside since':<13}  also outside", "dim")]
    for name, head in zip(labels, shown, strict=True):
        lines.append(_worst_line(frame, head, words.cut(name, label, keep_end=True), label, bars))
    return lines


def _worst_line(frame: Frame, head: Head, name: str, label: int, bars: int) -> Text:
    flag = int(health.outside(np.array([head.number]), frame.vital)[0])
    line = Text(f"{name:<{label}}  {words.short(head.numbers[0]):>4} ")
    line.append(f" {words.short(head.number):>4}{heat.mark(flag)}", "bold red" if flag else "")
    line.append(" ").append_text(curve.draw(head.steps, head.numbers, frame.vital, bars))
    line.pad_right(label + 14 + bars - len(line))
    since = "" if head.since is None else f"step {head.since:,}"
    line.append(f"  {since:<13}")
    line.append("  " + ", ".join(f"{n} {words.short(v)}" for n, v in head.others.items()), "dim")
    return line


def _cost(frame: Frame, width: int, most: int) -> list[Text]:
    every = {None: "", 1: ", reads every step"}.get(frame.every, f", reads 1 step in {frame.every}")
    cost = "not known yet" if frame.cost is None else f"{frame.cost:.2%} of the run so far"
    if frame.steady_cost is not None:
        cost += f", {frame.steady_cost:.2%} when steady"
    read = str(frame.evidence) if frame.evidence.steps else ""
    dropped = f"{words.count(frame.dropped, 'number')} dropped" if frame.dropped else ""
    remedies = f"remedy: {', '.join(frame.remedies)}" if frame.remedies else ""
    parts = (f"the watch costs {cost}{every}", read, dropped, remedies, frame.coverage)
    wrapped = textwrap.wrap("; ".join(filter(None, parts)), width, max_lines=most, placeholder=" …")
    return [Text(line) for line in wrapped]


def _nothing(frame: Frame) -> list[Text]:
    if frame.phase == "eval":
        return [Text("no evaluation has been read so far; training: key e, or --phase train")]
    if frame.state == "ended":
        return [Text("no training step was read; evaluation: key e, or --phase eval")]
    return [Text("no reading so far: the first comes at the end of the first training step")]
