"""Host memory: 60 bytes a parameter for copies on two nodes, 36 on one, 12 for staging; and how many copies are made."""

from __future__ import annotations

import json
import math

import pytest

from presets import preset_job
from seatrial.hardware.host_memory import HostMemory
from seatrial.job import Job
from seatrial.plan.cost.host import Account, Device, host_need, in_words, would_fit

GIB = 1024**3


def account(of: Job, gib: float | None, device: Device = "cpu", gpu_gib: float | None = None) -> Account:
    available = None if gib is None else HostMemory(round(gib * GIB), "that much")
    return Account(
        of, device, "a test", host_need(of, device), available, None if gpu_gib is None else gpu_gib * GIB
    )


def small(*overrides: str) -> Job:
    """126 million parameters on two virtual nodes of two CPU ranks, as two replicas of two shards."""
    return preset_job(
        "first-voyage",
        "model.hidden_size=1024",
        "model.head_dim=256",
        "model.intermediate_size=4096",
        "model.num_hidden_layers=8",
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "parallel.shard=2",
        "parallel.replicate=2",
        "cluster.gpus_per_node=2",
        *overrides,
    )


def test_the_bytes_of_a_node_by_hand() -> None:
    """72B on two nodes of eight: for half of the parameters each, 60 bytes for copies and 12 on the way to the disk."""
    of = preset_job("qwen2.5-72b-b300", "cluster.nodes=2", "parallel.shard=1")
    need = host_need(of, "cuda")
    held = of.architecture.parameters() / 2
    assert need.copies(2) == pytest.approx(60 * held, rel=0.01)
    assert need.copies(1) == pytest.approx(36 * held, rel=0.01)
    assert need.copies(0) == need.ranks == 0
    assert need.staging == pytest.approx(12 * held, rel=0.01)
    assert need.total(2) > 2.6e12
    assert sum(need.parts(2).values()) == need.total(2)


