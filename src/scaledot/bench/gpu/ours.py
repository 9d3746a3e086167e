"""The library's functions as contenders on a GPU: our kernels by name, and the dispatch."""

import torch

from scaledot import functional
from scaledot.bench.workload import Answer, Inputs

HOPPER, TRITON = "hopper", "triton"  # the names by which backend= forces our kernels


def own(inputs: Inputs) -> Answer:
    """Our own kernel, no dispatch to a peer."""
    query, key, value, _, causal, _ = inputs
    return Answer(
        functional.attention(query, key, value, is_causal=causal, backend=HOPPER),
        None,
    )


def own_with_vitals(inputs: Inputs) -> Answer:
    return _with_vitals(inputs, HOPPER)


def own_vitals(inputs: Inputs) -> Answer:
    query, key, causal = inputs.query, inputs.key, inputs.causal
    return Answer(None, functional.vitals(query, key, is_causal=causal, backend=HOPPER))


def triton_with_vitals(inputs: Inputs) -> Answer:
    return _with_vitals(inputs, TRITON)


def forward_backward(inputs: Inputs) -> Answer:
    """A step of training with vitals, as dispatched."""
    answer = _with_vitals(inputs, None)
    assert answer.out is not None
    return answer._replace(gradients=torch.autograd.grad(answer.out, inputs[:3], inputs.grad))


def _with_vitals(inputs: Inputs, backend: str | None) -> Answer:
    query, key, value, _, causal, _ = inputs
    return Answer(
        *functional.attention_with_vitals(query, key, value, is_causal=causal, backend=backend)
    )
