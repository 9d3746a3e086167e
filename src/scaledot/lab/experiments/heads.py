"""d_k is the head's width, not the model's; and many heads are many small attentions."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import scaledot
from scaledot import scale as scale_rules
from scaledot.lab.experiments.lesson import Claim, Control, Lesson, claim, seed_control

PRESETS = {"transformer": (512, 8), "gpt2": (768, 12), "gpt3": (12288, 96)}
FOLKLORE = {"transformer": 64.0, "gpt2": 64.0, "gpt3": 128.0}  # d_k as the notes have it
ENTRIES = 2**17  # of q, and of k
TOKENS = 16
# Where heads are computed one by one: no more than so many, no wider together. A slider waits.
CHECKED_HEADS, CHECKED_WIDTH = 32, 192
CLOSE = 1e-5  # float32 sums in another order

# sqrt(d_model) in place of sqrt(d_k), found in public repositories: the thread that says so.
REPOSITORIES = (
    ("karpathy/ng-video-lecture", "PR 6"),
    ("lucidrains/vit-pytorch", "issue 65"),
    ("jadore801120/attention-is-all-you-need-pytorch", "issues 42 and 49"),
    ("chelsea0x3b/dfdx", "issue 171"),
    ("juho-lee/set_transformer", "issue 18"),
    ("FrancescoSaverioZuppichini/ViT", "issue 1"),
    ("FareedKhan-dev/train-llm-from-scratch", "PR 3"),
    ("aladdinpersson/Machine-Learning-Collection", "PR 159"),
    ("Graylab/DL4Proteins-notebooks", "issue 12"),
    ("omihub777/ViT-CIFAR", "PR 11"),
)


@dataclass(frozen=True)
class Repository:
    name: str
    thread: str


@dataclass(frozen=True)
class Preset:
    name: str
    d_model: int
    heads: int
    d_k: int


@dataclass(frozen=True)
class HeadsResult:
    """Placeholders: d_model, heads, d_k, right_divisor, wrong_divisor, sd_right, sd_wrong,
    theory_sd_wrong, checked_heads, checked_d_model, difference, torch_difference.

    claims: `width_transformer`, `width_gpt2`, `width_gpt3` (d_model / heads as the notes have it),
    `wrong_rule` ("sqrt(d_model) does as well": the deviation under it against 1), `one_by_one`
    ("heads one by one give the module's output": the largest difference against 0).
    """

    preset: str
    d_model: int
    heads: int
    d_k: int
    right_divisor: float  # sqrt(d_k)
    wrong_divisor: float  # sqrt(d_model)
    sd_right: float
    sd_wrong: float
    theory_sd_wrong: float  # 1 / sqrt(heads)
    samples: int  # scores behind the deviations
    seed: int
    checked_heads: int  # of the modules compared: heads, or as many as a slider waits for
    checked_d_model: int
    difference: float  # largest, heads one by one against scaledot.nn.MultiHeadAttention
    torch_difference: float  # and against torch.nn.MultiheadAttention
    presets: tuple[Preset, ...]
    repositories: tuple[Repository, ...]
    claims: tuple[Claim, ...]


def heads(
    *, preset: str = "custom", d_model: int = 512, heads: int = 8, seed: int = 0
) -> HeadsResult:
    """preset, unless it is "custom", sets d_model and heads."""
    d_model, heads = PRESETS.get(preset, (d_model, heads))
    if d_model % heads:
        raise ValueError(f"d_model {d_model} is no multiple of heads {heads}; choose heads that is")
    d_k = d_model // heads
    generator = torch.Generator().manual_seed(seed)
    problems = max(1, ENTRIES // (TOKENS * d_k))
    q, k = (torch.randn(problems, TOKENS, d_k, generator=generator) for _ in range(2))
    sd = float((q @ k.mT).std())
    right = scale_rules.resolve("sqrt_dk", d_k)
    wrong = scale_rules.resolve("sqrt_dmodel", d_k, heads)
    checked = min(heads, CHECKED_HEADS)
    checked_width = max(1, min(d_k, CHECKED_WIDTH // checked))
    difference, torch_difference = _one_by_one(checked * checked_width, checked, generator)
    presets = tuple(
        Preset(name, width, number, width // number) for name, (width, number) in PRESETS.items()
    )
    return HeadsResult(
        preset=preset,
        d_model=d_model,
        heads=heads,
        d_k=d_k,
        right_divisor=1 / right,
        wrong_divisor=1 / wrong,
        sd_right=sd * right,
        sd_wrong=sd * wrong,
        theory_sd_wrong=1 / math.sqrt(heads),
        samples=problems * TOKENS * TOKENS,
        seed=seed,
        checked_heads=checked,
        checked_d_model=checked * checked_width,
        difference=difference,
        torch_difference=torch_difference,
        presets=presets,
        repositories=tuple(Repository(*entry) for entry in REPOSITORIES),
        claims=(
            *(
                claim(
                    f"width_{row.name}",
                    folklore=FOLKLORE[row.name],
                    measured=float(row.d_k),
                    tolerance=0.0,
                )
                for row in presets
            ),
            claim(
                "wrong_rule",
                folklore=1.0,
                measured=sd * wrong,
                theory=1 / math.sqrt(heads),
                tolerance=0.1,
            ),
            claim(
                "one_by_one",
                folklore=0.0,
                measured=max(difference, torch_difference),
                theory=0.0,
                tolerance=CLOSE,
            ),
        ),
    )


def _one_by_one(d_model: int, heads: int, generator: torch.Generator) -> tuple[float, float]:
    """The largest difference of heads computed apart from scaledot's module, and from torch's."""
    w_q, w_k, w_v, w_o = (
        torch.randn(d_model, d_model, generator=generator) / math.sqrt(d_model) for _ in range(4)
    )
    tokens = torch.randn(1, TOKENS, d_model, generator=generator)
    d_k = d_model // heads
    contexts = []
    for head in range(heads):
        rows = slice(head * d_k, (head + 1) * d_k)
        q, k, v = (tokens @ weight[rows].T for weight in (w_q, w_k, w_v))
        contexts.append(scaledot.attention(q, k, v))
    apart = torch.cat(contexts, -1) @ w_o.T
    ours = _ours(d_model, heads, w_q, w_k, w_v, w_o)(tokens)
    theirs, _ = _torchs(d_model, heads, w_q, w_k, w_v, w_o)(
        tokens, tokens, tokens, need_weights=False
    )
    return float((apart - ours).abs().max()), float((apart - theirs).abs().max())


def _ours(d_model: int, heads: int, *weights: Tensor) -> nn.Module:
    """Built on the meta device, so that no module draws from torch's global generator."""
    module = scaledot.nn.MultiHeadAttention(
        d_model, heads, bias=False, measure=False, device="meta"
    )
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight")
    return _filled(module, dict(zip(names, weights, strict=True)))


