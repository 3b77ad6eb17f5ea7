"""Memory files with something in them, as a rank would have written it."""

from __future__ import annotations

import json

from seatrial.checkpoint import memory
from seatrial.checkpoint.memory import Filling, Snapshot, layout_key
from seatrial.job.layout import Layout
from seatrial.record.messages import SnapshotFilled

LAYOUT = Layout(shard=2)
KEY = layout_key(LAYOUT.as_dict())


def put(
    fd: int, rank: int = 0, step: int = 10, generation: int = 1, layout: str = KEY, size: int = 5000
) -> Snapshot:
    """Fill `fd` with `size` bytes of data after the header."""
    own = json.dumps(
        memory.metadata(rank=rank, step=step, generation=generation, layout=layout), separators=(",", ":")
    )
    text = (
        f'{{"__metadata__":{own},"x":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
    )
    data = len(text).to_bytes(8, "little") + text
    filling = Filling(fd, len(data) + size)
    filling.add(data)
    filling.add(bytes((rank + step + i) % 251 for i in range(1000)) * (size // 1000) + bytes(size % 1000))
    piece = {"key": f"x/{rank}", "shape": [size], "dtype": "uint8", "offsets": [0], "sizes": [size]}
    index = {"pieces": [piece]}
    return Snapshot(rank, step, generation, layout, len(data) + size, filling.finish(), index)


def filled(snapshot: Snapshot, slot: int) -> SnapshotFilled:
    """What the rank says then."""
    return SnapshotFilled(**snapshot.to_message(), slot=slot, seconds=0.1)
