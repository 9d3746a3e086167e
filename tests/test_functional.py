"""The public functions in torch's place: under its name, in its override protocol."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import scaledot
from scaledot.backends import torch_sdpa


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20_19)


@pytest.fixture
def in_torchs_place(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaledot.attention)


def normal(*shape):
    return torch.randn(*shape)


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"scale": 0.3}, {"window": (2, 0)}])
def test_our_function_stands_under_torchs_name(in_torchs_place, keywords):
    query = normal(2, 3, 20, 8)
    out = F.scaled_dot_product_attention(query, query, query, **keywords)
    torch.testing.assert_close(
        out, scaledot.attention(query, query, query, **keywords, backend="cpu")
    )


def test_torchs_layers_run_on_our_function(in_torchs_place):
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).train()
    torch.manual_seed(1)
    layer(normal(2, 20, 16)).sum().backward()
    gate = layer.self_attn.in_proj_weight.grad
    assert gate is not None
    assert gate.isfinite().all()


def test_what_stands_under_torchs_name_is_not_what_our_backend_calls(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a stranger's function")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    query = normal(2, 3, 20, 8)
    scaledot.attention(query, query, query)
    scaledot.attention(query, query, query, scale=0.3, backend="torch")


# --- the override protocol -----------------------------------------------------------------------

QUERY, WEIGHT = torch.randn(2, 3, 5, 8), torch.randn(8)
PACKED, ENDS = torch.randn(9, 3, 8), torch.tensor([0, 4, 9])
CALLS = {
    scaledot.attention: (QUERY, QUERY, QUERY),
    scaledot.attention_with_vitals: (QUERY, QUERY, QUERY),
    scaledot.vitals: (QUERY, QUERY),
    scaledot.attention_varlen: (PACKED, PACKED, PACKED, ENDS, ENDS),
    scaledot.attention_varlen_with_vitals: (PACKED, PACKED, PACKED, ENDS, ENDS),
    scaledot.vitals_varlen: (PACKED, PACKED, ENDS, ENDS),
    scaledot.additive_attention: (QUERY, QUERY, QUERY, WEIGHT),
    scaledot.additive_attention_with_vitals: (QUERY, QUERY, QUERY, WEIGHT),
}
EVERY_FUNCTION = pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)


class Recorded(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


class Logged(Tensor):
    calls: list = []  # noqa: RUF012 (one list for all, as a log has)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Answering(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "its own answer"


class Quiet(Tensor):
    pass


@EVERY_FUNCTION
def test_a_mode_sees_the_call_and_nothing_inside_it(function):
    with Recorded() as mode:
        function(*CALLS[function])
    assert mode.calls == [function]


@EVERY_FUNCTION
@pytest.mark.parametrize("at", [0, -1])
def test_a_tensor_class_is_asked_first(function, at):
    arguments = list(CALLS[function])
    arguments[at] = arguments[at].as_subclass(Answering)
    assert function(*arguments) == "its own answer"


@pytest.mark.parametrize("name", ["attn_mask", "scale", "sinks", "key_lengths"])
def test_a_tensor_class_among_the_keywords_is_asked_too(name):
    assert scaledot.attention(QUERY, QUERY, QUERY, **{name: WEIGHT.as_subclass(Answering)}) == (
        "its own answer"
    )


@EVERY_FUNCTION
def test_a_tensor_class_without_a_handler_of_its_own_works_and_stays(function):
    query, *rest = CALLS[function]
    result = function(query.as_subclass(Quiet), *rest)
    expected = function(query, *rest)
    if isinstance(result, tuple):
        result, expected = result[0], expected[0]
    if isinstance(result, Tensor):
        assert type(result) is Quiet
        torch.testing.assert_close(result.as_subclass(Tensor), expected)
    else:
        torch.testing.assert_close(result.entropy, expected.entropy)


def test_a_tensor_class_that_logs_sees_our_function():
    Logged.calls.clear()
    out = scaledot.attention(QUERY.as_subclass(Logged), QUERY, QUERY, is_causal=True)
    assert Logged.calls[0] is scaledot.attention
    assert type(out) is Logged


def test_parameters_and_devices_around_a_call_change_nothing():
    parameter = torch.nn.Parameter(QUERY)
    out = scaledot.attention(parameter, QUERY, QUERY)
    assert type(out) is Tensor
    assert out.requires_grad
    with torch.device("cpu"):
        assert torch.equal(scaledot.attention(QUERY, QUERY, QUERY), out.detach())


def test_the_signature_is_that_of_torch_first():
    import inspect

    names = list(inspect.signature(scaledot.attention).parameters)
    assert names[:8] == [
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
        "scale",
        "enable_gqa",
    ]


# --- where nobody may look at the data -----------------------------------------------------------


class Watched(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"attn_mask": torch.ones(20) > 0}])
@pytest.mark.parametrize("differentiated", [False, True])
def test_no_number_is_read_under_a_dispatch_mode(keywords, differentiated):
    query = normal(2, 3, 20, 8).requires_grad_(differentiated)
    with Watched() as mode:
        scaledot.attention(query, query, query, **keywords)
    assert torch.ops.aten._local_scalar_dense.default not in mode.operators
    assert torch.ops.scaledot.cpu_forward.default in mode.operators


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"dropout_p": 0.5}])
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_a_call(keywords, tracing_mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    def attend(query, key):
        return scaledot.attention(query, key, key, **keywords)

    query, key = normal(2, 3, 5, 8), normal(2, 3, 7, 8)
    traced = make_fx(attend, tracing_mode=tracing_mode)(query, key)
    torch.manual_seed(3)
    expected = attend(query, key)
    torch.manual_seed(3)
    torch.testing.assert_close(traced(query, key), expected)


# --- what a file holds ---------------------------------------------------------------------------


class Attends(torch.nn.Module):
    def __init__(self, **keywords):
        super().__init__()
        self.keywords = keywords

    def forward(self, query, key):
        return scaledot.attention(query, key, key, **self.keywords)


def operators_of(program):
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return {str(target) for target in called}


TORCHS = "aten.scaled_dot_product_attention.default"
EXPRESSIBLE = [
    {},
    {"is_causal": True},
    {"scale": 0.3},
    {"attn_mask": torch.rand(5, 7) > 0.3},
    {"attn_mask": torch.randn(3, 5, 7)},
]


@pytest.mark.parametrize(
    "keywords", EXPRESSIBLE, ids=["plain", "causal", "scale", "bool mask", "float mask"]
)
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs_without_scaledot(keywords, strict):
    query, key = normal(2, 3, 5, 8), normal(2, 3, 7, 8)
    program = torch.export.export(Attends(**keywords), (query, key), strict=strict)
    assert TORCHS in operators_of(program)
    assert not any("scaledot" in name for name in operators_of(program))
    torch.testing.assert_close(
        program.module()(query, key), scaledot.attention(query, key, key, **keywords)
    )


@pytest.mark.parametrize(
    "keywords",
    [
        {"softcap": 3.0},
        {"window": (2, 0)},
        {"scale": "log_n"},
        {"is_causal": True, "scale": -0.3},
        {"is_causal": True, "attn_mask": torch.randn(5, 7)},
        {"is_causal": True, "causal_align": "bottom_right"},
        {"attn_mask": torch.randn(5, 7, dtype=torch.float16)},
    ],
    ids=" ".join,
)
def test_an_exported_program_holds_our_operator_where_torch_has_no_such_argument(keywords):
    query, key = normal(2, 3, 5, 8), normal(2, 3, 7, 8)
    program = torch.export.export(Attends(**keywords), (query, key))
    assert "scaledot.cpu_forward.default" in operators_of(program)
    torch.testing.assert_close(
        program.module()(query, key), scaledot.attention(query, key, key, **keywords)
    )


def test_grouped_heads_and_a_value_width_of_its_own_are_exported():
    class Grouped(torch.nn.Module):
        def forward(self, query, key, value):
            return scaledot.attention(query, key, value, enable_gqa=True)

    tensors = normal(2, 6, 5, 8), normal(2, 3, 7, 8), normal(2, 3, 7, 4)
    program = torch.export.export(Grouped(), tensors)
    assert TORCHS in operators_of(program)
    torch.testing.assert_close(
        program.module()(*tensors), scaledot.attention(*tensors, enable_gqa=True)
    )


def test_a_mask_of_a_batch_size_that_the_data_decides_is_exported():
    class Filtered(torch.nn.Module):
        def forward(self, x):
            kept = x[x.sum((-1, -2, -3)) != 0]
            mask = torch.ones((kept.shape[0], 1, 1, 1), dtype=torch.bool)
            return scaledot.attention(kept, kept, kept, attn_mask=mask)

    x = normal(4, 3, 5, 8)
    x[0] = 0.0
    program = torch.export.export(Filtered(), (x,))
    kept = x[1:]
    torch.testing.assert_close(program.module()(x), scaledot.attention(kept, kept, kept))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_of_torch_jit_runs_without_scaledot():
    query, key = normal(2, 3, 5, 8), normal(2, 3, 7, 8)
    traced = torch.jit.trace(Attends(), (query, key), check_trace=False)
    assert "aten::scaled_dot_product_attention" in str(traced.inlined_graph)
    torch.testing.assert_close(traced(query, key), scaledot.attention(query, key, key))


def test_a_compiled_call_is_ours():
    """torch's kernel would need a look at the data, which a graph cannot have."""
    assert torch_sdpa.exporting() is False
    nodes = []

    def note(graph, _):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    query = normal(2, 3, 5, 8)
    torch.compile(scaledot.attention, backend=note, fullgraph=True)(query, query, query)
    assert any("scaledot.cpu_forward" in name for name in nodes)
