"""What an agent tells a rank of a generation, where a test does not care."""

from __future__ import annotations

from typing import Any

from seatrial.record.messages import RankSpec


def rank_spec(generation: int, rank: int = 0, **more: Any) -> RankSpec:
    plain: dict[str, Any] = {"local_rank": 0, "node": 0, "slot": 0, "slots": 1, "world_size": 1, "layout": {}}
    plain |= {"master_addr": "127.0.0.1", "master_port": 1, "again": False, "inputs": {}, "snapshots": []}
    return RankSpec(generation=generation, rank=rank, **plain | {"log": ""} | more)