def test_offloaded_inputs_by_hand() -> None:
    """72B in two stages of 40 layers: in the first, two microbatches in flight keep 39 inputs of 1/8 of 4,096 tokens each."""
    full = ("train.activation_checkpointing=full", "train.offload_activations=true")
    of = preset_job("qwen2.5-72b-b300", *full)
    tokens = of.train.microbatch * of.train.sequence_length
    each = 2 ** math.ceil(math.log2(tokens * of.architecture.hidden_size * 2 // 8))
    need = host_need(of, "cuda")
    assert need.offloaded == 8 * 2 * 39 * each
    assert (
        need.total(0) - host_need(preset_job("qwen2.5-72b-b300", full[0]), "cuda").total(0) == need.offloaded
    )
    assert account(of, None, "cuda").gpu < account(preset_job("qwen2.5-72b-b300", full[0]), None, "cuda").gpu


def test_frozen_weights_have_no_state() -> None:
    """With LoRA 20 bytes for copies of a frozen weight and 4 on the way to the disk."""
    whole = preset_job("qwen2.5-72b-b300", "cluster.nodes=2", "parallel.shard=1")
    of = preset_job("qwen2.5-72b-b300", "cluster.nodes=2", "parallel.shard=1", "model.lora={rank=1, alpha=2}")
    need, arch = host_need(of, "cuda"), of.architecture
    assert arch.trained_parameters() == arch.parameters() - whole.architecture.parameters() > 0
    assert need.copies(2) == pytest.approx(20 * arch.parameters() / 2, rel=0.01)
    assert need.staging == pytest.approx(4 * arch.parameters() / 2, rel=0.01)


def test_a_virtual_cluster_is_all_on_one_host() -> None:
    one, two = small(), small("cluster.spares=2")
    n = one.architecture.parameters()
    need = host_need(one, "cpu")
    assert need.copies(2) == pytest.approx(60 * n * 2, rel=0.01), "two replicas"
    assert need.staging == pytest.approx(12 * n, rel=0.03), "the first replica saves"
    assert need.ranks > 16 * n * 2, "weights, gradients and both moments"
    assert host_need(two, "cpu").processes > need.processes, "spares have processes"
    assert host_need(two, "cpu").ranks == need.ranks, "and no ranks"


def test_a_single_node_has_no_copies_on_another() -> None:
    need = host_need(preset_job("llama3-8b-h100"), "cuda")
    assert need.copies(2) == need.copies(1) > 0


def test_as_many_copies_as_fit_into_host_memory() -> None:
    of = small()
    need = host_need(of, "cpu")
    for copies in (2, 1, 0):
        for gib, wanted in (
            (need.total(copies) / GIB + 0.01, copies),
            (need.total(copies) / GIB - 0.01, max(0, copies - 1)),
        ):
            found = account(of, gib)
            assert found.copies[0] == wanted
            assert found.settled().resilience.snapshot_copies == wanted
            assert found.host_fits(wanted) == (gib * GIB >= need.total(wanted))


def test_the_consequence_of_fewer_copies_is_stated() -> None:
    def why(of: Job, copies: int) -> str:
        return account(of, host_need(of, "cpu").total(copies) / GIB + 0.001).copies[1]

    assert why(small(), 2).endswith("which fits")
    assert "a replica on another node holds the same state" in why(small(), 1)
    assert "a replica's process holds the same state" in why(small(), 0)
    alone = ("parallel.replicate=1", "parallel.shard=4")
    assert "a run that loses a node resumes from its last checkpoint" in why(small(*alone), 1)
    assert "a run that fails resumes from its last checkpoint" in why(small(*alone), 0)
    near = ("parallel.shard=1", "parallel.replicate=2", "parallel.pipeline=2", "train.microbatch=1")
    assert "a run that loses a node" in why(small(*near), 1), "both replicas are on one node"


def test_the_jobs_snapshot_copies_are_kept() -> None:
    assert account(small("resilience.snapshot_copies=2"), 0.1).copies == (2, "as the job says")
    assert account(small("resilience.snapshot_every_steps=0"), 100).copies[0] == 0
    assert account(small(), None).copies[0] == 2, "where the memory is not known nothing is taken away"


def test_suggested_changes_fit() -> None:
    of = small("train.sequence_length=2048", "train.microbatch=8")
    assert of.train.activation_checkpointing == "none"
    most = host_need(of, "cpu").total(0)
    less = host_need(small("train.sequence_length=2048", "train.microbatch=1"), "cpu").total(0)
    assert less < most
    assert would_fit(account(of, (less + 1) / GIB + 0.001)) == "train.microbatch = 1 would fit"
    assert (
        would_fit(account(small(), 3)) == "of the built-in models qwen2.5-tiny is the largest that would fit"
    )
    assert would_fit(account(of, 0.1)) == ""
    gpu = preset_job("llama3-8b-h100", "train.microbatch=2")
    assert would_fit(account(gpu, None, "cuda", 70)) == 'train.accumulate = "sharded" would fit'
    assert would_fit(account(gpu, None, "cuda", 57.5)) == "train.microbatch = 1 would fit"
    long = preset_job("llama3-8b-h100", "train.sequence_length=65536", "model.max_position_embeddings=65536")
    full = 'train.activation_checkpointing = "full"'
    assert would_fit(account(long, None, "cuda", 54)) == f"{full} would fit"
    assert (
        would_fit(account(long, None, "cuda", 48)) == f"{full} and train.offload_activations = true would fit"
    )


def test_account_as_text_and_json() -> None:
    text = dict(in_words(account(small(), 100)))
    assert text["copies"].startswith("of the state in memory: on each rank's own node and the next")
    assert "CPU ranks" in text["host memory"]
    gpu = account(preset_job("llama3-8b-h100"), None, "cuda")
    assert "unknown" in dict(in_words(gpu))["GPU memory"]
    document = json.loads(json.dumps(gpu.document()))
    assert (document["host_room_bytes"], document["gpu_room_bytes"], document["snapshot_copies"]) == (
        None,
        None,
        2,
    )
