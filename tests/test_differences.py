"""docs/differences.md, line by line: what torch does, what ours does."""

import math
import pathlib
import re

import pytest
import torch
from torch.nn import functional as F

import scaledot

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "differences.md"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_29)


def normal(*shape):
    return torch.randn(*shape)


def theirs(*tensors, **keywords):
    return F.scaled_dot_product_attention(*tensors, **keywords)


def by_the_formula(query, key, value, bias=0.0, scale=None):
    query, key, value = query.double(), key.double(), value.double()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return (query @ key.mT * scale + bias).softmax(-1) @ value


def assert_near(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def triangle(queries, keys):
    return torch.zeros(queries, keys).masked_fill(
        ~torch.ones(queries, keys).tril().bool(), -math.inf
    )


def test_every_line_of_the_page_names_a_test_and_every_test_is_named():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`(\w+)` \|$", row)}
    assert len(named) == len([row for row in rows if not row.startswith("| |")])
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert named == here - {"every_line_of_the_page_names_a_test_and_every_test_is_named"}


def test_mask_and_is_causal_both_apply():
    query, mask = normal(3, 6, 8), torch.rand(6, 6) > 0.3
    mask.fill_diagonal_(True)
    bias = triangle(6, 6).masked_fill(~mask, -math.inf)
    found = scaledot.attention(query, query, query, mask, is_causal=True)
    assert_near(found, by_the_formula(query, query, query, bias))
    with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
        theirs(query, query, query, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_causal_with_a_scale_of_zero_or_below(scale):
    query = normal(2, 3, 6, 8)
    found = scaledot.attention(query, query, query, is_causal=True, scale=scale)
    assert_near(found, by_the_formula(query, query, query, triangle(6, 6), scale))
    assert theirs(query, query, query, is_causal=True, scale=scale).isnan().any()


def test_nan_in_a_query_stays_visible():
    query, key = normal(1, 1, 4, 8), normal(1, 1, 4, 8)
    query[0, 0, 1] = math.nan
    assert scaledot.attention(query, key, key)[0, 0, 1].isnan().all()
    assert not theirs(query, key, key).isnan().any()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_nan_that_is_hidden_stays_hidden(broken):
    query, key, value = normal(1, 1, 4, 8), normal(1, 1, 20, 8), normal(1, 1, 20, 8)
    value[0, 0, 7] = broken
    mask = torch.ones(4, 20).bool()
    mask[:, 7] = False
    assert scaledot.attention(query, key, value, mask).isfinite().all()
    assert not theirs(query, key, value, mask).isfinite().all()


def test_a_mask_of_one_dimension_broadcasts():
    query, mask = normal(1, 2, 5, 8), torch.tensor([True, False, True, True, True])
    expected = scaledot.attention(query, query, query, mask.expand(5, 5))
    torch.testing.assert_close(scaledot.attention(query, query, query, mask), expected)
    with pytest.raises(IndexError):
        theirs(query, query, query, mask)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
def test_a_float_mask_may_have_another_type(kind):
    query, bias = normal(1, 2, 5, 8), normal(5, 5).to(kind)
    found = scaledot.attention(query, query, query, bias)
    assert_near(found, by_the_formula(query, query, query, bias.double()))
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype"):
        theirs(query, query, query, bias)


def test_value_and_key_need_the_same_tokens():
    query, value = normal(1, 2, 6, 8), normal(1, 2, 4, 8)
    with pytest.raises(ValueError, match="each key needs exactly one value"):
        scaledot.attention(query, query, value)
    assert theirs(query, query, value).shape == query.shape


def test_a_scale_that_is_not_finite_is_an_error():
    query = normal(1, 2, 5, 8)
    with pytest.raises(ValueError, match="scale=inf must be finite"):
        scaledot.attention(query, query, query, scale=math.inf)
    assert theirs(query, query, query, scale=math.inf).isnan().any()


def test_a_bool_is_no_probability():
    query = normal(1, 2, 5, 8)
    with pytest.raises(TypeError, match="dropout_p must be a number, got bool"):
        scaledot.attention(query, query, query, dropout_p=True)
    assert not theirs(query, query, query, dropout_p=True).any()


def test_causal_bias_of_other_lengths_is_an_error():
    from torch.nn.attention.bias import causal_upper_left

    query, bias = normal(1, 2, 5, 8), causal_upper_left(3, 4)
    with pytest.raises(ValueError, match=r"CausalBias of shape \[3, 4\]"):
        scaledot.attention(query, query, query, bias)
    causal = theirs(query, query, query, is_causal=True)
    torch.testing.assert_close(theirs(query, query, query, bias), causal)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_may_be_causal():
    rows = [normal(3, 4, 8), normal(5, 4, 8)]
    query = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    found = scaledot.attention(query, query, query, is_causal=True)
    for entry, out in zip(rows, found.transpose(1, 2).unbind(), strict=True):
        heads = entry.transpose(0, 1)
        bias = triangle(len(entry), len(entry))
        assert_near(out.transpose(0, 1), by_the_formula(heads, heads, heads, bias))
    with pytest.raises(RuntimeError, match="No viable backend"):
        theirs(query, query, query, is_causal=True)


def test_flags_may_be_numbers_of_numpy():
    import numpy as np

    query = normal(1, 2, 5, 8)
    expected = scaledot.attention(query, query, query, is_causal=True)
    found = scaledot.attention(query, query, query, is_causal=np.True_)
    torch.testing.assert_close(found, expected)
    with pytest.raises(TypeError, match="must be bool"):
        theirs(query, query, query, is_causal=np.True_)


WRONG = {
    "types": (normal(2, 5, 8), normal(2, 5, 8).double(), normal(2, 5, 8)),
    "ranks": (normal(8), normal(2, 5, 8), normal(2, 5, 8)),
    "heads": (normal(2, 6, 5, 8), normal(2, 3, 5, 8), normal(2, 3, 5, 8)),
    "widths": (normal(2, 3, 5, 8), normal(2, 3, 5, 7), normal(2, 3, 5, 8)),
    "integers": (torch.ones(2, 3, 5, 8).int(),) * 3,
}


@pytest.mark.parametrize("mistake", WRONG)
def test_errors_are_runtime_errors_too(mistake):
    with pytest.raises(RuntimeError):
        theirs(*WRONG[mistake])
    with pytest.raises(RuntimeError) as caught:
        scaledot.attention(*WRONG[mistake])
    assert isinstance(caught.value, (ValueError, TypeError))


def test_dropout_draws_other_numbers():
    query, value = normal(1, 1, 40, 8), torch.eye(40).view(1, 1, 40, 40)
    torch.manual_seed(5)
    first = scaledot.attention(query, query, value, dropout_p=0.5)
    torch.manual_seed(5)
    again = scaledot.attention(query, query, value, dropout_p=0.5)
    torch.manual_seed(5)
    other = theirs(query, query, value, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first == 0.0, other == 0.0)
    for weights in (first, other):
        assert 0.4 < (weights == 0.0).double().mean() < 0.6


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"attn_mask": torch.randn(50, 50)}])
def test_numbers_agree_within_rounding(keywords):
    query = normal(2, 3, 50, 16)
    found = scaledot.attention(query, query, query, **keywords, backend="cpu")
    torch.testing.assert_close(found, theirs(query, query, query, **keywords))


