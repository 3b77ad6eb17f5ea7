"""What one rank of a GPU job asks of CUDA, cuBLAS and NCCL, found out without a GPU.

    python -m venv ENV && ENV/bin/pip install -e . 'torch===2.13.0'     a CUDA build of torch, 5 GB
    python bench/null_cuda/run.py --python ENV/bin/python [--write bench/null_cuda/log.txt] [--only NAME]

Each case is a process in that environment with runtime.c preloaded: it trains a few steps of the real loop, supervised, with
torch's own allocator, autograd and NCCL process groups; only the device computes nothing, and the other ranks are imagined.
Checked, and the exit status is 1 if one is not so:

    attention   by the kernels that are expected for that compute capability, never by one that keeps all scores
    waits       the host waits for the device in a step only where the result of an earlier step is read
    races       torch's CUDA sanitizer finds no two accesses of a tensor by two streams, or NCCL's, that no event puts in order;
                without a wait, it finds some
    memory      the peak of torch's allocator, within 2 % of the dry run's and of the planner's
                reserved memory is only reported, beside the planner's
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TextIO

from seatrial.base import units
from seatrial.job import Job, job_from_text
from seatrial.plan.cost.dryrun import dry_run
from seatrial.plan.cost.memory import rank_memory
from seatrial.plan.cost.predict import stack_for
from seatrial.plan.model.recipe import Recipe

HERE = Path(__file__).parent
CAPABILITIES = (80, 90, 100, 103)  # A100; H100, H200; B200; B300
SMALL = """
name = "small"
[model]
family = "qwen2"
hidden_size = 256
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 512
vocab_size = 1024
"""
EXPERTS = """
name = "experts"
[model]
family = "qwen3_moe"
hidden_size = 256
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 64
intermediate_size = 512
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 128
norm_topk_prob = true
vocab_size = 1024
"""
REST = """
[data]
train = "builtin:python-library"
tokenizer = "bytes"
[train]
steps = 1000
sequence_length = 128
microbatch = 2
[optimizer]
lr = 1e-4
[checkpoint]
every_steps = 100
[resilience]
verify_every_steps = 6
snapshot_every_steps = 6
"""

# What kernels are called, after the first pattern that their name matches.
GROUPS = (
    ("flash attention", "pytorch_flash"),
    ("cuDNN attention", "cudnn_attention"),
    ("efficient attention", "fmha_cutlass|PyTorchMemEffAttention"),
    ("compiled kernel", "^triton_"),
    ("softmax", "[sS]oft[mM]ax"),
    ("norm", "layer_norm|rms_norm|GammaBeta"),
    ("multi-tensor", "multi_tensor_apply"),
    ("CUTLASS product", "cutlass"),
    ("copy or cast", "copy_kernel|CatArray|chunk_cat|split_with_sizes"),
    ("reduction", "reduce_kernel"),
    ("elementwise", "elementwise_kernel"),
)
ATTENTION = {"flash": "flash attention", "cudnn": "cuDNN attention", "efficient": "efficient attention"}

# What torch does on some GPUs, and no code of ours can change: grouped_mm multiplies expert by expert there, after it has read
# on the host where each begins.
READS_OFFSETS = {"model/decoder.py forward", "torch"}


@dataclass(frozen=True)
class Case:
    name: str
    options: tuple[str, ...] = ()  # section.key = value, as on the command line
    model: str = SMALL
    size: tuple[tuple[str, int], ...] = ()  # [parallel]
    microbatches: int = 4
    rank: int = 0
    attention: tuple[str, ...] = ("cudnn",)  # on GPUs from 9.0 on; before, there is flash attention instead
    only: tuple[int, ...] = CAPABILITIES
    reads_offsets: tuple[int, ...] = ()
    reads_sizes: bool = False  # of what experts of other ranks are sent
    without: str = ""  # the wait that is left out
    memory: bool = False  # compared; without snapshots, and without the sanitizer
    compiled: bool = False  # without the sanitizer too, which sees no compiled code

    def text(self) -> str:
        return self.model + REST

    def overrides(self) -> tuple[str, ...]:
        world = prod(n for key, n in self.size if key != "expert")  # whose ranks are those of shard
        samples = world // prod(n for key, n in self.size if key in ("tensor", "pipeline", "context"))
        per_node = min(8, world)
        at_sizes = (f"parallel.{key}={n}" for key, n in self.size)
        microbatch = 1 if self.memory else 2
        return (
            *(f"cluster.nodes={world // per_node}", f"cluster.gpus_per_node={per_node}", *at_sizes),
            f"train.global_batch={self.microbatches * microbatch * samples}",
            *(("train.microbatch=1", "train.sequence_length=4096") if self.memory else ()),
            *(
                ("resilience.snapshot_every_steps=0", "resilience.verify_every_steps=0")
                if self.memory
                else ()
            ),
            f"train.compile={str(self.compiled).lower()}",
            *self.options,
        )

    def job(self) -> Job:
        return job_from_text(self.text(), name=self.name, base_folder=Path(), overrides=self.overrides())

    def expected(self, capability: int) -> set[str]:
        return {"flash" if kernel == "cudnn" and capability < 90 else kernel for kernel in self.attention}


def sizes(**size: int) -> tuple[tuple[str, int], ...]:
    return tuple(size.items())


def preset(name: str) -> str:
    return f'name = "{name}"\n[model]\npreset = "{name}"\n'


FULL = "train.activation_checkpointing=full"
SELECTIVE = "train.activation_checkpointing=selective"
RING = "parallel.ring_attention=true"
DOCUMENTS = "data.attend_across_documents=false"
CASES = (
    Case("one rank"),
    Case("FSDP8", size=sizes(shard=8)),
    Case("FSDP8, gradients sharded", ("train.accumulate=sharded",), size=sizes(shard=8)),
    Case("2 replicas of FSDP2", size=sizes(replicate=2, shard=2)),
    Case("TP2, FSDP2", size=sizes(tensor=2, shard=2)),
    Case("TP2 in order", ("parallel.async_tensor=false",), size=sizes(tensor=2)),
    Case("TP2, PP2, FSDP2, first stage", size=sizes(tensor=2, pipeline=2, shard=2)),
    Case("TP2, PP2, FSDP2, last stage", size=sizes(tensor=2, pipeline=2, shard=2), rank=7),
    Case("PP2, interleaved", ("parallel.schedule=interleaved-1f1b", "parallel.stages_per_rank=2"), size=sizes(pipeline=2, shard=2)),
    Case("PP2, zero bubble", ("parallel.schedule=zero-bubble", "parallel.stages_per_rank=2"), size=sizes(pipeline=2)),
    # The mask of a rank's later positions is one that torch has only flash attention for.
    Case("CP2, TP2", size=sizes(context=2, tensor=2), attention=("cudnn", "flash")),
    Case("documents", (DOCUMENTS,), attention=("flash",)),
    Case("documents, CP2, TP2", (DOCUMENTS,), size=sizes(context=2, tensor=2), attention=("flash",)),
    Case("ring, CP2, TP2", (RING,), size=sizes(context=2, tensor=2)),
    Case("ring by flash, CP2, selective", (RING, SELECTIVE, "train.attention=flash"), size=sizes(context=2), attention=("flash",)),
    Case("full recomputation, offloaded, TP2", (FULL, "train.offload_activations=true"), size=sizes(tensor=2, shard=2)),
    Case("selective recomputation, TP2", (SELECTIVE,), size=sizes(tensor=2, shard=2)),
    Case("fp32", ("train.precision=fp32",), size=sizes(shard=2), attention=("efficient",)),
    Case("FP8, rowwise", ("train.precision=fp8", "train.fp8_scaling=rowwise"), size=sizes(shard=2), only=(90, 100, 103)),
    Case("FP8, tensorwise, TP2", ("train.precision=fp8", "train.fp8_scaling=tensorwise"), size=sizes(tensor=2), only=(90, 100, 103)),
    Case("FP8, MXFP8", ("train.precision=fp8", "train.fp8_scaling=mxfp8"), size=sizes(shard=2), only=(100, 103)),
    Case("deterministic", ("train.deterministic=true",), size=sizes(tensor=2, shard=2), attention=("flash",)),
    Case("attention by flash", ("train.attention=flash",), attention=("flash",)),
    Case("attention by cuDNN", ("train.attention=cudnn",), only=(90, 100, 103)),
    Case("attention by the efficient kernel", ("train.attention=efficient",), attention=("efficient",)),
    Case("Muon, TP2, FSDP2", ("optimizer.name=muon",), size=sizes(tensor=2, shard=2)),
    Case("LoRA, TP2", ("model.lora.rank=8", "model.lora.alpha=16"), size=sizes(tensor=2, shard=2)),
    Case("experts, FSDP2", model=EXPERTS, size=sizes(shard=2), reads_offsets=(80,)),
    Case("experts, EP2, TP2", model=EXPERTS, size=sizes(tensor=2, expert=2, shard=2), reads_offsets=(80,), reads_sizes=True),
    Case("experts in fp32", ("train.precision=fp32",), EXPERTS, sizes(shard=2), attention=("efficient",), reads_offsets=CAPABILITIES),
    Case("compiled, FSDP2", size=sizes(shard=2), compiled=True),
    Case("compiled, TP2, PP2, FSDP2", size=sizes(tensor=2, pipeline=2, shard=2), compiled=True, only=(90, 103)),
    Case("compiled, selective, documents", (SELECTIVE, DOCUMENTS), attention=("flash",), compiled=True, only=(90, 103)),
    Case("compiled experts, EP2, TP2", model=EXPERTS, size=sizes(tensor=2, expert=2, shard=2), reads_sizes=True, compiled=True, only=(90, 103)),
    Case("compiled experts, FSDP2, selective", (SELECTIVE,), EXPERTS, sizes(shard=2), compiled=True, only=(90, 103)),
    Case("compiled, FP8, rowwise", ("train.precision=fp8", "train.fp8_scaling=rowwise"), compiled=True, only=(90, 103)),
    Case("compiled, FP8, MXFP8", ("train.precision=fp8", "train.fp8_scaling=mxfp8"), compiled=True, only=(103,)),
    Case("compiled, ring, CP2, TP2", (RING,), size=sizes(context=2, tensor=2), compiled=True, only=(90, 103)),
    Case("ring without its wait", (RING,), size=sizes(context=2), without="seatrial.parallel.ring.wait", only=(90,)),
    Case("TP2 without its wait", size=sizes(tensor=2), without="seatrial.parallel.overlap.wait", only=(90,)),
    Case(
        "offload without its wait",
        (FULL, "train.offload_activations=true"),
        without="seatrial.parallel.offload._wait",
        only=(90,),
    ),
    Case("7B, FSDP8", model=preset("qwen2.5-7b"), size=sizes(shard=8), memory=True, only=(90,)),
    Case("7B, FSDP8, sharded, full, offloaded", (FULL, "train.accumulate=sharded", "train.offload_activations=true"),
         preset("qwen2.5-7b"), sizes(shard=8), memory=True, only=(90,)),
    Case("7B, FSDP8, selective", (SELECTIVE,), preset("qwen2.5-7b"), sizes(shard=8), memory=True, only=(90,)),
    Case("7B, FSDP8, sharded", ("train.accumulate=sharded",), preset("qwen2.5-7b"), sizes(shard=8), memory=True, only=(90,)),
    Case("7B, DP2, FSDP4, full", (FULL,), preset("qwen2.5-7b"), sizes(replicate=2, shard=4), memory=True, only=(90,)),
    Case("7B, PP2, FSDP4, full", (FULL,), preset("qwen2.5-7b"), sizes(pipeline=2, shard=4), memory=True, only=(90,)),
    Case("7B, TP2, FSDP4", model=preset("qwen2.5-7b"), size=sizes(tensor=2, shard=4), memory=True, only=(90,)),
    Case("7B, FSDP8, documents", (DOCUMENTS,), preset("qwen2.5-7b"), sizes(shard=8), attention=("flash",), memory=True, only=(90,)),
    Case("72B, TP8, PP2, FSDP8, first stage", model=preset("qwen2.5-72b"), size=sizes(tensor=8, pipeline=2, shard=8), memory=True, only=(90, 103)),
    Case("72B, TP8, PP2, FSDP8, last stage", model=preset("qwen2.5-72b"), size=sizes(tensor=8, pipeline=2, shard=8), rank=127, memory=True, only=(90, 103)),
)  # fmt: skip


def libraries(python: Path, folder: Path) -> list[Path]:
    """runtime.c and nvml.c, compiled with the headers that come with the CUDA build of torch."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(
        subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    )
    includes = [
        f"-I{packages / name}"
        for name in ("nvidia/cu13/include", "triton/backends/nvidia/include", "nvidia/nccl/include")
    ]
    made = []
    # By these names torch finds them where it looks for the driver's.
    for source, name in (("runtime.c", "libcuda.so.1"), ("nvml.c", "libnvidia-ml.so.1")):
        made.append(folder / name)
        flags = ("-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-lpthread")
        subprocess.run(["cc", HERE / source, "-o", made[-1], *includes, *flags], check=True)
    return made


