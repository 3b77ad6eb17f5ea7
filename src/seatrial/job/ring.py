"""Where keys and values of context parallel go around a ring, rather than being gathered."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Positions of a sequence on a rank. Attention to another rank's keys is positions / 2 x (query heads / key heads) FLOPs a byte
# of them: with 4 to 8, 16,000 to 32,000. A GPU that computes 500 TFLOPS while 50 GB/s arrive needs 10,000.
RING_POSITIONS = 8192


@dataclass(frozen=True)
class RingRule:
    """From how many `positions` of a sequence on a rank, where tensor x context are more than so many `ranks`."""

    positions: float
    ranks: int = 0

    def holds(self, sequence: int, tensor: int, context: int) -> bool:
        """For sequences of `sequence` positions in a layout of these sizes."""
        return context > 1 and sequence // context >= self.positions and tensor * context > self.ranks


ALWAYS, NEVER = RingRule(0), RingRule(math.inf)
