"""Where the time of a step went at one size, from the records that the ranks of its runs left in their run folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.record.connections import read_connections
from seatrial.record.folder import RunFolder
from seatrial.record.frontier import Account, account
from seatrial.record.stages import read_generation
from seatrial.scale.links import SlowLink, slow_link
from seatrial.scale.sizes import Size
from seatrial.scale.trial import Trial


@dataclass(frozen=True)
class Steps:
    """The steady steps of one run of a size."""

    size: Size
    account: Account
    slow_link: SlowLink | None  # the link that is slower than all others, whatever it costs
    training_s: float  # of the run: all its steps

    @property
    def ranks_per_node(self) -> int:
        return self.size.gpus // self.size.nodes

    def node_of(self, rank: int) -> int:
        """The node of `rank`: nodes hold consecutive ranks, and a measured run has no spares."""
        return rank // self.ranks_per_node


def steps_of(root: Path, size: Size, trials: Sequence[Trial]) -> Steps | None:
    """Of the run in `root` with the median speed among `trials`; None if its ranks' records cannot be used."""
    known = sorted((t.figures.tokens_per_s, i) for i, t in enumerate(trials) if t.figures is not None)
    if not known:
        return None
    trial = trials[known[len(known) // 2][1]]
    assert trial.figures is not None
    folder = RunFolder(root / trial.folder)
    stages, _ = read_generation(folder, 1)
    found = account(stages, first_step=trial.figures.warm_up + 1)
    if found is None:
        return None
    connections, _ = read_connections(folder, 1)
    ranks_per_node = size.gpus // size.nodes
    link = slow_link(connections, {rank: rank // ranks_per_node for rank in range(size.gpus)})
    seconds = sum(float(each.seconds.sum()) for each in stages.values()) / len(stages)
    return Steps(size, found, link, seconds)