def trace(python: Path, made: list[Path], case: Case, capability: int) -> dict[str, Any] | str:
    """What step.py says, or the end of what it printed."""
    request = {
        "job": case.text(),
        "overrides": case.overrides(),
        "rank": case.rank,
        "without": case.without,
        "sanitize": not case.memory and not case.compiled,
    }
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(map(str, made)),
        "TRITON_LIBCUDA_PATH": str(made[0].parent),
        "NULL_CUDA_CAPABILITY": str(capability),
        "NULL_CUDA_GIB": "280",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as an agent sets it
    }
    ran = subprocess.run(
        [python, HERE / "step.py"], input=json.dumps(request), capture_output=True, text=True, env=environment
    )
    found: dict[str, Any] | str = json.loads(ran.stdout) if ran.returncode == 0 else ran.stderr[-2000:]
    return found


def groups(records: Sequence[tuple[str, str, int]]) -> Counter[str]:
    """Group of kernels, or kind of call -> number of launches."""
    found: Counter[str] = Counter()
    for kind, name, n in records:
        if kind == "K":
            found[next((group for group, pattern in GROUPS if re.search(pattern, name)), "other kernel")] += n
        elif kind in "BCN":
            found[{"B": "cuBLAS", "C": "", "N": "NCCL "}[kind] + (name if kind != "B" else "")] += n
    return found


