"""Dry runs from few layers and microbatches against those of all of them, and of a model that is large."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from dryrun_derived import derived, held
from dryrun_ranks import job_of
from parity_ranks import LENGTH, SEQUENCES

from conftest import each_case
from seatrial.base.errors import InputError, InternalError, RunFailed
from seatrial.job.architecture import Architecture
from seatrial.job.job import Job
from seatrial.plan.cost import dryrun
from seatrial.plan.cost.dryrun import DryRun, RankStep, dry_run
from seatrial.train.dryrun.trace import at_size

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

TIMEOUT_S = 3600.0  # what a trace costs is processor time, of which others may take most

QWEN_72B = Architecture(
    family="qwen2",
    vocab_size=152064,
    hidden_size=8192,
    intermediate_size=29568,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=32768,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
)
MANY = {"pipeline": 2, "shard": 2, "stages_per_rank": 2}
# Name -> case, layers, microbatches. Layers do not divide evenly where that is possible.
LARGE: dict[str, tuple[dict[str, Any], int, int]] = {
    "fsdp3-recompute": ({"layout": {"shard": 3}, "activation_checkpointing": "full"}, 7, 5),
    "fsdp3-recompute-every3": (
        {"layout": {"shard": 3}, "activation_checkpointing": "full", "recompute_every_layers": 3},
        13,
        5,
    ),
    "pp2-selective-every2": (
        {
            "layout": {"pipeline": 2, "tensor": 2},
            "activation_checkpointing": "selective",
            "recompute_every_layers": 2,
        },
        17,
        7,
    ),
    "replicate2": ({"layout": {"replicate": 2}}, 7, 5),
    "pp2-tied": ({"layout": {"pipeline": 2, "shard": 2, "tensor": 2}, "tied": True}, 13, 7),
    "pp2-gpipe": ({"layout": {"pipeline": 2, "schedule": "gpipe"}}, 13, 7),
    "pp2-async": ({"layout": {"pipeline": 2, "tensor": 2}, "async_tensor": True}, 13, 7),
    "interleaved": (
        {
            "layout": {**MANY, "schedule": "interleaved-1f1b"},
            "activation_checkpointing": "full",
            "offload_activations": True,
            "reshard_after_forward": True,
        },
        25,
        12,
    ),
    "zero-bubble": ({"layout": {**MANY, "schedule": "zero-bubble"}}, 25, 12),
}


def assert_same_step(few: RankStep, whole: RankStep) -> None:
    assert few.peak_bytes == whole.peak_bytes
    assert few.flops == whole.flops
    assert few.traffic == whole.traffic
    assert (few.parameter_bytes, few.gradient_bytes, few.optimizer_bytes) == (
        whole.parameter_bytes,
        whole.gradient_bytes,
        whole.optimizer_bytes,
    )


_LONG = (
    "interleaved",
    "zero-bubble",
    "pp2-gpipe",
    "pp2-async",
    "replicate2",
    "fsdp3-recompute",
    "fsdp3-recompute-every3",
    "pp2-selective-every2",
)  # the first two trace many layers and microbatches


@each_case(LARGE, long=_LONG)
def test_a_step_carried_over_is_the_whole_step(name: str) -> None:
    case, layers, microbatches = LARGE[name]
    job = at_size(job_of({"name": name, "tied": False, "precision": "bf16", **case}), layers, microbatches)
    # Of several stages a rank, one rank: the first has most microbatches under way.
    ranks = [0] if job.layout.stages_per_rank > 1 else None
    few = dry_run(job, ranks=ranks, processes=2, timeout_s=TIMEOUT_S)
    whole = dry_run(job, ranks=ranks, processes=2, whole=True, timeout_s=TIMEOUT_S)
    for a, b in zip(few.ranks, whole.ranks, strict=True):
        assert len(a.traced) == 4
        assert b.traced == ((layers, microbatches),)
        assert_same_step(a, b)
        _by_hand(job, a)


def _by_hand(job: Job, step: RankStep) -> None:
    layout = job.layout
    assert step.parameter_bytes == step.gradient_bytes == 4 * held(job, step.rank)
    if layout.pipeline > 1 and job.parallel.reshards:
        return
    counted = {(t.kind, t.dimension, t.dtype): (t.calls, t.payload_bytes) for t in step.traffic}
    assert counted == derived(job, step.rank, "cuda")


@pytest.fixture(scope="module")
def large() -> tuple[Job, DryRun]:
    """Qwen2.5-72B, tensor 8 x pipeline 2 x shard 8: a rank of each stage, that of the second from the midst."""
    layout = {"tensor": 8, "pipeline": 2, "shard": 8}
    job = job_of({"name": "72b", "layout": layout, "tied": False, "precision": "bf16"})
    train = job.train.model_copy(update={"sequence_length": 4096, "microbatch": 1, "global_batch": 16})
    job = Job(job.file.model_copy(update={"train": train}), QWEN_72B, job.layout, "72b")
    return job, dry_run(job, ranks=[0, 93], processes=2, timeout_s=TIMEOUT_S)


def test_72b_on_128_ranks_takes_little_memory(large: tuple[Job, DryRun]) -> None:
    assert large[1].process_bytes < 2 * 1024**3


def test_72b_holds_and_sends_what_is_derived_by_hand(large: tuple[Job, DryRun]) -> None:
    job, run = large
    for step in run.ranks:
        _by_hand(job, step)
    assert [step.at.pipeline for step in run.ranks] == [0, 1]


def test_72b_computes_the_model_flops(large: tuple[Job, DryRun]) -> None:
    """A rank of each stage together: 6 FLOPs a parameter and token, and attention's seven products over all scores."""
    job, run = large
    first, last = run.ranks
    tokens = job.microbatches * job.train.microbatch * job.train.sequence_length
    flops = dict.fromkeys(("matmul", "attention"), 0)
    for step in (first, last):
        for (_, kind), n in step.flops.items():
            flops[kind] += n
    n = job.layout.tensor
    assert flops["matmul"] == 6 * QWEN_72B.matmul_parameters() * tokens // n
    scores = tokens * job.train.sequence_length * QWEN_72B.num_attention_heads * QWEN_72B.head_dim
    assert flops["attention"] == 14 * scores * QWEN_72B.num_hidden_layers // n


