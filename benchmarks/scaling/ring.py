"""The ring, played step by step: who computes when, which message leaves when.

Each rank has one engine that computes and one link to the next rank; both do one thing at a time.
Rank r starts with its own block; step s of a rank is its work on the block of rank r - s. The times
follow from what waits for what, so they are exact for the times put in, whatever those are: jitter,
a slow rank, links of two kinds. model.py has the closed form for equal ranks and links.
"""

from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Played(NamedTuple):
    seconds: float  # until the last rank has ended
    waited: float  # of that, the mean over ranks that their engine stood still


def forward(compute: Array, transfer: Array, buffers: int = 2) -> Played:
    """compute [ranks, ranks]: seconds of each rank's step; transfer [ranks]: of each rank's link.

    A message leaves when its block is there, the link is free, and the next rank has a buffer: it
    has `buffers`, and one is free again when its block was used and sent on.
    """
    ranks, steps = compute.shape
    arrived = np.zeros(ranks)  # the block of this step
    link_free = np.zeros(ranks)
    freed: list[Array] = []  # by step: when its buffer could be written again
    engine_free = np.zeros(ranks)
    for step in range(steps):
        begins = np.maximum(arrived, engine_free)
        engine_free = begins + compute[:, step]
        last = step == steps - 1
        if not last:
            leaves = np.maximum(arrived, link_free)
            if step + 1 >= buffers:
                leaves = np.maximum(leaves, np.roll(freed[step + 1 - buffers], -1))
            link_free = leaves + transfer
            arrived = np.roll(link_free, 1)  # from rank r to rank r + 1
        freed.append(engine_free if last else np.maximum(engine_free, link_free))
    return _played(compute, engine_free)


def backward(compute: Array, transfer: Array, gradients: Array, buffers: int = 2) -> Played:
    """The same with a second kind of message: the gradients of a block follow it around.

    transfer, gradients [ranks]: seconds of each on a rank's link, which sends in the order in which
    a program asks for it: block 0, its gradients, block 1, ... Gradients leave when those of the
    ranks before are there and this rank has added its own; the last hop brings them home.
    """
    ranks, steps = compute.shape
    arrived, sums_here = np.zeros(ranks), np.zeros(ranks)
    link_free, engine_free = np.zeros(ranks), np.zeros(ranks)
    freed: list[Array] = []
    for step in range(steps):
        begins = np.maximum(arrived, engine_free)
        next_arrives = arrived
        if step < steps - 1:
            leaves = np.maximum(arrived, link_free)
            if step + 1 >= buffers:
                leaves = np.maximum(leaves, np.roll(freed[step + 1 - buffers], -1))
            link_free = leaves + transfer
            next_arrives = np.roll(link_free, 1)
        sent = link_free
        engine_free = begins + compute[:, step]
        link_free = np.maximum(np.maximum(engine_free, sums_here), link_free) + gradients
        freed.append(np.maximum(engine_free, sent))
        arrived, sums_here = next_arrives, np.roll(link_free, 1)
    return _played(compute, sums_here if ranks > 1 else engine_free)


def _played(compute: Array, ends: Array) -> Played:
    seconds = float(ends.max())
    return Played(seconds, seconds - float(compute.sum(1).mean()))
