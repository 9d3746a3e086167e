"""How a chunk's columns become bytes and arrays again; the words are in schema.ABOUT."""

import zlib

import numpy as np

FLOAT32 = np.dtype("<f4")
FLOAT64 = np.dtype("<f8")
INT64 = np.dtype("<i8")


def pack_integers(records: np.ndarray) -> bytes:
    """int64 [n] or [n, width], column by column.

    Steps and counts hardly change: their differences are zeros. Where they do change, the heads of
    a layer change alike: whole columns repeat.
    """
    differences = np.diff(records, axis=0, prepend=np.zeros_like(records[:1]))
    return zlib.compress(differences.T.astype(INT64).tobytes())


def unpack_integers(packed: bytes, records: int, width: int) -> np.ndarray:
    """int64 [n, width]."""
    expected = records * width * INT64.itemsize
    # Never more than announced: a small file may promise to unpack into a large memory.
    raw = zlib.decompressobj().decompress(packed, expected + 1)
    if len(raw) != expected:
        raise ValueError(f"a packed column has {len(raw)} bytes, expected {expected}")
    differences = np.frombuffer(raw, INT64).reshape(width, records).T
    return np.cumsum(differences, axis=0, dtype=np.int64)


def unpack_floats(packed: bytes, records: int, width: int, dtype: np.dtype) -> np.ndarray:
    """[n, width]"""
    return np.frombuffer(packed, dtype).reshape(records, width)