def _torchs(d_model: int, heads: int, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor) -> Any:
    module = nn.MultiheadAttention(d_model, heads, bias=False, batch_first=True, device="meta")
    state = {"in_proj_weight": torch.cat([w_q, w_k, w_v]), "out_proj.weight": w_o}
    return _filled(module, state)


def _filled(module: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    module.load_state_dict(state, assign=True)
    return module.requires_grad_(False).eval()


def _code(preset: str, d_model: int, heads: int, seed: int) -> str:
    d_model, heads = PRESETS.get(preset, (d_model, heads))
    d_k = d_model // heads
    return f"""\
import torch

d_model, heads = {d_model}, {heads}
d_k = d_model // heads
generator = torch.Generator().manual_seed({seed})
shape = ({max(1, ENTRIES // (TOKENS * d_k))}, {TOKENS}, d_k)
q, k = (torch.randn(shape, generator=generator) for _ in range(2))
scores = q @ k.mT
print("d_k", d_k)
print("right_divisor", d_k**0.5)
print("wrong_divisor", d_model**0.5)
print("sd_right", (scores / d_k**0.5).std().item())
print("sd_wrong", (scores / d_model**0.5).std().item())
"""


LESSON = Lesson(
    "heads",
    heads,
    (
        Control("preset", "choice", "custom", values=("custom", *PRESETS)),
        Control("d_model", "steps", 512, values=(192, 384, 512, 768, 1536, 3072, 6144, 12288)),
        Control("heads", "steps", 8, values=(1, 2, 4, 8, 16, 32, 64)),
        seed_control(),
    ),
    _code,
)
