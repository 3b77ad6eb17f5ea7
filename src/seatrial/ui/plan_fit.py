"""Memory needs of a model and the smallest clusters that satisfy them, as lines and as a document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from seatrial.base.atomic import finite
from seatrial.job.job import Job
from seatrial.plan.cost.memory_fit import shipped_errors
from seatrial.plan.search.fit import Account, Fit
from seatrial.ui import figures
from seatrial.ui.plan_json import SCHEMA_VERSION, recipe
from seatrial.ui.plan_words import HEAD, TIGHT, TIGHT_NOTE, Line, brief, data, gib, note, pair, table


def lines(job: Job, memory: Account, fits: Sequence[Fit], *, width: int) -> list[Line]:
    """The memory account, then the clusters from the smallest."""
    return [*_account(job, memory, width), ("", ""), *_clusters(job, fits, width)]


def _account(job: Job, memory: Account, width: int) -> Iterator[Line]:
    yield f"memory needs of {job.name}", HEAD
    yield from pair("", memory.headline, width)
    weights = ", ".join(f"{data(n)} in {name}" for name, n in memory.weights)
    yield from pair("weights", f"{weights}: one copy, for inference only", width)
    yield "", ""
    rows = [
        [
            line.name,
            "" if line.per_parameter is None else f"{line.per_parameter:g}",
            "" if line.once is None else data(line.once),
            "" if line.gpu is None else gib(line.gpu),
            "" if line.cluster is None else data(line.cluster),
            line.note,
        ]
        for line in memory.lines
        if line.once or line.gpu or line.cluster
    ]
    total = "" if memory.gpu_bytes is None else gib(memory.gpu_bytes)
    whole = "" if memory.cluster_bytes is None else data(memory.cluster_bytes)
    rows.append(["total", "", data(memory.states), total, whole, "one copy: states only"])
    head = ["to train it", "bytes per parameter", "one copy", "per GPU", "all GPUs", ""]
    if memory.gpus is None:
        rows = [[*row[:3], row[5]] for row in rows]
        head = [*head[:3], ""]
    yield from table(head, rows, width)
    if memory.gpus is not None:
        yield from note(f"per GPU, all GPUs: {brief_layout(job)}; the most loaded GPU, at its peak", width)


def brief_layout(job: Job) -> str:
    """The job's layout with the number of its ranks."""
    n = job.layout.world_size
    return f"{job.layout} on {n:,} GPU{'s' * (n != 1)}"


def _clusters(job: Job, fits: Sequence[Fit], width: int) -> Iterator[Line]:
    yield "the smallest clusters in which a layout fits", HEAD
    rows = [
        row
        for f in fits
        for row in (_cluster(f, f.gpu.name), *([] if f.safe is None else [_cluster(f.safe, "  with margin")]))
        if row
    ]
    head = ["GPU", "GPUs", "nodes", "layout", "memory", "tok/s/GPU"]
    yield from _plain(head, rows, width)
    for f in fits:
        if f.recipe is None:
            # If every layout is illegal, there is no finite need to show.
            needs = f"; the smallest needs {gib(f.needs)} per GPU" if math.isfinite(f.needs) else ""
            yield from pair(f.gpu.name, f"{f.why_unknown}{needs}", width, "dim")
    if any(f.recipe is not None and not f.verdict.sure for f in fits):
        known = shipped_errors()
        text = (
            f"{TIGHT_NOTE}: 1 in 100 or more of {known.figures} published figures exceeded their prediction by the missing "
            f"margin. with margin: the smallest cluster that needs at most {known.full * 100:.0f} % of a GPU's memory"
        )
        yield from note(text, width)
    sizes = (size for f in fits if f.recipe is not None for size in (f, f.safe) if size is not None)
    if remarks := dict.fromkeys(text for size in sizes if (text := as_sold(size))):
        yield from note("; ".join(remarks), width)
    missing = [f for f in fits if f.recipe is not None and f.prediction is None]
    unknown = dict.fromkeys((f.why_unknown or "").removesuffix(f" on {f.gpu.name}") for f in missing)
    if any(unknown):
        yield from note(f"speed unknown: {'; '.join(unknown)}", width)
    micro, sequence = job.train.global_batch, job.train.sequence_length
    yield from note(f"at the job's batch of {micro:,} x {sequence:,} tokens; mb: microbatch", width)


def _cluster(f: Fit, name: str) -> list[str]:
    if f.recipe is None:
        return []
    return [
        name,
        f"{f.gpus:,}",
        _nodes(f),
        brief(f.recipe),
        f"{f.needs / f.available * 100:.0f} %" + f" {' ' if f.verdict.sure else TIGHT}",
        "unknown" if f.prediction is None else figures.rate(f.prediction.tokens_per_s_per_gpu),
    ]


def _is_part(f: Fit) -> bool:
    return f.sold is not None and f.cluster.gpus_per_node < f.sold


def _nodes(f: Fit) -> str:
    """Nodes and GPUs of each: 2 x 8; of a part of a node: 4 of 8."""
    each = f.cluster.gpus_per_node
    return f"{each} of {f.sold}" if _is_part(f) else f"{f.cluster.nodes:,} x {each}"


def as_sold(f: Fit) -> str:
    """What is to be known about nodes that nobody may sell; "" if they are those of the vendor."""
    if f.sold is None:
        return f"{f.gpu.name}: {f.cluster.gpus_per_node} GPUs per node are assumed"
    return f"{_nodes(f)}: part of a node as it is sold" if _is_part(f) else ""


def _plain(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Line]:
    """Like `table`, with figures in the last column too."""
    if not rows:
        return []
    last = max(len(r[-1]) for r in (head, *rows))
    return table(
        [*head[:-1], f"{head[-1]:>{last}}"], [[*r[:-1], f"{r[-1]:>{last}}"] for r in rows], width, left=(0, 3)
    )


def document(job: Job, memory: Account, fits: Sequence[Fit]) -> dict[str, Any]:
    """The same content as JSON."""
    whole = {
        "schema_version": SCHEMA_VERSION,
        "name": job.name,
        "account": asdict(memory) | {"weights": dict(memory.weights), "states": memory.states},
        "clusters": [
            _fit(f)
            | {"memory_verdict": f.verdict.document(), "safe": None if f.safe is None else _fit(f.safe)}
            for f in fits
        ],
    }
    return dict(finite(whole))


def _fit(f: Fit) -> dict[str, Any]:
    return {
        "gpu": f.gpu.name,
        "nodes": f.cluster.nodes,
        "gpus_per_node": f.cluster.gpus_per_node,
        "gpus": f.gpus,
        "gpus_per_node_sold": f.sold,
        "fits": f.recipe is not None,
        "recipe": None if f.recipe is None else recipe(f.recipe),
        "needs_bytes": f.needs,
        "room_bytes": f.available,
        "tokens_per_s_per_gpu": None if f.prediction is None else f.prediction.tokens_per_s_per_gpu,
        "step_s": None if f.prediction is None else f.prediction.step_s,
        "why_unknown": f.why_unknown,
    }
