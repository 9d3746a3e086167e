"""Heat maps, aggregates, and TensorBoard read back by TensorBoard itself."""

import dataclasses
import io

import numpy as np
import pytest
from watch.sinks_cases import LAYERS, needs, reading, readings, with_a_head_without_rows

from scaledot.measure import COUNT_FIELDS
from scaledot.watch.reading import Reading
from scaledot.watch.sinks import TensorBoard
from scaledot.watch.sinks.aggregate import MOST_SERIES, Aggregates
from scaledot.watch.sinks.heat_map import (
    COLOURS,
    LARGEST,
    NO_HEAD,
    NOT_FINITE,
    SHADES,
    colours_of,
    heat_map,
)
from scaledot.watch.sinks.whole import WholeStep

VITALS = ("max_logit", "entropy_ratio", "passes")


def whole(some: list[Reading]) -> WholeStep:
    step = WholeStep(some[0].step, some[0].phase)
    for one in some:
        step.add(one)
    return step


def renamed(one: Reading, layer: str, **more) -> Reading:
    return dataclasses.replace(one, layer=layer, **more)


def with_broken_rows(one: Reading, head: int) -> Reading:
    counts = one.counts.copy()
    counts[COUNT_FIELDS.index("nonfinite"), head] = 11
    return Reading(one.step, one.phase, one.time, one.layer, one.floats, counts)


