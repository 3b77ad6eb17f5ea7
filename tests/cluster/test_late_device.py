"""Whole supervised jobs on the test device, through the code that GPUs run: bit-equal to the same job on the CPU."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recovery_runs import Begin, Trial, beginning, make_folder

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

SHARDED = ("parallel.tensor=1", "parallel.pipeline=1", "cluster.gpus_per_node=1", "parallel.shard=2")
REPLICATED = (*SHARDED[:3], "parallel.replicate=2")
SAVES = ("checkpoint.every_steps=4", "resilience.verify_every_steps=2", "train.sample_tokens=4")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with beginning(tmp_path / "job") as start:
        yield start


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """An undisturbed run on the CPU."""
    trial = Trial(make_folder(tmp_path_factory.mktemp("cpu") / "job"), *SHARDED, *SAVES)
    code, err = trial.end()
    assert code == 0, err
    return trial


def assert_bit_equal(late: Trial, cpu: Trial) -> None:
    """Losses, norms, samples, and every tensor of the last checkpoint, but for the device's own random state."""
    assert late.steps() == cpu.steps()
    assert late.samples() == cpu.samples()
    last = max(cpu.steps())
    ours, theirs = late.state(last), cpu.state(last)
    assert {key for key in ours if "rng/cuda" not in key} == theirs.keys()
    assert len(ours) > len(theirs), "the device's random state is saved"
    for key, values in theirs.items():
        assert torch.equal(ours[key], values), key


def late_copies(trial: Trial) -> list[int]:
    """How many asynchronous copies each rank made that ended by itself."""
    logs = sorted((trial.run / "logs").glob("*/*/rank*.log"))
    found = re.findall(
        r"late device: .'copies': (\d+).*, (\d+) left", "".join(log.read_text() for log in logs)
    )
    assert all(left == "0" for _, left in found), "something is used that was never waited for"
    return [int(count) for count, _ in found]


def test_killed_preempted_and_resumed_it_is_bit_equal(begin: Begin, on_cpu: Trial) -> None:
    trial = begin(*SHARDED, *SAVES, late=True)
    trial.until_step(7)
    trial.kill_rank(1)
    recovered = trial.until_event("recovered")
    assert recovered["data"]["source"] == "memory", (
        "a GPU's ranks are replaced, and go on from their snapshots"
    )
    trial.until_step(9)
    trial.process.send_signal(signal.SIGTERM)
    code, err = trial.end()
    assert code == 75, err
    saved = trial.events("checkpoint_saved")[-1]["data"]["step"]
    resumed = begin(*SHARDED, *SAVES, late=True)
    code, err = resumed.end()
    assert code == 0, err
    assert resumed.events("resumed")[-1]["data"]["step"] == saved
    assert_bit_equal(resumed, on_cpu)
    assert resumed.events("sample")[-1]["data"]["text"] == on_cpu.events("sample")[-1]["data"]["text"]
    assert min(late_copies(resumed)) > 100
