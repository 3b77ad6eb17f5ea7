"""Tokens per second of `seatrial train` over torchtitan, transformers' Trainer and a hand-written PyTorch loop, for several layouts.

    python -m venv PEERS && PEERS/bin/pip install torch==VERSION transformers accelerate torchtitan==0.2.2
    python bench/peers.py --peers-python PEERS/bin/python [--layouts 1 dp2 fsdp2 tp2-fsdp2 tp2-pp2] [--rounds 3]
        [--model small] [--layers N] [--sequence 128] [--batch 8] [--microbatch N] [--device cpu] [--precision fp32]
        [--fp8-scaling rowwise]

All train the same decoder from random weights on the same batches with AdamW, warm-up of 2 steps, clipping at 1; on a CPU with one
thread a rank, on GPUs compiled. Each turn starts the ranks anew; they take turns in rounds, in changing order, so that a noisy machine
disturbs all alike. Each ratio is the median of the rounds' ratios. A turn counts only if the number of parameters is right, the first
loss is near ln(vocabulary), and the loss falls; otherwise, and where a peer cannot do a layout, the ratio is unknown and the reason is
printed. Seatrial runs with its defaults: supervised, with copies of the state in memory every 10 steps, metrics and ledger; it logs each
loss. The peers do none of that. Exit code 1: a ratio is below 1; 2: nothing could be measured. `bench/peers_rank.py` is a peer's rank.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from peers_rank import PEERS, SHIM
from seatrial.base import process
from seatrial.base.batches import BatchSizes
from seatrial.base.units import GIB
from seatrial.data.loader import BatchLoader
from seatrial.data.prepare import data_cache, resolve_stores
from seatrial.hardware import accelerator
from seatrial.hardware.catalogue import find_gpu, peak_flops
from seatrial.hardware.devices import cuda_device_count
from seatrial.hardware.mfu import mfu
from seatrial.job import load_job
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.models import family_defaults, model_presets
from seatrial.model.decoder import whole_shapes

LIMIT = 1.0
OURS = "seatrial"
# torchtitan's llama3 debugmodel.
SMALL = {
    "family": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 16,
    "max_position_embeddings": 131072,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LR = 1e-3


class Unknown(Exception):
    """Why a contestant was not measured."""


@dataclass(frozen=True)
class Turn:
    tokens_per_s: float
    losses: list[float]
    parameters: int
    memory: int  # peak of a rank, bytes


class Bench:
    """One layout: the job, the batches, and a turn of each contestant."""

    def __init__(self, options: argparse.Namespace, name: str, folder: Path) -> None:
        self.options, self.name, self.layout, self.folder = options, name, layout_named(name), folder
        self.arch = architecture(options)
        self.steps = options.warm_up + options.steps
        share = options.batch // self.layout.data_parallel
        self.microbatch = options.microbatch or (max(1, share // 4) if self.layout.pipeline > 1 else share)
        folder.mkdir()
        self.job = folder / "job.toml"
        self.job.write_text(self._job_text())
        job = load_job(self.job)
        self.cache = data_cache(folder.parent)
        loader = BatchLoader(
            resolve_stores(job.data, self.cache, folder),
            sequence_length=options.sequence,
            batches=BatchSizes.of(options.batch),
            seed=job.train.seed,
            vocab_size=self.arch.vocab_size,
            ahead=0,
        )
        batches = [loader.batch(step, 0, options.batch) for step in range(1, self.steps + 1)]
        rows = [torch.cat((b.ids_BT, b.target_BT[:, -1:]), 1).numpy().astype(np.int32) for b in batches]
        self.rows = folder / "rows.npy"
        np.save(self.rows, np.stack(rows))

    def _job_text(self) -> str:
        o, layout, sizes = self.options, self.layout, self.arch.as_dict()
        model = "\n".join(f"{name} = {json.dumps(sizes[name])}" for name in SMALL)
        return f"""
