"""A process that traces steps of single ranks: `python -m seatrial.train.dryrun.process --parent PID`.

Started by `plan.cost.dryrun` as a separate process, because torch has one world per process, and because the planner
does not load torch. It reads one request from stdin, as JSON, and answers on stdout:

    {"file": ..., "architecture": ..., "layout": ...,    a job, as its own models serialise it
     "device": "cuda" or "cpu",
     "edges": [number of first, of last microbatches that have labels of their own],
     "traces": [[rank, layers, microbatches], ...]}

    {"traces": [{"bytes": {...}, "flops": [[phase, kind, FLOPs], ...],
                 "collectives": [[kind, dimension, dtype, bytes of one, calls], ...],
                 "peaks": {label: {kind: bytes}}, "seconds": ...}, ...],
     "memory_bytes": peak resident memory of this process}
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any

import torch

from seatrial.base.process import die_with_parent, exit_now
from seatrial.job.architecture import Architecture
from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.schema import JobFile
from seatrial.train.dryrun.trace import Traced, at_size, trace


def main() -> int:
    """Answer one request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    die_with_parent(parser.parse_args().parent)
    torch.set_num_threads(1)
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
    return 0


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run all traces of `request`."""
    file = dict(request["file"])
    del file["model"]  # the sizes are in `architecture`
    job = Job(
        file=JobFile.model_validate({**file, "model": {}}),
        architecture=Architecture.from_dict(request["architecture"]),
        layout=Layout(**request["layout"]),
        source="",
    )
    traces = []
    for rank, layers, microbatches in request["traces"]:
        begin = time.monotonic()
        small = at_size(job, layers, microbatches)
        traced = trace(small, rank, request["device"], edges=tuple(request["edges"]))
        traces.append({**as_json(traced), "seconds": time.monotonic() - begin})
    # `ru_maxrss` is in KiB on Linux.
    return {"traces": traces, "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def as_json(traced: Traced) -> dict[str, Any]:
    """`traced` as plain values."""
    counts = traced.counts
    return {
        "bytes": {
            "parameters": traced.parameter_bytes,
            "gradients": traced.gradient_bytes,
            "optimizer": traced.optimizer_bytes,
        },
        "flops": [[*key, flops] for key, flops in sorted(counts.flops.items())],
        "collectives": [[*key, calls] for key, calls in sorted(counts.collectives.items())],
        "peaks": {label: dict(peak.kinds) for label, peak in traced.peaks.items()},
    }


if __name__ == "__main__":
    exit_now(main())
