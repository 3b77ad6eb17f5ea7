"""Real training steps on gloo, and the dry run of the same ranks beside them.

    python dryrun_ranks.py CASES.json OUT_FOLDER

A case is {"name", "layout", "tied", "precision", "only_dry", ...}. OUT_FOLDER gets NAME.RANK.pt of each real rank, and
NAME.dry.json with the traces of all of them. What a real rank sent is told twice: by the recorder that the dry run uses too, and by
others: torch's flight recorder, inside the process groups, and for messages between stages by the calls themselves.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import parity_ranks
import torch
import torch.distributed as dist
from parity_ranks import LENGTH, LOGITS, SEQUENCES
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from seatrial.job import loss_rows
from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.schema import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    JobFile,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    TrainSection,
)
from seatrial.model.initialise import RandomWeights
from seatrial.parallel import collectives
from seatrial.parallel.mesh import Mesh
from seatrial.train.dryrun.process import as_json
from seatrial.train.dryrun.recorder import dimensions
from seatrial.train.dryrun.trace import measure_steps, trace
from seatrial.train.rank import build

MICROBATCH = 4
STEPS = 2  # the second is looked at: the first one of a pipeline also introduces neighbours to each other


def job_of(case: dict[str, Any]) -> Job:
    layout = Layout(**case["layout"])
    file = JobFile(
        name="dry",
        model=ModelSection(),
        data=DataSection(train="nothing", attend_across_documents=not case.get("documents", False)),
        cluster=ClusterSection(gpus_per_node=layout.world_size),
        parallel=ParallelSection(
            **{k: v for k, v in layout.as_dict().items() if k != "world_size"}
            | {"shard": layout.sample_shards},
            reshard_after_forward=case.get("reshard_after_forward"),
            async_tensor=case.get("async_tensor", False),
            ring_attention=case.get("ring_attention", False),
        ),
        train=TrainSection(
            steps=STEPS,
            sequence_length=LENGTH,
            global_batch=SEQUENCES if layout.data_parallel != 3 else 24,
            microbatch=case.get("microbatch", MICROBATCH),
            precision=case["precision"],
            activation_checkpointing=case.get("activation_checkpointing", "none"),
            recompute_every_layers=case.get("recompute_every_layers", 1),
            offload_activations=case.get("offload_activations", False),
            accumulate=case.get("accumulate", "auto"),
        ),
        optimizer=OptimizerSection(**{"lr": 1e-3, **case.get("optimizer", {})}),
        checkpoint=CheckpointSection(every_steps=100),
    )
    arch = parity_ranks.arch_of(case)
    if case.get("all_experts"):  # every expert gets all positions: as evenly spread as a dry run assumes
        arch = replace(arch, num_experts_per_tok=arch.num_experts, topk_group=arch.n_group)
    return Job(file, arch, layout, "dry")


def real(case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """What one rank held, and what it sent in its second step."""
    job = job_of(case)
    model, optimizer = build(job, mesh, RandomWeights(job.architecture, seed=1))
    messages = _count_messages()
    before = 0

    def before_last() -> None:
        nonlocal before
        before = len(_flown())
        messages.clear()

    traced = measure_steps(job, model, optimizer, steps=STEPS, before_last=before_last)
    names = dimensions(mesh)
    flown: Counter[tuple[str, str, int]] = Counter()
    for entry in _flown()[before:]:
        flown[_operation(entry), names[entry["process_group"][0]], _size(entry)] += 1
    return {
        **as_json(traced),
        "flown": [[*key, n] for key, n in sorted(flown.items())],
        "messages": [[*key, n] for key, n in sorted(messages.items())],
        "held": sum(s.local.nbytes for s in model.shards),
        "state": sum(v.nbytes for _, _, v in optimizer.state()),
        "scalars": 4 * len(optimizer.counts()),
    }


def _flown() -> list[dict[str, Any]]:
    """What the process groups have done so far, in order. Without send and receive, which gloo does not record."""
    entries: list[dict[str, Any]] = json.loads(c10d._dump_fr_trace_json()).get("entries", [])
    return sorted(entries, key=lambda e: e["record_id"])


_NAMES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}
_BYTES = {"Float": 4, "BFloat16": 2, "Double": 8, "Long": 8, "Int": 4}


def _operation(entry: dict[str, Any]) -> str:
    name = entry["profiling_name"].partition(":")[2].strip("_")
    return next((ours for theirs, ours in _NAMES.items() if name.startswith(theirs)), name)


def _size(entry: dict[str, Any]) -> int:
    """Bytes of the larger side."""

    def side(sizes: list[list[int]], types: list[str]) -> int:
        total = 0
        for shape, kind in zip(sizes, types, strict=True):
            n = _BYTES[kind]
            for length in shape:
                n *= length
            total += n
        return total

    return max(
        side(entry["input_sizes"], entry["input_dtypes"]), side(entry["output_sizes"], entry["output_dtypes"])
    )


def _count_messages() -> Counter[tuple[str, int]]:
    """From now on, what is sent and received between stages, counted where torch's pipeline asks for it."""
    counted: Counter[tuple[str, int]] = Counter()
    for name, word in (("isend", "send"), ("irecv", "receive")):
        whole = getattr(distributed_c10d, name)

        def counting(tensor: Any, *args: Any, _whole: Any = whole, _word: str = word, **kwargs: Any) -> Any:
            counted[_word, tensor.nbytes] += 1
            return _whole(tensor, *args, **kwargs)

        setattr(distributed_c10d, name, counting)
        setattr(dist, name, counting)
    return counted


def dry(case: dict[str, Any], out: Path) -> None:
    job = job_of(case)
    traces = [as_json(trace(job, rank, "cpu")) for rank in range(job.layout.world_size)]
    second = as_json(trace(job, 0, "cpu", steps=2))
    (out / f"{case['name']}.dry.json").write_text(json.dumps({"traces": traces, "second": second}))


def main() -> int:
    torch.set_num_threads(1)
    loss_rows.LOGITS = LOGITS
    # As NCCL's: each one call, without memory for what all ranks send.
    collectives._BroadcastsInFlight = partial(collectives._all_gather_single, async_op=True)  # type: ignore[assignment, misc]
    collectives._SumInFlight = partial(collectives._reduce_scatter_single, async_op=True)  # type: ignore[assignment, misc]
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"
    out = Path(sys.argv[2])
    failed = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        ran = case["only_dry"] or parity_ranks.run_case(case, out, real)
        if not parity_ranks.in_processes([partial(dry, case, out)]) or not ran:
            failed.append(case["name"])
    if failed:
        print("failed:", ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
