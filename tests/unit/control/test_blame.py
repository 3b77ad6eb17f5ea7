"""Who is blamed for a hang: made-up hangs of 256 ranks, which come from running the ranks' programs to a standstill."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hang_cases import LARGE, Hang, evidence, places, program

from seatrial.control.hangs.blame import Sighting, find_blame
from seatrial.control.hangs.evidence import Evidence
from seatrial.control.hangs.waits import dimension
from seatrial.job.layout import Layout

# -- one rank did not arrive


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("seed", range(25))
def test_one_of_256_ranks_stops_anywhere_and_is_found(seed: int) -> None:
    stops = places(seed, 1)
    blame = find_blame(Hang(LARGE, stops).sightings(), LARGE)
    assert (blame.ranks, blame.kind) == (tuple(stops), "not_arrived"), blame
    assert blame.operation is not None
    assert "is at model.py:7 in f" in str(blame)


@pytest.mark.parametrize("seed", range(10))
def test_of_several_stopped_ranks_no_other_is_blamed(seed: int) -> None:
    stops = places(seed, 3)
    blame = find_blame(Hang(LARGE, stops).sightings(), LARGE)
    assert blame.ranks
    assert set(blame.ranks) <= set(stops), blame


def test_the_operation_is_named_with_its_group_and_number() -> None:
    layout = Layout(shard=2, pipeline=2)
    steps = program(layout, 1)
    third = [i for i, (kind, what) in enumerate(steps) if kind == "enter" and what[0] == "shard"][2]
    blame = find_blame(Hang(layout, {1: third}).sightings(), layout)
    assert blame.ranks == (1,)
    assert blame.operation is not None
    assert str(blame.operation) == "reduce_scatter number 3 of the shard group of ranks 0, 1"
    assert blame.operation.waiting == (0,)
    assert blame.evidence[0] == f"rank 1 did not enter {blame.operation}"


def test_the_wait_chain_from_culprit_to_last_waiter_is_reported() -> None:
    layout = Layout(pipeline=4)
    receive = next(i for i, step in enumerate(program(layout, 3)) if step[0] == "receive")
    blame = find_blame(Hang(layout, {3: receive}).sightings(), layout)
    assert blame.ranks == (3,)
    assert blame.operation is not None
    assert blame.operation.name == "send or receive"
    assert "rank 0 for 1 for 2 for 3" in str(blame)


def test_without_a_layout_groups_are_named_by_their_ranks() -> None:
    blame = find_blame(Hang(Layout(shard=4), {2: 0}).sightings())
    assert blame.ranks == (2,)
    assert "of the group of ranks 0, 1, 2, 3" in str(blame)


@pytest.mark.parametrize("seed", range(10))
def test_ranks_waiting_for_their_device_are_not_blamed(seed: int) -> None:
    # On a GPU the host is seen in Python, reading a value, while the collective that it waits for is on the device.
    layout = Layout(replicate=2, shard=4)
    stops = places(seed, 1, layout)
    seen = Hang(layout, stops).sightings()
    for sighting in seen:
        assert sighting.answer is not None
        if sighting.rank not in stops:
            sighting.answer["at"]["in"] = "python" if sighting.rank % 2 else "device"
    blame = find_blame(seen, layout)
    assert blame.ranks == tuple(stops), blame


def test_a_send_or_receive_that_the_recorder_knows_counts_too() -> None:
    # NCCL's are recorded; the host does not wait in them.
    layout = Layout(pipeline=2)
    seen = Hang(layout, {0: 0}).sightings()
    assert seen[1].answer is not None
    seen[1].answer["at"] = {"in": "device", "frame": "streams.py:1 in synchronize", "peers": None}
    seen[1].answer["flight"] = [
        {
            "group": "pp",
            "ranks": [0, 1],
            "last": 0,
            "op": "",
            "pending": [],
            "p2p": [{"op": "recv 1<-0", "peer": 0}],
        }
    ]
    blame = find_blame(seen, layout)
    assert (blame.ranks, blame.kind) == ((0,), "not_arrived")


def test_a_rank_alone_is_its_own_culprit() -> None:
    blame = find_blame(Hang(Layout(), {0: 0}).sightings(), Layout())
    assert (blame.ranks, blame.kind) == ((0,), "not_arrived")
    assert "model.py:7" in str(blame)


def test_rank_absent_from_a_rendezvous_is_blamed() -> None:
    # In a rendezvous: no collective is recorded.
    nowhere = {"flight": [], "python": ""}
    seen = [
        Sighting(
            r, {**nowhere, "at": {"in": "communication" if r != 2 else "python", "frame": "f", "peers": None}}
        )
        for r in range(4)
    ]
    blame = find_blame(seen)
    assert (blame.ranks, blame.kind) == ((2,), "not_arrived")
    assert "did not arrive where the others wait" in str(blame)


def test_uninterruptible_sleep_is_distinguished_from_computing() -> None:
    layout = Layout(shard=4)
    seen = Hang(layout, {2: 0}).sightings()
    seen[2] = Sighting(2, seen[2].answer, evidence(blocked="python (nfs_wait_on_request)"))
    blame = find_blame(seen, layout)
    assert (blame.ranks, blame.kind) == ((2,), "uninterruptible")
    assert "nfs_wait_on_request" in str(blame)


# -- ranks that do not answer


@pytest.mark.parametrize(
    ("found", "kind", "text"),
    [
        (evidence(state="T"), "stopped", "is stopped"),
        (evidence(state="t", tracer="9 (gdb)"), "stopped", "9 (gdb)"),
        (evidence(state="X"), "dead", "has ended"),
        (evidence(state="Z"), "dead", "has ended"),
        (evidence(state="D"), "uninterruptible", "waits in the kernel"),
        (evidence(state="R", cpu_s=0.99), "gil_held", "used 0.99 s of CPU in 1.00 s"),
        (
            evidence(stack='Current thread 0x1:\n  File "a.py", line 3 in f\n'),
            "gil_held",
            'File "a.py", line 3 in f',
        ),
        (evidence(), "unknown", "did not answer SIGUSR2"),
        (None, "unknown", "does not answer"),
    ],
)
def test_a_silent_rank_is_blamed_before_those_that_answer(
    found: Evidence | None, kind: str, text: str
) -> None:
    seen = Hang(LARGE, places(1, 1)).sightings()
    (culprit,) = places(1, 1)
    other = 0 if culprit else 1
    seen[other] = Sighting(other, None, found)
    blame = find_blame(seen, LARGE)
    assert (blame.ranks, blame.kind) == ((other,), kind)
    assert text in str(blame)


def test_what_others_wait_for_is_reported_of_a_silent_rank_too() -> None:
    layout = Layout(pipeline=2, shard=2)
    seen = Hang(layout, {1: 1}).sightings()
    seen[1] = Sighting(1, None, evidence(state="T"))
    blame = find_blame(seen, layout)
    assert str(blame.operation) == "all_gather number 1 of the shard group of ranks 0, 1"


def test_of_silent_ranks_the_one_with_a_reason_comes_first() -> None:
    seen = [Sighting(0, None, evidence()), Sighting(1, None, evidence(state="T")), Sighting(2, None, None)]
    blame = find_blame(seen)
    assert (blame.ranks, blame.kind) == ((1,), "stopped")
    assert "ranks 0, 2 did not answer either" in str(blame)


def stack(*threads: str) -> str:
    """As faulthandler writes it: the main thread last, the innermost frame first."""
    blocks = [
        f'Thread 0x{i} (most recent call first):\n  File "{f}\n  File "run.py", line 1 in g'
        for i, f in enumerate(threads)
    ]
    return "\n\n".join(blocks) + "\n"


def test_rank_slow_to_answer_is_not_blamed() -> None:
    layout = Layout(shard=4)
    seen = Hang(layout, {2: 0}).sightings()
    written = stack(
        '/x/train/supervision/supervisor_client.py", line 9 in _serve',
        '/x/torch/distributed/distributed_c10d.py", line 3 in f',
    )
    seen[1] = Sighting(1, None, evidence(stack=written))
    blame = find_blame(seen, layout)
    assert (blame.ranks, blame.kind) == ((2,), "not_arrived")
    # The thread that waits for the agent is not where the rank is.
    seen[1] = Sighting(
        1, None, evidence(stack=stack('/x/torch/distributed/a.py", line 1 in f', '/x/a.py", line 2 in h'))
    )
    blame = find_blame(seen, layout)
    assert (blame.ranks, blame.kind) == ((1,), "gil_held")
    assert 'rank 1 was at File "/x/a.py", line 2 in h' in str(blame)


# -- nobody can be blamed


def pending(*operations: tuple[int, str, int], age_s: float = 31.0) -> list[dict[str, Any]]:
    return [
        {"seq": seq, "op": op, "state": "scheduled", "sizes": [[size]], "age_s": age_s}
        for seq, op, size in operations
    ]


def waiting(rank: int, group: Iterable[int], operations: list[dict[str, Any]], name: str = "g") -> Sighting:
    members = list(group)
    last = max(o["seq"] for o in operations)
    flight = {"group": name, "ranks": members, "last": last, "op": "", "pending": operations, "p2p": []}
    at = {"in": "communication", "frame": "c10d.py:1 in all_reduce", "caller": "step.py:9", "peers": None}
    return Sighting(rank, {"flight": [flight], "at": at, "python": ""})


def test_unfinished_collective_entered_by_all_points_at_network() -> None:
    layout = Layout(shard=4)
    operations = pending((7, "all_gather", 64), (8, "all_gather", 64))
    blame = find_blame([waiting(r, range(4), operations) for r in range(4)], layout)
    assert (blame.ranks, blame.kind) == ((), "unknown")
    assert "all 4 members are in all_gather number 7 of the world of ranks 0, 1, 2, 3" in str(blame)
    assert "network" in str(blame)
    assert blame.operation is not None
    assert blame.operation.waiting == (0, 1, 2, 3)


def test_different_operations_with_one_number_are_reported() -> None:
    seen = [
        waiting(0, range(2), pending((3, "all_reduce", 64))),
        waiting(1, range(2), pending((3, "broadcast", 8))),
    ]
    blame = find_blame(seen)
    assert (blame.ranks, blame.kind) == ((), "unknown")
    assert "entered different operations as number 3" in str(blame)
    assert "rank 1 entered broadcast with [[8]]" in str(blame)


def test_circular_wait_is_reported_and_no_rank_is_blamed() -> None:
    seen = [
        waiting(0, (0, 1), pending((1, "all_reduce", 1)), "a"),
        waiting(1, (1, 2), pending((1, "all_reduce", 1)), "b"),
        waiting(2, (2, 0), pending((1, "all_reduce", 1)), "c"),
    ]
    blame = find_blame(seen)
    assert (blame.ranks, blame.kind) == ((), "unknown")
    assert "rank 0 for 1 for 2 for 0" in str(blame)
    assert "rank 2 is at step.py:9" in str(blame)


def test_ranks_that_are_all_at_work_are_not_blamed() -> None:
    at = {"in": "python", "frame": "f.py:1 in f", "caller": "f.py:1 in f", "peers": None}
    blame = find_blame([Sighting(r, {"flight": [], "at": at, "python": ""}) for r in range(4)])
    assert (blame.ranks, blame.kind) == ((), "unknown")
    assert "no rank waits for another" in str(blame)


def test_an_answer_without_a_record_does_not_fail() -> None:
    seen = Hang(Layout(shard=4), {2: 0}).sightings()
    seen[0] = Sighting(0, {"flight": [], "error": "AttributeError: no recorder"})
    assert find_blame(seen).ranks == (2,)


# -- words


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (range(4), "tensor group"),
        (range(0, 32, 4), "shard group"),
        ((0, 32), "replicate group"),
        ((0, 64, 128, 192), "pipeline group"),
        ((0, 192), "pipeline group"),
        (range(256), "world"),
        ((0, 5), "group"),
    ],
)
def test_what_a_group_is_in_the_layout(ranks: Iterable[int], name: str) -> None:
    assert dimension(LARGE, tuple(ranks)) == name


def test_a_group_that_exchanges_with_experts() -> None:
    layout = Layout(shard=8, expert=4, tensor=2)
    assert dimension(layout, (0, 2, 4, 6)) == "expert group"
    assert dimension(layout, (0, 8)) == "shard group"
    assert dimension(Layout(replicate=2, shard=4, expert=4), range(4)) == "expert or shard group"


def test_many_ranks_are_not_named_one_by_one() -> None:
    text = str(find_blame(Hang(Layout(shard=32), {9: 1}).sightings(), Layout(shard=32)))
    assert "and 24 more" in text
