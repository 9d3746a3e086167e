"""Our PNG, read back by Pillow and by hand."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest

from scaledot.watch.report import png, scales

PALETTE = np.array([[9, 8, 7], [0, 110, 210], [255, 255, 255], [1, 2, 3]], np.uint8)


def _cells(rows: int, columns: int) -> np.ndarray:
    return (np.arange(rows * columns) % len(PALETTE)).astype(np.uint8).reshape(rows, columns)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (63, 65)])
def test_pillow_reads_back_every_cell(shape):
    pillow = pytest.importorskip("PIL.Image")
    cells = _cells(*shape)
    picture = pillow.open(io.BytesIO(png.encode(cells, PALETTE)))
    picture.load()
    np.testing.assert_array_equal(np.asarray(picture.convert("RGB")), PALETTE[cells])


def test_the_transparent_colour_lets_the_page_through():
    pillow = pytest.importorskip("PIL.Image")
    picture = pillow.open(io.BytesIO(png.encode(_cells(2, 3), PALETTE, transparent=0)))
    opacity = np.asarray(picture.convert("RGBA"))[..., 3]
    np.testing.assert_array_equal(opacity == 0, _cells(2, 3) == 0)


def test_every_chunk_carries_its_checksum():
    content = png.encode(_cells(3, 5), PALETTE, transparent=0)[len(png.SIGNATURE) :]
    kinds = []
    while content:
        (size,) = struct.unpack(">I", content[:4])
        kind, body = content[4:8], content[8 : 8 + size]
        (check,) = struct.unpack(">I", content[8 + size : 12 + size])
        assert check == zlib.crc32(kind + body)
        kinds.append(kind)
        content = content[12 + size :]
    assert kinds == [b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"]


def test_a_picture_without_cells_is_refused():
    with pytest.raises(ValueError, match="one cell at least"):
        png.encode(np.empty((0, 3), np.uint8), PALETTE)


def test_an_address_holds_the_picture():
    picture = png.encode(_cells(2, 2), PALETTE)
    kind, _, content = png.address(picture).partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content) == picture


@pytest.mark.parametrize(("vital", "edge"), [("max_logit", 100), ("passes", 0.1)])
def test_the_edge_of_the_band_is_in_the_middle_of_the_scale(vital, edge):
    assert scales.SCALES[vital].place(edge) == pytest.approx(0.5)


def test_a_worse_number_is_never_paler():
    for scale in scales.SCALES.values():
        values = np.geomspace(scale.low, scale.high, 31)
        cells = scales.cells_of(values, scale).astype(int)
        assert (np.diff(cells) >= 0).all()
        assert (cells[0], cells[-1]) == (scales.FIRST, scales.FIRST + scales.SHADES - 1)


def test_what_is_missing_or_broken_has_a_colour_of_its_own():
    values = np.array([np.nan, 3.0, 3.0])
    cells = scales.cells_of(values, scales.SCALES["max_logit"], np.array([False, True, False]))
    assert cells[:2].tolist() == [scales.NOTHING, scales.BROKEN]
    assert cells[2] >= scales.FIRST
