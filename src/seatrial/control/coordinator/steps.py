"""The last step completed by every node of a generation. A heartbeat's cost does not grow with the nodes. Pure."""

from __future__ import annotations

from collections import Counter

from seatrial.control.machine.world import World


class Steps:
    """The steps of the generation that the last heartbeat was counted for."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._of: dict[int, int] = {}  # node -> its step; 0: none of this generation
        self._count: Counter[int] = Counter()  # step -> nodes

    def beat(self, world: World, node: int, generation: int, step: int) -> int:
        """Record that `node` completed `step` of `generation`; return the step that all of `world` did, 0 for none."""
        if self._generation != world.generation:
            self._generation, self._of = world.generation, dict.fromkeys(world.ranks, 0)
            self._count = Counter(self._of.values())
        old, new = self._of.get(node), step if generation == world.generation else 0
        if old is not None and old != new:
            self._of[node] = new
            self._count[new] += 1
            self._count[old] -= 1
            if not self._count[old]:
                del self._count[old]
        return min(self._count)
