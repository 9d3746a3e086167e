"""From the tables `chunk` and `part` to arrays: of every field, or of those that are asked for."""

from collections.abc import Iterable, Sequence

import numpy as np

from scaledot.watch.store.packing import (
    FLOAT32,
    FLOAT64,
    INT64,
    unpack,
    unpack_integers,
    unpacked_bytes,
)
from scaledot.watch.store.records import PASSES, Chunk, Stream
from scaledot.watch.store.schema import PARTS_A_CHUNK, Database
from scaledot.watch.store.tables import LATEST, LATEST_TIME, whole

# A full chunk has some 16,000 numbers a field; a record of a wide model has more.
MOST_NUMBERS = 2**17
LEAST_BYTES = 4_096  # of the file that a chunk stands for
CHUNK_BYTES = 1_000  # that a chunk takes in memory besides its numbers
MICROSECONDS = LATEST_TIME * 1_000_000

COLUMNS = "id, first, records, split, steps, times"


def read_chunks(
    database: Database,
    stream: Stream,
    fields: Sequence[str] | None = None,
    *,
    from_record: int = 0,
    after_step: int | None = None,
    most_records: int | None = None,
) -> list[Chunk]:
    """In order. fields: None for all; () for steps and times alone.

    from_record: leave out the records before it. after_step: leave out chunks whose steps are all
    up to this one. most_records: end with the chunk that passes this number.
    """
    # The chunk that holds the first wanted record begins at it or before.
    rows = database.execute(
        f"SELECT {COLUMNS} FROM chunk WHERE stream = ? AND last_step > ? AND first >="
        " (SELECT coalesce(max(first), 0) FROM chunk WHERE stream = ? AND first <= ?)"
        " ORDER BY first",
        (
            stream.id,
            -(2**63) if after_step is None else after_step,
            stream.id,
            from_record,
        ),
    )
    chunks = []
    seen = 0
    for row in rows:
        if row[1] + row[2] <= from_record:
            continue
        chunks.append(_chunk(database, stream, row, fields).since(from_record))
        _keep(database, chunks[-1])
        seen += len(chunks[-1])
        if most_records is not None and seen >= most_records:
            break
    return chunks


def read_evenly(
    database: Database, stream: Stream, fields: Sequence[str], most: int
) -> list[Chunk]:
    """At most so many records, evenly chosen, the first and the last among them; order kept."""
    number = number_of_records(database, stream)
    if number <= most:
        return read_chunks(database, stream, fields)
    places = np.linspace(0, number - 1, most).round().astype(np.int64)
    chunks = []
    rows = database.execute(
        f"SELECT {COLUMNS} FROM chunk WHERE stream = ? ORDER BY first", (stream.id,)
    )
    for row in rows:
        begin, end = np.searchsorted(places, (row[1], row[1] + row[2]))
        if begin < end:
            chunk = _chunk(database, stream, row, fields)
            chunks.append(chunk.at(places[begin:end] - chunk.first))
            _keep(database, chunks[-1])
    return chunks


def last_record(
    database: Database, stream: Stream, fields: Sequence[str] | None = None
) -> Chunk | None:
    row = database.execute(
        f"SELECT {COLUMNS} FROM chunk WHERE stream = ? ORDER BY first DESC LIMIT 1", (stream.id,)
    ).fetchone()
    if row is None:
        return None
    chunk = _chunk(database, stream, row, fields)
    last = chunk.at(np.array([len(chunk) - 1]), chunk.end - 1)  # a copy: the chunk is let go
    _keep(database, last)
    return last


def first_step(database: Database, stream: Stream) -> int | None:
    row = database.execute(
        "SELECT steps, records FROM chunk WHERE stream = ? ORDER BY first LIMIT 1", (stream.id,)
    ).fetchone()
    if row is None:
        return None
    return int(_integers(database, row[0], whole(row[1], 1, MOST_NUMBERS), LATEST).min())


def number_of_records(database: Database, stream: Stream) -> int:
    row = database.execute(
        "SELECT first + records FROM chunk WHERE stream = ? ORDER BY first DESC LIMIT 1",
        (stream.id,),
    ).fetchone()
    return 0 if row is None else whole(row[0], 0, LATEST)


def joined(chunks: Sequence[Chunk], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Fields of many chunks of one stream, [n, heads of all layers]."""
    return {name: np.concatenate([chunk.field(name) for chunk in chunks]) for name in names}


def _chunk(
    database: Database, stream: Stream, row: Sequence, fields: Sequence[str] | None
) -> Chunk:
    id_, first, records, split, steps, times = row
    database.spend("chunks", LEAST_BYTES)
    whole(first, 0, LATEST)
    whole(records, 1, max(MOST_NUMBERS // stream.width, 1))
    if (times is None) != bool(stream.names):
        raise ValueError(f"chunk {id_} has {'no ' * (times is None)}times")
    wanted = _wanted(stream, fields)
    by_field = _split if whole(split, 0, 1) else _whole
    return Chunk(
        stream,
        first,
        _integers(database, steps, records, LATEST),
        None if times is None else _integers(database, times, records, MICROSECONDS) / 1e6,
        by_field(database, stream, id_, records, wanted),
    )


def _integers(database: Database, packed: bytes, records: int, most: int) -> np.ndarray:
    """Steps or times, [records]."""
    database.spend("unpack", records * INT64.itemsize)
    found = unpack_integers(packed, records)
    if found.min() < -most or found.max() > most:
        raise ValueError(f"a step or a time is beyond {most}")
    return found


def _keep(database: Database, chunk: Chunk) -> None:
    """Count what stays in memory, of one of its vitals."""
    database.spend("keep", CHUNK_BYTES + len(chunk) * 8 * (chunk.stream.width + 2))


def _wanted(stream: Stream, fields: Sequence[str] | None) -> list[str]:
    known = (*stream.floats, *stream.counts)
    if fields is None:
        return list(known)
    asked = [part for name in fields for part in (PASSES if name == "passes" else (name,))]
    return [name for name in known if name in asked]


def _split(
    database: Database, stream: Stream, chunk: int, records: int, wanted: list[str]
) -> dict[str, np.ndarray]:
    known = (*stream.floats, *stream.counts)
    found = {}
    for name in wanted:
        dtype = FLOAT32 if name in stream.floats else INT64
        shape = (1, records, stream.heads)
        found[name] = _part(database, chunk, known.index(name), shape, dtype)[0]
    return found


def _whole(
    database: Database, stream: Stream, chunk: int, records: int, wanted: list[str]
) -> dict[str, np.ndarray]:
    found = {}
    of_floats = FLOAT64 if stream.names else FLOAT32
    place = 0
    for names, dtype in ((stream.floats, of_floats), (stream.counts, INT64)):
        mine = [name for name in wanted if name in names]
        if mine:
            shape = (len(names), records, stream.width)
            values = _part(database, chunk, place, shape, dtype)
            found |= {name: values[names.index(name)] for name in mine}
        place += len(names)
    return found


def _part(
    database: Database,
    chunk: int,
    place: int,
    shape: tuple[int, int, int],
    dtype: np.dtype,
) -> np.ndarray:
    row = database.execute(
        "SELECT packing, data FROM part WHERE id = ?", (chunk * PARTS_A_CHUNK + place,)
    ).fetchone()
    if row is None:
        raise ValueError(f"chunk {chunk} has no part at place {place}: the file is damaged")
    packing, data = row
    database.spend("unpack", unpacked_bytes(packing, shape, dtype))
    return unpack(packing, data, shape, dtype)