def problems(case: Case, capability: int, found: dict[str, Any], made: Counter[str]) -> list[str]:
    """What is not as it should be, other than memory."""
    wrong = []
    by = {key for key, group in ATTENTION.items() if made[group]}
    expected = case.expected(capability)
    if by != expected:
        wrong.append(f"attention by {sorted(by)}, not {sorted(expected)}")
    if made["softmax"] and case.model != EXPERTS:  # whose routers have one
        wrong.append("scores are kept: there is a softmax")
    allowed = {"train/step.py values"}
    allowed |= READS_OFFSETS if capability in case.reads_offsets else set()
    allowed |= {"parallel/expert.py split_sizes"} if case.reads_sizes else set()
    for wait, n in found["waits"].items():
        if re.sub(r":\d+", "", wait.rpartition(" at ")[2]) not in allowed:
            wrong.append(f"{n} times in a step the host waits: {wait}")
    races = found["races"] or {}
    if case.without and not races:
        wrong.append("nothing is found without the wait")
    elif not case.without:
        wrong += [f"{n} times {race}" for race, n in races.items()]
    return wrong


def memory(case: Case, found: dict[str, Any]) -> tuple[str, list[str]]:
    """A line on the peaks, and what is not as it should be."""
    job = case.job()
    recipe, stage = Recipe.of(job), job.layout.coordinates(case.rank).pipeline
    (dry,) = (step.peak_bytes for step in dry_run(job, timeout_s=3600).ranks if step.at.pipeline == stage)
    plan = rank_memory(job.architecture, recipe, stack_for(recipe), stage)
    peak, reserved = found["peak"], found["reserved"]
    line = (
        f"peak {units.memory(peak)}: dry run {dry / peak:.4f} of it, planner {plan.allocated / peak:.4f}; "
        f"reserved {reserved / peak:.4f} of it, planner {plan.held / reserved:.4f} of that"
    )
    predicted = (("dry run", dry), ("planner", plan.allocated))
    wrong = [f"{who} off by more than 2 %" for who, n in predicted if abs(n / peak - 1) > 0.02]
    return line, wrong


