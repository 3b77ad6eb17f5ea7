"""The expected outcome of a scenario, as data for the judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Relative tolerances against a run that kept its size, once another number of replicas has summed the gradients in another
# order. Measured on first-voyage over 19 steps after a shrink, at a learning rate of 3e-3: in fp32 6e-7, 4e-5 and 7e-5, growing
# with the steps. In bf16 the first of these steps was 1e-7 apart, and the tenth 0.1: rounding to 8 bits magnifies the last
# bits of the weights. So with less than fp32 only the first step is held to them.
OTHER_WORLD = {"loss": 1e-4, "gradient norm": 1e-3, "weights": 1e-2}

SizeAtEnd = Literal["same", "other", "any"]
Names = Literal["rank", "node", "nothing"]
Redone = Literal["none", "one", "snapshot", "two snapshots", "checkpoint", "two checkpoints"]


@dataclass(frozen=True)
class Expectation:
    """Class of outcome of one scenario.

    world     same: the run ends as large as it began, bit-equal to the reference; other: it trains on fewer replicas
              for a while, with the same data in the same order, bit-equal to a replay in the same layouts; any: whichever
              of the two happened
    detected  kinds of events of which the first after the fault counts as its detection
    names     what that event (or, with `named_by`, the first of those kinds) must name
    first_names  whether the first of those events must name it, or any of them may
    recovers  whether a later generation, or a redone step, must follow
    redone    how many steps may be redone
    exits     exit codes of its processes in order: -9 killed by the drill, 75 preempted, 0 done
    follows   kinds of events that must follow the fault
    replaced  whether the named node is out of the next generation; None: not checked
    """

    world: SizeAtEnd
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
        """Short text for the list of scenarios."""
        return {
            "same": "same world, bit-equal",
            "other": "other world, same data in the same order",
            "any": "bit-equal, or the same data if it had to shrink",
        }[self.world]

    def redone_limit(self, *, snapshot: int, checkpoint: int, late: Sequence[int] = ()) -> int:
        """Maximum number of redone steps, given the intervals of snapshots and checkpoints (0: never).

        `late`: by how many steps checkpoints were delayed, because the one before was still being written.
        """
        if self.redone == "none":
            return 0
        if self.redone == "one":
            return 1
        often = 2 if self.redone.startswith("two") else 1
        if "checkpoint" in self.redone or not snapshot:
            return often * checkpoint + sum(sorted(late)[-often:])
        return often * snapshot
