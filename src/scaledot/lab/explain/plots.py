"""Which picture of a lesson belongs under which of its paragraphs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaledot.lab import drawing
from scaledot.lab.drawing import Bar
from scaledot.lab.explain import race
from scaledot.lab.explain.charts import Curve, HeatMap, Histogram
from scaledot.lab.explain.voice import Voice

Pictures = Mapping[int, Sequence[RenderableType]]  # the paragraph's number -> what is under it

FLOW = ("embeddings", "w_q", "q", "k", "v", "scores", "scaled", "weights", "context", "output")
RULES = ("none", "sqrt_dk", "dk", "sqrt_dmodel", "cosine")


def of(name: str, result: Any, voice: Voice) -> Pictures:
    return PICTURES[name](result, voice) if name in PICTURES else {}


def _vectors(result: Any, voice: Voice) -> Pictures:
    table = _table(voice, "q", "k", ">dot")
    for row in result.table:
        table.add_row(
            drawing.as_vector(row.q), drawing.as_vector(row.k), Text(f"{row.dot:.4g}", "bold")
        )
    return {1: [_bars(voice, "products", _counted("q_{0} k_{0}", result.products))], 4: [table]}


def _variance(result: Any, voice: Voice) -> Pictures:
    histogram = Histogram(
        result.histogram.edges, result.histogram.counts, voice.say("explain.chart.dot_products")
    )
    steps = _table(voice, "step", ">theory", ">measured")
    for step in result.derivation:
        steps.add_row(
            voice.say(f"variance.step.{step.key}"),
            drawing.as_four(step.theory),
            Text(drawing.as_four(step.measured), "bold"),
        )
    curve = Curve(
        result.curve.d_k,
        result.curve.measured,
        result.curve.theory,
        voice.say("explain.chart.sd_by_width"),
        here=result.d_k,
    )
    return {1: [histogram], 3: [steps], 4: [curve]}


def _saturation(result: Any, voice: Voice) -> Pictures:
    table = _table(voice, ">score", ">exp", ">weight", "")
    for score, power, weight in zip(
        result.logits, result.exponentials, result.weights, strict=True
    ):
        table.add_row(
            f"{score:.4g}",
            drawing.as_exponential(power),
            Text(drawing.as_weight(weight), "bold"),
            Bar(weight, 24),
        )
    return {1: [table]}


def _jacobian(result: Any, voice: Voice) -> Pictures:
    names = [f"z{index}" for index in range(len(result.scores))]
    matrix = HeatMap(result.matrix, names, voice.say("explain.chart.jacobian"))
    slopes = _table(voice, "scores", ">slope", "share_of_quarter")
    for row in result.table:
        slopes.add_row(
            drawing.as_vector(row.scores),
            Text(drawing.as_small(row.slope), "bold"),
            Bar(row.slope / 0.25, 24),
        )
    return {1: [matrix], 3: [slopes]}


def _gradients(result: Any, voice: Voice) -> Pictures:
    """Bins of a quarter decade, four together: one line a power of ten."""
    table = _table(voice, ">row_size", f">={result.rule}", "", ">=√d_k", "")
    pairs = [
        (result.edges[start], sum(result.counts[start:end]), sum(result.scaled.counts[start:end]))
        for start in range(0, len(result.counts), 4)
        for end in [start + 4]
    ]
    for place, (edge, chosen, scaled) in enumerate(pairs):
        if place < len(pairs) - 1 and not any(sum(pair[1:]) for pair in pairs[: place + 1]):
            continue  # nothing this small: begin where rows begin
        low = "0" if place == 0 else f"{edge:.0e}" if edge < 0.01 else f"{edge:g}"
        table.add_row(
            f"{low} ..",
            drawing.as_share(chosen / result.rows),
            Bar(chosen / result.rows, 16, "red" if result.rule == "none" else "cyan"),
            drawing.as_share(scaled / result.rows),
            Bar(scaled / result.rows, 16),
        )
    return {2: [Group(Text(voice.say("explain.chart.row_sizes"), "bold"), table)]}


def _divisors(result: Any, voice: Voice) -> Pictures:
    table = _table(voice, "rule", ">divisor", ">sd", ">top_weight", ">saturated", ">entropy", "")
    table.columns[0].min_width = 8  # where room is short, a row still says which rule it is,
    longest = table.columns[4]  # and the longest heading gives way
    longest.no_wrap, longest.overflow = False, "fold"
    for rule in RULES:
        row = getattr(result, rule)
        table.add_row(
            voice.say(f"explain.rule.{rule}"),
            f"{row.divisor:.3g}",
            Text(f"{row.sd:.3f}", "bold"),
            f"{row.top:.3f}",
            f"{row.saturated:.0%}",
            f"{row.entropy_ratio:.1%}",
            Bar(row.entropy_ratio, 12),
            style="green" if rule == "sqrt_dk" else "",
        )
    return {1: [table]}


def _flow(result: Any, voice: Voice) -> Pictures:
    boxes = _table(voice, "box", ">shape", "first_numbers")
    for box in FLOW:
        numbers = getattr(result, box)[0][:4]
        boxes.add_row(
            voice.say(f"explain.box.{box}"),
            Text(_shape(result.shapes[box]), "bold"),
            " ".join(f"{number:+.2f}" for number in numbers),
        )
    names = [voice.write(token) for token in result.tokens]
    weights = HeatMap(result.weights, names, voice.say("explain.chart.weights"))
    return {3: [boxes], 4: [weights]}


def _heads(result: Any, voice: Voice) -> Pictures:
    shapes = _table(voice, "model", ">d_model", ">heads", ">d_k", ">sqrt_dk", ">sqrt_dmodel")
    rows = [(row.name, row.d_model, row.heads, row.d_k) for row in result.presets]
    for name, d_model, heads, d_k in rows:
        shapes.add_row(
            voice.say(f"heads.value.{name}").split(" (")[0],
            str(d_model),
            str(heads),
            Text(str(d_k), "bold"),
            f"{math.sqrt(d_k):.4g}",
            f"{math.sqrt(d_model):.4g}",
        )
    found = _table(voice, "repository", "thread")
    for repository in result.repositories:
        found.add_row(Text(repository.name, overflow="fold"), repository.thread)
    return {3: [shapes], 5: [found]}


def _scores(result: Any, voice: Voice) -> Pictures:
    table = _table(voice, "kind", ">sd", ">largest", ">bound", ">max_weight", ">milliseconds")
    for kind in ("dot", "cosine", "additive"):
        row = getattr(result, kind)
        table.add_row(
            voice.say(f"explain.score.{kind}"),
            Text(f"{row.sd:.3g}", "bold"),
            f"{row.largest:.3g}",
            f"{row.bound:.3g}" if math.isfinite(row.bound) else voice.say("explain.no_bound"),
            f"{row.max_weight:.3f}",
            "-" if row.milliseconds is None else f"{row.milliseconds:.3g}",
        )
    return {2: [table]}


def _layernorm(result: Any, voice: Voice) -> Pictures:
    rows = (
        ("raw", result.sd_raw, result.theory_sd_raw),
        ("scaled", result.sd_scaled, result.theory_sd_scaled),
        ("projected", result.sd_scores, result.theory_sd_scores),
    )
    largest = max(measured for _, measured, _ in rows) or 1.0
    table = _table(voice, "standard_deviation", ">theory", ">measured", "")
    for name, measured, theory in rows:
        table.add_row(
            voice.say(f"explain.layernorm.{name}"),
            drawing.as_four(theory),
            Text(drawing.as_four(measured), "bold"),
            Bar(measured / largest, 16),
        )
    return {2: [table]}


def _overflow(result: Any, voice: Voice) -> Pictures:
    table = _table(voice, ">score", ">exp", ">naive", ">safe", "")
    for score, power, naive, safe in zip(
        result.logits, result.exponentials, result.naive, result.safe, strict=True
    ):
        table.add_row(
            f"{score:.4g}",
            drawing.as_exponential(power),
            Text(f"{naive:.4g}", "" if math.isfinite(naive) else "bold red"),
            Text(f"{safe:.4g}", "bold"),
            Bar(safe, 16),
        )
    thresholds = _table(voice, "dtype", ">overflows_above")
    for row in result.thresholds:
        thresholds.add_row(row.dtype, Text(f"{row.theory:.5g}", "bold"))
    return {1: [table], 2: [thresholds]}


def _assumption(result: Any, voice: Voice) -> Pictures:
    table = _table(voice, "init", ">weight_sd", ">sd_scaled", "")
    largest = max(row.theory_scaled for row in result.inits)
    for row in result.inits:
        table.add_row(
            row.init,
            f"{row.weight_sd:.4f}",
            Text(f"{row.theory_scaled:.3f}", "bold"),
            Bar(row.theory_scaled / largest, 20),
            style="green" if row.init == result.init else "",
        )
    return {3: [table]}


def _race(result: Any, voice: Voice) -> Pictures:
    finishes = _table(voice, "rule", ">steps_to_90", ">loss", ">accuracy", ">entropy", ">dead")
    for row in result.finishes:
        reached = voice.say("explain.never") if row.steps_to_90 is None else str(row.steps_to_90)
        finishes.add_row(
            voice.say(f"explain.rule.{row.rule}"),
            reached,
            f"{row.loss:.3f}",
            Text(race.share(row, "accuracy", 1), "bold"),
            race.share(row, "entropy_ratio", 0),
            race.share(row, "dead", 1),
        )
    ends = Group(Text(voice.say("explain.chart.finishes"), "bold"), finishes)
    return {2: [race.table(voice, result.curves), ends]}


def _table(voice: Voice, *columns: str) -> Table:
    """A column for each key `explain.column.{key}`; `>` aligns right, `=` is the name itself."""
    names = []
    for column in columns:
        side, key = (">", column[1:]) if column.startswith(">") else ("", column)
        name = voice.write(key[1:]) if key.startswith("=") else _column(voice, key)
        names.append(side + name)
    table = drawing.table(*names)
    for column in table.columns:
        if column.justify == "left":  # words may go on in the next line, numbers may not
            column.no_wrap, column.overflow = False, "fold"
    return table


def _column(voice: Voice, key: str) -> str:
    return voice.say(f"explain.column.{key}") if key else ""


def _bars(voice: Voice, title: str, rows: Iterable[tuple[str, float]]) -> Table:
    """Numbers of either sign as bars of their size: one style for plus, another for minus."""
    rows = list(rows)
    largest = max((abs(number) for _, number in rows), default=0.0) or 1.0
    table = _table(voice, title, ">number", "")
    for name, number in rows:
        table.add_row(
            name, f"{number:+.4g}", Bar(abs(number) / largest, 24, "cyan" if number >= 0 else "red")
        )
    return table


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _counted(name: str, numbers: Sequence[float]) -> list[tuple[str, float]]:
    return [(name.format(index), number) for index, number in enumerate(numbers, 1)]


PICTURES: dict[str, Callable[[Any, Voice], Pictures]] = {
    "flow": _flow,
    "vectors": _vectors,
    "variance": _variance,
    "saturation": _saturation,
    "jacobian": _jacobian,
    "gradients": _gradients,
    "divisors": _divisors,
    "heads": _heads,
    "scores": _scores,
    "layernorm": _layernorm,
    "overflow": _overflow,
    "assumption": _assumption,
    "race": _race,
}