def test_72b_kinds_add_up_to_the_peak(large: tuple[Job, DryRun]) -> None:
    for step in large[1].ranks:
        assert sum(step.peak.values()) == step.peak_bytes
        assert min(step.peak.values()) > 0
        # Rounded up to the allocator's blocks, parameter by parameter.
        assert 0 <= step.peak["parameters"] - step.parameter_bytes < 512 * 12 * 41


def test_unknown_values_are_reported() -> None:
    job = job_of({"name": "x", "layout": {}, "tied": False, "precision": "fp32", "documents": True})
    compiled = job.train.model_copy(update={"compile": True})
    job = Job(job.file.model_copy(update={"train": compiled}), job.architecture, job.layout, "x")
    notes = " ".join(dry_run(job, processes=1).notes)
    assert "compile" in notes
    assert "attend_across_documents" in notes


@pytest.mark.parametrize(
    "case",
    [
        {"layout": {}, "activation_checkpointing": "selective"},
        {"layout": {"pipeline": 2, "tensor": 2}, "activation_checkpointing": "full"},
        # Of more sequences at once a rank copies the keys before its last position, to have them one after the other.
        {"layout": {"shard": 2, "context": 2}, "microbatch": 1},
    ],
)
def test_documents_need_no_mask_where_flash_attention_is(case: dict[str, Any]) -> None:
    """Memory and FLOPs of a step are those without documents, but for a few integers."""
    usual = {"name": "x", "tied": False, "precision": "bf16", **case}
    plain = dry_run(job_of(usual), processes=1)
    found = dry_run(job_of({**usual, "documents": True}), processes=1)
    assert "one document a sequence" in " ".join(found.notes)
    for with_, without in zip(found.ranks, plain.ranks, strict=True):
        assert with_.flops == without.flops
        assert 0 <= with_.peak_bytes - without.peak_bytes <= SEQUENCES * LENGTH * 4 + 8192


def test_a_rank_that_is_not_there_is_refused() -> None:
    job = job_of({"name": "x", "layout": {"shard": 2}, "tied": False, "precision": "fp32"})
    with pytest.raises(InputError, match="there is no rank 2"):
        dry_run(job, ranks=[2])


def test_a_failed_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of({"name": "x", "layout": {}, "tied": False, "precision": "fp32"})
    program = "raise ValueError('not so')"
    monkeypatch.setattr(dryrun, "python", lambda *words: [sys.executable, "-c", program])
    with pytest.raises(InternalError, match="ValueError: not so"):
        dry_run(job)
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RunFailed, match="signal 9"):
        dry_run(job)
    program = "import signal; signal.pause()"
    with pytest.raises(RunFailed, match="longer than"):
        dry_run(job, timeout_s=0.1)
