"""A watch is in nobody's way: overrides, scripts, tracebacks and warnings are as without it."""

import contextlib
import copy
import functools
import gc
import pickle
import re
import sys
import traceback
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex_attention_module
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import scaledot
from scaledot import Watch, functional
from scaledot.watch.probes import by_hand


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("sizes", [(5, 5), (5, 7)])
@pytest.mark.parametrize("compiled", [False, True])
def test_causal_bias_means_what_it_means(bias, sizes, compiled):
    queries, keys = sizes
    query, key = random(1, 2, queries, 8).requires_grad_(), random(1, 2, keys, 8, seed=1)

    def attend():
        return F.scaled_dot_product_attention(query, key, key, bias(queries, keys))

    expected = attend()
    (slope,) = torch.autograd.grad(expected.sum(), query)
    torch._dynamo.reset()
    with Watch(every=1, store=(readings := [])):
        found = (torch.compile(attend, backend="eager") if compiled else attend)()
        (ours,) = torch.autograd.grad(found.sum(), query)
    assert torch.equal(found, expected)
    assert torch.equal(ours, slope)
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    below = keys - queries if bias is causal_lower_right else 0
    assert readings[0].value("pairs").tolist() == [int((columns <= rows + below).sum())] * 2


class Counting(TorchFunctionMode):
    """A user's: says what torch calls, and whether it is the function of that name."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.called.append(function)
        return function(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A user's, which computes attention its own way."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in HANDLED:
            return HANDLED[function](*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            return "compared"
        return super().__torch_function__(function, types, args, kwargs)


HANDLED = {}


@pytest.mark.parametrize(
    "call",
    [
        lambda q: F.scaled_dot_product_attention(q, q, q),
        lambda q: F.scaled_dot_product_attention(query=q, key=q, value=q, is_causal=True),
        lambda q: torch.softmax(q, -1),
        lambda q: torch.special.softmax(q, -1),
        lambda q: q.softmax(-1),
        lambda q: nn.MultiheadAttention(4, 2)(q[0], q[0], q[0]),
        lambda q: nn.TransformerEncoderLayer(4, 2, 8).eval()(q[0]),
    ],
    ids=["plain", "named", "softmax", "special", "method", "module", "layer"],
)
def test_a_mode_sees_the_calls_of_the_program_and_no_others(call):
    q = random(2, 2, 3, 4)
    torch.manual_seed(0)
    with Counting() as alone:
        call(q)
    torch.manual_seed(0)
    with Watch(every=1, store=(readings := [])) as watch, Counting() as counted:
        call(q)
        names = {"scaled_dot_product_attention": F, "softmax": torch}
        for name, home in names.items():
            meant = [one for one in counted.called if one.__name__ == name]
            assert all(one in (getattr(home, name), torch.Tensor.softmax) for one in meant)
    assert [one.__name__ for one in counted.called] == [one.__name__ for one in alone.called]
    assert watch.coverage().watched or not readings


def test_a_mode_around_a_training_sees_the_training_alone():
    def names(watched):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with contextlib.ExitStack() as stack:
            if watched:
                stack.enter_context(Watch(every=1, store=(readings := [])))
            counted = stack.enter_context(Counting())
            seen = stack.enter_context(Operators())
            for _ in range(2):
                (model(random(3, 2, 4)).square().mean() / 2).backward()
                optimizer.step()
        assert not watched or len(readings) == 2
        return [one.__name__ for one in counted.called], seen.called

    assert names(True) == names(False)


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_type_that_compares_with_the_function_is_asked():
    q = random(1, 2, 3, 4).as_subclass(Own)
    assert F.scaled_dot_product_attention(q, q, q) == "compared"
    with Watch(every=1):
        assert F.scaled_dot_product_attention(q, q, q) == "compared"


def test_a_table_of_overrides_made_before_is_asked_and_put_back():
    q = random(1, 2, 3, 4).as_subclass(Own)
    HANDLED[F.scaled_dot_product_attention] = lambda *args, **kwargs: "handled"
    try:
        with Watch(every=1):
            assert F.scaled_dot_product_attention(q, q, q) == "handled"
        assert list(HANDLED) == [F.scaled_dot_product_attention]
        assert F.scaled_dot_product_attention(q, q, q) == "handled"
    finally:
        HANDLED.clear()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_served():
    parts = [random(3, 2, 4), random(5, 2, 4, seed=1)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    expected = F.scaled_dot_product_attention(nested, nested, nested)
    with Watch(every=1):
        found = F.scaled_dot_product_attention(nested, nested, nested)
    assert torch.equal(found.values(), expected.values())


def in_default(q, attend=F.scaled_dot_product_attention):
    return attend(q, q, q)


def in_keyword_default(q, *, attend=F.scaled_dot_product_attention):
    return attend(q, q, q)


class InClass:
    attend = F.scaled_dot_product_attention
    static = staticmethod(F.scaled_dot_product_attention)

    def __init__(self):
        self.own = F.scaled_dot_product_attention


def in_closure():
    attend = F.scaled_dot_product_attention
    return lambda q: attend(q, q, q)


TABLE = {"sdpa": F.scaled_dot_product_attention}
LIST = [F.scaled_dot_product_attention]
PARTIAL = functools.partial(F.scaled_dot_product_attention, is_causal=True)
CLOSURE = in_closure()
OBJECT = InClass()

HELD = {
    "table": (lambda q: TABLE["sdpa"](q, q, q), lambda: TABLE["sdpa"]),
    "list": (lambda q: LIST[0](q, q, q), lambda: LIST[0]),
    "partial": (lambda q: PARTIAL(q, q, q), lambda: PARTIAL.func),
    "default": (in_default, lambda: in_default.__defaults__[0]),
    "keyword": (in_keyword_default, lambda: in_keyword_default.__kwdefaults__["attend"]),
    "closure": (lambda q: CLOSURE(q), lambda: CLOSURE.__closure__[0].cell_contents),
    "class": (lambda q: OBJECT.attend(q, q, q), lambda: InClass.attend),
    "static": (lambda q: OBJECT.static(q, q, q), lambda: InClass.static),
    "object": (lambda q: OBJECT.own(q, q, q), lambda: OBJECT.own),
}


@pytest.fixture
def _everything_is_collected():
    """What this module holds is hidden from the garbage collector after the collection of tests."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("_everything_is_collected")
