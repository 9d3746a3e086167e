"""Draws docs/vitals.svg, the picture of the README, with numbers computed by the library.

python docs/picture.py
"""

import pathlib

import torch

import scaledot

WIDTH, KEYS, SEED = 512, 16, 3
FIELDS = ("max_logit", "logit_std", "entropy_ratio", "passes", "top_p", "saturated")
INK, FAINT, GOOD, BAD = "#1b1f24", "#8b949e", "#2f81f7", "#cf222e"


def panel(x: int, title: str, rule: str, query: torch.Tensor, key: torch.Tensor) -> list[str]:
    """One head's mean attention row, sorted, and its vital signs beside the healthy band."""
    weights, vitals = scaledot.attention_with_vitals(query, key, torch.eye(KEYS)[None], scale=rule)
    bars = weights[0].sort(-1, descending=True).values.mean(0).tolist()
    out = [f"<text x='{x}' y='40' class='title'>{title}</text>"]
    for i, weight in enumerate(bars):
        height = max(150 * weight, 1)
        out.append(
            f"<rect x='{x + 22 * i}' y='{210 - height:.1f}' width='18' height='{height:.1f}' "
            f"fill='{GOOD if rule != 'none' else BAD}'/>"
        )
    out.append(f"<text x='{x}' y='232' class='note'>weights of a row, largest first</text>")
    for i, name in enumerate(FIELDS):
        value, band = getattr(vitals, name).item(), scaledot.measure.BANDS[name]
        low, high = band.low, band.high
        sick = (low is not None and value < low) or (high is not None and value > high)
        y = 266 + 24 * i
        words = f"{low} to {high}"
        if low is None or high is None:
            words = f"up to {high}" if low is None else f"from {low}"
        out.append(f"<text x='{x}' y='{y}' class='name'>{name}</text>")
        out.append(
            f"<text x='{x + 215}' y='{y}' class='value' style='fill:{BAD if sick else INK}'>"
            f"{value:.3g}{' !' if sick else ''}</text>"
        )
        out.append(f"<text x='{x + 235}' y='{y}' class='note'>healthy {words}</text>")
    return out


def picture() -> str:
    generator = torch.Generator().manual_seed(SEED)
    query = torch.randn(1, 64, WIDTH, generator=generator)
    key = torch.randn(1, KEYS, WIDTH, generator=generator)
    style = (
        f"text{{font-family:ui-sans-serif,system-ui,sans-serif;font-size:14px;fill:{INK}}}"
        f".title{{font-size:18px;font-weight:600}}.note{{font-size:12px;fill:{FAINT}}}"
        ".value{text-anchor:end;font-weight:600}"
    )
    body = [
        *panel(30, f"q·k, d_k = {WIDTH}, no scaling", "none", query, key),
        *panel(450, f"q·k / √d_k, d_k = {WIDTH}", "sqrt_dk", query, key),
    ]
    return (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 860 410' role='img' "
        "aria-label='Attention weights and vital signs without and with the division by the "
        "square root of d_k'>"
        f"<style>{style}</style><rect width='860' height='410' fill='white'/>"
        f"{''.join(body)}</svg>\n"
    )


if __name__ == "__main__":
    pathlib.Path(__file__).with_name("vitals.svg").write_text(picture(), encoding="utf-8")
