"""How far all nodes have come, against the plain minimum over all of them."""

from __future__ import annotations

import random

from seatrial.control.coordinator.steps import NOTHING, Steps
from seatrial.control.machine.world import World
from seatrial.job.layout import Layout
from seatrial.job.shapes import Shape


def world(generation: int, *nodes: int) -> World:
    shape = Shape(slots=len(nodes), layout=Layout(shard=len(nodes)))
    return World.make(generation, dict(enumerate(nodes)), [shape], 0, 1)


def test_it_is_the_least_of_all() -> None:
    chance, steps = random.Random(3), Steps()
    for generation in range(1, 20):
        nodes = chance.sample(range(8), 4)
        here, done = world(generation, *nodes), dict.fromkeys(nodes, NOTHING)
        for _ in range(60):
            node, told = chance.randrange(8), chance.choice([generation, generation, generation, 0])
            step = max(0, max(done.values())[0] + chance.randint(-3, 2))  # a rollback goes down
            came = (step, chance.randint(0, 3))  # batches of a validation
            if node in done:
                done[node] = came if told == generation else NOTHING
            assert steps.beat(here, node, told, came) == min(done.values())
