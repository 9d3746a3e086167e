"""Rows of the small tables as records. What scaledot never writes is an error."""

import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from scaledot.watch import reading
from scaledot.watch.alarms.alarm import GRADES, Alarm, from_json
from scaledot.watch.reading import PHASES, Phase, RunAttributes
from scaledot.watch.store import schema
from scaledot.watch.store.records import Segment, Stream
from scaledot.watch.store.schema import PARTS_A_CHUNK, SCALARS, Database

LATEST = 2**53  # steps and counts beyond are no exact numbers in a page
LATEST_TIME = 253_000_000_000  # seconds since 1970: the year 9987
MOST_HEADS = 2**16  # of a layer
WIDEST = 2**18  # heads of all layers
MOST_ROWS = {"segment": 2_000, "attribute": 20_000, "stream": 10_000, "alarm": 20_000}
MOST_LAYERS = 6_000  # of the run
MOST_NAMES = 10_000  # of layers or scalars in one stream
LONGEST_NAME = 1_000
# Characters of one text, and of the JSON in a row of a table.
LONGEST_TEXT = 2**21
LONGEST = {"segment": 2**16, "attribute": 2**20, "stream": 2**21, "alarm": 2**20}


def read_name(database: Database) -> str:
    """What tells this run from every other, whatever its file is called."""
    return _text(database.execute("SELECT text FROM about WHERE name = 'run'").fetchone()[0])


def read_segments(database: Database) -> dict[int, Segment]:
    """By id, oldest first."""
    attributes: dict[int, dict[str, Any]] = {}
    for segment, name, value in _rows(database, "attribute", "segment, name", "value"):
        attributes.setdefault(segment, {})[_name(name)] = _json(database, value, "attributes")
    rows = _rows(
        database,
        "segment",
        "id, started, seen, ended, dropped",
        "float_fields",
        "count_fields",
        rest="ORDER BY id",
    )

    @cache  # the fields of most segments are the same
    def fields(text: str) -> tuple[str, ...]:
        return _names(_json(database, text), PARTS_A_CHUNK)

    return {
        id_: Segment(
            whole(id_, 0, 2**31),
            _time(started),
            _time(seen),
            None if ended is None else _time(ended),
            whole(dropped, 0, LATEST),
            float_fields=fields(floats),
            count_fields=fields(counts),
            attributes=_attributes(attributes.get(id_, {})),
        )
        for id_, started, seen, ended, dropped, floats, counts in rows
    }


def read_streams(database: Database, segments: dict[int, Segment] | None = None) -> list[Stream]:
    """In the order in which they began."""
    segments = read_segments(database) if segments is None else segments
    rows = _rows(database, "stream", "id, segment, kind", "content", rest="ORDER BY id")
    known: dict[tuple[str, int], tuple[str, int]] = {}  # one object for each layer of many streams

    @cache  # many streams are of the same layers
    def layers_of(text: str) -> tuple[tuple[str, int], ...]:
        return tuple(known.setdefault(one, one) for one in _layers(_json(database, text)))

    @cache
    def names_of(text: str) -> tuple[str, ...]:
        return _names(_json(database, text), MOST_NAMES)

    found = []
    for id_, segment, kind, content in rows:
        layers, names = (), ()
        if kind == SCALARS:
            names = names_of(content)
        elif kind in PHASES:
            layers = layers_of(content)
        else:
            raise ValueError(f"a stream is of the kind {kind!r}")
        found.append(Stream(whole(id_, 0, 2**63 - 1), segments[segment], kind, layers, names))
    if len({layer for layer, _ in known}) > MOST_LAYERS:
        raise ValueError(f"it has more than {MOST_LAYERS} layers")
    return found


def read_alarms(database: Database, after: int = -1) -> dict[int, Alarm]:
    """By id, in the order in which they were raised; after: only those with a larger id."""
    if not schema.has_alarms(database):
        return {}
    rows = _rows(database, "alarm", "id", "alarm", rest="WHERE id > ? ORDER BY id", values=(after,))
    return {id_: _alarm(_json(database, text, "alarms")) for id_, text in rows}


def vitals_streams(database: Database, phase: Phase | None) -> list[Stream]:
    """Those of one phase; None: of all."""
    return [
        stream
        for stream in read_streams(database)
        if stream.layers and phase in (None, stream.kind)
    ]


