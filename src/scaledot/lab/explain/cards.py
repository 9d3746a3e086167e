"""Flashcards in a terminal: front, then back."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from scaledot.lab.explain.voice import Voice
from scaledot.lab.flashcards import Card


def whole(voice: Voice, cards: Sequence[Card]) -> Iterator[RenderableType]:
    line = "-" if voice.ascii_only else "─"
    title = Text(voice.say("flashcards.title"), "bold")
    yield Rule(title, align="left", style="cyan", characters=line)
    yield Text(voice.say("flashcards.intro", cards=len(cards)), "dim")
    for number, card in enumerate(cards, 1):
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(justify="right", width=2, style="dim")
        table.add_column()
        table.add_row(str(number), Text(voice.write(card.front), "bold"))
        table.add_row("", Text(voice.write(card.back)))
        yield Padding(table, (1, 0, 0, 0))
    language = "" if voice.lang == "en" else f" --lang {voice.lang}"
    command = f"scaledot explain flashcards{language} --anki scaledot.txt"
    yield Padding(
        Text.assemble(f"{voice.say('flashcards.anki')} ", (command, "green")), (1, 0, 0, 0)
    )
