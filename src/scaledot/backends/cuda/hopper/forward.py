"""All launches of a call: the pass, the moments that it left out, the vitals of its rows.

They are written down and made again for calls alike (replay.py).
"""

import math

import torch
from torch import Tensor

from scaledot.backends.cuda import moments, replay, summary, whole_moments
from scaledot.backends.cuda.hopper import launch
from scaledot.backends.cuda.repair import repair
from scaledot.backends.cuda.statistics import ROW_PLANES
from scaledot.backends.inputs import Inputs
from scaledot.backends.operators import Measured
from scaledot.measure import ROW_FIELDS
from scaledot.problem import Settings


def forward(
    inputs: Inputs,
    settings: Settings,
    out: Tensor | None,
    wants_vitals: bool,
    per_row: bool,
    summed: str,
) -> Measured:
    """`out` filled. summed: of which keys the pass sums moments, see `launch.forward`."""
    query, key = inputs.query, inputs.key
    batch, heads, queries, _ = query.shape
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=query.device)
    floats = counts = rows = None
    block = 0
    if wants_vitals:
        floats, counts = summary.new_vitals(inputs)
        block = moments.block_for(*key.shape[2:]) if summed == "edges" else 0
        if per_row:
            rows = lse.new_empty(launch.planes_of(summed), batch, heads, queries)
    if inputs.cu_seqlens_q is not None:
        _blind(out, lse, rows)
    # Of a scale of 0 the sign counts. Another config_for may have been put in its place.
    facts = settings, settings.scale or str(settings.scale), summed, block, launch.config_for
    call = replay.describe(inputs, *facts, made=(out, lse, floats, counts, rows))
    if not replay.again(call):
        _launch_first(call, settings, summed, block)
    if rows is not None:
        rows = rows[: len(ROW_FIELDS)].clone()
    return Measured(lse, floats, counts, rows)


def _blind(out: Tensor | None, lse: Tensor, rows: Tensor | None) -> None:
    """What there is of a token of no sequence, which the kernel does not meet: it sees no key."""
    lse.fill_(-math.inf)
    if out is not None:
        out.zero_()
    if rows is not None:
        rows.zero_()
        for name in ("max_logit", "lse"):
            rows[ROW_PLANES.index(name)].fill_(-math.inf)


def _launch_first(call: replay.Call, settings: Settings, summed: str, block: int) -> None:
    """The launches of a call that has none like it, written down for those that will be."""
    recording = replay.Recording(call)
    *tensors, out, lse, floats, counts, rows = recording.tensors
    inputs = Inputs._make(tensors)
    passed = launch.forward(
        inputs,
        settings,
        out,
        floats is not None,
        summed,
        block,
        lse=lse,
        rows=rows,
        launches=recording,
    )
    if floats is not None and counts is not None:
        # Matrices are products, too: where the pass had to copy its rows first, they read these.
        inputs = inputs._replace(query=passed.read[0], key=passed.read[1])
        # After the long kernel: while it runs, the short ones are queued, and the first of them
        # gets the multiprocessors that it leaves (launching.enter).
        rows, squares, key_squares = passed.rows, passed.squares, passed.key_squares
        counted = inputs.key_lengths is None and inputs.cu_seqlens_k is None
        if summed == "all" and counted and key_squares is None:
            key_squares = summary.square_keys(inputs.key, recording, beside=True)
        elif summed == "none":
            key_squares = whole_moments.add_all(rows, inputs, settings, recording, beside=True)
        elif summed == "edges":
            key_squares = moments.add_blocks(
                rows, inputs, settings, block, passed.tile_rows, recording, beside=True
            )
        summary.fill(floats, counts, rows, inputs, squares, recording, key_squares, soon=True)
    if passed.broken is not None and out is not None:
        inputs = inputs._replace(query=passed.read[0], key=passed.read[1], value=passed.read[2])
        repair(out, passed.lse, passed.broken, inputs, settings, recording)
    recording.keep()
