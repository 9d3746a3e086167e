"""The tables of docs/scaling.md. Each takes the rows of the CSV and the measured speeds."""

from collections.abc import Callable, Iterable

from benchmarks.scaling import facts, model, study
from benchmarks.scaling.facts import NETWORK, NODE, NVLINK, Link, Speeds
from benchmarks.scaling.model import Work
from benchmarks.scaling.rows import Row

Rows = list[Row]


def summary(_: Rows, found: Speeds) -> str:
    """What the tables below come to."""
    flops, heads, groups = found.forward[-1].flops, 32, 8

    def needed(link: Link) -> int:
        return round(model.enough_tokens(link, flops, heads, groups, causal=True))

    forward, backward = (
        study.smallest_local(found, NETWORK, way, heads, groups) for way in (False, True)
    )
    most = [study.most_at_half(found, tokens, "ring", backward=False) for tokens in study.LENGTHS]
    lengths = ", ".join(
        f"{ranks} GPUs for {_tokens(tokens)} tokens"
        for tokens, ranks in zip(study.LENGTHS, most, strict=True)
    )
    step = model.forward_step(Work(4096 * NODE, NODE), found)
    few, many = (model.memory(Work(1 << 20, ranks)) for ranks in (NODE, 128))
    return "\n".join(
        (
            f"- Inside a node of eight H200 no message is waited for from {needed(NVLINK)} tokens "
            "a GPU on.",
            f"- Between nodes it takes {needed(NETWORK)} tokens a GPU by the kernel alone. As "
            f"scaledot is today, with what else a block costs, it takes {forward} forward and "
            f"{backward} backward; with fewer, every step waits for the network.",
            f"- The ring works at half of its GPUs' speed or better, forward, up to {lengths}.",
            "- What no link can hide is the merge: at 4096 tokens a GPU adding a block's output "
            f"to what is there takes {_ms(step.merge)}, its message {_ms(step.transfer)} over "
            f"NVLink, its kernel {_ms(step.kernel)}.",
            "- Over many nodes the all-gather is faster than the ring, because it uses every "
            "network card; but every rank holds K and V of all. With eight ranks it needs "
            f"{few.gather / few.ring:.1f} times the memory of the ring, with 128 "
            f"{many.gather / many.ring:.0f} times.",
            "- Contiguous shards under a causal mask waste half of the GPUs. Use "
            '`layout="zigzag"`.',
        )
    )


def links(_: Rows, __: Speeds) -> str:
    """What is assumed."""
    lines = _head("", "nominal, one way", "taken", "latency of a message", "source")
    for link in (NVLINK, NETWORK):
        lines.append(
            _line(
                link.name,
                f"{link.nominal / 1e9:.0f} GB/s",
                f"{link.bandwidth / 1e9:.0f} GB/s",
                f"{link.latency * 1e6:.1f} µs",
                link.source,
            )
        )
    gather = f"{facts.GATHER_OVER_NODES / 1e9:.0f} GB/s a GPU"
    lines.append(_line("all-gather over nodes", "", gather, "NCCL's formula", "nccl#1218"))
    memory = f"{facts.MEMORY_BANDWIDTH / 1e12:.2f} TB/s"
    lines.append(_line("memory of an H200", "4.8 TB/s", memory, "", "MLPerf v4.1; share assumed"))
    overhead = f"{facts.STEP_OVERHEAD * 1e6:.0f} µs"
    lines.append(_line("queueing a step", "", overhead, "", "assumed"))
    return "\n".join(lines)


def speeds(_: Rows, found: Speeds) -> str:
    """What is measured."""
    lines = _head("pass", "n", "TFLOP/s", "row of gpu.csv (case, shape, date)")
    for name, column in (
        ("forward", found.forward),
        ("forward with vitals", found.with_vitals),
        ("backward", found.backward),
    ):
        for speed in column:
            source = f"`{speed.case}`, {speed.shape}, {speed.date}"
            lines.append(_line(name, f"{speed.length}", f"{speed.flops / 1e12:.0f}", source))
    return "\n".join(lines)


def steps(backward: bool) -> Callable[[Rows, Speeds], str]:
    """On one node and on several, zigzag."""

    def table(_: Rows, found: Speeds) -> str:
        message = "K, V, dK, dV" if backward else "K, V"
        words = (f"{message} message", "over NVLink", "over the network", "kernel", "merge, queue")
        lines = _head("tokens a GPU", *words)
        make = model.backward_step if backward else model.forward_step
        for local in study.LOCAL:
            work = Work(local * NODE, NODE)
            near, far = make(work, found, NVLINK), make(work, found, NETWORK)
            size = work.message + (work.gradient_message if backward else 0.0)
            times = (near.transfer, far.transfer, near.kernel, near.merge)
            lines.append(_line(f"{local}", _size(size), *map(_ms, times)))
        return "\n".join(lines)

    return table


