"""A run that is hit goes on by itself, and ends as if nothing had happened; or it ends, and says why."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from recovery_runs import (
    RARELY_VERIFIED,
    REPLICAS,
    STEPS,
    Begin,
    Trial,
    assert_same,
    beginning,
    lines,
    make_folder,
    one_node,
)

from seatrial.base import process

pytestmark = [pytest.mark.cluster, pytest.mark.timed]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with beginning(tmp_path / "job") as start:
        yield start


def undisturbed(folder: Path, *settings: str) -> Trial:
    trial = Trial(make_folder(folder), *settings)
    code, err = trial.end()
    assert code == 0, err
    assert trial.events("recovering", "recovered") == []
    return trial


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A run of the small job that never failed."""
    return undisturbed(tmp_path_factory.mktemp("reference") / "job", *one_node(4))


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """The same with replicas instead of a pipeline."""
    return undisturbed(tmp_path_factory.mktemp("replicas") / "job", *REPLICAS, *one_node(4))


def recovered(trial: Trial) -> tuple[str, int]:
    """(source, steps done again) of the only recovery."""
    (event,) = trial.events("recovered")
    return event["data"]["source"], event["data"]["redone"]


@pytest.mark.long  # in place: test_rank_killed_in_a_validation_is_replaced; otherwise: the tests of lost nodes
@pytest.mark.parametrize("in_place", [True, False])
def test_a_killed_rank_is_replaced(begin: Begin, reference: Trial, in_place: bool) -> None:
    trial = begin(f"resilience.in_place={str(in_place).lower()}")
    trial.until_step(7)
    before = trial.pids()
    trial.kill_rank(3)
    code, err = trial.end()
    assert code == 0, err
    assert_replaced(trial, before, in_place)
    assert_same(trial, reference)


def assert_replaced(trial: Trial, before: dict[int, int], in_place: bool) -> None:
    """Rank 3 was killed, and goes on from memory; the other ranks stay where that is done in place."""
    (event,) = trial.events("recovering")
    assert (event["node"], event["rank"], event["data"]["signal"]) == (1, 3, "worker_killed")
    source, redone = recovered(trial)
    assert source == "memory", "two stages and two halves of each tensor: nobody has what rank 3 had"
    assert redone <= 5
    after = trial.pids()
    assert after[3] != before[3]
    assert all((after[rank] == before[rank]) == in_place for rank in (0, 1, 2))


@pytest.mark.long  # with gradients reduced in every microbatch: the next one
def test_a_replica_gives_its_state_and_no_step_is_lost(begin: Begin, replicas: Trial) -> None:
    trial = begin(*REPLICAS, *RARELY_VERIFIED)
    trial.until_step(9)
    trial.kill_rank(2)
    code, err = trial.end()
    assert code == 0, err
    assert recovered(trial) == ("replica", 0)
    assert_same(trial, replicas)


# -- gradients reduced in every microbatch: nothing that an interrupted step has added up is in the one after it


@pytest.mark.ci
def test_killed_rank_resumes_with_sharded_gradients(begin: Begin, replicas: Trial) -> None:
    """Replicas alone add up in the same order either way, so their bits are those of whole gradients."""
    trial = begin(*REPLICAS, *RARELY_VERIFIED, "train.accumulate=sharded")
    trial.until_step(9)
    trial.kill_rank(1)
    code, err = trial.end()
    assert code == 0, err
    assert recovered(trial) == ("replica", 0)
    assert_same(trial, replicas)


@pytest.mark.long
def test_killed_rank_of_shards_resumes_bit_for_bit(begin: Begin, tmp_path: Path) -> None:
    shards = ("cluster.gpus_per_node=1", "parallel.tensor=1", "parallel.pipeline=1", "train.microbatch=1")
    settings = (*shards, "train.accumulate=sharded", "train.steps=9")
    trial = begin(*settings)
    trial.until_step(7)
    trial.kill_rank(1)
    code, err = trial.end()
    assert code == 0, err
    assert recovered(trial)[0] == "memory"
    assert_same(trial, undisturbed(tmp_path / "undisturbed", *settings))


@pytest.mark.ci
@pytest.mark.parametrize("ring", [(), ("parallel.ring_attention=true", "cluster.device=cpu")])
def test_killed_rank_of_a_context_group_resumes_bit_for_bit(
    ring: tuple[str, ...], begin: Begin, tmp_path: Path
) -> None:
    context = ("parallel.context=2", "parallel.shard=1", "parallel.replicate=2", "parallel.pipeline=1")
    settings = ("cluster.gpus_per_node=2", "parallel.tensor=1", *context, *RARELY_VERIFIED, *ring)
    trial = begin(*settings)
    trial.until_step(9)
    trial.kill_rank(1)
    code, err = trial.end()
    assert code == 0, err
    assert recovered(trial)[0] == "replica"
    assert_same(trial, undisturbed(tmp_path / "undisturbed", *settings))


