"""What the first reading says of a wrong scale and of weights that are too large."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from watch.alarms.alarm_cases import kinds, reading

import scaledot
from scaledot.watch.alarms import Judge, of_run, overridden
from scaledot.watch.alarms.heads import Scale
from scaledot.watch.alarms.judge import SCALES, scales_from
from scaledot.watch.store import RunReader

WIDTH, HEADS, TOKENS = 64, 4, 24
D_K = WIDTH // HEADS
LARGE = {"logit_std": 20.0, "row_std": 19.0, "q_rms": 4.5, "k_rms": 4.5}


class Attention(nn.Module):
    def __init__(self, scale=None, normal="", fold="", learned=None, alibi=False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale, self.normal, self.fold, self.alibi = scale, normal, fold, alibi
        self.learned = None if learned is None else nn.Parameter(torch.tensor(learned))

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (HEADS, D_K)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        if self.normal == "length":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        elif self.normal == "rms":
            q, k = F.rms_norm(q, (D_K,)), F.rms_norm(k, (D_K,))
        if self.learned is not None:
            q = q * self.learned
        if self.fold == "q":
            q = q / math.sqrt(D_K)
        mask = None
        if self.alibi:
            at = torch.arange(TOKENS)
            slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)
            mask = -slopes[:, None, None] * (at[:, None] - at).abs()
        out = F.scaled_dot_product_attention(q, k, v, mask, mask is None, scale=self.scale)
        return out.transpose(1, 2).flatten(2)


def _weights(attention, kind: str, times: float = 1.0) -> None:
    for part in (attention.q, attention.k):
        if kind == "gpt2":
            nn.init.normal_(part.weight, std=0.02)
            nn.init.zeros_(part.bias)
        elif kind == "xavier":
            nn.init.xavier_uniform_(part.weight)
        elif kind == "t5":
            std = WIDTH**-0.5 * (D_K**-0.5 if part is attention.q else 1)
            nn.init.normal_(part.weight, std=std)
            nn.init.zeros_(part.bias)
        with torch.no_grad():
            part.weight *= times
            part.bias *= times


def _first_reading(weights: str = "torch", times: float = 1.0, store=None, **more):
    """The alarms of a model's first step, a layer each."""
    torch.manual_seed(0)
    model = nn.ModuleList(Attention(**more) for _ in "ab")
    for attention in model:
        _weights(attention, weights, times)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with scaledot.Watch(model, every=1, store=store) as watch:
        x = F.layer_norm(torch.randn(2, TOKENS, WIDTH), (WIDTH,))
        sum(attention(x).square().mean() for attention in model).backward()
        optimizer.step()
    return [alarm for alarm in watch.alarms if alarm.kind in ("start", "scale")]


@pytest.mark.parametrize("weights", ["torch", "gpt2", "xavier"])
def test_healthy_weights_are_left_in_peace(weights):
    assert _first_reading(weights) == []


@pytest.mark.parametrize(
    "more",
    [
        dict(normal="rms"),
        dict(normal="length", scale=10.0),
        dict(normal="length", scale=1.0, learned=10.0),
        dict(normal="length", scale=math.sqrt(D_K)),
        dict(fold="q", scale=1.0),
        dict(weights="t5", scale=1.0),
        dict(alibi=True),
    ],
    ids=["rms", "cosine", "learned scale", "unit length", "folded into q", "T5", "ALiBi"],
)
def test_attention_that_chooses_its_own_scale_is_left_in_peace(more):
    assert _first_reading(**more) == []


def test_weights_that_are_too_large_are_a_warning_at_the_first_reading():
    first, second = _first_reading(times=8.0)
    assert (first.kind, first.grade, first.step, first.layer) == ("start", "warn", 0, "0")
    assert first.heads == tuple(range(HEADS))
    assert "logit_std 2" in first.words
    assert "are they initialised too large? The scale, 0.25, is right" in first.words
    assert "--remedy qk-norm" in first.advice
    assert second.layer == "1"