def test_a_heat_map_has_a_row_a_layer_and_a_column_a_head():
    step = whole(readings(2))
    picture = heat_map(step, "passes")
    assert picture.shape == (2 * LARGEST, 5 * LARGEST, 3)
    cells = picture[LARGEST // 2 :: LARGEST, LARGEST // 2 :: LARGEST]
    for row, (layer, heads) in zip(cells, LAYERS, strict=True):
        right = colours_of(step.layers[layer].value("passes").astype(float), "passes")
        np.testing.assert_array_equal(row[:heads], right)
    np.testing.assert_array_equal(cells[0, 3:], [NO_HEAD] * 2)  # the first layer has three


def test_heads_without_rows_and_with_broken_rows_have_colours_of_their_own():
    one = with_broken_rows(with_a_head_without_rows(reading(0)), head=1)
    cells = heat_map(whole([one]), "max_logit")[0, LARGEST // 2 :: LARGEST]
    assert tuple(cells[3]) == NO_HEAD
    assert tuple(cells[1]) == NOT_FINITE
    assert tuple(cells[0]) not in (NO_HEAD, NOT_FINITE)


@pytest.mark.parametrize(
    ("vital", "healthy", "ill"),
    [("max_logit", 0.0, 1e5), ("passes", 1.0, 0.0), ("saturated", 0.0, 1.0), ("q_rms", 0.0, 999.0)],
)
def test_bright_is_ill(vital, healthy, ill):
    dark, bright = colours_of(np.array([healthy, ill]), vital)
    np.testing.assert_array_equal(dark, COLOURS[0])
    np.testing.assert_array_equal(bright, COLOURS[-1])


@pytest.mark.parametrize("vital", SHADES)
def test_every_vital_has_a_shade_that_survives_infinities(vital):
    picture = colours_of(np.array([0.0, 1.0, np.inf, -np.inf, np.nan]), vital)
    assert picture.dtype == np.uint8
    np.testing.assert_array_equal(picture[-1], NO_HEAD)


def test_a_thousand_layers_make_a_picture_that_can_be_shown():
    one = reading(0)
    step = whole([renamed(one, f"blocks.{number}") for number in range(1009)])
    assert heat_map(step, "passes").shape == (1009 * 4, 3 * 4, 3)


def test_aggregates_are_the_least_mean_and_greatest_head():
    some = readings(1)
    some[0] = with_a_head_without_rows(some[0])  # its -inf must not be the least
    named = Aggregates(("max_logit",)).of(whole(some))
    first, second = (
        one.value("max_logit")[:heads] for one, heads in zip(some, (3, 5), strict=True)
    )
    for group, values in (
        ("all", np.concatenate([first, second])),
        (some[0].layer, first),
        (some[1].layer, second),
    ):
        for figure in ("min", "mean", "max"):
            found = named.pop(f"scaledot_max_logit/{group}/{figure}")
            np.testing.assert_allclose(found, getattr(np, figure)(values), rtol=1e-6)
    assert named == {"scaledot/nonfinite_rows": 0.0}


def test_many_layers_share_charts_and_no_extreme_is_lost():
    pool = [reading(5, f"blocks.{number}", heads=2) for number in range(7)]
    some = [renamed(pool[number % 7], f"blocks.{number}") for number in range(211)]
    some[100] = renamed(reading(9, heads=2), "blocks.100", step=5)  # the ill one
    aggregates = Aggregates(VITALS)
    named = aggregates.of(whole(some))
    assert len(named) <= MOST_SERIES + 3 * len(VITALS) + 1
    groups = {name: value for name, value in named.items() if "/all/" not in name}
    most = max(
        v
        for name, v in groups.items()
        if name.startswith("scaledot_max_logit/blocks.") and name.endswith("/max")
    )
    assert most == max(one.value("max_logit").max() for one in some)
    assert any("/blocks.0 to blocks.6/" in name for name in groups)
    later = aggregates.of(whole([*some, reading(5, "blocks.999", heads=2)]))
    assert set(named) < set(later)  # names stay; a late layer is not left out
    assert any("/later layers/" in name for name in later)


def test_unknown_vitals_are_named(tmp_path):
    needs("tensorboard", "tensorboard")
    with pytest.raises(ValueError, match=r"give a tuple of names out of max_logit"):
        TensorBoard(tmp_path, vitals=("entropie",))
    with pytest.raises(ValueError, match=r"pictures=-1; give 0 for none"):
        TensorBoard(tmp_path, pictures=-1)


@pytest.fixture
def events():
    needs("tensorboard", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def load(folder):
        accumulator = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
        accumulator.Reload()
        return accumulator

    return load


def test_tensorboard_reads_back_pictures_aggregates_and_scalars(tmp_path, events):
    image = needs("PIL.Image", "tensorboard")
    with TensorBoard(tmp_path) as sink:
        for step in (0, 3):
            assert sink.write(readings(step))
            sink.scalar(step, "loss", 2.5 - step)
        sink.write(readings(3, phase="eval"))
    assert sink.off is None
    found = events(tmp_path)
    tags = found.Tags()
    phases = ("scaledot", "scaledot_eval")
    assert sorted(tags["images"]) == sorted(
        f"{phase}/{vital}" for phase in phases for vital in VITALS
    )
    for vital in VITALS:
        pictures = found.Images(f"scaledot/{vital}")
        assert [one.step for one in pictures] == [0, 3]
        for one in pictures:
            pixels = np.asarray(image.open(io.BytesIO(one.encoded_image_string)).convert("RGB"))
            np.testing.assert_array_equal(pixels, heat_map(whole(readings(one.step)), vital))
    right = Aggregates(VITALS).of(whole(readings(3)))
    for tag, value in right.items():
        assert found.Scalars(tag)[-1].step == 3
        np.testing.assert_allclose(found.Scalars(tag)[-1].value, value, rtol=1e-6)
    assert [(one.step, one.value) for one in found.Scalars("scaledot/loss")] == [
        (0, 2.5),
        (3, -0.5),
    ]
    words = found.Tensors("scaledot/legend/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| 1 | `blocks.1.attention` | 5 |" in words
    per_phase = 3 * len(VITALS) * (1 + len(LAYERS)) + 1  # all and each layer; rows with NaN
    assert len(tags["scalars"]) == 2 * per_phase + 1


def test_pictures_can_be_rarer_than_readings(tmp_path, events):
    with TensorBoard(tmp_path, vitals=("sink",), pictures=2) as sink:
        for step in range(5):
            sink.write(readings(step))
    found = events(tmp_path)
    assert [one.step for one in found.Images("scaledot/sink")] == [0, 2, 4]
    assert len(found.Scalars("scaledot_sink/all/max")) == 5