@pytest.mark.ci
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_killed_rank_of_an_expert_group_resumes_bit_for_bit(
    family: str, begin: Begin, tmp_path: Path
) -> None:
    expert = ("parallel.expert=2", "parallel.shard=4", "parallel.tensor=1", "parallel.pipeline=1")
    sizes = ("num_experts=8", "num_experts_per_tok=2", "moe_intermediate_size=16")
    model = (f"model.family={family}", *(f"model.{size}" for size in sizes))
    settings = (*expert, *model, "train.microbatch=1", "train.steps=9")
    trial = begin(*settings)
    trial.until_step(7)
    trial.kill_rank(1)
    code, err = trial.end()
    assert code == 0, err
    assert recovered(trial)[0] == "memory"
    assert_same(trial, undisturbed(tmp_path / "undisturbed", *settings))


@pytest.mark.ci
def test_killed_rank_goes_back_into_a_batch_ramp_bit_for_bit(begin: Begin, tmp_path: Path) -> None:
    ramp = "train.batch_ramp=[{steps=3, global_batch=4}, {steps=4, global_batch=8}]"
    settings = (ramp, "train.global_batch=16", "train.steps=10")
    trial = begin(*settings)
    trial.until_step(8)
    trial.kill_rank(1)
    code, err = trial.end()
    assert code == 0, err
    assert recovered(trial)[0] == "memory"
    assert_same(trial, undisturbed(tmp_path / "undisturbed", *settings))
    assert trial.samples()[2:9:2] == [(8, 12), (20, 28), (36, 44), (60, 76)]
    tokens = {m["step"]: m["tokens"] for m in lines(trial.run / "metrics.jsonl")}
    assert tokens == {step: 32 * end for step, (_, end) in enumerate(trial.samples(), 1)}


# -- during a validation

VALIDATION = ("data.validation=other.py", "train.validate_every_steps=8", "train.validate_samples=160")


def validating(begin: Begin, *settings: str) -> Trial:
    """A run that is in the validation after step 8."""
    trial = begin(*VALIDATION, *settings)
    trial.until(
        lambda: any(r["step"] == 8 for r in lines(trial.run / "ledger.jsonl")) and 8 not in trial.steps()
    )
    return trial


