"""Peak memory: a block, never the matrix of all pairs, however long the sequence."""

import subprocess
import sys

import pytest

# Measured in processes of their own: their peak is nobody else's. The peak before includes short
# calls of the same kind, so that what torch allocates once is not counted.
SCRIPT = """
import resource, sys
import torch, scaledot

TOKENS, HEADS, WIDTH = 8192, 1, 16
MATRIX = TOKENS * TOKENS * HEADS * 4  # bytes of all scores in float32

ARGUMENTS = {
    "plain": lambda n: {},
    "causal": lambda n: {"is_causal": True},
    "window": lambda n: {"window": (500, 3)},
    "lengths": lambda n: {"key_lengths": torch.tensor([n - 3])},
    "softcap": lambda n: {"softcap": 5.0},
    "sinks": lambda n: {"sinks": torch.zeros(HEADS)},
    "log_n": lambda n: {"scale": "log_n", "is_causal": True},
    "column_mask": lambda n: {"attn_mask": torch.arange(n) % 7 > 0},
    "bias_row": lambda n: {"attn_mask": torch.randn(n)},
    "row_mask": lambda n: {"attn_mask": torch.rand(n, 1) < 0.9},
    "dropout": lambda n: {"dropout_p": 0.1},
}

def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

def tensors(tokens, grad=False):
    return [torch.randn(1, HEADS, tokens, WIDTH, requires_grad=grad) for _ in range(3)]

def backward(query, key, value, **words):
    scaledot.attention_with_vitals(query, key, value, **words)[0].sum().backward()

RUN = {
    "vitals": lambda tokens, **words: scaledot.vitals(*tensors(tokens)[:2], **words, per_row=True),
    "with_vitals": lambda n, **words: scaledot.attention_with_vitals(*tensors(n), **words),
    "attention": lambda tokens, **words: scaledot.attention(*tensors(tokens), **words),
    "backward": lambda tokens, **words: backward(*tensors(tokens, grad=True), **words),
}

run, names = RUN[sys.argv[1]], sys.argv[2:]
for name in names:
    run(300, **ARGUMENTS[name](300))
before = peak()
for name in names:
    run(TOKENS, **ARGUMENTS[name](TOKENS))
    print(name, (peak() - before) / MATRIX)
"""

CASES = {
    "with_vitals": [
        "plain",
        "causal",
        "window",
        "softcap",
        "log_n",
        "column_mask",
        "bias_row",
        "dropout",
    ],
    "vitals": ["plain", "causal", "lengths", "sinks", "row_mask"],
    "attention": ["plain", "window", "softcap"],
    "backward": ["plain", "causal", "window", "softcap", "sinks"],
}


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no getrusage")
@pytest.mark.parametrize("function", CASES)
def test_peak_at_8192_tokens_is_an_eighth_of_the_matrix_at_most(function):
    command = [sys.executable, "-c", SCRIPT, function, *CASES[function]]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr
    for line in ran.stdout.splitlines():
        name, share = line.split()
        assert float(share) < 1 / 8, f"{name} took the peak to {share} of the matrix of all pairs"
    assert len(ran.stdout.splitlines()) == len(CASES[function])
