"""The state that a rank saves. `staging.AsyncWriter` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from seatrial.base.box import Box
from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.verified import BOXES


class SaveFailed(SeatrialError):
    """A checkpoint could not be written (disk full, no permission, ...). Existing checkpoints are untouched."""


class PeerSaveFailed(SaveFailed):
    """Like SaveFailed, in a rank that wrote its own part: another rank knows the reason."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, saved by this rank."""

    key: str  # "KIND/NAME"
    tensor: Tensor
    box: Box
    whole: tuple[int, ...]
    owner: bool = True  # each box has exactly one owner among the ranks
    stands_in: bool = False  # would be the owner if this rank's replica were the only one

    def to_index(self) -> dict[str, Any]:
        """Its entry in the index of the file that holds it."""
        return {
            "key": self.key,
            "shape": self.whole,
            "dtype": str(self.tensor.dtype).removeprefix("torch."),
            "offsets": self.box.offsets,
            "sizes": self.box.sizes,
            "owner": self.owner,
            "stands_in": self.stands_in,
        }


def boxes_of(pieces: Iterable[Piece]) -> dict[str, str]:
    """The metadata of the file that holds `pieces`: where each belongs, in case the manifest is wrong about it."""
    boxes = {piece.key: [piece.box.offsets, piece.whole] for piece in pieces}
    return {BOXES: json.dumps(boxes, separators=(",", ":"))}
