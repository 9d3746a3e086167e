"""Rows of the small tables as records."""

import json
import sqlite3
from typing import Any

from scaledot.watch.alarms.alarm import Alarm, from_json
from scaledot.watch.reading import Phase, RunAttributes
from scaledot.watch.store import schema
from scaledot.watch.store.records import Segment, Stream


def read_name(database: sqlite3.Connection) -> str:
    """What tells this run from every other, whatever its file is called."""
    return database.execute("SELECT text FROM about WHERE name = 'run'").fetchone()[0]


def read_segments(database: sqlite3.Connection) -> dict[int, Segment]:
    """By id, oldest first."""
    attributes: dict[int, dict[str, Any]] = {}
    for segment, name, value in database.execute("SELECT segment, name, value FROM attribute"):
        attributes.setdefault(segment, {})[name] = json.loads(value)
    rows = database.execute(
        "SELECT id, started, seen, ended, dropped, float_fields, count_fields"
        " FROM segment ORDER BY id"
    )
    return {
        id_: Segment(
            id_,
            *plain,
            float_fields=tuple(json.loads(floats)),
            count_fields=tuple(json.loads(counts)),
            attributes=_attributes(attributes.get(id_, {})),
        )
        for id_, *plain, floats, counts in rows
    }


def read_streams(
    database: sqlite3.Connection, segments: dict[int, Segment] | None = None
) -> list[Stream]:
    """In the order in which they began."""
    segments = read_segments(database) if segments is None else segments
    rows = database.execute("SELECT id, segment, kind, content FROM stream ORDER BY id")
    return [Stream.of(row, segments) for row in rows]


def read_alarms(database: sqlite3.Connection, after: int = -1) -> dict[int, Alarm]:
    """By id, in the order in which they were raised; after: only those with a larger id."""
    if not schema.has_alarms(database):
        return {}
    rows = database.execute("SELECT id, alarm FROM alarm WHERE id > ? ORDER BY id", (after,))
    return {id_: from_json(json.loads(text)) for id_, text in rows}


def vitals_streams(database: sqlite3.Connection, phase: Phase | None) -> list[Stream]:
    """Those of one phase; None: of all."""
    return [
        stream
        for stream in read_streams(database)
        if stream.layers and phase in (None, stream.kind)
    ]


def _attributes(named: dict[str, Any]) -> RunAttributes:
    return RunAttributes(
        command=tuple(named.pop("command", ())),
        versions=named.pop("versions", {}),
        model=named.pop("model", ""),
        started=named.pop("started", 0.0),
        more=named,
    )
