"""Three replicas of one place, forked, on gloo; two have lost their state and get it from the third.

    python share_ranks.py FOLDER

Each leaves what it then has, and what the giver had before, in a file of its own.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import build, everything, train
from safetensors.torch import save_file

from seatrial.train.recovery import carried

GIVER, REPLICAS = 1, 3


def main(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), REPLICAS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=REPLICAS, timeout=timedelta(seconds=30)
    )
    model, optimizer = build(seed=rank)
    torch.manual_seed(rank)
    train(model, optimizer, range(rank + 1))
    before = everything(model, optimizer)
    assert dist.group.WORLD is not None
    with mock.patch.object(carried, "_BUCKET_BYTES", 5000):  # several, and some tensors larger than one
        carried.broadcast_state(model, optimizer, dist.group.WORLD, GIVER)
    for when, values in (("before", before), ("after", everything(model, optimizer))):
        save_file(values, folder / f"{when}-{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    children = []
    for number in range(REPLICAS):
        pid = os.fork()
        if pid == 0:
            main(number, where)
            os._exit(0)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    sys.exit(max(map(abs, codes)))
