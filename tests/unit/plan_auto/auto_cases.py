"""Jobs with `parallel = "auto"`, reports of `seatrial check`, and earlier runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from presets import preset_job
from seatrial.check.blame.nodes import RATES
from seatrial.check.judging.check_run import CheckRun
from seatrial.check.judging.findings import Expected, Finding, Target
from seatrial.check.judging.measured import of_nodes
from seatrial.check.judging.report import Report
from seatrial.check.live.live_rates import rate
from seatrial.check.node.judge_load import _RATES as NODE_RATES
from seatrial.check.reports import report_json
from seatrial.job import Job, job_from_text, preset_text
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.run import open_run

GIB = 1 << 30
LINE = 'parallel = "auto"\n'


def job(*overrides: str, preset: str = "llama3-8b-h100") -> Job:
    """Two nodes of eight H100 unless overridden."""
    own = ("name=auto", "cluster.nodes=2", "cluster.network=InfiniBand NDR 8x400")
    return preset_job(preset, *(own if preset == "llama3-8b-h100" else ()), *overrides)


def open_job(preset: str, *overrides: str, drop: tuple[str, ...] = ()) -> Job:
    """A preset with its [parallel] replaced, and without the lines of the keys `drop`."""
    text = preset_text(preset)
    begin = text.index("[parallel]")
    text = LINE + text[:begin] + text[text.index("[train]") :]
    lines = [line for line in text.splitlines() if line.partition(" =")[0] not in drop]
    return job_from_text(
        "\n".join(lines) + "\n", name="job.toml", base_folder=Path("/jobs"), overrides=overrides
    )


def gpu_rates(kind: str = "NVIDIA H100 80GB HBM3", **values: float) -> dict[str, Any]:
    """`measured["gpu"]`: quantities of the node stage by their names there."""
    known = {q.name: q for q in RATES}
    told = {
        name: rate([value] * 16, known[name].unit, known[name].algorithm, known[name].direction, None)
        for name, value in values.items()
    }
    return {"kind": kind, **told}


def all_reduce(nodes: int, busbw: float, *, ranks: int | None = None, size: int = GIB) -> dict[str, Any]:
    return {
        "what": f"{nodes} nodes",
        "nodes": nodes,
        "ranks": nodes * 8 if ranks is None else ranks,
        **rate([busbw] * nodes, "GB/s", "nccl all-reduce, busbw", "one direction", size),
    }


def rails(gbit_s: float, ports: int = 16) -> dict[str, Any]:
    return rate([gbit_s] * ports, "Gb/s", "ib_write_bw", "one direction", 8 << 20)


def storage(*gb_s: float) -> list[dict[str, Any]]:
    """`measured["node"]` of nodes that wrote at these rates."""
    r = NODE_RATES["write_gb_s"]
    expected = Expected(None, r.unit, "", r.direction, r.algorithm)
    return of_nodes(
        Finding(r.code, "PASS", Target(node=f"n{i}"), f"{r.what}: {v} {r.unit}", v, r.unit, expected)
        for i, v in enumerate(gb_s)
    )


def report(
    folder: Path, measured: dict[str, Any], *, nodes: int = 2, days: float = 0.0, simulated: str = ""
) -> Path:
    """reports/check.json of the run folder `folder`, as the verb writes it, `days` old."""
    check_run = CheckRun(tuple(f"n{i}" for i in range(nodes)), measured=measured, simulated=simulated)
    file = RunFolder(folder).reports / "check.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(report_json.text(Report((), (), check_run), time=time.time() - days * 86400))
    return file


def made(
    root: Path,
    done: Job,
    step_s: float,
    *,
    steps: int = 60,
    device: str = "NVIDIA H100 80GB HBM3",
    wait_s: float = 0.0,
    ranks: int | None = None,
) -> RunFolder:
    """A run of `done` below `root` that took `step_s` for each step, and ten times that for the first two."""
    ranks = ranks or done.layout.world_size
    tokens = done.train.global_batch * done.train.sequence_length
    with open_run(done, root) as opened:
        folder, generation = opened.folder, opened.generation
        events.append(folder, "run_started", "", generation=generation)
        events.append(folder, "device", "", generation=generation, data={"device": device})
        writer = MetricsWriter(folder)
        for step in range(1, steps + 1):
            took = step_s * (10 if step <= 2 else 1)
            speed = tokens / took
            writer.write(
                MetricsRecord(
                    *(step, step * tokens, 2.0, 1.0, 1e-4, took, wait_s, speed, speed / ranks, 0.4, 1),
                    *(1.7e9 + step, generation),
                )
            )
        writer.close()
    return folder


def edit(file: Path, **changes: Any) -> None:
    """Put other values into a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