def test_sdpa_kernel_does_not_choose_our_kernel():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, mask = normal(1, 2, 5, 8), torch.rand(5, 5) > 0.3
    expected = scaledot.attention(query, query, query, mask)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # there is none for a CPU
        assert torch.equal(scaledot.attention(query, query, query, mask), expected)
        with pytest.raises(RuntimeError, match="No viable backend"):
            theirs(query, query, query, mask)
        with pytest.raises(RuntimeError, match="No viable backend"):  # torch's kernel serves it
            scaledot.attention(query, query, query, backend="torch")


def test_a_compiled_graph_holds_our_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    query = normal(2, 3, 5, 8)

    def attend(query):
        return scaledot.attention(query, query, query)

    graph = make_fx(attend)(query).graph
    assert any(node.target is torch.ops.scaledot.cpu_forward.default for node in graph.nodes)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_an_exported_file_holds_torchs_operator(tmp_path):
    import subprocess
    import sys

    class Attends(torch.nn.Module):
        def forward(self, query):
            return scaledot.attention(query, query, query, is_causal=True)

    query = normal(2, 3, 5, 8)
    torch.export.save(torch.export.export(Attends(), (query,)), tmp_path / "program.pt2")
    torch.save((query, Attends()(query)), tmp_path / "expected.pt")
    code = (
        "import sys, torch\n"
        f"program = torch.export.load({str(tmp_path / 'program.pt2')!r}).module()\n"
        f"query, expected = torch.load({str(tmp_path / 'expected.pt')!r})\n"
        "torch.testing.assert_close(program(query), expected)\n"
        "assert 'scaledot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    scripted = torch.jit.script(Scripted())
    assert "aten::scaled_dot_product_attention" in str(scripted.graph)
    torch.testing.assert_close(scripted(query), Attends()(query))


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return scaledot.attention(query, query, query, is_causal=True)


def test_a_lazy_clone_is_copied():
    query = normal(2, 3, 5, 8)
    lazy = torch._lazy_clone(query)
    theirs(lazy, query, query)
    assert torch._C._is_cow_tensor(lazy)
    scaledot.attention(lazy, query, query, window=(2, 0))
    assert not torch._C._is_cow_tensor(lazy)
