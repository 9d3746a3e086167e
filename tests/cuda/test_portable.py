"""Which calls of the portable backend take the moments of their logits from Gram matrices."""

import dataclasses
import weakref

import pytest
import torch

import scaledot
from scaledot.backends.cuda import arguments, backend, forward, launching, portable, whole_moments
from scaledot.measure import FLOAT_FIELDS

QUERIES, KEYS, WIDTH = 37, 83, 24
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _short_calls_count_as_long(monkeypatch):
    monkeypatch.setattr(portable, "GRAM_FROM_KEYS", dict.fromkeys((64, 128, 256), (KEYS, KEYS + 1)))
    monkeypatch.setattr(portable, "GRAM_FROM_QUERIES", QUERIES)


@pytest.fixture
def made_of_matrices(monkeypatch):
    """A list with an entry for each call whose moments come from matrices."""
    calls = []

    def add_all(*arguments, **words):
        calls.append(arguments)
        return original(*arguments, **words)

    original = whole_moments.add_all
    monkeypatch.setattr(whole_moments, "add_all", add_all)
    return calls


def draw(device, dtype=BFLOAT16, queries=QUERIES, keys=KEYS, width=WIDTH):
    query = torch.randn(1, 2, queries, width, device=device, dtype=dtype)
    key, value = (torch.randn(1, 1, keys, width, device=device, dtype=dtype) for _ in range(2))
    return query, key + 2.0, value


def on(device, words):
    return {name: x.to(device) if torch.is_tensor(x) else x for name, x in words.items()}


def measure(tensors, **words):
    return scaledot.attention_with_vitals(*tensors, backend="triton", enable_gqa=True, **words)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (BFLOAT16, {}),
        (BFLOAT16, {"sinks": torch.tensor([0.5, 3.0])}),
        (FLOAT16, {"scale": "log_n"}),
        (BFLOAT16, {"dropout_p": 0.5}),
    ],
    ids=str,
)
def test_they_are_those_of_the_pass(device, dtype, words, made_of_matrices, monkeypatch):
    words = on(device, words)
    query, key, value = draw(device, dtype)
    query = torch.stack([query, query], -1)[..., 0]  # rows that a program cannot read as they lie
    torch.manual_seed(3)
    out, found = measure((query, key, value), **words)
    assert len(made_of_matrices) == 1
    monkeypatch.setattr(portable, "GRAM_FROM_QUERIES", QUERIES + 1)
    torch.manual_seed(3)
    same, summed = measure((query, key, value), **words)
    assert len(made_of_matrices) == 1
    torch.testing.assert_close(out, same)
    for name in ("logit_mean", "logit_std", "row_std", "entropy", "max_logit", "top_p", "sum_p2"):
        torch.testing.assert_close(
            getattr(found, name), getattr(summed, name), rtol=2e-4, atol=2e-5, msg=name
        )


@pytest.mark.parametrize(
    "words",
    [
        {"is_causal": True},
        {"window": (50, None)},
        {"softcap": 5.0},
        {"key_lengths": torch.tensor([KEYS])},
        {"attn_mask": torch.ones(QUERIES, KEYS, dtype=torch.bool)},
    ],
    ids=lambda words: next(iter(words)),
)
def test_none_where_keys_are_hidden_or_capped(device, words, made_of_matrices):
    measure(draw(device), **on(device, words))
    assert not made_of_matrices


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"width": 20},
        {"width": 264},
        {"queries": QUERIES - 1},
        {"keys": KEYS - 1},
    ],
    ids=str,
)
def test_none_where_they_cannot_be_or_take_longer(device, changes, made_of_matrices):
    measure(draw(device, **changes))
    assert not made_of_matrices


def test_scores_alone_have_a_threshold_of_their_own(device, made_of_matrices):
    query, key, _ = draw(device)
    scaledot.vitals(query, key, backend="triton", enable_gqa=True)
    assert not made_of_matrices
    query, key, _ = draw(device, keys=KEYS + 1)
    scaledot.vitals(query, key, backend="triton", enable_gqa=True)
    assert made_of_matrices


@pytest.mark.parametrize("shape", [(0, 2), (1, 0)])
def test_nothing_at_all(device, shape):
    query = torch.randn(*shape, QUERIES, WIDTH, device=device, dtype=BFLOAT16)
    key = torch.randn(*shape, KEYS, WIDTH, device=device, dtype=BFLOAT16)
    out, vitals = measure((query, key, key))
    assert out.shape == query.shape
    assert vitals.row_std.shape == shape


