"""replace=True: scaledot's attention in the place of each library's own, or a word why not."""

import inspect
import math
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from watched_models import VOCABULARY, TinyEncoder, assert_same, train

import scaledot
from scaledot import Watch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def both_ways(model, *inputs, dtype=torch.float32, **keywords):
    """Output and gradients of the model's own attention and of scaledot's, compared.

    Returns the two watches' readings and the coverage of the second.
    """
    found = []
    for replace in (False, True):
        model.zero_grad(set_to_none=True)
        copies = [tensor.clone().requires_grad_() for tensor in inputs]
        with Watch(model, every=1, store=(readings := []), replace=replace) as watch:
            out = model(*copies, **keywords)
            (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)).sum().backward()
        gradients = [copy.grad for copy in copies]
        gradients += [parameter.grad for parameter in model.parameters()]
        found.append((out, gradients, readings, str(watch.coverage())))
    (out, gradients, readings, _), (ours, our_gradients, our_readings, words) = found
    assert_near(ours, out)
    for one, other in zip(our_gradients, gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_near(one, other)
    assert len(our_readings) == len(readings) > 0
    for one, other in zip(our_readings, readings, strict=True):
        assert_same(one, other)
    return words


def assert_near(found, expected):
    """Terms cancel in gradients: what is lost is measured in the largest of the numbers."""
    # torch rounds its probabilities to bfloat16, and scaledot does not.
    roundings = 2 if expected.dtype == torch.bfloat16 else 100
    scale = 1 + expected.detach().abs().amax().item()
    tolerance = roundings * torch.finfo(expected.dtype).eps * scale
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)


def forbid(monkeypatch, *where):
    """The model's own attention must not run."""

    def never(*args, **kwargs):
        raise AssertionError("the model's own attention was called")

    for owner, name in where:
        monkeypatch.setattr(owner, name, never)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# torch's modules ---------------------------------------------------------------------------------


class Multihead(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attend = nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True)
        self.need_weights = need_weights

    def forward(self, x, **keywords):
        return self.attend(x, x, x, need_weights=self.need_weights, **keywords)[0]


PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


def test_torchs_module(monkeypatch):
    words = both_ways(Multihead(need_weights=False), random(2, 5, 12), key_padding_mask=PADDING)
    assert words == "1 of 1 attention layer watched"


def test_torchs_module_computes_with_ours(monkeypatch):
    model, x = Multihead(need_weights=False), random(2, 5, 12)
    forbid(monkeypatch, (F, "scaled_dot_product_attention"))
    with Watch(model, replace=True, store=(readings := [])):
        model(x)
    assert len(readings) == 1


def test_torchs_module_that_owes_its_weights_keeps_its_own_attention():
    words = both_ways(Multihead(need_weights=True), random(2, 5, 12), key_padding_mask=PADDING)
    assert words == (
        "1 of 1 attention layer watched; 1 layer keeps its own attention "
        "(its weights are asked for: need_weights=True): attend"
    )


def test_torchs_fast_path_keeps_its_own_attention():
    model = TinyEncoder().eval()
    tokens = torch.zeros(2, 5, dtype=torch.long)
    with torch.no_grad():
        plain = model(tokens)
        with Watch(model, replace=True, store=(readings := [])) as watch:
            watched = model(tokens)
    assert torch.equal(plain, watched)
    assert len(readings) == 2
    assert "2 layers keep their own attention (evaluation takes torch's fast path)" in str(
        watch.coverage()
    )


def test_torchs_encoder_trains_the_same():
    model = TinyEncoder()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(model, steps=3)
    model.load_state_dict(state)
    with Watch(model, replace=True):
        assert train(model, steps=3) == pytest.approx(expected, rel=1e-5)


# FlexAttention -----------------------------------------------------------------------------------


class Flex(nn.Module):
    def forward(self, q, k, v, **keywords):
        from torch.nn.attention import flex_attention

        out = flex_attention.flex_attention(q, k, v, **keywords)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")  # torch's own, about running it uncompiled
