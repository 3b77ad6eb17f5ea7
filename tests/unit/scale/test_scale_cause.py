"""The cause of a lost efficiency: tables made by hand, what is named, and what timings cannot tell."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from seatrial.hardware.counters import PortFault
from seatrial.job.layout import Layout
from seatrial.record.stages import (
    BACKWARD,
    CONTEXT,
    DATA,
    EXPERT,
    FORWARD,
    PIPELINE,
    REPLICATE,
    SAVE,
    SHARD,
    STAGES,
    STEP_SUM,
    TENSOR,
    RankStages,
)
from seatrial.scale.cause import Cause, find_causes, lines
from seatrial.scale.observed import Observed, steady_steps

LARGE, SMALL = {"shard": 1e9, "replicate": 1e9}, {"shard": 1e5}
RETRANSMISSIONS = PortFault("retransmissions", None, "TCP sent 2.00% of its segments again", {})
FSDP_2, FSDP_4 = Layout(shard=2), Layout(shard=4)


def size(
    layout: Layout, waits: Mapping[tuple[int, int], float], *, per_node: int = 1, steps: int = 4, **known: Any
) -> Observed:
    """A second of compute on each rank, and `waits`: (rank, or -1 for all; stage) -> seconds, added in this order."""
    table = np.zeros((layout.world_size, len(STAGES)))
    table[:, FORWARD], table[:, BACKWARD], table[:, DATA], table[:, STEP_SUM] = 0.3, 0.7, 0.01, 0.001
    for (rank, stage), seconds in waits.items():
        table[slice(None) if rank < 0 else rank, stage] += seconds
    tokens = known.pop("tokens", 1000.0 * layout.world_size)
    return Observed(np.repeat(table[None], steps, axis=0), layout, per_node, tokens, **known)


BASE = size(FSDP_2, {(-1, SHARD): 0.1})


def only(found: Sequence[Cause]) -> Cause:
    assert len(found) == 1, found
    return found[0]


def test_no_cause_without_a_loss() -> None:
    assert find_causes(BASE, size(FSDP_4, {(-1, SHARD): 0.11})) == ()


def test_a_slow_rank_is_named_and_waiting_ranks_are_not() -> None:
    late = {(r, SHARD): 0.4 for r in (0, 1, 3)}
    found = only(find_causes(BASE, size(FSDP_4, {(-1, SHARD): 0.1, (2, BACKWARD): 0.4} | late)))
    assert (found.kind, found.ranks, found.nodes, found.remove_node) == ("straggler", (2,), (2,), 2)
    assert found.seconds == pytest.approx(0.4)


def test_one_of_two_ranks_can_be_slow() -> None:
    alone = size(Layout(), {})
    found = only(find_causes(alone, size(FSDP_2, {(1, FORWARD): 0.3, (0, SHARD): 0.3})))
    assert (found.kind, found.ranks) == ("straggler", (1,))


@pytest.mark.parametrize(("mhz", "word"), [(1200.0, "low"), (1980.0, "normal")])
def test_the_clock_of_a_slow_device_is_reported(mhz: float, word: str) -> None:
    late = {(r, SHARD): 0.4 for r in (0, 1, 3)}
    clocks = np.array([1980.0, 1980.0, mhz, 1975.0])
    here = size(FSDP_4, {(-1, SHARD): 0.1, (2, BACKWARD): 0.4} | late, clocks_mhz=clocks)
    assert any(f"clock is {word}" in text for text in only(find_causes(BASE, here)).evidence)


def test_a_slow_disk_is_named_but_no_node_for_a_slow_store() -> None:
    late = {(r, SHARD): 0.4 for r in (0, 1, 3)}
    disk = only(find_causes(BASE, size(FSDP_4, {(-1, SHARD): 0.1, (2, DATA): 0.4} | late)))
    assert (disk.kind, disk.nodes, disk.remove_node) == ("data", (2,), 2)
    store = only(find_causes(BASE, size(FSDP_4, {(-1, SHARD): 0.1, (-1, DATA): 0.4})))
    assert (store.kind, store.ranks, store.remove_node) == ("data", (), None)


def test_timings_do_not_locate_a_slow_link_in_one_ring() -> None:
    base = size(FSDP_2, {(-1, SHARD): 0.1})
    here = size(FSDP_4, {(-1, SHARD): 0.5}, message_bytes=LARGE)
    found = only(find_causes(base, here))
    assert (found.kind, found.dimensions, found.nodes, found.remove_node) == ("network", ("shard",), (), None)
    assert any("timings do not show" in text for text in found.evidence)


def test_counters_locate_a_slow_link() -> None:
    here = size(FSDP_4, {(-1, SHARD): 0.5}, message_bytes=LARGE, faults={2: [RETRANSMISSIONS], 1: []})
    found = only(find_causes(BASE, here))
    assert (found.kind, found.nodes, found.remove_node) == ("network", (2,), 2)
    assert RETRANSMISSIONS.message in " ".join(found.evidence)


def test_counter_faults_of_the_first_size_are_ignored() -> None:
    base = size(FSDP_2, {(-1, SHARD): 0.1}, faults={2: [RETRANSMISSIONS]})
    here = size(FSDP_4, {(-1, SHARD): 0.5}, message_bytes=LARGE, faults={2: [RETRANSMISSIONS]})
    assert only(find_causes(base, here)).nodes == ()


def test_counters_of_every_node_are_congestion() -> None:
    crowded = {
        n: [PortFault("congestion", "mlx5_0/1", "held back for 30 % of the time", {})] for n in range(4)
    }
    found = only(find_causes(BASE, size(FSDP_4, {(-1, SHARD): 0.5}, message_bytes=LARGE, faults=crowded)))
    assert (found.kind, found.nodes, found.remove_node) == ("congestion", (0, 1, 2, 3), None)


def test_a_node_in_the_slow_groups_of_two_dimensions_is_named() -> None:
    # Node 2 is replica 1, shard 0. Its ring along shard is {2, 3}, along replicate {0, 2}.
    layout, old = Layout(replicate=2, shard=2), Layout(shard=2)
    slow = {(2, SHARD): 0.2, (3, SHARD): 0.2, (0, REPLICATE): 0.5, (2, REPLICATE): 0.3, (1, REPLICATE): 0.2}
    here = size(
        layout, {(-1, SHARD): 0.1, (-1, REPLICATE): 0.02, (1, STEP_SUM): 0.3, (3, STEP_SUM): 0.3} | slow
    )
    found = only(find_causes(size(old, {(-1, SHARD): 0.1}), here))
    assert (found.kind, found.nodes, found.remove_node) == ("network", (2,), 2)
    assert set(found.dimensions) == {"shard", "replicate"}
    assert found.seconds == pytest.approx(0.5, abs=0.03)


def test_a_slow_context_group_is_named() -> None:
    """Context groups of 2 ranks within the ring of 4 over which states are sharded: it waits for the slow group."""
    layout, old = Layout(shard=4, context=2), Layout(shard=2, context=2)
    usual = {(-1, CONTEXT): 0.1, (-1, SHARD): 0.05}
    slow = {(2, CONTEXT): 0.4, (3, CONTEXT): 0.4, (0, SHARD): 0.4, (1, SHARD): 0.4}
    found = only(find_causes(size(old, usual), size(layout, usual | slow)))
    assert (found.kind, found.dimensions, found.ranks) == ("network", ("context",), (2, 3))
    assert found.seconds == pytest.approx(0.4)


def test_a_slow_expert_group_is_named() -> None:
    layout, old = Layout(shard=4, expert=2), Layout(shard=2, expert=2)
    usual = {(-1, EXPERT): 0.1, (-1, SHARD): 0.05}
    slow = {(2, EXPERT): 0.4, (3, EXPERT): 0.4, (0, SHARD): 0.4, (1, SHARD): 0.4}
    found = only(find_causes(size(old, usual), size(layout, usual | slow)))
    assert (found.kind, found.dimensions, found.ranks) == ("network", ("expert",), (2, 3))


def test_slower_exchange_of_keys_is_communication() -> None:
    layout, old = Layout(shard=4, context=2), Layout(shard=2, context=2)
    usual = {(-1, SHARD): 0.05}
    found = only(
        find_causes(size(old, usual | {(-1, CONTEXT): 0.1}), size(layout, usual | {(-1, CONTEXT): 0.5}))
    )
    assert (found.kind, found.dimensions, found.ranks) == ("communication", ("context",), ())
    assert found.seconds == pytest.approx(0.4)


def test_a_slow_rail_is_named_and_its_node_is_not() -> None:
    layout, old = Layout(shard=4, tensor=2), Layout(shard=2, tensor=2)
    odd, even = range(1, 8, 2), range(0, 8, 2)
    slow = {(r, SHARD): 0.3 for r in odd} | {(r, TENSOR): 0.3 for r in even}
    usual = {(-1, SHARD): 0.1, (-1, TENSOR): 0.05}
    found = only(find_causes(size(old, usual, per_node=2), size(layout, usual | slow, per_node=2)))
    assert (found.kind, found.link, found.ranks) == ("network", "rail 1", (1, 3, 5, 7))
    assert (found.nodes, found.remove_node) == ((0, 1, 2, 3), None)
    assert "network on shard, one of nodes 0-3, ranks 1, 3, 5, 7, rail 1" in next(iter(lines([found])))[1]


def test_small_messages_are_identified_by_size() -> None:
    found = only(find_causes(BASE, size(FSDP_4, {(-1, SHARD): 0.5}, message_bytes=SMALL)))
    assert found.kind == "small messages"
    unknown = only(find_causes(BASE, size(FSDP_4, {(-1, SHARD): 0.5})))
    assert unknown.kind == "communication"
    # 0.4 s more for 24 collectives over 3 hops each are no latency; 0.5 ms for each of 1,000 hops may be.
    few, many = ({"shard": calls} for calls in (24, 333))
    assert (
        only(find_causes(BASE, size(FSDP_4, {(-1, SHARD): 0.5}, message_bytes=SMALL, calls=few))).kind
        == "network"
    )
    found = only(find_causes(BASE, size(FSDP_4, {(-1, SHARD): 0.5}, message_bytes=SMALL, calls=many)))
    assert found.kind == "small messages"
    assert "333 collectives per step" in " ".join(found.evidence)
    # What is sent along the pipeline goes to one rank only: no latency of many hops.
    assert "4.00 KiB per message" in " ".join(pipeline_waits(message_bytes={"pipeline": 4096}).evidence)


def pipeline_waits(**known: Any) -> Cause:
    base = size(Layout(pipeline=2), {(-1, PIPELINE): 0.1}, microbatches=8)
    here = size(Layout(pipeline=2, replicate=2), {(-1, PIPELINE): 0.6}, microbatches=8, **known)
    return only(find_causes(base, here))


def test_fewer_microbatches_are_a_bubble() -> None:
    old, new = Layout(pipeline=2), Layout(pipeline=2, replicate=2)

    # 1F1B with equal stages: idle for 1/m of the work. The last stage idles before its first pass and after its last.
    def waits(idle: float, ranks: int) -> dict[tuple[int, int], float]:
        first = {(r, PIPELINE): idle for r in range(ranks // 2)}
        last = {(r, PIPELINE): idle / 3 for r in range(ranks // 2, ranks)}
        return first | last | {(r, STEP_SUM): idle * 2 / 3 for r in range(ranks // 2, ranks)}

    base = size(old, waits(1 / 8, 2), microbatches=8)
    found = only(find_causes(base, size(new, waits(1 / 2, 4), microbatches=2)))
    assert found.kind == "bubble"
    assert found.seconds == pytest.approx(1 / 2 - 1 / 8)
    # The same idle time with as many microbatches: not what filling and draining explain.
    assert {c.kind for c in find_causes(base, size(new, waits(1 / 2, 4), microbatches=8))} == {
        "communication"
    }


def test_saves_count_though_most_steps_have_none() -> None:
    here = size(FSDP_4, {(-1, SHARD): 0.1}, steps=20)
    here.seconds[::5, :, SAVE] = 1.0
    found = only(find_causes(BASE, here))
    assert found.kind == "save"
    assert found.seconds == pytest.approx(0.2)


def test_strong_scaling_expects_less_work() -> None:
    base = size(FSDP_2, {(-1, SHARD): 0.1}, tokens=8000.0)
    here = size(FSDP_4, {(-1, SHARD): 0.1}, tokens=8000.0)  # half the tokens of a rank in the same time
    found = find_causes(base, here)
    assert found[0].kind == "compute"
    assert found[0].seconds == pytest.approx(0.5)


def test_waiting_for_replicas_in_shard_blames_no_shard_group() -> None:
    layout = Layout(replicate=2, shard=2)
    # Rank 0 is late; its shard group waits for it there, the other replica at the sums over replicas.
    waits = {(-1, SHARD): 0.1, (0, BACKWARD): 0.4, (1, SHARD): 0.4, (2, SHARD): 0.4, (3, SHARD): 0.4}
    merged = {"replicate": "counts as shard"}
    found = only(find_causes(BASE, size(layout, waits, not_separated=merged)))
    assert (found.kind, found.ranks) == ("straggler", (0,))


def test_sizes_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline"):
        find_causes(size(Layout(), {}), size(Layout(pipeline=2), {}))
    with pytest.raises(ValueError, match="context"):
        find_causes(size(Layout(shard=2), {}), size(Layout(shard=2, context=2), {}))
    with pytest.raises(ValueError, match="the layout has 4 ranks"):
        Observed(np.zeros((1, 2, len(STAGES))), FSDP_4, 1, 1.0)


def test_the_steps_that_all_ranks_recorded() -> None:
    def record(rank: int, steps: Sequence[int], ranks: int = 2) -> RankStages:
        seconds = np.array([[step + rank / 10] * len(STAGES) for step in steps])
        return RankStages(1, rank, ranks, "cpu", 3, {}, np.array(steps), seconds)

    both = {1: record(1, [3, 4, 5, 7]), 0: record(0, [3, 4, 5, 6, 7])}
    table = steady_steps(both, 1)
    assert table is not None
    assert table[:, :, 0].tolist() == [[4, 4.1], [5, 5.1], [7, 7.1]]
    assert steady_steps(both, 5) is None
    assert steady_steps({}, 0) is None
    assert steady_steps({0: record(0, [3, 4])}, 0) is None  # a rank is missing


def test_words_and_json() -> None:
    late = {(r, SHARD): 0.4 for r in (0, 1, 3)}
    found = find_causes(BASE, size(FSDP_4, {(-1, SHARD): 0.1, (2, BACKWARD): 0.4} | late))
    label, text = next(iter(lines(found)))
    assert label == "cause"
    assert text.startswith(
        "straggler node 2, rank 2: 400 ms of a step (26%); rank 2: compute takes 1.40 times"
    )
    assert (
        "try",
        "repeat this size without node 2: exclude it from the allocation (slurm.exclude)",
    ) in lines(found)
    assert json.loads(json.dumps(asdict(found[0])))["remove_node"] == 2
