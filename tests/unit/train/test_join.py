"""How a rank joins the process group, with fakes for CUDA and NCCL."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster

CODE = """
from datetime import timedelta
import torch, torch.distributed as dist
from seatrial.train.rank import RankEnvironment, join
asked, real = {}, dist.init_process_group

def stand_in(backend, **given):
    asked.update(given, backend=backend)
    real("gloo", store=given["store"], rank=0, world_size=1, timeout=given["timeout"])
    dist.group.WORLD.bound_device_id = given["device_id"]

torch.accelerator.set_device_index = lambda device: asked.update(set=device)
dist.init_process_group = stand_in
device = join(RankEnvironment(0, 3, 1, 0, DEVICE), timedelta(seconds=77), dist.HashStore())
print(asked["backend"], device, asked["device_id"], asked.get("set"), dist.group.WORLD.bound_device_id, asked["timeout"])
"""


def said(device: str) -> list[str]:
    code = CODE.replace("DEVICE", repr(device))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.ci
def test_nccl_gets_the_device_and_groups_are_not_split() -> None:
    """Split groups need every rank of the world, and ours are made by their members alone."""
    assert said("cuda") == ["nccl", "cuda:3", "cuda:3", "cuda:3", "None", str(timedelta(seconds=77))]


@pytest.mark.ci
def test_gloo_is_unchanged() -> None:
    assert said("cpu") == ["gloo", "cpu", "None", "None", "None", str(timedelta(seconds=77))]