def validation_losses(trial: Trial) -> dict[int, float]:
    found = {m["step"]: m.get("validation_loss") for m in lines(trial.run / "metrics.jsonl")}
    return {step: loss for step, loss in found.items() if loss is not None}


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A run with a validation that never failed."""
    return undisturbed(tmp_path_factory.mktemp("validated") / "job", *VALIDATION, *one_node(4))


def test_rank_killed_in_a_validation_is_replaced(begin: Begin, reference: Trial) -> None:
    trial = validating(begin)
    before = trial.pids()
    trial.kill_rank(3)
    code, err = trial.end()
    assert code == 0, err
    assert_replaced(trial, before, in_place=True)
    assert sorted(validation_losses(trial)) == [8, 16]
    assert_same(trial, reference)  # which validates nothing
    assert "validation" in err


@pytest.mark.long
@pytest.mark.parametrize("in_place", [True, False])
def test_validation_losses_are_those_of_an_undisturbed_run(
    begin: Begin, validated: Trial, in_place: bool
) -> None:
    trial = validating(begin, f"resilience.in_place={str(in_place).lower()}")
    trial.kill_rank(0)
    code, err = trial.end()
    assert code == 0, err
    assert validation_losses(trial) == validation_losses(validated)
    assert_same(trial, validated)


@pytest.mark.long
def test_validation_goes_on_with_fewer_replicas(begin: Begin, validated: Trial) -> None:
    trial = validating(begin, *REPLICAS)
    trial.kill_agent(1)
    code, err = trial.end()
    assert code == 0, err
    assert trial.events("shrunk")
    assert validation_losses(trial) == pytest.approx(validation_losses(validated), abs=1e-4, rel=0)


@pytest.mark.long
def test_preempted_in_a_validation_and_resumed(begin: Begin, validated: Trial) -> None:
    trial = validating(begin)
    trial.process.send_signal(signal.SIGTERM)
    code, err = trial.end()
    assert code == 75, err
    assert 8 not in validation_losses(trial)
    again = begin(*VALIDATION)
    code, err = again.end()
    assert code == 0, err
    assert validation_losses(again) == validation_losses(validated)
    assert_same(again, validated)


# -- with fewer copies in memory than on two nodes

ONE_COPY = "resilience.snapshot_copies=1"


@pytest.mark.long
def test_with_one_copy_a_killed_rank_finds_it_on_its_own_node(begin: Begin, reference: Trial) -> None:
    trial = begin(ONE_COPY)
    trial.until_step(7)
    trial.kill_rank(3)
    code, err = trial.end()
    assert code == 0, err
    source, redone = recovered(trial)
    assert (source, redone <= 5) == ("memory", True)
    (planned,) = trial.events("memory_planned")
    assert (planned["severity"], planned["data"]["snapshot_copies"]) == ("warning", 1)
    assert_same(trial, reference)


@pytest.mark.long
def test_node_loss_with_one_copy_and_no_replica_uses_the_disk(begin: Begin, reference: Trial) -> None:
    trial = begin(ONE_COPY, "cluster.spares=1", "checkpoint.every_steps=4")
    trial.until_event("checkpoint_saved")
    trial.until_step(7)
    trial.kill_agent(1)
    code, err = trial.end()
    assert code == 0, err
    assert recovered(trial)[0] == "disk", "nobody else had what that node held"
    assert_same(trial, reference)


@pytest.mark.ci
def test_node_loss_with_one_copy_resumes_from_replica_memory(begin: Begin, replicas: Trial) -> None:
    """No process keeps its state, as on GPUs: what the spare's ranks go on from is what a replica's node holds."""
    trial = begin(*REPLICAS, ONE_COPY, "cluster.spares=1", "resilience.in_place=false")
    trial.until_step(7)
    trial.kill_agent(0)
    code, err = trial.end()
    assert code == 0, err
    source, redone = recovered(trial)
    assert (source, redone <= 5) == ("memory", True)
    assert_same(trial, replicas)


@pytest.mark.long
def test_with_one_copy_a_run_shrinks_from_a_replicas_memory(begin: Begin, replicas: Trial) -> None:
    """The node that is lost has the replica which saves checkpoints: the other one writes them for it."""
    trial = begin(*REPLICAS, ONE_COPY)
    trial.until_step(7)
    trial.kill_agent(0)
    code, err = trial.end()
    assert code == 0, err
    (flushed,) = trial.events("snapshot_flushed")
    assert flushed["severity"] == "info", flushed["message"]
    assert trial.events("generation_started")[-1]["data"]["layout"]["replicate"] == 1
    source, redone = recovered(trial)
    assert (source, redone <= 5) == ("disk", True), "from what was just written"
    assert trial.samples() == replicas.samples()
    ours, theirs = trial.steps(), replicas.steps()
    for step in range(1, STEPS + 1):
        assert ours[step] == pytest.approx(theirs[step], rel=1e-4)


@pytest.mark.long
def test_without_copies_a_replica_is_all_that_is_needed(begin: Begin, replicas: Trial) -> None:
    trial = begin(*REPLICAS, *RARELY_VERIFIED, "resilience.snapshot_copies=0")
    trial.until_step(9)
    trial.kill_rank(2)
    code, err = trial.end()
    assert code == 0, err
    assert recovered(trial) == ("replica", 0)
    assert_same(trial, replicas)


def test_a_spare_takes_the_place_of_a_lost_node(begin: Begin, reference: Trial) -> None:
    trial = begin("cluster.spares=1")
    trial.until_step(7)
    trial.kill_agent(1)
    code, err = trial.end()
    assert code == 0, err
    (lost,) = trial.events("node_lost")
    assert (lost["node"], lost["data"]["certain"]) == (1, True)
    assert trial.events("generation_started")[-1]["data"]["slots"] == {"0": 0, "1": 2}
    assert recovered(trial)[0] == "memory", "the buddy had a copy"
    assert_same(trial, reference)


@pytest.mark.long  # with ranks that compute nothing: test_supervision; on hosts of its own: test_hosts_apart
def test_the_node_that_coordinates_is_lost_like_any_other(begin: Begin, reference: Trial) -> None:
    trial = begin("cluster.spares=1", coordinator=0)
    trial.until_step(7)
    assert trial.coordinator() == 0
    trial.kill_agent(0)
    code, err = trial.end()
    assert code == 0, err
    assert trial.coordinator() != 0
    assert trial.events("generation_started")[-1]["data"]["slots"] == {"0": 2, "1": 1}
    assert len(trial.events("recovering")) == 1
    assert_same(trial, reference)


@pytest.mark.long
def test_losing_a_coordinator_without_ranks_stops_no_rank(begin: Begin, reference: Trial) -> None:
    """The next one takes over a run that goes on, and must notice what happens to it."""
    trial = begin("cluster.spares=1", coordinator=2)
    trial.until_step(4)
    assert trial.coordinator() == 2
    before = trial.pids()
    trial.kill_agent(2)
    trial.until_event("coordinator_elected", count=2)
    trial.until_step(8)
    assert trial.pids() == before
    assert trial.events("recovering") == []
    trial.kill_rank(1)
    code, err = trial.end()
    assert code == 0, err
    (event,) = trial.events("recovering")
    assert (event["rank"], event["data"]["signal"], event["generation"]) == (1, "worker_killed", 1)
    assert_same(trial, reference)


@pytest.mark.long
def test_run_recovers_when_stalled_coordinator_finds_ranks_gone(begin: Begin, reference: Trial) -> None:
    """Agents stop their ranks when nobody answers. If the answer comes a moment later, nobody is lost: only the ranks."""
    trial = begin("resilience.silence_s=1", coordinator=0)
    trial.until_step(7)
    agent, far = trial.agents()[0], trial.pids()[2]
    os.kill(agent, signal.SIGSTOP)
    trial.until(lambda: far not in process.living())
    os.kill(agent, signal.SIGCONT)
    code, err = trial.end()
    assert code == 0, err
    assert trial.events("hang_blamed") == []
    assert_same(trial, reference)


def test_run_without_spare_shrinks_and_grows_on_node_return(begin: Begin, replicas: Trial) -> None:
    trial = begin(*REPLICAS, "train.steps=2000", returns={1: 3.0}, coordinator=0)
    trial.until_step(7)
    trial.kill_agent(1)
    trial.until_event("shrunk")
    trial.until_event("recovered")
    assert trial.events("generation_started")[-1]["data"]["layout"]["replicate"] == 1
    trial.until_event("grown")
    trial.until_event("recovered", count=2)
    assert trial.events("generation_started")[-1]["data"]["slots"] == {"0": 0, "1": 1}
    trial.process.send_signal(signal.SIGTERM)
    code, err = trial.end()
    assert code == 75, err
    samples = trial.samples()
    assert samples == [(8 * i, 8 * i + 8) for i in range(len(samples))], "each once, in order"
    assert trial.events("recovered")[1]["data"]["redone"] == 0, "who yields saves before"
    ours, theirs = trial.steps(), replicas.steps()
    for step in range(1, STEPS + 1):
        assert ours[step] == pytest.approx(theirs[step], rel=1e-4)


@pytest.mark.long  # test_train's test of a preempted run has the same, and more
def test_a_preempted_run_is_saved_and_goes_on_bit_for_bit(begin: Begin, reference: Trial) -> None:
    first = begin()
    first.until_step(5)
    first.process.send_signal(signal.SIGTERM)
    code, err = first.end()
    assert code == 75, err
    saved = first.events("checkpoint_saved")[-1]["data"]["step"]
    assert saved >= 5
    assert first.events("run_interrupted")[-1]["data"] == {"preempted": True}
    second = begin()
    code, err = second.end()
    assert code == 0, err
    assert second.events("resumed")[-1]["data"]["step"] == saved
    assert second.events("recovered") == [], "nothing failed"
    assert_same(second, reference)


def test_a_rank_that_hangs_is_named_and_replaced(begin: Begin, reference: Trial) -> None:
    trial = begin("resilience.hang_min_s=2")
    trial.until_step(7)
    trial.kill_rank(2, signal.SIGSTOP)
    code, err = trial.end()
    assert code == 0, err
    (blamed,) = trial.events("hang_blamed")
    assert (blamed["node"], blamed["rank"]) == (1, 2)
    (event,) = trial.events("recovering")
    assert (event["rank"], event["data"]["signal"]) == (2, "stopped")
    assert_same(trial, reference)


@pytest.mark.long  # test_train kills a rank in the same way
def test_without_restarts_the_first_failure_ends_the_run(begin: Begin) -> None:
    trial = begin("resilience.max_restarts=0")
    trial.until_step(4)
    trial.kill_rank(3)
    code, err = trial.end()
    assert code == 1
    assert "rank 3 on node 1 was killed by SIGKILL" in err
    (failed,) = trial.events("run_failed")
    assert (failed["node"], failed["rank"]) == (1, 3)
    assert trial.events("generation_started")[-1]["generation"] == 1


@pytest.mark.long  # test_rounds has two faults at any moment
def test_blow_after_blow_in_the_midst_of_recoveries(begin: Begin, reference: Trial) -> None:
    trial = begin("cluster.spares=2", "resilience.max_same_failure=9")
    trial.until_step(7)
    trial.kill_agent(1)
    trial.until_event("recovering")
    trial.kill_rank(0)
    trial.until_event("generation_started", count=2)
    trial.kill_agent(0)
    trial.until(lambda: set(trial.events("generation_started")[-1]["data"]["slots"].values()) == {2, 3})
    trial.until(lambda: {e["node"] for e in trial.events("rank_started")} == {0, 1, 2, 3})
    trial.until(lambda: [e for e in trial.events("rank_started") if e["node"] > 1 and e["rank"] == 1])
    trial.kill_rank(1)
    code, err = trial.end()
    assert code == 0, err
    generations = [e["generation"] for e in trial.events("generation_started")]
    assert generations == sorted(set(generations)), "none begins twice"
    assert_same(trial, reference)