def test_flex_attention_with_a_block_mask(monkeypatch):
    """torch's has no backward pass on a CPU; the textbook has."""
    from torch.nn.attention.flex_attention import create_block_mask

    def document_and_causal(b, h, i, j):
        return (i >= j) & (i // 5 == j // 5)

    mask = create_block_mask(document_and_causal, None, None, 16, 16, device="cpu")
    q, k, v = (random(1, 4, 16, 8, seed=i).requires_grad_() for i in range(3))
    model, keywords = Flex(), {"block_mask": mask, "scale": 0.5}
    with torch.no_grad():
        plain = model(*(tensor.detach() for tensor in (q, k, v)), **keywords)
    with Watch(model, replace=True, store=(readings := [])) as watch:
        out = model(q, k, v, **keywords)
    torch.testing.assert_close(out, plain)
    assert len(readings) == 1
    assert str(watch.coverage()) == "1 of 1 attention layer watched"
    i = torch.arange(16)
    hidden = ~document_and_causal(0, 0, i[:, None], i[None])
    expected = (q @ k.mT * 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    found, wanted = (torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (out, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_that_owes_more_than_its_output_keeps_its_own():
    q, model = random(1, 2, 16, 8), Flex()
    with Watch(model, replace=True, store=(readings := [])) as watch:
        model(q, q, q, return_lse=True)
    assert len(readings) == 1
    assert "1 layer keeps its own attention (more than its output is asked for): Flex" in str(
        watch.coverage()
    )


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_with_a_score_mod_keeps_its_own():
    q, model = random(1, 2, 16, 8), Flex()
    with Watch(model, replace=True) as watch:
        out = model(q, q, q, score_mod=lambda score, b, h, i, j: score * 2)
    torch.testing.assert_close(out, (q @ q.mT * 2 / math.sqrt(8)).softmax(-1) @ q)
    assert "keeps its own attention (its score_mod may do anything to the scores)" in str(
        watch.coverage()
    )


# flash_attn --------------------------------------------------------------------------------------


@pytest.fixture
def flash_attn(monkeypatch):
    """The package's signatures, computed by the textbook: its own kernels need a GPU."""
    home = types.ModuleType("flash_attn.flash_attn_interface")

    def textbook(q, k, v, scale, causal, softcap):
        groups = q.shape[-3] // k.shape[-3]
        k, v = (tensor.repeat_interleave(groups, -3) for tensor in (k, v))
        scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        if causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ v

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, softcap=0.0,
        alibi_slopes=None, return_attn_probs=False,
    ):  # fmt: skip
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return textbook(*heads_first, softmax_scale, causal, softcap).transpose(1, 2)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal=False, return_attn_probs=False,
    ):  # fmt: skip
        outs = []
        for i in range(len(cu_seqlens_q) - 1):
            rows = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
            columns = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
            parts = (t.transpose(0, 1) for t in (q[rows], k[columns], v[columns]))
            outs.append(textbook(*parts, None, causal, 0.0).transpose(0, 1))
        return torch.cat(outs)

    def flash_attn_kvpacked_func(q, kv, causal=False, return_attn_probs=False):
        return flash_attn_func(q, *kv.unbind(2), causal=causal)

    def flash_attn_varlen_qkvpacked_func(
        qkv, cu_seqlens, max_seqlen, causal=False, return_attn_probs=False
    ):
        lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        return flash_attn_varlen_func(*qkv.unbind(1), *lengths, causal)

    def flash_attn_with_kvcache(q, k_cache, v_cache, causal=False):
        return q

    for function in list(locals().values()):
        if inspect.isfunction(function) and function.__name__.startswith("flash"):
            setattr(home, function.__name__, function)
    monkeypatch.setitem(sys.modules, home.__name__, home)
    return home


class Calls(nn.Module):
    """A module that calls one function of a package, looked up at every call."""

    def __init__(self, home, name):
        super().__init__()
        self.home, self.name = home, name

    def forward(self, *tensors, **keywords):
        return getattr(self.home, self.name)(*tensors, **keywords)


@pytest.mark.slow
def test_flash_attention(flash_attn):
    q, k, v = random(2, 5, 6, 4), random(2, 7, 2, 4, seed=1), random(2, 7, 2, 4, seed=2)
    model = Calls(flash_attn, "flash_attn_func")
    words = both_ways(model, q, k, v, causal=True, softcap=1.5, softmax_scale=0.3)
    assert words == "1 of 1 attention layer watched"


@pytest.mark.slow
def test_flash_attention_of_packed_sequences(flash_attn):
    q, k, v = (random(7, 2, 4, seed=i) for i in range(3))
    lengths = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = {"max_seqlen_q": 4, "max_seqlen_k": 4, "causal": True}
    packed |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    words = both_ways(Calls(flash_attn, "flash_attn_varlen_func"), q, k, v, **packed)
    assert words == "1 of 1 attention layer watched"
    model = Calls(flash_attn, "flash_attn_varlen_qkvpacked_func")
    packed = {"cu_seqlens": lengths, "max_seqlen": 4, "causal": True}
    words = both_ways(model, torch.stack([q, k, v], 1), **packed)
    assert words == "1 of 1 attention layer watched"


def test_flash_attention_of_packed_keys_and_values(flash_attn):
    q, kv = random(2, 5, 2, 4), random(2, 5, 2, 2, 4, seed=1)
    words = both_ways(Calls(flash_attn, "flash_attn_kvpacked_func"), q, kv, causal=True)
    assert words == "1 of 1 attention layer watched"


def test_flash_attention_that_we_cannot_follow_keeps_its_own(flash_attn):
    q, model = random(2, 5, 2, 4), Calls(flash_attn, "flash_attn_func")
    plain = model(q, q, q)
    with Watch(model, replace=True) as watch:
        assert torch.equal(model(q, q, q, alibi_slopes=torch.ones(2)), plain)
    assert "1 layer keeps its own attention (the watch does not follow alibi_slopes): Calls" in str(
        watch.coverage()
    )


def test_a_cache_of_keys_is_named(flash_attn):
    q, model = random(2, 1, 2, 4), Calls(flash_attn, "flash_attn_with_kvcache")
    with Watch(model, every=1) as watch:
        model(q, q, q)
    assert "1 layer not measured (it reads keys from a cache): Calls" in str(watch.coverage())


# transformers ------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
    "attention_dropout": 0.0,
}
TOKENS = torch.arange(14).view(2, 7)
LEFT_PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])
FAMILIES = {
    "Llama": {"num_key_value_heads": 2},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 4},
    "GptOss": {
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "GPT2": {"n_embd": 16, "n_head": 4, "n_layer": 2, "attn_pdrop": 0.0},
    "Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_eager_attention(family):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    model = getattr(transformers, f"{family}Model")(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            out = self.model(inputs_embeds=x, attention_mask=LEFT_PADDED)
            return out.last_hidden_state * LEFT_PADDED[..., None]

    own = sys.modules[type(model).__module__].eager_attention_forward
    calls = []

    def counting(*args, **kwargs):
        calls.append(args)
        return own(*args, **kwargs)

    sys.modules[type(model).__module__].eager_attention_forward = counting
    try:
        words = both_ways(Embedded(), random(2, 7, 16))
    finally:
        sys.modules[type(model).__module__].eager_attention_forward = own
    assert words == "2 of 2 attention layers watched"
    assert len(calls) == 2 + 1  # beside, both layers; replacing, the trial of the first


def test_transformers_attention_that_owes_its_weights_keeps_its_own():
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    with Watch(model, replace=True) as watch:
        out = model(TOKENS, output_attentions=True)
    assert [weights.shape for weights in out.attentions] == [(2, 4, 7, 7)] * 2
    assert "2 layers keep their own attention (its weights are asked for" in str(watch.coverage())


def test_an_eager_attention_that_computes_something_else_stays(monkeypatch):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    home = sys.modules[type(model).__module__]
    own = home.eager_attention_forward

    def doubled(module, query, *args, **kwargs):
        return own(module, query * 2, *args, **kwargs)

    monkeypatch.setattr(home, "eager_attention_forward", doubled)
    plain = model(TOKENS).last_hidden_state
    with Watch(model, replace=True) as watch:
        watched = model(TOKENS).last_hidden_state
    assert torch.equal(plain, watched)
    assert "2 layers keep their own attention (its eager attention computes something else)" in str(
        watch.coverage()
    )


def test_transformers_flash_attention(monkeypatch):
    """Its name and its rules; the function behind the name is the eager one with a causal mask."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_utils import AttentionInterface

    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    home = sys.modules[type(model).__module__]

    def flash(module, query, key, value, attention_mask, **kwargs):
        causal = torch.full((7, 7), -torch.inf).triu(1)[None, None]
        return home.eager_attention_forward(module, query, key, value, causal, **kwargs)[0], None

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash)
    model.config._attn_implementation = "flash_attention_2"
    layer = model.layers[0].self_attn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, (torch.ones(2, 7, 4), torch.zeros(2, 7, 4)), None)[0]

    assert both_ways(Layer(), random(2, 7, 16)) == "1 of 1 attention layer watched"


# scaledot's own ----------------------------------------------------------------------------------

OWN = {
    "attention": lambda q, k, v: scaledot.attention(q, k, v, is_causal=True, softcap=2.0),
    "packed": lambda q, k, v: scaledot.attention_varlen(
        *(t[0].transpose(0, 1) for t in (q, k, v)), *[torch.tensor([0, 2, 5])] * 2
    ),
    "additive": lambda q, k, v: scaledot.additive_attention(q, k, v, torch.arange(4.0)),
}


class Own(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v):
        return self.attend(q, k, v)


@pytest.mark.parametrize("name", OWN)
def test_scaledots_own_functions(name, monkeypatch):
    tensors = [random(2, 3, 5, 4, seed=i) for i in range(3)]
    assert both_ways(Own(OWN[name]), *tensors) == "1 of 1 attention layer watched"


def test_scaledots_own_functions_measure_in_the_same_pass(monkeypatch):
    q, model = random(2, 3, 5, 4), Own(OWN["attention"])
    forbid(monkeypatch, (scaledot.functional, "vitals"))
    with Watch(model, replace=True, store=(readings := [])):
        model(q, q, q)
    assert len(readings) == 1


# In general --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_type(dtype):
    class Attend(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    tensors = [random(2, 3, 5, 4, seed=i).to(dtype) for i in range(3)]
    assert both_ways(Attend(), *tensors, dtype=dtype) == "1 of 1 attention layer watched"


def test_what_scaledot_refuses_the_model_computes_itself(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("not today")

    class Attend(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    q, model = random(2, 3, 5, 4), Attend()
    plain = model(q)
    monkeypatch.setattr(scaledot.functional, "attention_with_vitals", refuse)
    with Watch(model, replace=True, store=(readings := [])) as watch:
        assert torch.equal(model(q), plain)
    assert len(readings) == 1
    assert str(watch.coverage()) == (
        "1 of 1 attention layer watched; "
        "1 layer keeps its own attention (ValueError: not today): Attend"
    )


class Listening:
    """What the probes say of a call, and nothing else."""

    model = None

    def __init__(self, replaces):
        self.seen, self._replaces = [], replaces

    def wants(self):
        return True

    def replaces(self):
        return self._replaces

    def saw(self, seen):
        self.seen.append(seen)

    def cannot_see(self, kind, reason, module):
        raise AssertionError(reason)


@pytest.mark.parametrize(
    ("attend", "replaces", "measured"),
    [
        (F.scaled_dot_product_attention, False, False),
        (F.scaled_dot_product_attention, True, True),
        (scaledot.attention, False, False),
        (scaledot.attention, True, True),
        (scaledot.attention_with_vitals, False, True),
    ],
)
def test_vitals_of_the_same_pass_are_no_work_of_their_own(attend, replaces, measured):
    """Nothing is launched to have them: there is no time on the device to be charged."""
    from scaledot.watch.probes import hub

    class Module(nn.Module):
        def forward(self, q):
            return getattr(home, attend.__name__)(q, q, q)  # as the probes have left it

    home = F if attend is F.scaled_dot_product_attention else scaledot
    hub.listen(listening := Listening(replaces))
    try:
        Module()(torch.randn(1, 2, 5, 4))
    finally:
        hub.leave(listening)
    (seen,) = listening.seen
    assert seen.measured == measured
    assert seen.measure().shape == (1, 2)


class Last(nn.Module):
    """Attention is the last that a checkpoint of it saves."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        parts = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        return F.scaled_dot_product_attention(*parts, is_causal=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_that_ends_inside_of_attention_ends_there(use_reentrant):
    model = Last()
    x = torch.randn(2, 5, 8, requires_grad=True)

    def gradient():
        model.zero_grad()
        checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
        return model.qkv.weight.grad.clone()

    expected = gradient()
    with Watch(model, every=1, store=(readings := []), replace=True) as watch:
        assert_near(gradient(), expected)
        assert "kept" not in str(watch.coverage())
    assert len(readings) == 1
