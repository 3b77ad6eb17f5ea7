"""The smaller layouts of a job: whole replicas left out, the batch and the rules kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import GOOD, load

from seatrial.job import Job, job_from_text
from seatrial.job.layout import Layout
from seatrial.job.shapes import Shape, at_shape, shapes


def sizes(job: Job) -> list[tuple[int, int, int]]:
    return [(s.slots, s.layout.replicate, s.layout.shard) for s in shapes(job)]


def test_the_own_layout_comes_first_then_one_replica_less() -> None:
    job = load()
    assert shapes(job)[0] == Shape(2, job.layout)
    assert sizes(job) == [(2, 1, 2), (1, 1, 1)]


def test_one_node_has_nothing_smaller() -> None:
    assert sizes(load(GOOD, "cluster.nodes=1")) == [(1, 1, 1)]


def test_replicas_go_before_shards() -> None:
    job = load(GOOD, "cluster.nodes=8", "parallel.replicate=4", "train.global_batch=96", "train.microbatch=1")
    assert sizes(job) == [(8, 4, 2), (6, 3, 2), (4, 2, 2), (2, 1, 2), (1, 1, 1)]


def test_a_batch_that_cannot_be_divided_leaves_sizes_out() -> None:
    """32 / microbatch 4 = 8 microbatches: over 8, 4, 2 or 1 replicas, never over 7, 6, 5 or 3."""
    job = load(GOOD, "cluster.nodes=4", "parallel.pipeline=1", "parallel.tensor=2")
    assert [s.layout.shard for s in shapes(job)] == [8, 4, 2]
    assert [s.slots for s in shapes(job)] == [4, 2, 1]


def test_sizes_that_save_no_node_are_left_out() -> None:
    job = load(
        GOOD, "parallel.pipeline=1", "parallel.tensor=1", "train.global_batch=840", "train.microbatch=1"
    )
    assert sizes(job) == [(2, 1, 8), (1, 1, 4)]


def test_the_last_node_may_be_partly_used() -> None:
    job = load(
        GOOD,
        "cluster.nodes=3",
        "parallel.pipeline=1",
        "parallel.tensor=2",
        "train.global_batch=60",
        "train.microbatch=1",
    )
    assert sizes(job) == [(3, 1, 6), (2, 1, 4), (1, 1, 2)]
    odd = load(GOOD, "cluster.nodes=3", "parallel.pipeline=1", "train.global_batch=30", "train.microbatch=1")
    assert sizes(odd) == [(3, 1, 6), (2, 1, 3), (1, 1, 2)]
    assert shapes(odd)[1].layout.world_size == 6


def test_interleaved_schedule_keeps_pipeline_multiples() -> None:
    interleaved = ("parallel.schedule=interleaved-1f1b", "parallel.stages_per_rank=2")
    job = load(GOOD, "cluster.nodes=3", "train.global_batch=24", "train.microbatch=2", *interleaved)
    # 24 / 2 = 12 microbatches: 4 on each of 3 replicas, 6 on each of 2, 12 on one.
    assert sizes(job) == [(3, 1, 3), (2, 1, 2), (1, 1, 1)]


def test_a_job_at_a_shape_is_the_same_run_with_more_microbatches() -> None:
    job = load()
    small = at_shape(job, shapes(job)[1].layout)
    assert (job.microbatches, small.microbatches) == (4, 8)
    assert small.identity() == job.identity()
    assert small.layout == shapes(job)[1].layout
    assert (small.cluster.nodes, small.parallel.shard, small.parallel.replicate) == (1, 1, 1)
    assert (small.train, small.optimizer, small.checkpoint) == (job.train, job.optimizer, job.checkpoint)
    assert at_shape(small, job.layout).layout == job.layout


def test_a_job_at_a_shape_reads_as_a_job_file() -> None:
    job = load()
    for shape in shapes(job):
        small = at_shape(job, shape.layout)
        again = job_from_text(small.to_toml(), name="job.toml", base_folder=Path("/nowhere"))
        assert (again.layout, again.microbatches) == (small.layout, small.microbatches)


def test_another_pipeline_is_not_a_shape_of_the_job() -> None:
    job = load()
    with pytest.raises(AssertionError, match="is no shape of"):
        at_shape(job, Layout(pipeline=1, shard=4, tensor=2))


@pytest.mark.cluster  # for its time only
@given(
    tensor=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2, 4]),
    replicate=st.integers(1, 3),
    shard=st.integers(1, 6),
    micro=st.integers(1, 3),
    microbatches=st.integers(4, 12),
    data=st.data(),
)
def test_every_shape_is_a_job_that_the_rules_allow(
    tensor: int,
    pipeline: int,
    replicate: int,
    shard: int,
    micro: int,
    microbatches: int,
    data: st.DataObject,
) -> None:
    world = tensor * pipeline * replicate * shard
    gpus = data.draw(st.sampled_from([g for g in range(tensor, world + 1, tensor) if world % g == 0]))
    values = {
        "cluster.nodes": world // gpus,
        "cluster.gpus_per_node": gpus,
        "parallel.tensor": tensor,
        "parallel.pipeline": pipeline,
        "parallel.replicate": replicate,
        "train.global_batch": replicate * shard * micro * microbatches,
        "train.microbatch": micro,
    }
    job = load(GOOD, *(f"{key}={value}" for key, value in values.items()))
    found = shapes(job)
    assert found[0] == Shape(world // gpus, job.layout)
    slots = [s.slots for s in found]
    assert slots == sorted(set(slots), reverse=True)
    for shape in found:
        small = at_shape(job, shape.layout)
        assert small.microbatches * small.layout.data_parallel * micro == job.train.global_batch
        assert small.microbatches >= pipeline
        if shape.slots * gpus == shape.layout.world_size:  # a job file has full nodes only
            again = job_from_text(small.to_toml(), name="j", base_folder=Path("/"))
            assert again.layout == shape.layout