def test_a_function_that_the_program_holds_is_seen_and_put_back():
    q = random(1, 2, 3, 4)
    before = {name: (kept(), call(q)) for name, (call, kept) in HELD.items()}
    with Watch(every=1, store=(readings := [])):
        for name, (call, _) in HELD.items():
            assert torch.equal(call(q), before[name][1]), name
    assert len(readings) == len(HELD)
    for name, (call, kept) in HELD.items():
        assert kept() is before[name][0], name
        assert torch.equal(call(q), before[name][1]), name


STANDING = {
    "attention": lambda: F.scaled_dot_product_attention,
    "softmax": lambda: torch.softmax,
    "special": lambda: torch.special.softmax,
    "method": lambda: torch.Tensor.softmax,
    "multihead": lambda: F.multi_head_attention_forward,
    "fast module": lambda: torch._native_multi_head_attention,
    "fast layer": lambda: torch._transformer_encoder_layer_fwd,
    "backward": lambda: torch.autograd.backward,
    "scale": lambda: torch.amp.GradScaler.scale,
    "flex": lambda: flex_attention_module.flex_attention,
    "ours": lambda: scaledot.attention,
    "ours in functional": lambda: functional.attention_varlen,
}


@pytest.mark.parametrize("name", STANDING)
def test_a_function_that_is_pickled_meanwhile_is_found_again_after_the_watch(name):
    """A model may hold one, and a checkpoint may hold the model."""
    original = STANDING[name]()
    with Watch(every=1):
        stand_in = STANDING[name]()
        assert stand_in is not original
        assert stand_in.__name__ == original.__name__
        written = pickle.dumps(stand_in)
        assert pickle.loads(written) is stand_in
        assert copy.deepcopy(stand_in) is stand_in
    assert b"scaledot.watch" not in written
    assert pickle.loads(written) is original


@pytest.mark.parametrize("known", [True, False], ids=["before", "meanwhile"])
@pytest.mark.parametrize("name", ["attention", "softmax", "special", "method", "multihead"])
def test_overrides_know_a_function_by_its_name(name, known):
    """A mode that says what it was asked looks the name up in tables that torch makes once."""

    def known_as():
        function = STANDING[name]()
        is_method = torch.overrides.is_tensor_method_or_property(function)
        return torch.overrides.resolve_name(function), is_method

    for table in ("get_testing_overrides", "_get_overridable_functions", "_get_tensor_methods"):
        getattr(torch.overrides, table).cache_clear()
    before = known_as() if known else None
    with Watch(every=1):
        during = known_as()
    after = known_as()
    assert during == after
    assert after == before or not known
    assert after[0] is not None
    assert after[1] == (name == "method")


