"""How far results depend on the number of threads.

The compiled pass never splits a sum over threads. Tiles of torch operators and torch's own kernel
leave their products to a library that does, for some shapes: the last bits may differ then.
"""

import pytest
import torch
from conformance.agreement import assert_output_agrees
from conformance.calls import call

import scaledot
from scaledot.backends.cpu import native

COUNTS = (1, 2, 3, 4, 8)
COMPILED = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (20, 3)},
    "bool": {"attn_mask": torch.arange(509) % 7 > 0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
    "scale": {"scale": torch.tensor([0.5, -0.2])},
}
OTHERS = {"float": {"attn_mask": torch.linspace(-2, 2, 509)}, "softcap": {"softcap": 5.0}}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def shaped(queries, dtype, **words):
    c = call(lead=(1, 2), queries=queries, keys=509, width=64, value_width=64, dtype=dtype)
    floats = {
        n: x.to(dtype)
        for n, x in words.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    return c.with_keywords(**{**words, **floats})


@pytest.mark.one_case
@pytest.mark.skipif(native.library() is None, reason=str(native.fault()))
@pytest.mark.parametrize("queries", [1, 5, 301])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_pass_gives_the_same_bits_on_any_number_of_threads(
    name, dtype, queries, threads
):
    c = shaped(queries, dtype, **COMPILED[name])
    found = []
    for count in COUNTS:
        threads(count)
        out, vitals = scaledot.attention_with_vitals(*c.tensors, **c.keywords, per_row=True)
        found.append([out, *vitals.packed(), *vitals.per_row])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.one_case
@pytest.mark.parametrize("queries", [1, 5, 301])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*COMPILED, *OTHERS])
def test_every_path_repeats_its_bits_on_as_many_threads(name, dtype, queries, threads):
    c = shaped(queries, dtype, **(COMPILED | OTHERS)[name])
    for count in (1, 3, 8):
        threads(count)
        outs = []
        for function in (scaledot.attention, with_vitals):
            first, second = (function(*c.tensors, **c.keywords) for _ in range(2))
            assert torch.equal(first, second)
            outs.append(first)
        assert_output_agrees(outs, *c.tensors, **c.keywords)


def with_vitals(*tensors, **keywords):
    return scaledot.attention_with_vitals(*tensors, **keywords)[0]
