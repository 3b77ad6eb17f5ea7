"""`seatrial train` on one CUDA device: bf16, compiled, NCCL; resumed; beside the same job on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_runs import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device (torch.cuda.is_available() is false)"
    ),
]

JOB = """
name = "one-gpu"
[model]
preset = "qwen2.5-tiny"
[data]
train = "builtin:python-library"
[train]
steps = 12
sequence_length = 128
global_batch = 16
microbatch = 4
precision = "bf16"
sample_tokens = 8
[optimizer]
lr = 3e-3
warmup_steps = 2
[checkpoint]
every_steps = 6
"""


def test_the_gpu_trains_as_the_cpu_does(tmp_path: Path) -> None:
    gpu = train(tmp_path / "gpu", JOB, "cluster.device=cuda")
    cpu = train(tmp_path / "cpu", JOB, "cluster.device=cpu", "train.precision=fp32")
    assert len(gpu) == len(cpu) == 12
    for ours, theirs in zip(gpu, cpu, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.05), ours["step"]
    assert gpu[-1]["loss"] < gpu[0]["loss"] - 0.3
    assert gpu[-1]["memory_bytes"] > 0


def test_compiled_and_recomputed(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", JOB, "cluster.device=cuda", "train.compile=false")
    compiled = train(
        tmp_path / "compiled",
        JOB,
        "cluster.device=cuda",
        "train.activation_checkpointing=full",
    )
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.05), ours["step"]


def test_stopped_and_resumed_it_is_the_same_training(tmp_path: Path) -> None:
    constant = ("cluster.device=cuda", "optimizer.decay=constant")
    whole = train(tmp_path / "whole", JOB, *constant)
    train(tmp_path / "resumed", JOB, *constant, "train.steps=6")
    resumed = train(tmp_path / "resumed", JOB, *constant)
    assert [m["step"] for m in resumed] == [m["step"] for m in whole]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3), ours["step"]


def test_deterministic_runs_have_the_same_bits(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        metrics = train(tmp_path / name, JOB, "cluster.device=cuda", "train.deterministic=true")
        found.append([(m["step"], m["loss"], m["grad_norm"]) for m in metrics])
    assert len(found[0]) == 12
    assert found[0] == found[1]


def test_offloaded_inputs_change_no_bit(tmp_path: Path) -> None:
    found = []
    for offload in ("false", "true"):
        metrics = train(
            tmp_path / offload,
            JOB,
            "cluster.device=cuda",
            "train.deterministic=true",
            "train.activation_checkpointing=full",
            f"train.offload_activations={offload}",
        )
        found.append([(m["step"], m["loss"], m["grad_norm"]) for m in metrics])
    assert len(found[0]) == 12
    assert found[0] == found[1]