def test_a_function_in_a_class_made_meanwhile_is_no_method():
    q = random(1, 2, 3, 4)
    with Watch(every=1, store=(readings := [])):

        class Attention(nn.Module):
            attend, soft = F.scaled_dot_product_attention, torch.softmax

            def forward(self, q):
                return self.attend(q, q, self.soft(q, -1))

        found = Attention()(q)
    assert len(readings) == 1
    assert torch.equal(found, F.scaled_dot_product_attention(q, q, q.softmax(-1)))


SCRIPTED = {
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("kind", SCRIPTED)
def test_torchs_modules_are_scripted_during_a_watch_and_after_it(kind):
    x = random(3, 2, 8)
    module = SCRIPTED[kind]().eval()
    inputs = (x, x, x) if kind == "attention" else (x,)
    expected = module(*inputs)
    with Watch(every=1):
        during = torch.jit.script(module)(*inputs)
    after = torch.jit.script(module)(*inputs)
    for found in (during, after):
        torch.testing.assert_close(found, expected)


class Traced(nn.Module):
    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q) + torch.softmax(q, -1) + self.others(q)

    def others(self, q):
        return torch.special.softmax(q, -1) + q.softmax(-1) + F.softmax(q, -1)


def test_a_graph_of_fx_is_the_same_and_runs():
    q = random(1, 2, 3, 4)
    plain = torch.fx.symbolic_trace(Traced())
    targets = tuple(node.target for node in plain.graph.nodes)
    with Watch(every=1):
        graph = torch.fx.symbolic_trace(Traced())
        during = graph(q)
    assert graph.code == plain.code
    assert tuple(node.target for node in graph.graph.nodes) == targets
    assert torch.equal(during, plain(q))
    assert torch.equal(graph(q), during)


def into_backward(x: torch.Tensor) -> torch.Tensor:
    total = x.square().sum()
    torch.autograd.backward([total])
    return total


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_function_calls_backward_during_a_watch_and_after_it():
    for watch in (Watch(every=1), contextlib.nullcontext()):
        x = torch.ones(3, requires_grad=True)
        with watch:
            torch.jit.script(into_backward)(x)
        assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("given", [True, False])
def test_a_scripted_model_is_trained_under_a_watch(given, caplog):
    module = torch.jit.script(SCRIPTED["attention"]())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = random(3, 2, 8)
    with Watch(module if given else None, every=1) as watch:
        for _ in range(3):
            module(x, x, x)[0].square().mean().backward()
            optimizer.step()
        assert {"288 parameters"} == set(re.findall(r"\d+ parameters", watch.models()))
    assert watch.step_number == 3
    assert str(watch.coverage()).startswith("0 of ")
    assert not caplog.records


FAILING = {
    "nothing": lambda q: F.scaled_dot_product_attention(),
    "an argument too many": lambda q: F.scaled_dot_product_attention(q, q, q, causal=True),
    "shapes": lambda q: F.scaled_dot_product_attention(q, q[..., :2], q),
    "softmax": lambda q: torch.softmax(q),
    "a dimension": lambda q: q.softmax(7),
    "many heads": lambda q: F.multi_head_attention_forward(q),
    "backward": lambda q: F.mse_loss(q, q).backward(),
    "a function of its own": lambda q: flex_attention(q, q, nothing=q),
    "module": lambda q: nn.MultiheadAttention(4, 2)(q, q, q),
}


def failure(call, q):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, it is the same
        call(q)
    found, error = [], caught.value
    while error is not None:  # with what came before it
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        found.append((type(error), str(error), files))
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize("call", FAILING)
@pytest.mark.parametrize("due", [True, False])
def test_a_failing_call_fails_as_without_the_watch(call, due):
    q = random(2, 2, 3, 4)
    expected = failure(FAILING[call], q)
    with Watch(every=1 if due else 10**6) as watch:
        if not due:
            watch.step()
        found = failure(FAILING[call], q)
    assert found == expected


def test_a_warning_names_the_line_of_the_program():
    """warnings.warn is written in C, as torch's functions are, and names the frame around it."""
    warn = by_hand._stand_in(warnings.warn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("careful")  # once: it is the same line each time
        line = sys._getframe().f_lineno - 1
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line)]


@pytest.mark.parametrize("due", [True, False])
def test_a_warning_that_counts_frames_names_the_same_line(due):
    """torch's own do, in backward hooks."""

    def places():
        x = random(3).requires_grad_()
        for level in range(1, 6):
            x.register_hook(lambda slope, level=level: warnings.warn("x", stacklevel=level))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x.sum().backward()
        return [(one.filename, one.lineno) for one in caught]

    expected = places()
    with Watch(every=1 if due else 10**6) as watch:
        if not due:
            watch.step()
        assert places() == expected
    assert expected[-1][0] == __file__
