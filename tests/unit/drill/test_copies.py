"""The copy of a job: the same job where it counts, another one where the drill needs it, and every change is told."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest
from drill_jobs import STORE, copy, job
from hypothesis import given
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.drill.copies import LEAST_STEPS, Cadence


def test_every_difference_is_reported() -> None:
    original = job()
    found = copy(original, spares=2)
    ours, theirs = (tomllib.loads(j.to_toml()) for j in (found.job, original))
    told = {c.key: (c.job, c.copy) for c in found.changes}
    differing = {"name": (theirs.pop("name"), ours.pop("name"))}
    for section, values in theirs.items():
        for key in {**values, **ours[section]}:
            pair = (values.get(key), ours[section].get(key))
            if pair[0] != pair[1]:
                differing[f"{section}.{key}"] = pair
    assert told == differing
    assert all(c.why for c in found.changes)
    assert told["cluster.spares"] == (0, 2)
    assert told["data.train"] == ("builtin:python-library", STORE)


def test_what_makes_it_this_job_stays() -> None:
    original, found = job(), copy(job()).job
    assert found.architecture == original.architecture
    assert found.layout == original.layout
    assert found.train.global_batch == original.train.global_batch
    assert found.optimizer.lr == original.optimizer.lr


def test_learning_rate_does_not_depend_on_the_number_of_steps() -> None:
    original = job("optimizer.decay=wsd", "optimizer.decay_steps=20")
    short, long = (copy(original, steps=steps).job.optimizer for steps in (16, 40))
    assert (short.decay, short.decay_steps) == ("constant", None)
    assert long.lr == short.lr


def test_a_fixed_port_is_left_to_the_run_itself() -> None:
    assert copy(job("cluster.port=29500")).job.cluster.port is None
    assert copy(job("watch.metrics_port=9464")).job.file.watch.metrics_port is None


def test_nothing_outside_the_run_is_allowed() -> None:
    original = job("resilience.allow_gpu_reset=true", "resilience.allow_node_drain=true")
    found = copy(original).job.resilience
    assert (found.allow_gpu_reset, found.allow_node_drain) == (False, False)


def test_what_the_job_switched_off_stays_off() -> None:
    original = job("resilience.snapshot_every_steps=0", "resilience.verify_every_steps=0")
    found = copy(original).job.resilience
    assert (found.snapshot_every_steps, found.verify_every_steps) == (0, 0)


def test_replicas_come_from_the_shards() -> None:
    found = copy(job(), replicas=True)
    assert (found.job.layout.replicate, found.job.layout.shard) == (2, 1)
    assert found.job.layout.world_size == job().layout.world_size
    assert {c.key for c in found.changes} >= {"parallel.replicate", "parallel.shard"}


def test_a_job_with_replicas_keeps_its_layout() -> None:
    original = job("parallel.shard=1", "parallel.replicate=2")
    assert copy(original, replicas=True).job.layout == original.layout


def test_replicas_replace_tensor_ranks_when_nothing_is_sharded() -> None:
    original = job("cluster.gpus_per_node=2", "parallel.shard=1")
    assert copy(original, replicas=True).job.layout.as_dict() == original.layout.as_dict() | {
        "replicate": 2,
        "tensor": 1,
    }


def test_one_rank_has_no_replicas() -> None:
    original = job(
        "cluster.nodes=1",
        "cluster.gpus_per_node=1",
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "parallel.shard=1",
    )
    with pytest.raises(InputError, match="cannot hold two replicas"):
        copy(original, replicas=True)


def test_a_storm_costs_no_node() -> None:
    assert copy(job(), seconds=30).job.resilience.evict_after == 1000


def test_the_copy_is_read_like_any_job_file() -> None:
    """What a rule forbids is forbidden here too."""
    broken = job()
    train = broken.file.train.model_copy(update={"microbatch": 5})
    with pytest.raises(InputError, match="microbatch"):
        copy(dataclasses.replace(broken, file=broken.file.model_copy(update={"train": train})))


@given(steps=st.integers(LEAST_STEPS, 500))
def test_a_fault_comes_after_copies_and_before_the_end(steps: int) -> None:
    cadence = Cadence(steps)
    assert cadence.fault < steps - 1
    assert cadence.fault // cadence.snapshot >= 2
    assert cadence.fault // cadence.checkpoint >= 2
    assert cadence.fault % cadence.checkpoint
    assert (cadence.fault + 1) % cadence.snapshot == 0
    assert 0 < cadence.unverified_snapshot <= cadence.fault
