"""How a chunk's columns become bytes and arrays again; the words are in schema.ABOUT."""

import math
import zlib

import numpy as np

FLOAT32 = np.dtype("<f4")
FLOAT64 = np.dtype("<f8")
INT64 = np.dtype("<i8")

RAW = "raw"  # the array as it is
SAME = "same"  # all records are equal: one of them, as it is
SHUFFLED = "shuffled"  # the first byte of every number, then the second ...; zlib
DELTAS = "deltas"  # each record less the one before it, then shuffled

LEVEL = 1  # of zlib: higher levels take several times as long for a percent


def pack(array: np.ndarray, *, small: bool) -> tuple[str, bytes]:
    """array: [fields, records, width] of any of the types above.

    Numbers of a small model are compressed, for there a run's other columns weigh as much as its
    vitals do. Large ones are read where they lie.
    """
    array = np.ascontiguousarray(array)
    if array.shape[1] > 1 and _all_the_same(array):
        return SAME, array[:, :1].tobytes()
    raw = array.tobytes()
    if array.dtype == INT64:
        packed = zlib.compress(_shuffled(_differences(array)), LEVEL)
        return (DELTAS, packed) if len(packed) < len(raw) else (RAW, raw)
    if small:
        packed = zlib.compress(_shuffled(array), LEVEL)
        if len(packed) < len(raw):
            return SHUFFLED, packed
    return RAW, raw


def unpacked_bytes(packing: str, shape: tuple[int, int, int], dtype: np.dtype) -> int:
    """How many bytes `unpack` makes, besides those that are there."""
    return 0 if packing in (RAW, SAME) else math.prod(shape) * dtype.itemsize


def unpack(packing: str, data: bytes, shape: tuple[int, int, int], dtype: np.dtype) -> np.ndarray:
    """[fields, records, width]; a view of `data` wherever that can be."""
    fields, records, width = shape
    if packing in (RAW, SAME):
        stored = records if packing == RAW else 1
        _check(len(data), fields * stored * width * dtype.itemsize)
        found = np.frombuffer(data, dtype).reshape(fields, stored, width)
        return found if packing == RAW else np.broadcast_to(found, shape)
    if packing not in (SHUFFLED, DELTAS):
        raise ValueError(f"a column is packed as {packing!r}, which is not known here")
    planes = _inflated(data, fields * records * width * dtype.itemsize)
    found = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1).T.copy()
    found = found.view(dtype).reshape(shape)
    return np.cumsum(found, axis=1, dtype=dtype) if packing == DELTAS else found


def pack_integers(numbers: np.ndarray) -> bytes:
    """int64 [n] that hardly change or grow evenly, such as steps and times: as differences."""
    return zlib.compress(_shuffled(_differences(numbers[None, :, None].astype(INT64))), LEVEL)


def unpack_integers(packed: bytes, records: int) -> np.ndarray:
    return unpack(DELTAS, packed, (1, records, 1), INT64)[0, :, 0]


def _all_the_same(array: np.ndarray) -> bool:
    bits = array.view(np.uint32 if array.dtype == FLOAT32 else np.uint64)  # NaN is equal to itself
    first = bits[:, :1]
    return bool((bits[:, -1:] == first).all()) and bool((bits == first).all())


def _differences(array: np.ndarray) -> np.ndarray:
    return np.diff(array, axis=1, prepend=np.zeros_like(array[:, :1]))


def _shuffled(array: np.ndarray) -> bytes:
    """Signs and exponents repeat, the last bits of a mantissa do not: each among its like."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


def _inflated(packed: bytes, expected: int) -> bytes:
    # Never more than announced: a small file may promise to unpack into a large memory.
    raw = zlib.decompressobj().decompress(packed, expected + 1)
    _check(len(raw), expected)
    return raw


def _check(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"a packed column has {found} bytes, expected {expected}")
