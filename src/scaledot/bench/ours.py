"""The library's functions as contenders."""

from scaledot import functional
from scaledot.bench.workload import Answer, Inputs


def attention(inputs: Inputs) -> Answer:
    out = functional.attention(inputs.query, inputs.key, inputs.value, is_causal=inputs.causal)
    return Answer(out, None)


def attention_with_vitals(inputs: Inputs) -> Answer:
    query, key, value = inputs.query, inputs.key, inputs.value
    return Answer(
        *functional.attention_with_vitals(query, key, value, is_causal=inputs.causal),
    )


def vitals(inputs: Inputs) -> Answer:
    return Answer(None, functional.vitals(inputs.query, inputs.key, is_causal=inputs.causal))


def additive_attention(inputs: Inputs) -> Answer:
    assert inputs.weight is not None
    query, key, value = inputs.query, inputs.key, inputs.value
    out = functional.additive_attention(query, key, value, inputs.weight, is_causal=inputs.causal)
    return Answer(out, None)