def merges(_: Rows, found: Speeds) -> str:
    lines = _head("tokens a GPU", "merged in four passes", "in one", "no merge at all")
    for local in study.LOCAL:
        work = Work(local * NODE, NODE)
        cells = [f"{local}"]
        for moved in (model.IN_FOUR_PASSES, model.AS_IT_IS, 0):
            step = model.forward_step(work, found, entry_bytes=moved)
            seconds = model.ring_seconds(work, step)
            cells.append(_percent(model.efficiency(work, found, seconds)))
        lines.append(_line(*cells))
    return "\n".join(lines)


HEADS = ((32, 32), (32, 8), (64, 8), (16, 1))


def overlap(_: Rows, found: Speeds) -> str:
    lines = _head(
        "H / G",
        "NVLink, all keys",
        "NVLink, causal",
        "network, all keys",
        "network, causal",
        "the same with all terms",
        "backward, network, causal, all terms",
    )
    flops = found.forward[-1].flops
    for heads, groups in HEADS:
        cells = [f"{heads} / {groups}"]
        for link in (NVLINK, NETWORK):
            for causal in (False, True):
                least = model.enough_tokens(link, flops, heads, groups, causal)
                cells.append(f"{least:.0f}")
        for backward in (False, True):
            cells.append(f"{study.smallest_local(found, NETWORK, backward, heads, groups)}")
        lines.append(_line(*cells))
    return "\n".join(lines)


def layouts(rows: Rows, _: Speeds) -> str:
    lines = _head("R", "R / (2R - 1)", "contiguous, model", "played", "zigzag, model", "played")
    for ranks in study.LAYOUT_RANKS:
        cells = [f"{ranks}", _percent(ranks / (2 * ranks - 1))]
        for layout in ("contiguous", "zigzag"):
            for kind in ("model", "simulated"):
                row = _one(rows, question="layout", layout=layout, ranks=ranks, kind=kind)
                cells.append(_percent(row.efficiency))
        lines.append(_line(*cells))
    return "\n".join(lines)


def strong(rows: Rows, _: Speeds) -> str:
    """Played; the formulas beside it, where they differ by more than rounding, are a test."""
    lengths = [_tokens(tokens) for tokens in study.LENGTHS]
    heads = [f"{words}, n = {n}" for n in lengths for words in ("tokens a GPU", *DIRECTIONS)]
    lines = _head("GPUs", *heads)
    for ranks in study.RANKS:
        cells = [f"{ranks}"]
        for tokens in study.LENGTHS:
            cells.append(f"{tokens // ranks}")
            for direction in DIRECTIONS:
                row = _one(
                    rows,
                    question="strong",
                    direction=direction,
                    form="ring",
                    kind="simulated",
                    tokens=tokens,
                    ranks=ranks,
                )
                cells.append(_percent(row.efficiency))
        lines.append(_line(*cells))
    return "\n".join(lines)


DIRECTIONS = ("forward", "backward")


