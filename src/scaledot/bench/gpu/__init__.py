"""What a GPU adds to the bench: contenders, cases, a clock of events, and peers in own processes.

The way of a number is the same; what differs is that all contenders of a workload run one race
(engine.py), because a peer that is measured once can be held against many bars.
"""

import torch


def missing() -> str | None:
    """Why nothing can be measured on a GPU here; None where it can."""
    if torch.cuda.is_available():
        return None
    return (
        f"--gpu needs a CUDA GPU, and torch {torch.__version__} sees none; "
        "without --gpu the bars of a CPU are measured"
    )