def report(case: Case, capability: int, found: dict[str, Any], into: TextIO) -> bool:
    """Write what was found; whether all is as it should be."""
    made = groups(found["records"])
    wrong = problems(case, capability, found, made)
    calls = ", ".join(f"{group} {n}" for group, n in made.most_common())
    print(f"\n{case.name}, capability {capability / 10}: {found['streams']} streams", file=into)
    print(f"  {calls}", file=into)
    waits = Counter(wait.rpartition(" at ")[2] for wait in Counter(found["waits"]).elements())
    print(
        f"  the host waits in {', '.join(f'{where} ({n})' for where, n in sorted(waits.items()))}", file=into
    )
    if case.without:
        print(f"  without {case.without}: {sum(found['races'].values())} accesses not in order", file=into)
    if case.memory:
        line, wrong_memory = memory(case, found)
        print(f"  {line}", file=into)
        wrong += wrong_memory
    for each in wrong:
        print(f"  WRONG: {each}", file=into)
    into.flush()
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--python", type=Path, required=True, help="of an environment with Seatrial and a CUDA build of torch"
    )
    parser.add_argument("--only", help="cases whose name contains it")
    parser.add_argument("--write", type=Path, help="a file for what is printed")
    parser.add_argument("--processes", type=int, default=2, help="traces at once")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, (args.write or Path("/dev/stdout")).open("w") as into:
        made = libraries(args.python, Path(folder))
        cases = [(c, capability) for c in CASES if (args.only or "") in c.name for capability in c.only]
        with ThreadPoolExecutor(args.processes) as pool:
            traces = [pool.submit(trace, args.python, made, *case) for case in cases]
            for (case, capability), traced in zip(cases, traces, strict=True):
                found = traced.result()
                if isinstance(found, str):
                    print(
                        f"\n{case.name}, capability {capability / 10}: WRONG: it failed\n{found}",
                        file=into,
                        flush=True,
                    )
                    wrong += 1
                else:
                    wrong += not report(case, capability, found, into)
        print(f"\n{wrong} cases are wrong" if wrong else "\nall as it should be", file=into)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