@pytest.mark.parametrize("words", [{}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("keys", [QUERIES, KEYS])
@pytest.mark.parametrize("broken", [False, True])
def test_norms_where_float32_does_not_hold_the_squares(device, words, keys, broken):
    """Too large, too small, or of what is no number: rows that see such a key do not count."""
    query, key, value = draw(device, keys=keys)
    query[0, 1] *= 1e20
    key *= 1e-17
    if broken:
        key[0, 0, 7, 2] = torch.inf
    _, vitals = measure((query, key, value), **words)
    _, exact = measure((query.float(), key.float(), value.float()), **words)
    assert vitals.k_rms.isfinite().all()
    torch.testing.assert_close(vitals.q_rms, exact.q_rms, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(vitals.k_rms, exact.k_rms, rtol=1e-5, atol=0.0)


class Noted:
    """Launches that are not made: which of them may begin early, and what the pass reads."""

    def __init__(self):
        self.flags, self.read = [], []

    def __getitem__(self, grid):
        return self.the_pass

    def the_pass(self, call, cut, **words):
        self.flags.append({"LET_NEXT": cut.LET_NEXT.value, "launch_pdl": words.get("launch_pdl")})
        self.read = [weakref.ref(part.ptr) for part in (call.query, call.key, call.value)]

    def launch(self, kernel, programs, like, arguments, **options):
        assert all(tensor() is not None for tensor in self.read), "freed while the pass reads it"
        self.flags.append({**arguments, **options})


@pytest.mark.parametrize("value_width", [WIDTH, 20])
@pytest.mark.parametrize("overlaps", [True, False])
def test_launches_behind_the_pass_begin_early_where_the_gpu_can(
    device, value_width, overlaps, monkeypatch
):
    noted = Noted()
    monkeypatch.setattr(arguments, "_must_align", lambda tensor: tensor.element_size() == 2)
    monkeypatch.setattr(backend, "overlaps", lambda device: overlaps)
    monkeypatch.setattr(forward, "_forward_kernel", noted)
    monkeypatch.setattr(launching, "launch", noted.launch)
    query, key, value = draw(device)
    value = torch.stack([value, value], -1)[..., 0][..., :value_width]  # copied before it is read
    for is_causal in (False, True):
        measure((query, key, value), is_causal=is_causal)
        (the_pass, *others), noted.flags = noted.flags, []
        assert len(others) == (1 if is_causal else 4)
        assert the_pass == {"LET_NEXT": overlaps, "launch_pdl": None}
        for place, words in enumerate(others):
            beside = place == 0 and not is_causal
            assert words["BESIDE" if beside else "SOON"] == words["launch_pdl"] == overlaps


@pytest.mark.parametrize(
    ("capability", "hip", "early", "hopper"),
    [
        ((8, 9), None, False, False),
        ((9, 0), None, True, True),
        ((12, 0), None, True, False),
        ((9, 0), "6.4", False, False),  # an MI200
    ],
)
def test_which_gpus_begin_a_launch_early(capability, hip, early, hopper, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    backend._capability.cache_clear()
    try:
        assert backend.overlaps(torch.device("cuda", 0)) == early
        assert backend.is_hopper(0) == hopper
    finally:
        backend._capability.cache_clear()
    assert not backend.overlaps(torch.device("cpu"))


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_passes_come_along_but_for_a_compiler(device):
    """The kernel writes them behind the fields; an operator's shapes know of the fields alone."""

    def attend(query, key, value):
        _, vitals = scaledot.attention_with_vitals(query, key, value, backend="triton")
        return vitals.passes, vitals.sum_p2

    tensors = draw(device, queries=20, keys=30)
    plain = measure(tensors)[1]
    computed = dataclasses.replace(plain)  # of fields that nobody made together
    assert torch.equal(plain.passes, computed.passes)
    behind = len(FLOAT_FIELDS) - FLOAT_FIELDS.index("sum_p2")
    assert plain.passes.data_ptr() == plain.sum_p2.data_ptr() + behind * plain.sum_p2.nbytes
    assert plain.packed()[0].shape[0] == len(FLOAT_FIELDS)
    query, key, value = tensors
    tensors = query, key.expand(-1, 2, -1, -1), value.expand(-1, 2, -1, -1)
    passes, sum_p2 = torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(passes, 1 - sum_p2)
    torch.testing.assert_close(passes, plain.passes)
