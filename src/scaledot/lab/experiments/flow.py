"""The flow of self-attention on a sentence: tokens to context, every box with its numbers."""

import functools
import math
import re
import unicodedata
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import scaledot
from scaledot import scale as scale_rules
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim, seed_control

RULES = ("none", "sqrt_dk", "dk", "sqrt_dmodel", "cosine")
TOKENS = 12  # at most
CHARACTERS = 200
SHOWN = 8  # columns of wide boxes
JOINERS = "\u200c\u200d"  # of the signs of a word in many scripts of India
MARK = "\u0300"  # stands for any mark

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class FlowResult:
    """Placeholders: d_model, heads, d_k, n, rule, divisor, context_shape, input_shape.

    Numbers are those of head 0; wide boxes show their first 8 columns. shapes: of every box
    (embeddings, w_q, w_k, w_v, q, k, v, scores, scaled, weights, context, joined, w_o, output).
    claims: `same_shape` ("the result has the same shape as the input": the context of a head),
    `joined_shape` (the output, after the heads are joined and projected).
    """

    tokens: tuple[str, ...]
    n: int
    d_model: int
    heads: int
    d_k: int
    rule: str
    divisor: float  # for cosine the mean of |q_i| |k_j|
    seed: int
    shapes: dict[str, tuple[int, ...]]
    embeddings: Rows
    w_q: Rows  # the first 8 rows and columns, as w_k, w_v
    w_k: Rows
    w_v: Rows
    q: Rows
    k: Rows
    v: Rows
    scores: Rows
    scaled: Rows
    weights: Rows
    context: Rows
    joined: Rows
    output: Rows
    entropy: tuple[float, ...]  # of each row's weights, in nats
    entropy_ratio: tuple[float, ...]  # of ln n; 0 for one token
    top: tuple[int, ...]  # the token each row looks at most
    input_shape: str
    context_shape: str
    claims: tuple[Claim, ...]


def flow(
    *,
    sentence: str = "Love Apple phones",
    d_model: int = 512,
    heads: int = 8,
    rule: str = "sqrt_dk",
    seed: int = 0,
) -> FlowResult:
    """One layer of self-attention over the sentence, with random embeddings and weights."""
    tokens = tokenise(sentence)
    n, d_k = len(tokens), d_model // heads
    x = torch.stack([embedding(token, d_model, seed) for token in tokens])
    w_q, w_k, w_v, w_o = weights_of(d_model, seed)
    # [tokens, d_model] -> [heads, tokens, d_k]
    q, k, v = ((x @ w).unflatten(-1, (heads, d_k)).transpose(0, 1) for w in (w_q, w_k, w_v))
    raw = q[0] @ k[0].mT
    if rule == "cosine":
        norms = q[0].norm(dim=-1)[:, None] * k[0].norm(dim=-1)
        divisor, scaled = float(norms.mean()), raw / norms
        q_in, k_in, scale = F.normalize(q, dim=-1), F.normalize(k, dim=-1), 1.0
    else:
        scale = scale_rules.resolve(rule, d_k, heads)
        divisor, scaled = 1 / scale, raw * scale
        q_in, k_in = q, k
    context, vitals = scaledot.attention_with_vitals(q_in, k_in, v, scale=scale, per_row=True)
    assert vitals.per_row is not None  # asked for
    weights = scaledot.attention(q_in[0], k_in[0], torch.eye(n), scale=scale)
    joined = context.transpose(0, 1).flatten(1)  # [tokens, d_model]
    output = joined @ w_o  # its first columns: no other is shown
    entropy = vitals.per_row.entropy[0]
    shapes = _shapes(n, d_model, d_k)
    assert tuple(context[0].shape) == shapes["context"]
    assert tuple(joined.shape) == shapes["joined"]
    return FlowResult(
        tokens=tokens,
        n=n,
        d_model=d_model,
        heads=heads,
        d_k=d_k,
        rule=rule,
        divisor=divisor,
        seed=seed,
        shapes=shapes,
        embeddings=_rows(x),
        w_q=_rows(w_q[:SHOWN]),
        w_k=_rows(w_k[:SHOWN]),
        w_v=_rows(w_v[:SHOWN]),
        q=_rows(q[0]),
        k=_rows(k[0]),
        v=_rows(v[0]),
        scores=_rows(raw, TOKENS),
        scaled=_rows(scaled, TOKENS),
        weights=_rows(weights, TOKENS),
        context=_rows(context[0]),
        joined=_rows(joined),
        output=_rows(output),
        entropy=tuple(entropy.tolist()),
        entropy_ratio=tuple((entropy / math.log(n)).tolist()) if n > 1 else (0.0,),
        top=tuple(weights.argmax(-1).tolist()),
        input_shape=_written(tuple(x.shape)),
        context_shape=_written(tuple(context[0].shape)),
        claims=_claims(tuple(x.shape), tuple(context[0].shape), shapes),
    )


