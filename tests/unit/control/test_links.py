"""Whose network is slow, from round trips between agents and coordinator."""

from __future__ import annotations

import pytest

from seatrial.control.coordinator.links import RoundTrips, SlowLink

FAST, SLOW = 0.001, 0.5


def tell(links: RoundTrips, times: dict[int, float], rounds: int = 4) -> list[SlowLink]:
    """`rounds` beats of each node; what was found."""
    found = []
    for _ in range(rounds):
        found += [link for node, seconds in times.items() if (link := links.add(node, seconds)) is not None]
    return found


def test_a_node_with_slow_round_trips_is_named_once() -> None:
    links = RoundTrips(own=0)
    found = tell(links, {0: FAST, 1: SLOW, 2: FAST}, rounds=20)
    assert [link.node for link in found] == [1]
    assert str(found[0]).startswith("TCP round trips to node 1 take 0.50 s, those to other nodes 1 ms")
    slowest = links.slowest()
    assert slowest is not None
    assert slowest.node == 1


def test_a_few_slow_round_trips_are_not_a_slow_link() -> None:
    links = RoundTrips(own=0)
    assert tell(links, {0: FAST, 1: SLOW, 2: FAST}, rounds=3) == []
    assert tell(links, {1: FAST}, rounds=1) == []
    assert tell(links, {1: SLOW}, rounds=3) == []


def test_if_all_round_trips_are_slow_no_node_is_blamed() -> None:
    assert tell(RoundTrips(own=0), {0: SLOW, 1: SLOW, 2: SLOW}) == []


def test_coordinators_own_link_is_named_when_all_others_are_slow() -> None:
    links = RoundTrips(own=2)
    found = tell(links, {0: SLOW, 1: 2 * SLOW, 2: FAST})
    assert [(link.node, link.own) for link in found] == [(2, True)]
    assert "all other nodes" in str(found[0])


@pytest.mark.parametrize("own", [0, 1])
def test_of_two_nodes_the_other_one_is_named(own: int) -> None:
    assert [link.node for link in tell(RoundTrips(own), {own: FAST, 1 - own: SLOW})] == [1 - own]


def test_a_slow_link_is_reported_again_after_recovery_or_loss() -> None:
    links = RoundTrips(own=0)
    times = {0: FAST, 1: SLOW, 2: FAST}
    assert len(tell(links, times)) == 1
    assert tell(links, {1: FAST}, rounds=1) == []
    assert len(tell(links, times)) == 1
    links.forget(1)
    assert links.slowest() is None
    assert len(tell(links, times)) == 1
