"""Whole supervised jobs on the test device, through the code that GPUs run: bit-equal to the same job on the CPU."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recovery_runs import Begin, Trial, beginning, lines, make_folder, one_node

from missing_waits import JOB_WAITS

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

TWO_NODES = ("cluster.gpus_per_node=1",)
LAYOUTS = {
    "shard": (
        *TWO_NODES,
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "parallel.shard=2",
        "train.precision=bf16",
    ),
    "replicate": (
        *TWO_NODES,
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "parallel.replicate=2",
        "data.attend_across_documents=false",
    ),
    "pipeline": (*TWO_NODES, "parallel.tensor=1", "parallel.pipeline=2"),
    "tensor": ("cluster.nodes=1", "parallel.pipeline=1", "parallel.tensor=2"),
    # Biases that move by what both ranks sent to each expert.
    "experts": (
        *TWO_NODES,
        *("parallel.tensor=1", "parallel.pipeline=1", "parallel.shard=2", "parallel.expert=2"),
        *("model.family=glm4_moe", "model.num_experts=8", "model.num_experts_per_tok=2"),
        *("model.moe_intermediate_size=16", "model.n_group=4", "model.topk_group=2"),
        *("model.first_k_dense_replace=1", "train.precision=bf16"),
    ),
}
JOB = (
    *LAYOUTS["shard"],
    "train.steps=80",
    "train.sample_tokens=4",
    "data.validation=other.py",
    "train.validate_every_steps=20",
    "train.validate_samples=12",
    "checkpoint.every_steps=10",
    "resilience.verify_every_steps=2",
    "resilience.max_same_failure=99",
)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with beginning(tmp_path / "job") as start:
        yield start


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """An undisturbed run on the CPU."""
    trial = Trial(make_folder(tmp_path_factory.mktemp("cpu") / "job"), *JOB, *one_node(2))
    code, err = trial.end()
    assert code == 0, err
    return trial


def differences(late: Trial, cpu: Trial) -> list[str]:
    """Of losses, norms, samples, and every tensor of the last checkpoint, but for the device's own random state."""
    last = max(cpu.steps())
    ours, theirs = late.state(last), cpu.state(last)
    assert len(ours) > len(theirs), "the device's random state is saved"
    ours = {key: values for key, values in ours.items() if "rng/cuda" not in key}
    found = [key for key in theirs if key not in ours or not torch.equal(ours[key], theirs[key])]
    found += [f"only on the device: {key}" for key in ours.keys() - theirs.keys()]
    found += ["samples"] if late.samples() != cpu.samples() else []
    return found + [
        f"step {step}" for step, values in numbers(cpu).items() if numbers(late).get(step) != values
    ]


def numbers(trial: Trial) -> dict[int, tuple[float | None, ...]]:
    """Step -> what was computed."""
    found = lines(trial.run / "metrics.jsonl")
    return {m["step"]: (m["loss"], m["grad_norm"], m.get("validation_loss")) for m in found}


def late_copies(trial: Trial) -> list[int]:
    """How many asynchronous copies each rank made that ended by itself."""
    logs = sorted((trial.run / "logs").glob("*/*/rank*.log"))
    found = re.findall(
        r"late device: .'copies': (\d+).*, (\d+) left", "".join(log.read_text() for log in logs)
    )
    assert all(left == "0" for _, left in found), "something is used that was never waited for"
    return [int(count) for count, _ in found]


def kill_at_random(trial: Trial, kills: int, seed: int) -> None:
    """Kill one rank of each generation: after some of its steps, or while it recovers from the kill before."""
    chance = random.Random(seed)
    generation = 0

    def ranks() -> dict[int, int]:
        """Rank -> process, of the newest generation."""
        started = [e for e in trial.events("rank_started") if e["generation"] > generation]
        newest = max((e["generation"] for e in started), default=0)
        return {e["rank"]: e["data"]["pid"] for e in started if e["generation"] == newest}

    for number in range(kills):
        trial.until(lambda: len(ranks()) == 2)
        pids = ranks()
        generation = trial.events("rank_started")[-1]["generation"]
        if number == 0 or chance.random() < 0.7:
            done = chance.randint(1, 8)
            trial.until(lambda g=generation, n=done: len(steps_of(trial, g)) >= n)
        os.kill(pids[chance.choice([0, 1])], signal.SIGKILL)


def steps_of(trial: Trial, generation: int) -> list[int]:
    return [m["step"] for m in lines(trial.run / "metrics.jsonl") if m["generation"] == generation]


@pytest.mark.ci
def test_killed_preempted_and_resumed_it_is_bit_equal(begin: Begin, on_cpu: Trial) -> None:
    offload = ("train.activation_checkpointing=full", "train.offload_activations=true")
    job = (*JOB, "train.deterministic=true", *offload)
    trial = begin(*job, late=True)
    kill_at_random(trial, 3, seed=1)
    trial.until(lambda: steps_of(trial, 4))
    trial.process.send_signal(signal.SIGTERM)
    code, err = trial.end()
    assert code == 75, err
    sources = {event["data"]["source"] for event in trial.events("recovered")}
    assert sources <= {"memory", "fresh"}, "a GPU's ranks are replaced, and go on from their snapshots"
    saved = trial.events("checkpoint_saved")[-1]["data"]["step"]
    resumed = begin(*job, late=True)
    code, err = resumed.end()
    assert code == 0, err
    assert resumed.events("resumed")[-1]["data"]["step"] == saved
    assert differences(resumed, on_cpu) == []
    assert resumed.events("sample")[-1]["data"]["text"] == on_cpu.events("sample")[-1]["data"]["text"]
    assert min(late_copies(resumed)) > 100


# All of them in one process, and with a bad step, without which a step in flight does no harm: test_missing_waits.py.
@pytest.mark.long
@pytest.mark.parametrize("wait", [w for w in JOB_WAITS if "in_flight" not in w and "while" not in w])
def test_without_a_wait_a_job_differs_or_fails(
    begin: Begin, on_cpu: Trial, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATE_DEVICE_WITHOUT", wait)
    trial = begin(*JOB, "resilience.max_restarts=2", late=True)
    if "snapshot" in wait:
        trial.until_step(7)
        trial.kill_rank(1)
    code, _ = trial.end()
    assert code != 0 or differences(trial, on_cpu)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_kills_leave_no_trace(begin: Begin, tmp_path: Path, layout: str) -> None:
    kills = 10
    settings = (
        *LAYOUTS[layout],
        f"train.steps={16 * kills}",
        "resilience.snapshot_every_steps=3",
        "resilience.max_same_failure=99",
    )
    cpu = Trial(make_folder(tmp_path / "cpu"), *settings)
    code, err = cpu.end()
    assert code == 0, err
    trial = begin(*settings, late=True)
    kill_at_random(trial, kills, seed=2)
    code, err = trial.end()
    assert code == 0, err
    assert len(trial.events("recovering")) == kills
    assert differences(trial, cpu) == []


@pytest.mark.long  # on the CPU: test_recovery
def test_a_lost_node_is_replaced_from_another_nodes_memory(begin: Begin, on_cpu: Trial) -> None:
    trial = begin(*JOB, "cluster.spares=1", late=True)
    trial.until_step(7)
    trial.kill_agent(1)
    code, err = trial.end()
    assert code == 0, err
    (recovered,) = trial.events("recovered")
    assert recovered["data"]["source"] == "memory"
    assert differences(trial, on_cpu) == []
