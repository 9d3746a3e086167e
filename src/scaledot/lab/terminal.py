"""How a lesson looks in a terminal: one function a lesson, a record in, a rich renderable out."""

import math
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from scaledot.lab import drawing, words
from scaledot.lab.drawing import Bar
from scaledot.lab.experiments.dot_product import DotProduct
from scaledot.lab.experiments.remedy import Reading
from scaledot.lab.experiments.softmax import DECADES, SoftmaxRow
from scaledot.lab.experiments.story import (
    Divisors,
    Gradient,
    Saturation,
    SmallVectors,
    Variance,
    VitalSigns,
)
from scaledot.lab.training import Moment, Training

WIDEST = 100  # columns: longer lines are hard to read
ROOMY = 96  # from here on, tables also say what a number means

SHOWN_MOMENTS = 9  # steps of the training that the table shows

RULE_NAMES = {"none": "none", "sqrt_dk": "√d_k", "dk": "d_k", "sqrt_dmodel": "√d_model"}


def draw(number: int, name: str, lesson: object, console_width: int) -> RenderableType:
    """The whole lesson: heading, opening words, tables, verdicts."""
    opening = words.opening(name, lesson)
    match lesson:
        case SmallVectors():
            body = _small_vectors(lesson)
        case Variance():
            body = _variance(lesson)
        case Saturation():
            body = _saturation(lesson)
        case Gradient():
            body = _gradient(lesson)
        case Divisors():
            body = _divisors(lesson)
        case VitalSigns():
            body = _vital_signs(lesson, roomy=console_width >= ROOMY)
        case _:
            raise TypeError(f"no picture for {type(lesson).__name__}")
    return _chapter(number, words.title(name), opening, body)


def draw_training(number: int, training: Training) -> RenderableType:
    """What every training shows on the left, what the watch adds on the right."""
    table = drawing.table(
        ">step", ">loss", ">|gradient|", ">largest score", ">passes", "", ">heads closed"
    )
    for moment in _chosen(training.moments):
        table.add_row(
            str(moment.step),
            f"{moment.loss_mean:.2f}",
            f"{moment.gradient_norm:.2f}",
            _judged(f"{moment.max_logit:,.0f}", moment.max_logit <= training.max_logit_high),
            _judged(f"{moment.passes:.3f}", moment.passes >= training.passes_low),
            Bar(moment.passes, 12),
            _judged(f"{moment.closed:.0%}", moment.closed < 0.5),
        )
    vitals, loss = words.training_verdicts(training)
    said = Table.grid(padding=(0, 1))
    said.add_row(Text("the vitals", "bold"), vitals)
    said.add_row(Text("the loss", "bold"), loss)
    parts: list[RenderableType] = [table, said, Text(words.training_cost(training), "dim")]
    return _chapter(number, words.TRAINING, words.training_opening(training), parts)


