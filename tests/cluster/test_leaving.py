"""Agents that are signalled: one alone hands over, all of them are a preemption. No step is lost either way."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver import JOB
from recovery_runs import STEPS, Begin, Trial, assert_same, beginning, lines, make_folder, one_node

from conftest import TIMEOUT_S
from seatrial.control.net.lease import Lease, Leases
from seatrial.control.net.wire import Incoming, Listener
from seatrial.control.node.spec import AgentSpec
from seatrial.job import job_from_text
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import freeze
from seatrial.record.launches import read_outcome
from seatrial.record.secret import make_secret, read_secret

pytestmark = [pytest.mark.cluster, pytest.mark.timed]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with beginning(tmp_path / "job") as start:
        yield start


def undisturbed(folder: Path, steps: int) -> Trial:
    """A run of the small job for so many steps that nobody disturbed."""
    trial = Trial(make_folder(folder), f"train.steps={steps}", *one_node(4))
    code, err = trial.end()
    assert code == 0, err
    return trial


def steps_in_order(trial: Trial) -> list[int]:
    """Every record of a step, also of one that was done again."""
    return [r["step"] for r in lines(trial.run / "ledger.jsonl")]


@pytest.mark.ci
@pytest.mark.parametrize("coordinator", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_node_that_leaves_hands_over_to_a_spare(begin: Begin, tmp_path: Path, coordinator: int) -> None:
    trial = begin("train.steps=5000", "cluster.spares=1", coordinator=coordinator)
    trial.until_step(4)
    os.kill(trial.agents()[1], signal.SIGTERM)
    trial.until_event("node_left")
    trial.until_event("recovered")
    trial.process.send_signal(signal.SIGTERM)
    code, err = trial.end()
    assert code == 75, err
    (leaving,) = trial.events("node_leaving")
    assert (leaving["node"], leaving["data"]["signal"]) == (1, "SIGTERM")
    assert [e["node"] for e in trial.events("node_left")] == [1]
    assert trial.events("recovering", "agent_failed", "node_lost") == []
    assert trial.events("generation_started")[-1]["data"]["slots"] == {"0": 0, "1": 2}
    (recovered,) = trial.events("recovered")
    assert recovered["data"]["redone"] == 0
    done = steps_in_order(trial)
    assert done == list(range(1, len(done) + 1))
    assert_same(trial, undisturbed(tmp_path / "reference", len(done)))


@pytest.mark.long  # with ranks that compute nothing: test_supervision
def test_all_that_leave_are_a_preemption(begin: Begin, tmp_path: Path) -> None:
    steps = 2 * STEPS
    trial = begin(f"train.steps={steps}")
    trial.until_step(4)
    for pid in trial.agents().values():
        os.kill(pid, signal.SIGUSR1)
    code, err = trial.end()
    assert code == 75, err
    assert {e["node"] for e in trial.events("node_leaving")} == {0, 1}
    assert trial.events("checkpoint_saved")
    again = begin(f"train.steps={steps}")
    code, err = again.end()
    assert code == 0, err
    assert steps_in_order(again) == list(range(1, steps + 1))
    assert_same(again, undisturbed(tmp_path / "reference", steps))


def prepared(path: Path) -> AgentSpec:
    """A run of one node whose agent a test starts itself, as a scheduler would: nobody speaks with it."""
    folder = RunFolder(path)
    job = job_from_text(JOB, name="job.toml", base_folder=path, overrides=["train.steps=5000"])
    folder.control.mkdir(parents=True)
    folder.job_toml.write_text(job.to_toml())
    folder.plan_json.write_text("{}")
    freeze(folder)
    folder.generation_file.write_text("1\n")
    make_secret(folder)
    worker = "standin_leaves"
    return AgentSpec(
        path, generation=1, node=0, nodes=1, ranks_per_node=1, device="cpu", worker_module=worker
    )


@pytest.mark.ci
def test_agent_without_launcher_and_late_agent_use_run_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    spec = prepared(tmp_path)
    with subprocess.Popen(spec.agent_command()) as agent:
        try:
            end = time.monotonic() + TIMEOUT_S
            while not any(e["kind"] == "rank_started" for e in lines(tmp_path / "events.jsonl")):
                assert agent.poll() is None
                assert time.monotonic() < end
                time.sleep(0.01)
            agent.send_signal(signal.SIGUSR1)
            assert agent.wait(TIMEOUT_S) == 75
        finally:
            agent.kill()
    outcome = read_outcome(spec.folder, 1)
    assert outcome is not None
    assert (outcome.exit_code, outcome.message) == (75, "the state is saved")
    (leaving,) = [e for e in lines(tmp_path / "events.jsonl") if e["kind"] == "node_leaving"]
    assert leaving["data"]["signal"] == "SIGUSR1"
    elected = len([e for e in lines(tmp_path / "events.jsonl") if e["kind"] == "coordinator_elected"])
    late = subprocess.run(spec.agent_command(), timeout=TIMEOUT_S, check=False)
    assert late.returncode == 75
    events = [e["kind"] for e in lines(tmp_path / "events.jsonl")]
    assert events.count("coordinator_elected") == elected, "it did not even take the lease"


def test_signal_during_connect_reaches_the_coordinator_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greeting was written before; without this the agent would end after its grace, and nothing be saved."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    spec = prepared(tmp_path)
    secret = read_secret(spec.folder)
    listener = Listener("127.0.0.1", secret)
    hold = Leases(spec.folder.leases).claim(Lease(1, 9, "127.0.0.1", listener.port, 0.0), 3.0)
    assert hold is not None
    calls: list[Incoming] = []
    end = time.monotonic() + TIMEOUT_S
    with subprocess.Popen(spec.agent_command()) as agent:
        try:
            while not calls:
                assert time.monotonic() < end
                time.sleep(0.01)
                calls = listener.accept()
            (call,) = calls
            assert call.advance() == "wait"  # our nonce goes out, the greeting comes
            while not select.select([call], [], [], 0.1)[0]:
                assert time.monotonic() < end
            agent.send_signal(signal.SIGUSR1)
            time.sleep(0.5)  # there is nothing to see of a signal that was taken
            hold.beat()
            assert call.advance() == "ready"
            assert call.hello["agent"]["leaving"] is None
            link = call.link()
            told: list[dict[str, object]] = []
            while not any("leaving" in message for message in told):
                assert time.monotonic() < end, told
                told += link.receive()
                time.sleep(0.01)
        finally:
            agent.kill()
            for call in calls:
                call.close()
            listener.close()
