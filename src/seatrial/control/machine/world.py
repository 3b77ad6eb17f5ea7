"""The current generation, as the coordinator sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seatrial.job.shapes import Shape


@dataclass(frozen=True)
class World:
    """Mapping of a generation's slots and ranks to nodes."""

    generation: int
    shape: Shape
    index: int  # of the shape among the job's
    slots: dict[int, int]  # slot -> node
    ranks: dict[int, list[int]]  # node -> its ranks

    @classmethod
    def make(
        cls, generation: int, slots: Mapping[int, int], shapes: Sequence[Shape], index: int, per_node: int
    ) -> World:
        """Assign ranks to slots in order; the last slot may have fewer."""
        size = shapes[index].layout.world_size
        ranks = {
            node: list(range(slot * per_node, min((slot + 1) * per_node, size)))
            for slot, node in sorted(slots.items())
        }
        return cls(generation, shapes[index], index, dict(slots), ranks)

    @property
    def nodes(self) -> list[int]:
        """Nodes sorted by slot."""
        return [node for _, node in sorted(self.slots.items())]

    def node_of(self, rank: int) -> int | None:
        return next((node for node, ranks in self.ranks.items() if rank in ranks), None)

    def neighbour(self, slot: int, step: int) -> int | None:
        """The node `step` slots further along the ring; None if that is the same node."""
        node = self.slots[(slot + step) % len(self.slots)]
        return None if node == self.slots[slot] else node

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "generation": self.generation,
            "index": self.index,
            "slots": {str(slot): node for slot, node in self.slots.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], shapes: Sequence[Shape], per_node: int) -> World:
        """The inverse of `to_dict`."""
        slots = {int(slot): node for slot, node in values["slots"].items()}
        return cls.make(values["generation"], slots, shapes, values["index"], per_node)