name = "peers"
[model]
{model}
[data]
train = "builtin:python-library"
[cluster]
gpus_per_node = {layout.world_size}
device = "{o.device}"
[parallel]
tensor = {layout.tensor}
pipeline = {layout.pipeline}
replicate = {layout.replicate}
[train]
steps = {self.steps + 1000}
sequence_length = {o.sequence}
global_batch = {o.batch}
microbatch = {self.microbatch}
precision = "{o.precision}"
fp8_scaling = "{o.fp8_scaling}"
activation_checkpointing = "{"full" if o.recompute else "none"}"
compile = {"true" if o.device == "cuda" else "false"}
[optimizer]
lr = {LR}
warmup_steps = 2
decay = "constant"
[checkpoint]
every_steps = {self.steps + 1000}
"""

    def turn(self, contestant: str, number: int) -> Turn:
        """Raises Unknown if it fails, or did other work than the others."""
        folder = self.folder / f"{contestant}-{number}"
        folder.mkdir()
        turn = self._seatrial(folder) if contestant == OURS else self._peer(contestant, folder)
        expected = math.log(self.arch.vocab_size)
        first, last = turn.losses[0], turn.losses[-1]
        if turn.parameters != self.arch.parameters():
            raise Unknown(f"it has {turn.parameters:,} parameters, not {self.arch.parameters():,}")
        if not abs(first - expected) < 1:  # logits of variance 1, as torchtitan's are at first, add 0.5
            raise Unknown(f"its first loss is {first:.3f}, but ln(vocabulary) is {expected:.3f}")
        if not last < first:
            raise Unknown(f"its loss does not fall: {first:.3f} -> {last:.3f}")
        return turn

    def _environment(self) -> dict[str, str]:
        on_gpu, cores = self.options.device == "cuda", len(os.sched_getaffinity(0))
        threads = max(1, cores // self.layout.world_size) if on_gpu else 1
        return {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}

    def _rate(self, seconds: float) -> float:
        return self.options.steps * self.options.batch * self.options.sequence / seconds

    def _seatrial(self, folder: Path) -> Turn:
        (folder / ".data").symlink_to(self.cache)
        metrics = folder / "peers" / "metrics.jsonl"
        lines: list[str] = []
        with (folder / "log").open("w") as log:
            command = process.python("seatrial", "train", str(self.job), "--runs", str(folder))
            run = subprocess.Popen(command, env=self._environment(), stdout=log, stderr=log)
            until = time.monotonic() + self.options.timeout
            try:
                while len(lines) < self.steps and run.poll() is None and time.monotonic() < until:
                    time.sleep(0.5)
                    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
            finally:
                for _ in range(2):  # the second one ends it without a last checkpoint
                    run.send_signal(signal.SIGTERM)
                    time.sleep(0.5)
                run.wait(120)
        if len(lines) < self.steps:
            raise Unknown(last_line(folder / "log"))
        records = [json.loads(line) for line in lines[: self.steps]]
        seconds = records[-1]["time"] - records[self.options.warm_up - 1]["time"]
        return Turn(
            self._rate(seconds),
            [record["loss"] for record in records],
            sum(math.prod(shape) for shape in whole_shapes(self.arch).values()),
            max(record["memory_bytes"] for record in records),
        )

    def _peer(self, contestant: str, folder: Path) -> Turn:
        o, layout = self.options, self.layout
        if o.precision == "fp8":
            raise Unknown("only Seatrial is set up for fp8 here")
        spec = {
            **{name: getattr(layout, name) for name in ("tensor", "shard", "replicate", "pipeline")},
            **{
                name: getattr(o, name)
                for name in ("batch", "sequence", "warm_up", "steps", "device", "recompute")
            },
            "contestant": contestant,
            "model": self.arch.as_dict(),
            "microbatch": self.microbatch,
            "lr": LR,
            "bf16": o.precision == "bf16",
            "rows": str(self.rows),
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        command = [o.peers_python]
        if layout.world_size > 1 or contestant == "torchtitan":  # which always wants a process group
            command += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(layout.world_size),
            ]
        command += [str(Path(__file__).with_name("peers_rank.py")), str(folder / "spec.json")]
        with (folder / "log").open("w") as log:
            run = subprocess.Popen(
                command, env=self._environment(), stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = run.wait(o.timeout)
            except subprocess.TimeoutExpired:
                raise Unknown(f"it did not finish in {o.timeout:g} s") from None
            finally:
                process.signal_group(run.pid, signal.SIGKILL)
        if code:
            failed = sorted(folder.glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
            raise Unknown(failed[0].read_text() if failed else last_line(folder / "log"))
        ranks = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(layout.world_size)]
        stage = layout.world_size // layout.pipeline
        last = [rank["losses"] for rank in ranks[-stage:]]
        return Turn(
            self._rate(max(rank["seconds"] for rank in ranks)),
            [statistics.fmean(losses) for losses in zip(*last, strict=True)],
            sum(rank["parameters"] for rank in ranks[::stage]),
            max(rank["memory"] for rank in ranks),
        )


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it ended without a word"


def architecture(options: argparse.Namespace) -> Architecture:
    if options.model == "small":
        arch = Architecture(**(family_defaults("llama") | SMALL))
    elif options.model in model_presets():
        arch = model_presets()[options.model]
    else:
        raise SystemExit(f"no model {options.model!r}; there are small, {', '.join(model_presets())}")
    if arch.family not in ("llama", "qwen2") or arch.tie_word_embeddings or arch.rope_scaling:
        raise SystemExit("the peers have llama and qwen2 models, without tied embeddings and RoPE scaling")
    return arch if options.layers is None else replace(arch, num_hidden_layers=options.layers)


def layout_named(name: str) -> Layout:
    """`1`: one rank; otherwise sizes joined by hyphens, as in tp2-fsdp4-pp2."""
    words = {"tp": "tensor", "fsdp": "shard", "dp": "replicate", "pp": "pipeline"}
    found = dict(re.findall(r"(tp|fsdp|dp|pp)(\d+)", name))
    written = "-".join(word + size for word, size in found.items()) or "1"
    if written != name or ("dp" in found and len(found) > 1):
        raise SystemExit(f"no layout {name!r}: 1, dp2 (DDP), or such as fsdp2, tp2-fsdp2, tp2-pp2")
    return Layout(**{words[word]: int(size) for word, size in found.items()})


def versions(interpreter: str) -> dict[str, str]:
    """Versions of the peers' packages that the interpreter has."""
    code = (
        "import importlib.metadata as m, json; "
        "names = {d.metadata['Name'] for d in m.distributions()}; "
        "print(json.dumps({n: m.version(n) for n in ('torch', 'torchtitan', 'transformers', 'accelerate') if n in names}))"
    )
    found: dict[str, str] = json.loads(subprocess.check_output([interpreter, "-c", code]))
    return found