def test_a_missing_division_is_a_question_at_the_first_reading():
    first, _ = _first_reading(scale=1.0)
    assert (first.kind, first.grade, first.step) == ("scale", "note", 0)
    assert first.value == pytest.approx(math.sqrt(D_K))
    assert "scale 1 where d_k = 16 (1/sqrt(d_k) is 0.25): is the division by" in first.words
    assert "F.scaled_dot_product_attention(q, k, v)" in first.advice


def test_a_missing_division_with_large_logits_is_a_warning_that_names_it():
    alarms = _first_reading("xavier", times=1.2, scale=1.0)
    assert kinds(alarms)[:1] == [("start", "warn")]
    assert "scale 1 where d_k = 16" in alarms[0].words
    assert ("scale", "note") in kinds(alarms)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (dict(scale=1 / D_K), "this is 1/d_k, right for muP alone"),
        (dict(scale=WIDTH**-0.5), "this is 1/sqrt(d_model); is d_k meant?"),
        (dict(fold="q"), "q is smaller than k by sqrt(d_k)"),
        (dict(scale=0.01), "is that meant?"),
    ],
    ids=["1/d_k", "1/sqrt(d_model)", "twice", "some number"],
)
def test_a_scale_that_is_too_small_is_a_note(more, words):
    first = _first_reading(**more)[0]
    assert (first.kind, first.grade) == ("scale", "note")
    assert first.value <= 0.5
    assert words in first.words


def test_a_compiled_model_tells_its_scale():
    pytest.importorskip("torch._dynamo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), Attention(scale=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with scaledot.Watch(model, every=1) as watch:
        compiled = torch.compile(model, backend="aot_eager")
        compiled(torch.randn(2, TOKENS, WIDTH)).square().mean().backward()
        optimizer.step()
    assert kinds(watch.alarms) == [("scale", "note")]


def test_the_store_keeps_the_scales_and_the_rules_find_the_same_again(tmp_path):
    told = _first_reading(scale=1.0, store=tmp_path / "r.vitals")
    reader = RunReader(tmp_path / "r.vitals")
    assert reader.attributes.more[SCALES] == {"0": [1.0, D_K], "1": [1.0, D_K]}
    again = of_run(reader)
    assert [(one.kind, one.layer, one.words) for one in again] == [
        (one.kind, one.layer, one.words) for one in told
    ]


@pytest.mark.parametrize(
    "note", [None, 7, [], {"a": None}, {"a": ["x", 3]}, {"a": [1.0]}, {"a": [-1, 4]}, {"a": [1, 0]}]
)
def test_a_foreign_note_of_scales_is_none(note):
    assert scales_from(note) == {}


def test_most_heads_must_be_too_large_and_only_the_first_reading_counts():
    judge = Judge()
    assert kinds(judge.read(reading(0, heads=10, **LARGE))) == [("start", "warn")]
    assert "start" not in [kind for kind, _ in kinds(judge.read(reading(1, heads=10, **LARGE)))]
    some = {**LARGE, "row_std": [1.0] * 2 + [19.0] * 8}
    assert Judge().read(reading(0, heads=10, **some)) == []
    assert Judge(overridden(["start=off"])).read(reading(0, heads=10, **LARGE)) == []


def test_a_layer_that_is_large_among_many_that_are_not_is_no_illness():
    """As of embeddings that are not normalised before the first layer."""
    usual = dict.fromkeys(LARGE, 1.0)
    readings = [reading(0, f"layer.{at}", **(usual if at else LARGE)) for at in range(4)]
    assert Judge().read_step(readings) == []


def test_a_number_alone_does_not_make_it_large():
    for missing in ("logit_std", "row_std", "q_rms"):  # a bias; a shift of rows; both
        assert Judge().read(reading(0, **{**LARGE, missing: 0.3})) == []
    judge = Judge()
    judge.scales["layer"] = Scale(1 / 64, 64)  # 1/8 of what is right
    assert ("start", "warn") not in kinds(judge.read(reading(0, **LARGE)))