def whole(value: Any, least: int, most: int) -> int:
    """The value, a whole number from least to most."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{value!r:.40} where a whole number from {least} to {most} belongs")
    return value


def _rows(
    database: Database,
    table: str,
    columns: str,
    *texts: str,
    rest: str = "",
    values: Sequence[Any] = (),
) -> Iterable[Sequence]:
    """Rows of a small table; texts: its columns of text, which come last."""
    most, longest = MOST_ROWS[table], LONGEST[table]
    counted = f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT {most + 1})"
    if database.execute(counted).fetchone()[0] > most:
        raise ValueError(f"the table {table} has more than {most} rows")
    # One character more than is allowed shows that a text is too long; the rest is not loaded.
    cut = ", ".join(f"substr({name}, 1, {longest + 1})" for name in texts)
    for row in database.execute(f"SELECT {columns}, {cut} FROM {table} {rest}", values):
        for text in row[-len(texts) :]:
            if len(_text(text)) > longest:
                raise ValueError(f"the table {table} has a text of more than {longest} characters")
        yield row


def _json(database: Database, text: str, what: str = "parse") -> Any:
    """what: the share of the allowance that it takes from."""
    values = sum(map(text.count, "[{,"))
    database.spend(what, len(text) + 32 * values)  # what an empty list takes in memory
    found = json.loads(text)
    if "\\ud" in text.lower():  # half a character: it could not be printed
        plain = json.dumps(found, ensure_ascii=False).encode(errors="replace").decode()
        found = json.loads(plain)
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} where text belongs")
    if len(value) > LONGEST_TEXT:
        raise ValueError(f"a text of {len(value)} characters")
    return value


def _name(value: Any) -> str:
    if len(_text(value)) > LONGEST_NAME:
        raise ValueError(f"a name of {len(value)} characters")
    return value


def _names(values: Any, most: int) -> tuple[str, ...]:
    names = tuple(map(_name, _list(values, most)))
    if len(set(names)) < len(names):
        raise ValueError("a name comes twice")
    return names


def _list(values: Any, most: int) -> list:
    if not isinstance(values, list) or len(values) > most:
        raise ValueError(f"{values!r:.40} where a list of at most {most} values belongs")
    return values


def _layers(values: Any) -> list[tuple[str, int]]:
    layers = []
    for value in _list(values, MOST_NAMES):
        name, heads = _list(value, 2)
        layers.append((_name(name), whole(heads, 1, MOST_HEADS)))
    if not layers or sum(heads for _, heads in layers) > WIDEST:
        raise ValueError(f"a stream has no layers, or more than {WIDEST} heads")
    return layers


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{value!r:.40} where a number belongs")
    return float(value)


def _time(value: Any) -> float:
    found = _number(value)
    if not 0 <= found <= LATEST_TIME:
        raise ValueError(f"{value!r:.40} where a time belongs")
    return found


def _alarm(data: Any) -> Alarm:
    alarm = from_json(data)
    for name in (alarm.kind, alarm.layer):
        _name(name)
    for text in (alarm.words, alarm.advice):
        _text(text)
    for number in (alarm.step, alarm.since):
        whole(number, -LATEST, LATEST)
    for head in _list(list(alarm.heads), MOST_HEADS) + [alarm.head] * (alarm.head is not None):
        whole(head, 0, MOST_HEADS - 1)
    if alarm.grade not in GRADES:
        raise ValueError(f"an alarm of grade {alarm.grade!r:.40}")
    if alarm.rate is not None and not math.isfinite(alarm.rate):
        raise ValueError(f"an alarm with a rate of {alarm.rate}")
    return alarm


def _attributes(named: dict[str, Any]) -> RunAttributes:
    command = _list(named.pop("command", []), MOST_NAMES)
    versions, model = named.pop("versions", {}), named.pop("model", "")
    if not isinstance(versions, dict):
        raise ValueError(f"{versions!r:.40} where the versions belong")
    for name, known in KNOWN.items():
        if name in named and not known(named[name]):
            raise ValueError(f"{named[name]!r:.40} where the run's {name} belongs")
    return RunAttributes(
        command=tuple(map(_text, command)),
        versions={_name(name): _text(value) for name, value in versions.items()},
        model=_text(model),
        started=_time(named.pop("started", 0.0)),
        more=named,
    )


def _is_remedies(value: Any) -> bool:
    """Whether it is what `remedies.Installed.note` gives, one for each remedy."""
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("spec"), str)
        and isinstance(one.get("dry_run"), bool)
        and type(one.get("since")) in (int, type(None))
        and all(_is_texts(one.get(name)) for name in ("layers", "refused"))
        and isinstance(one.get("words"), str)
        for one in value
    )


def _is_disk(value: Any) -> bool:
    """Whether it is what a store notes of a disk that refused to write."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("full"), bool)
        and _is_time(value.get("since"))
        and (value.get("until") is None or _is_time(value["until"]))
    )


def _is_sample(value: Any) -> bool:
    """Whether it says how many rows of a step were read, and how many there were."""
    return isinstance(value, dict) and all(
        type(value.get(name)) is int and 0 <= value[name] < LATEST for name in ("read", "there")
    )


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LATEST_TIME


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


# What viewers take from the attributes that came later; whatever else is there stays as it is.
KNOWN = {
    "judged": lambda value: isinstance(value, bool),
    reading.LOSS_CALLS: lambda value: type(value) is int and 0 < value < LATEST,
    reading.REMEDIES: _is_remedies,
    reading.DISK: _is_disk,
    reading.SAMPLE: _is_sample,
}