def tokenise(sentence: str) -> tuple[str, ...]:
    """Words and marks, at most TOKENS of them; what models do with a sentence is finer."""
    # A mark, such as a vowel sign of Hindi, belongs to what is before it; re has no class for it.
    marked = "".join(MARK if _is_mark(letter) else letter for letter in sentence)
    found = re.finditer(rf"\w[\w{MARK}]*|[^\w\s]{MARK}*", marked)
    tokens = tuple(sentence[slice(*match.span())] for match in found)
    if not tokens:
        raise ValueError(f"sentence {sentence!r} has no word; type one")
    if len(tokens) > TOKENS:
        raise ValueError(f"sentence has {len(tokens)} words and marks; type at most {TOKENS}")
    return tokens


def _is_mark(letter: str) -> bool:
    return unicodedata.category(letter).startswith("M") or letter in JOINERS


def embedding(token: str, d_model: int, seed: int) -> Tensor:
    """Unit-variance entries that depend on the word and the seed: a word looks the same twice."""
    number = zlib.crc32(token.encode()) + 2**32 * seed
    return torch.randn(d_model, generator=torch.Generator().manual_seed(number))


@functools.lru_cache(maxsize=4)
def weights_of(d_model: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_Q, W_K, W_V [d_model, d_model] and the first SHOWN columns of W_O: variance 1 / d_model,
    so that unit-variance tokens stay so. Kept for the next sentence; nobody writes into them."""
    generator = torch.Generator().manual_seed(seed)
    columns = (d_model, d_model, d_model, SHOWN)
    w_q, w_k, w_v, w_o = (
        torch.randn(d_model, number, generator=generator).div_(d_model**0.5) for number in columns
    )
    return w_q, w_k, w_v, w_o


def _shapes(n: int, d_model: int, d_k: int) -> dict[str, tuple[int, ...]]:
    tall, square = (d_model, d_k), (n, n)
    return {
        "embeddings": (n, d_model),
        "w_q": tall,
        "w_k": tall,
        "w_v": tall,
        "q": (n, d_k),
        "k": (n, d_k),
        "v": (n, d_k),
        "scores": square,
        "scaled": square,
        "weights": square,
        "context": (n, d_k),
        "joined": (n, d_model),
        "w_o": (d_model, d_model),
        "output": (n, d_model),
    }


def _rows(matrix: Tensor, columns: int = SHOWN) -> Rows:
    return tuple(tuple(row) for row in matrix[:, :columns].tolist())


def _written(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _claims(
    given: tuple[int, ...], context: tuple[int, ...], shapes: dict[str, tuple[int, ...]]
) -> tuple[Claim, ...]:
    return (
        claim("same_shape", folklore=given, measured=context, theory=shapes["q"], tolerance=0.0),
        claim(
            "joined_shape", folklore=given, measured=shapes["output"], theory=given, tolerance=0.0
        ),
    )


def _code(sentence: str, d_model: int, heads: int, rule: str, seed: int) -> str:
    d_k = d_model // heads
    if rule == "cosine":
        divide = "scaled = torch.cosine_similarity(q[:, None], k[None], dim=-1)"
    else:
        divide = f"scaled = scores * {scale_rules.resolve(rule, d_k, heads)!r}  # {rule}"
    return f"""\
import zlib
import torch

d_model, d_k, seed = {d_model}, {d_k}, {seed}
tokens = {list(tokenise(sentence))!r}


def embedding(token):  # the same word, the same vector
    generator = torch.Generator().manual_seed(zlib.crc32(token.encode()) + 2**32 * seed)
    return torch.randn(d_model, generator=generator)


x = torch.stack([embedding(token) for token in tokens])
generator = torch.Generator().manual_seed(seed)
w_q, w_k, w_v = (
    torch.randn(d_model, d_model, generator=generator) / d_model**0.5 for _ in range(3)
)
q, k, v = ((x @ w)[:, :d_k] for w in (w_q, w_k, w_v))  # head 0
scores = q @ k.T
{divide}
weights = torch.softmax(scaled, dim=-1)
context = weights @ v
print("scores", scores.tolist())
print("scaled", scaled.tolist())
print("weights", weights.tolist())
print("shapes.context", list(context.shape))
print("context", context[:, :8].tolist())
"""


LESSON = Lesson(
    "flow",
    flow,
    (
        Control("sentence", "text", "Love Apple phones", length=CHARACTERS),
        Control("d_model", "steps", 512, values=(64, 128, 256, 512, 768, 1024)),
        Control("heads", "steps", 8, values=(1, 2, 4, 8, 16)),
        Control("rule", "choice", "sqrt_dk", values=RULES),
        seed_control(),
    ),
    _code,
)