def measure(bench: Bench, contestants: Sequence[str], reasons: dict[str, str]) -> dict[str, list[Turn]]:
    """The turns of each contestant that did every one; the others get a reason."""
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for number in range(bench.options.rounds):
        for name in contestants if number % 2 == 0 else reversed(contestants):
            if name in reasons:
                continue
            try:
                turns[name].append(bench.turn(name, number))
            except Unknown as reason:
                reasons[name] = str(reason)
    return {name: found for name, found in turns.items() if name not in reasons}


def report(bench: Bench, turns: dict[str, list[Turn]], reasons: dict[str, str]) -> list[float]:
    """Print a layout's table; the ratios."""
    o, ranks = bench.options, bench.layout.world_size
    peak = None
    if o.device == "cuda":
        gpu = find_gpu(accelerator.name(torch.device("cuda", 0)))
        peak = peak_flops(gpu, o.precision) if gpu is not None else None
    print(
        f"\n{bench.name}: {ranks} rank(s), {o.batch} x {o.sequence} tokens a step, microbatches of {bench.microbatch}"
    )
    print(
        f"{'':13} {'tokens/s':>9} {'a rank':>8} {'range':>15} {'MFU':>7} {'GiB':>6} {'loss':>16} {'seatrial over it':>22}"
    )
    ratios = []
    for name in (OURS, *PEERS):
        if name not in turns:
            print(f"{name:13} unknown: {reasons[name]}")
            continue
        rates = [turn.tokens_per_s for turn in turns[name]]
        middle = statistics.median(rates)
        share = mfu(bench.arch.flops_per_token(o.sequence), middle / ranks, peak)
        pairs = [a.tokens_per_s / b for a, b in zip(turns[OURS], rates, strict=True)] if OURS in turns else []
        shown = ""
        if name != OURS and pairs:
            ratios.append(statistics.median(pairs))
            shown = f"{ratios[-1]:.3f} ({min(pairs):.3f}-{max(pairs):.3f})"
        one = turns[name][0]
        print(
            f"{name:13} {middle:9,.0f} {middle / ranks:8,.0f} {min(rates):7,.0f}-{max(rates):<7,.0f} "
            f"{'unknown' if share is None else format(share, '.1%'):>7} {max(t.memory for t in turns[name]) / GIB:6.2f} "
            f"{one.losses[0]:7.3f} -> {one.losses[-1]:5.3f} {shown:>22}",
            flush=True,
        )
    return ratios


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["1", "dp2", "fsdp2", "tp2-fsdp2", "tp2-pp2"])
    parser.add_argument("--contestants", nargs="+", choices=[OURS, *PEERS], default=[OURS, *PEERS])
    parser.add_argument("--model", default="small", help="small, or a model preset")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp8"], default="fp32")
    parser.add_argument("--fp8-scaling", choices=["rowwise", "tensorwise", "mxfp8"], default="rowwise")
    parser.add_argument("--recompute", action="store_true", help="recompute the activations of every layer")
    parser.add_argument("--layers", type=int, help="layers instead of the model's")
    parser.add_argument(
        "--microbatch",
        type=int,
        help="sequences a rank works on at once; default: all, a quarter with pipeline",
    )
    for name, value in (("sequence", 128), ("batch", 8), ("warm-up", 5), ("steps", 20), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of a turn")
    parser.add_argument("--peers-python", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument(
        "--folder", type=Path, help="new folder for logs and results; default: a temporary one"
    )
    return parser


def run(options: argparse.Namespace) -> int:
    if options.device == "cuda" and cuda_device_count() == 0:
        print("no GPU on this machine", file=sys.stderr)
        return 2
    installed = versions(options.peers_python)
    missing = {
        name: f"not installed: {options.peers_python} -m pip install torch=={torch.__version__.partition('+')[0]} {wanted}"
        for name, wanted in (("torchtitan", "torchtitan==0.2.2"), ("transformers", "transformers accelerate"))
        if name not in installed
    }
    arch = architecture(options)
    print(
        f"{options.model}: {arch.num_hidden_layers} layers, {arch.parameters():,} parameters, {options.precision}; "
        f"{accelerator.name(torch.device('cuda', 0)) if options.device == 'cuda' else 'CPU'}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; Seatrial's torch {torch.__version__}, "
        f"the peers' {', '.join(f'{k} {v}' for k, v in installed.items())}"
    )
    if options.device == "cpu" and "torchtitan" in options.contestants:
        print("torchtitan does not run without a GPU as it is; changed for this:\n  " + ";\n  ".join(SHIM))
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        for name in options.layouts:
            reasons = {
                peer: "left out" for peer in (OURS, *PEERS) if peer not in options.contestants
            } | missing
            bench = Bench(options, name, folder / name)
            turns = measure(bench, options.contestants, reasons)
            ratios += report(bench, turns, reasons)
    if not ratios:
        return 2
    print(f"\nlowest ratio {min(ratios):.3f} (limit {LIMIT}); higher is better")
    return 0 if min(ratios) >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(run(arguments().parse_args()))