def agreement(rows: Rows, _: Speeds) -> str:
    """The largest difference between the formulas and the played ring."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row.form == "ring" and row.kind in ("model", "simulated") and not row.case:
            key = (row.question, row.direction, row.layout, row.tokens, row.ranks)
            found.setdefault(key, {})[row.kind] = row
    differences = {
        key: abs(both["simulated"].seconds / both["model"].seconds - 1)
        for key, both in found.items()
    }
    worst = max(differences, key=lambda key: differences[key])
    _, direction, _, tokens, ranks = worst
    return (
        f"Over all {len(differences)} rings of this page the two differ by at most "
        f"{100 * differences[worst]:.1f} % ({direction}, {_tokens(tokens)} tokens, {ranks} GPUs)."
    )


def halves(_: Rows, found: Speeds) -> str:
    lines = _head("n", "pass", "ring", "all-gather", "ring of nodes around rings inside")
    for tokens in study.LENGTHS:
        for backward in (False, True):
            most = [
                f"{study.most_at_half(found, tokens, form, backward)}"
                for form in ("ring", "all_gather", "double_ring")
            ]
            lines.append(_line(_tokens(tokens), "backward" if backward else "forward", *most))
    return "\n".join(lines)


def weak(rows: Rows, _: Speeds) -> str:
    lines = _head(
        "tokens a GPU",
        *(f"{ranks} GPUs, {way}" for ranks in study.WEAK_RANKS for way in ("forward", "backward")),
    )
    for local in study.LOCAL:
        cells = [f"{local}"]
        for ranks in study.WEAK_RANKS:
            for direction in ("forward", "backward"):
                row = _one(
                    rows,
                    question="weak",
                    kind="simulated",
                    direction=direction,
                    tokens=local * ranks,
                    ranks=ranks,
                )
                cells.append(_percent(row.efficiency))
        lines.append(_line(*cells))
    return "\n".join(lines)


def forms(rows: Rows, _: Speeds) -> str:
    """n = 1M: the four ways in milliseconds a layer, forward."""
    tokens = study.LENGTHS[1]
    lines = _head(
        "GPUs",
        "ring",
        "ring without overlap",
        "all-gather",
        "ring of nodes",
        "ring, memory",
        "all-gather, memory",
    )
    for ranks in (2, 8, 16, 64, 256, 1024):
        cells = [f"{ranks}"]
        for form in ("ring", "serial", "all_gather", "double_ring"):
            row = _one(
                rows,
                question="strong",
                kind="model",
                direction="forward",
                form=form,
                tokens=tokens,
                ranks=ranks,
            )
            cells.append(_ms(row.seconds))
        found = model.memory(Work(tokens, ranks))
        lines.append(_line(*cells, _size(found.ring), _size(found.gather)))
    return "\n".join(lines)


def troubles(rows: Rows, _: Speeds) -> str:
    lines = _head("what is wrong", *(f"{ranks} GPUs, n = 1M" for _, ranks in study.TROUBLED))
    for trouble in study.TROUBLES:
        cells = [
            _percent(_one(rows, question="trouble", ranks=ranks, case=trouble.name).efficiency)
            for _, ranks in study.TROUBLED
        ]
        lines.append(_line(trouble.name, *cells))
    return "\n".join(lines)


def published(_: Rows, found: Speeds) -> str:
    """One point that others have measured: heads over the GPUs of a node, a ring over nodes."""
    work = Work(1 << 20, 16, heads=16, groups=1)  # 128 and 8 heads over 8 GPUs
    step = model.forward_step(work, found)
    share = model.efficiency(work, found, model.ring_seconds(work, step))
    lines = _head("", "efficiency")
    lines.append(_line("reported, whole model, 128 H100", "93 %"))
    lines.append(_line("model, attention alone", _percent(share)))
    lines.append(_line("model: message / block", f"{_ms(step.transfer)} / {_ms(step.compute)}"))
    return "\n".join(lines)


def memory(_: Rows, __: Speeds) -> str:
    lines = _head(
        "n",
        "GPUs",
        "q, k, v, out",
        "ring adds",
        "in its backward",
        "all-gather adds",
        "in its backward",
    )
    for tokens in study.LENGTHS:
        for ranks in (8, 128, 1024):
            work = Work(tokens, ranks)
            query = work.batch * work.heads * work.local * work.width * model.HALF
            own = 2 * query + work.message  # q and out, k and v
            cells = [_size(size) for size in (own, *model.memory(work))]
            lines.append(_line(_tokens(tokens), f"{ranks}", *cells))
    return "\n".join(lines)


LAYERS, WATCHED_HEADS = 32, 32  # Llama 3.1 8B


def reading(_: Rows, __: Speeds) -> str:
    size = model.reading_bytes(LAYERS, WATCHED_HEADS)
    lines = _head("GPUs", "a GPU gives", "a GPU gets", "of that, latency", "time")
    for ranks in (2, 8, 64, 1024):
        latency = model.collective_seconds(ranks, 0)
        total = model.collective_seconds(ranks, size)
        cells = (_size(size), _size(size * ranks), _ms(latency), _ms(total))
        lines.append(_line(f"{ranks}", *cells))
    return "\n".join(lines)


def measured(rows: Rows, _: Speeds) -> str:
    found = [row for row in rows if row.kind == "measured"]
    if not found:
        return "Nothing yet: `python -m benchmarks.scaling.measure`."
    lines = _head("device", "ranks", "n", "way", "pass", "ms (20 to 80 %)", "sent a rank", "load")
    for row in found:
        assert row.p20 is not None
        assert row.p80 is not None
        spread = f"{row.seconds * 1e3:.1f} ({row.p20 * 1e3:.1f} to {row.p80 * 1e3:.1f})"
        cells = (row.device, f"{row.ranks}", f"{row.tokens}", f"{row.form}, {row.layout}")
        lines.append(_line(*cells, row.direction, spread, _size(row.sent_bytes), f"{row.load}"))
    return "\n".join(lines)


TABLES: dict[str, Callable[[Rows, Speeds], str]] = {
    "summary": summary,
    "links": links,
    "speeds": speeds,
    "steps": steps(backward=False),
    "steps backward": steps(backward=True),
    "merges": merges,
    "overlap": overlap,
    "layouts": layouts,
    "agreement": agreement,
    "strong": strong,
    "halves": halves,
    "weak": weak,
    "forms": forms,
    "troubles": troubles,
    "published": published,
    "memory": memory,
    "reading": reading,
    "measured": measured,
}


def _one(rows: Iterable[Row], **wanted: object) -> Row:
    found = [row for row in rows if all(getattr(row, name) == v for name, v in wanted.items())]
    if wanted.get("question") == "weak":
        found = [row for row in found if row.form == "ring"]
    (row,) = found
    return row


def _head(*cells: str) -> list[str]:
    return [_line(*cells), "|" + "---|" * len(cells)]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(share: float | None) -> str:
    assert share is not None
    return f"{100 * share:.0f} %"


def _tokens(number: int) -> str:
    return f"{number >> 20}M" if number >= 1 << 20 else f"{number >> 10}k"


def _ms(seconds: float) -> str:
    """Three digits."""
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _size(number: float) -> str:
    """Three digits, powers of ten."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f} B"
