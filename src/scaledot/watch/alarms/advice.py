"""Say what to type about an alarm: declared here by kind and grade, never taken from a file.

A run's store may come from a stranger. What it holds of an alarm is numbers and words to read; a
command that a reader is asked to type is made of the words below alone.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scaledot.watch.alarms.alarm import Grade

SCRIPT = "SCRIPT"  # stands for the script, where it is not this process's own
QK_CLIP, QK_NORM = "qk-clip:100", "qk-norm"
REMEDIES = {  # by kind of alarm
    "collapse": QK_CLIP,
    "growth": QK_CLIP,
    "saturation": QK_NORM,
    "start": QK_NORM,
}
LINES = {  # of the other kinds
    "fading": "scaledot.attention(q, k, v, scale='sqrt_dk')",
    "scale": "F.scaled_dot_product_attention(q, k, v)  # without scale=: 1/sqrt(d_k)",
    "loss": "torch.autograd.set_detect_anomaly(True)",
    "broken": "torch.autograd.set_detect_anomaly(True)",
    "sink": "nothing to do",
}


def remedy_for(kind: str, grade: "Grade") -> str | None:
    """Name the remedy as it is typed; None where the alarm asks for none."""
    calm = kind == "growth" and grade == "note"  # healthy runs grow, too
    return None if calm else REMEDIES.get(kind)


def advice_for(kind: str, grade: "Grade", script: str = SCRIPT) -> str:
    """Write the command or line of code; empty for a kind that is not known here."""
    remedy = remedy_for(kind, grade)
    if remedy is not None:
        return f"scaledot run --remedy {remedy} {script}"
    return "scaledot top" if kind in REMEDIES else LINES.get(kind, "")
