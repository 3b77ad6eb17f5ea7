"""What a scenario must lead to: data that the judge reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What may be off, relative, once another number of replicas has summed the gradients in another order. Measured on
# first-voyage over 19 steps after a shrink, at a learning rate of 3e-3: 6e-7, 4e-5 and 7e-5, growing with the steps.
OTHER_WORLD = {"loss": 1e-4, "gradient norm": 1e-3, "weights": 1e-2}

World = Literal["same", "other", "any"]
Names = Literal["rank", "node", "nothing"]
Redone = Literal["none", "one", "snapshot", "two snapshots", "checkpoint", "two checkpoints"]


@dataclass(frozen=True)
class Expectation:
    """The class of outcome of one scenario.

    world     same: the run ends as large as it began, bit-equal to the one that never failed; other: it trains on fewer
              replicas for a while, with the same data in the same order; any: whichever of the two happened
    detected  kinds of events of which the first after the fault is its detection
    names     what that event (or, with `named_by`, the first of those kinds) must name
    first_names  whether the first of those events must name it, or any may
    recovers  whether a later generation, or a redone step, follows
    redone    how many steps may be done again
    exits     how its processes end, one after the other: -9 killed by the drill, 75 preempted, 0 done
    follows   kinds of events that must come after the fault
    replaced  whether the named node is out of the next generation; None: not asked
    """

    world: World
    detected: tuple[str, ...]
    names: Names
    recovers: bool = True
    redone: Redone = "snapshot"
    named_by: tuple[str, ...] = ()
    first_names: bool = True
    exits: tuple[int, ...] = (0,)
    follows: tuple[str, ...] = ()
    replaced: bool | None = None

    def in_words(self) -> str:
        """For the list of scenarios."""
        return {
            "same": "same world, bit-equal",
            "other": "other world, same data in the same order",
            "any": "bit-equal, or the same data where it had to shrink",
        }[self.world]

    def redone_limit(self, *, snapshot: int, checkpoint: int) -> int:
        """How many steps may be done again, given how often copies are made (0: never)."""
        if self.redone == "none":
            return 0
        if self.redone == "one":
            return 1
        often = 2 if self.redone.startswith("two") else 1
        if "checkpoint" in self.redone or not snapshot:
            return often * checkpoint
        return often * snapshot
