"""How far every node of a generation has come. A heartbeat's cost does not grow with the nodes. Pure."""

from __future__ import annotations

from collections import Counter

from seatrial.control.machine.world import World

Done = tuple[
    int, int
]  # the last step, 0: none of this generation; the last batch of the validation after it, 0: none
NOTHING: Done = (0, 0)


class Steps:
    """The steps of the generation that the last heartbeat was counted for."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._of: dict[int, Done] = {}  # node -> what it has done
        self._count: Counter[Done] = Counter()  # the same -> nodes

    def beat(self, world: World, node: int, generation: int, done: Done) -> Done:
        """Record that `node` has `done` this in `generation`; return what all of `world` have done."""
        if self._generation != world.generation:
            self._generation, self._of = world.generation, dict.fromkeys(world.ranks, NOTHING)
            self._count = Counter(self._of.values())
        old, new = self._of.get(node), done if generation == world.generation else NOTHING
        if old is not None and old != new:
            self._of[node] = new
            self._count[new] += 1
            self._count[old] -= 1
            if not self._count[old]:
                del self._count[old]
        return min(self._count)
