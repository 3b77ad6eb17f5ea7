"""The control machine through random histories of up to 256 nodes.

`history.py` draws a history from a seed; `world.py` and `cluster.py` play it, with nodes that die, come back, are cut
off, hang, answer late or twice, and with coordinators that die in the middle of what they do. `watcher.py` knows the
true state of every node and holds the machine to these invariants, at every action:

1. One generation at a time: at a start no worker of an older generation lives anywhere, and none begins later.
2. Generations only grow, over all coordinators.
3. A start fills each slot of its shape with a node of its own.
4. No node that is lost, evicted, being reset, or did not stop when told takes part in a start.
5. Progress: when the faults are over, the run ends within a bounded time; "done" only if every step is done and nothing
   runs any more, "failed" only if a budget is spent, the policy says stop, or too few nodes are left.
6. No endless loop: starts are bounded, and so are equal failures without progress.
7. The run ends once. Nothing but notes comes after that.
8. What the machine waits for lies ahead, so that nobody asks it without end.

A failure says its seed: `World(draw(SEED)).run()` is the same history again.
"""

from __future__ import annotations

from collections import Counter

import pytest
from broken import BROKEN, IsHaltedByAnOldStop
from history import draw
from watcher import BrokenInvariantError
from world import World

from seatrial.control.machine.machine import Machine

ENOUGH = 4000  # histories within which a broken machine must be caught; most take fewer than 100, one 3,540


def play(seeds: range) -> Counter[str]:
    """Play these histories; how they ended."""
    ends: Counter[str] = Counter()
    for seed in seeds:
        world = World(draw(seed))
        world.run()
        ends["nothing ended" if world.watcher.ended is None else world.watcher.ended.how] += 1
        ends["starts"] += world.watcher.starts
        ends["nodes"] = max(ends["nodes"], len(world.hosts))
    return ends


def caught_by(machine_type: type[Machine]) -> tuple[int, str]:
    """The history that catches a broken machine, and its invariant. The search begins where a rare one is known."""
    first = 3500 if machine_type is IsHaltedByAnOldStop else 0
    for seed in (*range(first, ENOUGH), *range(first)):
        try:
            World(draw(seed), machine_type).run()
        except BrokenInvariantError as error:
            return seed, str(error).splitlines()[0]
    raise AssertionError(f"{machine_type.__name__} was not caught in {ENOUGH} histories")


def test_a_few_hundred_histories() -> None:
    ends = play(range(300))
    assert ends["done"] > 100
    assert ends["starts"] > 600


@pytest.mark.ci
@pytest.mark.cluster
@pytest.mark.parametrize("histories", [2000, pytest.param(10_000, marks=pytest.mark.long)])
def test_thousands_of_histories(histories: int) -> None:
    ends = play(range(300, 300 + histories))
    # The histories are worth something: most runs get through, all ends occur, and the machine has a lot to do.
    assert ends["done"] > histories // 2
    assert min(ends["failed"], ends["preempted"], ends["interrupted"]) > histories // 100
    assert ends["starts"] > 2.5 * histories
    assert ends["nodes"] > 250


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("machine_type", BROKEN, ids=lambda t: t.__name__)
def test_a_broken_machine_is_caught(machine_type: type[Machine]) -> None:
    seed, invariant = caught_by(machine_type)
    print(f"{machine_type.__name__}: by history {seed}: {invariant}")


def test_a_history_is_the_same_each_time() -> None:
    def events(seed: int) -> list[str]:
        world = World(draw(seed))
        world.run()
        assert world.machine is not None
        return [*world.machine.story().splitlines(), str(world.now), str(world.events)]

    assert events(11) == events(11)
