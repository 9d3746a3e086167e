"""The check in a terminal: verdict first, evidence second."""

from statistics import median

from rich import box
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from scaledot.watch.check import words
from scaledot.watch.check.examine import Examination
from scaledot.watch.check.heads import Head, worst_first

WIDEST = 110  # columns: longer lines are hard to read
ROOMY = 92  # from here on the table has room for every column
COLUMNS = ("logit_std", "row_std", "max_logit", "entropy_ratio", "top_p", "saturated", "sink")
NARROW = ("logit_std", "row_std", "max_logit", "entropy_ratio")  # a sink is said in words
LETTERS = {"broken": "n", "positional": "p", "sink": "s", "saturated": "x", "flat": "f"}
HINT = (
    "A band is a hint, not an alarm: a trained head may leave it for a reason. What tells is the "
    "trend; watch a training with: scaledot run train.py"
)


def show(examination: Examination, name: str, top: int, console: Console) -> None:
    width = min(console.width, WIDEST)
    names = words.short_names(list(dict.fromkeys(head.layer for head in examination.heads)))
    for part in (
        _heading(examination, name),
        _verdict(examination),
        _scale(examination),
        _map(examination, names, width),
        _worst(examination, names, top, COLUMNS if width >= ROOMY else NARROW),
    ):
        console.print(part, width=width)
        console.print()
    console.print(Text(HINT, "dim"), width=width)


def _heading(examination: Examination, name: str) -> RenderableType:
    coverage = examination.coverage
    seen = f"{len(examination.heads)} heads; {coverage}"
    lines = [
        Text(words.shown(name), "bold"),
        Text(f"{examination.model}; one forward pass over {examination.subject.about}"),
        Text(seen, "yellow" if coverage.unseen else ""),
    ]
    lines += [Text(line, "yellow") for line in words.unknown(examination)]
    return Group(*lines)


def _verdict(examination: Examination) -> RenderableType:
    text = words.verdict(examination)
    if examination.healthy:
        return Text(f"✓ {text}", "bold green")
    broken = any("broken" in head.roles for head in examination.heads)
    return Text(f"✗ {text}", "bold red") if broken else Text(f"! {text}", "bold yellow")


def _scale(examination: Examination) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("", "least .. median .. most", "", "outside", style="dim")
    for line in words.spreads(examination):
        grid.add_row(*line)
    holds = all(head.scale_holds for head in examination.heads)
    return Group(
        _title("Is √d_k still right?"),
        *(Text(line) for line in words.divisors(examination)),
        grid,
        Text(words.scale_verdict(examination), "green" if holds else "yellow"),
    )


def _map(examination: Examination, names: words.Names, width: int) -> RenderableType:
    """One letter a head; a capital, or !, where it is outside a band."""
    layers: dict[str, list[Head]] = {}
    for head in examination.heads:
        layers.setdefault(head.layer, []).append(head)
    label = max(len("layer"), *(len(names.label(layer)) for layer in layers))
    most = max(map(len, layers.values()))
    side = ">" if names.pattern else "<"  # numbers to the right, words to the left
    step = next((size for size in (3, 2) if label + 2 + size * most <= width), 1)
    lines = [Text(f"{'layer':{side}{label}}  {_ruler(most, step)}", "dim")]
    for layer, heads in layers.items():
        line = Text(f"{names.label(layer):{side}{label}}  ", "dim")
        for head in heads:
            line.append(f"{_letter(head):<{step}}", "bold yellow" if head.outside else "default")
        lines.append(line)
    title = f"Layers by heads, layer N is {names.pattern}" if names.pattern else "Layers by heads"
    return Group(_title(title), *lines, _legend(examination))


def _ruler(heads: int, step: int) -> str:
    """Every head's number where there is room, else every tenth's."""
    if step == 3:
        return "".join(f"{head:<3}" for head in range(heads)).rstrip()
    return "".join(f"{head:<{10 * step}}" for head in range(0, heads, 10)).rstrip()


def _letter(head: Head) -> str:
    letter = LETTERS[head.roles[0]] if head.roles else ""
    if head.outside:
        return letter.upper() or "!"
    return letter or "·"


def _legend(examination: Examination) -> Text:
    letters = {_letter(head) for head in examination.heads}
    parts = ["· nothing in particular"] if "·" in letters else []
    parts += [
        f"{letter} {role}: {words.MEANINGS[role]}"
        for role, letter in LETTERS.items()
        if {letter, letter.upper()} & letters
    ]
    if any(head.outside for head in examination.heads):
        parts.append("capital or !: outside a band")
    return Text("\n".join(parts), "dim")


def _worst(
    examination: Examination, names: words.Names, top: int, columns: tuple[str, ...]
) -> RenderableType:
    ranked = worst_first(examination.heads)
    chosen = ranked[:top]
    if not chosen:
        return Text("")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="cyan", padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right", overflow="fold")
    table.add_column("head", justify="right")
    for column in columns:
        table.add_column(column.replace("_", "\n"), justify="right", no_wrap=True)
    table.add_column("what it does")
    healthy = [_healthy(chosen, column) for column in columns]
    table.add_row("healthy", "", *healthy, "", style="dim", end_section=True)
    for head in chosen:
        cells = [_number(head, column) for column in columns]
        does = words.of_head(head)
        if head.outside and not set(head.outside) & set(columns):
            does = ", ".join(filter(None, (does, f"{' and '.join(head.outside)} outside")))
        table.add_row(names.short[head.layer], str(head.head), *cells, does)
    count = f"{len(chosen)} of {len(ranked)}" if len(chosen) < len(ranked) else "all"
    more = f"; --top {len(ranked)} shows all, --json gives them as data"
    return Group(
        _title(f"Heads nearest to trouble ({count}), worst first"),
        table,
        Text(f"! outside its band{more if len(chosen) < len(ranked) else ''}", "dim"),
    )


def _number(head: Head, name: str) -> Text:
    value = head.vitals[name]
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return Text(f"{text}!", "bold yellow") if name in head.outside else Text(f"{text} ")


def _healthy(heads: list[Head], name: str) -> str:
    """The band of all these heads; about, where it depends on how many keys a layer has."""
    bands = [head.bands[name] for head in heads]
    low = bands[0].low
    high = median(band.high for band in bands if band.high is not None)
    about = "~" if len({f"{band.high:.3g}" for band in bands}) > 1 else ""
    return f"≤{high:g} " if low is None else f"{low:g}..{about}{high:.3g} "


def _title(text: str) -> Rule:
    return Rule(Text(text, "bold"), align="left", style="cyan")
