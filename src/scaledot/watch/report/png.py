"""A PNG of coloured cells, one pixel each: the part of the format that a heat map needs."""

import base64
import struct
import zlib

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
LEVEL = 6  # of zlib: 9 takes five times as long for a percent


def encode(cells: np.ndarray, palette: np.ndarray, transparent: int | None = None) -> bytes:
    """cells: uint8 [rows, columns], places in the palette: uint8 [up to 256, 3].

    transparent: the colour that lets the page through.
    """
    rows, columns = cells.shape
    if not rows or not columns:
        raise ValueError(f"a picture of {rows} x {columns} cells; give one cell at least")
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)  # 8 bits, a palette
    # Each line begins with the number of its filter; 0: the bytes as they are.
    lines = np.zeros((rows, columns + 1), np.uint8)
    lines[:, 1:] = cells
    chunks = [
        _chunk(b"IHDR", header),
        _chunk(b"PLTE", palette.astype(np.uint8).tobytes()),
        _chunk(b"IDAT", zlib.compress(lines.tobytes(), LEVEL)),
        _chunk(b"IEND", b""),
    ]
    if transparent is not None:
        opacity = np.full(transparent + 1, 255, np.uint8)
        opacity[transparent] = 0
        chunks.insert(2, _chunk(b"tRNS", opacity.tobytes()))
    return SIGNATURE + b"".join(chunks)


def address(picture: bytes) -> str:
    """The picture itself as an address, so that a page needs no second file."""
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
