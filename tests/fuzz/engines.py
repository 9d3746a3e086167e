"""Force one engine to serve a call."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

import scaledot
from fuzz.tensors import Call
from scaledot.backends.cpu import native

CPU = ("cpu-native", "cpu-tiles", "dispatched")
GPU = ("triton", "hopper", "dispatched")
ENGINES = ("cpu-native", "cpu-tiles", "triton", "hopper", "dispatched")


def on_this_machine() -> tuple[str, ...]:
    """The engines to take in turn: those of the GPU where there is one."""
    if torch.cuda.is_available():
        hopper = torch.cuda.get_device_capability() == (9, 0)
        return GPU if hopper else ("triton", "dispatched")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ("triton",)
    return CPU


def prepare(engine: str | None) -> None:
    """Let Triton interpret where its engine is asked for and there is no GPU."""
    if torch.cuda.is_available() or "triton" not in (engine, *on_this_machine()):
        return
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import interpreter

    interpreter.mend()
    np.seterr(all="ignore")  # a GPU overflows to infinity in silence


def device_of(engine: str) -> str:
    if engine in ("triton", "hopper", "dispatched") and torch.cuda.is_available():
        return "cuda"
    return "cpu"


@contextlib.contextmanager
def forced(engine: str) -> Iterator[str | None]:
    """Yield the `backend=` that makes this engine serve."""
    if engine == "cpu-tiles":
        before = native.library
        native.library = lambda: None
        try:
            yield "cpu"
        finally:
            native.library = before
        return
    yield {"cpu-native": "cpu", "dispatched": None}.get(engine, engine)


@contextlib.contextmanager
def noted_peers() -> Iterator[list[str]]:
    """Yield a list of torch's own kernels that compute gradients meanwhile."""
    found: list[str] = []
    if not torch.cuda.is_available():
        yield found
        return
    from scaledot.backends.cuda import peer_backward

    run = peer_backward.backward
    peer_backward.backward = lambda which, *args: (found.append(which), run(which, *args))[1]
    try:
        yield found
    finally:
        peer_backward.backward = run


def serves(call: Call, backend: str) -> bool:
    """Tell whether this backend takes a call, with vitals."""
    try:
        attention_with_vitals(call, backend)
    except ValueError as error:
        if "cannot serve this call" in str(error):
            return False
        raise
    return True


def attention(call: Call, backend: str | None, **changes) -> torch.Tensor:
    return _run(call, ("attention", "attention_varlen", "additive_attention"), backend, changes)


def attention_with_vitals(call: Call, backend: str | None, **changes):
    names = (
        "attention_with_vitals",
        "attention_varlen_with_vitals",
        "additive_attention_with_vitals",
    )
    return _run(call, names, backend, {**changes, "per_row": call.case.per_row})


def vitals(call: Call, backend: str | None):
    """Of scores alone; None where there is no such function, or the value's shape adds to them."""
    case = call.case
    if case.additive is not None or replace(case, value_lead=case.key_lead).lead != case.lead:
        return None
    changes = {"per_row": call.case.per_row, "value": None}
    return _run(call, ("vitals", "vitals_varlen", ""), backend, changes)


def _run(call: Call, names: tuple[str, str, str], backend: str | None, changes: dict):
    given = {**call.tensors, **changes}
    tensors = [given.pop(name) for name in ("query", "key", "value")]
    words = {**call.words, **given, "backend": backend}
    if tensors[2] is None:
        tensors.pop()
    elif call.case.dropout:
        words["dropout_p"] = call.case.dropout
    torch.manual_seed(call.case.seed)
    if call.case.packed is not None:
        ends = [call.lengths[f"cu_seqlens_{x}"] for x in "qk"]
        return getattr(scaledot, names[1])(*tensors, *ends, **words)
    words |= call.lengths
    if "mask" in words:
        words["attn_mask"] = words.pop("mask")
    if call.case.additive is not None:
        weight = words.pop("weight")
        return getattr(scaledot, names[2])(*tensors, weight, **words)
    return getattr(scaledot, names[0])(*tensors, **words)