def _chosen(moments: tuple[Moment, ...]) -> list[Moment]:
    """Some of them, evenly spaced, with the first and the last."""
    last = len(moments) - 1
    parts = max(min(SHOWN_MOMENTS - 1, last), 1)
    return [moments[place] for place in sorted({last * part // parts for part in range(parts + 1)})]


def _judged(text: str, healthy: bool) -> Text:
    return Text(text, "bold" if healthy else "bold red")


def _chapter(number: int, title: str, opening: str, body: list[RenderableType]) -> RenderableType:
    heading = Rule(Text(f"{number}  {title}", "bold"), align="left", style="cyan")
    parts = (Padding(part, (1, 0, 0, 0)) for part in body)
    return Group("", heading, Text(opening, "dim"), *parts)


def _small_vectors(lesson: SmallVectors) -> list[RenderableType]:
    table = drawing.table("q", "k", "q_i k_i", ">claim", ">measured", "verdict")
    for row in lesson.products:
        _add_product(table, row)
    table.add_section()
    _add_product(table, lesson.flipped)
    five = lesson.first_five
    terms = drawing.table("first five of 64", *(f">{index}" for index in range(1, 6)), "verdict")
    terms.add_row("q", *map(drawing.as_plain, five.query), "")
    terms.add_row("k", *map(drawing.as_plain, five.key), "")
    terms.add_row("claim", *map(drawing.as_plain, drawing.several(five.finding.claim)), "")
    terms.add_row(
        "measured", *map(drawing.as_plain, five.terms), drawing.verdict(five.finding), style="bold"
    )
    return [table, terms, *drawing.spoken(lesson.findings, lesson)]


def _add_product(table: Table, row: DotProduct) -> None:
    said = row.finding.claim
    table.add_row(
        drawing.as_vector(row.query),
        drawing.as_vector(row.key),
        " ".join(f"{term:+g}" for term in row.terms),
        "" if said is None else drawing.as_plain(drawing.one(said)),
        Text(drawing.as_plain(drawing.one(row.finding.measured)), "bold"),
        Text("one sign flipped", "dim") if said is None else drawing.verdict(row.finding),
    )


def _variance(lesson: Variance) -> list[RenderableType]:
    table = drawing.table(">d_k", ">theory", ">measured Var(q·k)", ">sd", "sd, drawn")
    widest = math.sqrt(lesson.widths[-1].d_k)
    for row in lesson.widths:
        deviation = math.sqrt(drawing.one(row.finding.measured))
        table.add_row(
            str(row.d_k),
            f"{drawing.one(row.finding.theory):.0f}",
            Text(drawing.as_four(drawing.one(row.finding.measured)), "bold"),
            f"{deviation:.2f}",
            Bar(deviation / widest, 32),
        )
    return [
        table,
        _derivation(lesson),
        _typical(lesson),
        *drawing.spoken(lesson.findings[:1], lesson),
        _spreads(lesson),
        *drawing.spoken(lesson.findings[1:], lesson),
    ]


def _derivation(lesson: Variance) -> Table:
    d_k = lesson.typical.d_k
    table = drawing.table(f"step by step, d_k = {d_k}", "", ">theory", ">measured")
    steps = lesson.derivation
    for formula, reason, finding in (
        ("E[q_i k_i]", "independent, mean 0", steps.mean_of_term),
        ("Var(q_i k_i)", "1 × 1", steps.variance_of_term),
        ("Var(q·k)", "independent terms add up", steps.variance_of_sum),
        ("Var(q·k / √d_k)", "d_k / (√d_k)²", steps.divided_by_root),
        ("Var(q·k / d_k)", "d_k / d_k²: too small", steps.divided_by_width),
    ):
        table.add_row(
            formula,
            Text(reason, "dim"),
            drawing.as_four(drawing.one(finding.theory)),
            Text(drawing.as_four(drawing.one(finding.measured)), "bold"),
        )
    return table


def _typical(lesson: Variance) -> Table:
    typical = lesson.typical
    table = drawing.table(f"size of q·k at d_k = {typical.d_k}", ">theory", ">measured")
    root = math.sqrt(typical.d_k)
    for name, finding in (
        ("standard deviation", typical.standard_deviation),
        ("mean of |q·k|", typical.mean_size),
        ("median of |q·k|", typical.median_size),
        (f"share with |q·k| > {root:g}", typical.above_one_sd),
        (f"share with |q·k| > {1.5 * root:g}", typical.above_one_and_a_half),
    ):
        table.add_row(
            name,
            f"{drawing.one(finding.theory):.2f}",
            Text(f"{drawing.one(finding.measured):.2f}", "bold"),
        )
    return table


def _spreads(lesson: Variance) -> Table:
    table = drawing.table(">d_k", ">draws", ">lowest", ">highest", ">sd")
    for spread in lesson.spreads:
        table.add_row(
            str(spread.d_k),
            f"{spread.draws:,}",
            f"{spread.low:.1f}",
            f"{spread.high:.1f}",
            Text(f"{spread.standard_deviation:.2f}", "bold"),
        )
    return table


def _saturation(lesson: Saturation) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for row in lesson.rows:
        verdicts = [drawing.reason(row.weights, lesson)]
        if row.exponentials.claim is not None:
            verdicts.append(drawing.reason(row.exponentials, lesson))
        parts += [_weights(row), Group(*verdicts)]
    return parts


def _weights(row: SoftmaxRow) -> Table:
    scores = drawing.as_vector(row.scores)
    name = scores if row.divisor == 1 else f"{scores} / {row.divisor:g}"
    table = drawing.table(f">{name}", ">exp", ">claim", ">measured", "weight")
    for column, width in zip(table.columns, (15, 9, 7, 12), strict=False):
        column.min_width = width  # so that the four tables of the lesson line up
    for logit, power, said, weight in zip(
        row.logits,
        drawing.several(row.exponentials.measured),
        drawing.several(row.weights.claim),
        drawing.several(row.weights.measured),
        strict=True,
    ):
        table.add_row(
            f"{logit:g}",
            drawing.as_exponential(power),
            drawing.as_plain(said),
            Text(drawing.as_weight(weight), "bold"),
            Bar(weight, 24),
        )
    return table


def _gradient(lesson: Gradient) -> list[RenderableType]:
    table = drawing.table(
        "logits", ">p(1 - p)", ">autograd", ">1 - Σp²", ">vitals.passes", "share of ¼"
    )
    for slope in lesson.slopes:
        measured = drawing.one(slope.winner.measured)
        table.add_row(
            drawing.as_vector(slope.logits),
            drawing.as_small(drawing.one(slope.winner.theory)),
            Text(drawing.as_small(measured), "bold"),
            drawing.as_small(drawing.one(slope.trace.theory)),
            Text(drawing.as_small(slope.passes), "bold"),
            Bar(measured / 0.25, 10),
        )
    steepest, *rest = lesson.findings
    return [
        table,
        *drawing.spoken((steepest,), lesson),
        Text(
            f"Now whole rows: dL/dq at d_k = {lesson.d_k}, {lesson.keys} keys, a random linear "
            f"loss, {lesson.unscaled.rows:,} rows, root mean square of each.",
            "dim",
        ),
        _decades(lesson),
        _row_gradients(lesson),
        *drawing.spoken(tuple(rest), lesson),
    ]


def _decades(lesson: Gradient) -> Table:
    """Two histograms side by side, one line a power of ten."""
    table = drawing.table(">size of a row", ">", "without scaling", ">", "with √d_k")
    marks = [f"1e{power}" if power < -2 else f"{10.0**power:g}" for power in DECADES]
    between = [f"{low} .. {high}" for low, high in pairwise(marks)]
    names = [f"below {marks[0]}", *between, f"above {marks[-1]}"]
    for name, without, scaled in zip(
        names, lesson.unscaled.histogram, lesson.scaled.histogram, strict=True
    ):
        table.add_row(
            name,
            drawing.as_share(without),
            Bar(without, 20, "red"),
            drawing.as_share(scaled),
            Bar(scaled, 20),
        )
    return table


def _row_gradients(lesson: Gradient) -> Table:
    below = f">below {lesson.silent_below:g}"
    table = drawing.table("rows of dL/dq", ">median", below, ">99th percentile")
    for name, rows in (("without scaling", lesson.unscaled), ("with √d_k", lesson.scaled)):
        table.add_row(
            name,
            Text(f"{rows.median:.2g}", "bold"),
            Text(f"{rows.silent:.0%}", "bold"),
            Text(f"{rows.percentile_99:.2g}", "bold"),
        )
    return table


def _divisors(lesson: Divisors) -> list[RenderableType]:
    table = drawing.table(
        "divide by", ">that is", ">sd, theory", ">sd", ">top p", ">entropy", "share of ln n"
    )
    for row in lesson.rules:
        table.add_row(
            RULE_NAMES[row.rule],
            f"{row.divisor:.3g}",
            f"{drawing.one(row.standard_deviation.theory):.3f}",
            Text(f"{drawing.one(row.standard_deviation.measured):.3f}", "bold"),
            Text(f"{row.top_p:.3f}", "bold"),
            Text(f"{row.entropy_ratio:.1%}", "bold"),
            Bar(row.entropy_ratio, 16),
            style="green" if row.rule == "sqrt_dk" else "",
        )
    return [table, *drawing.spoken(lesson.findings, lesson)]


def _vital_signs(lesson: VitalSigns, roomy: bool) -> list[RenderableType]:
    columns = ["vital sign", '>scale="none"', ">√d_k", ">healthy"]
    table = drawing.table(*columns, *(["meaning"] if roomy else []))
    for reading in lesson.readings:
        cells: list[RenderableType] = [
            reading.name,
            _signed(reading.unscaled, reading.unscaled_healthy),
            _signed(reading.scaled, reading.scaled_healthy),
            Text(_band(reading), "dim"),
        ]
        table.add_row(*cells, *([Text(reading.meaning, "dim")] if roomy else []))
    sick = [row for row in lesson.readings if row.unscaled_healthy is False]
    still = [row for row in lesson.readings if row.scaled_healthy is False]
    return [
        table,
        Text(
            f"Outside their band: {len(sick)} without scaling, {len(still) or 'none'} with √d_k.",
            "bold",
        ),
    ]


def _band(reading: Reading) -> str:
    match reading.low, reading.high:
        case None, None:
            return "-"
        case None, high:
            return f"≤ {high:g}"
        case low, None:
            return f"≥ {low:g}"
        case low, high:
            return f"{low:g} .. {high:g}"


def _signed(number: float, healthy: bool | None) -> Text:
    mark, style = {True: ("✓", "green"), False: ("✗", "bold red"), None: (" ", "")}[healthy]
    return Text(f"{drawing.as_small(number)} {mark}", style)
