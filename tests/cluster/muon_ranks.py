"""Muon in many layouts: with gradients that are given, and in training; see test_muon.py.

python muon_ranks.py CASES.json OUT_FOLDER
"""

from __future__ import annotations

import sys
from typing import Any

import parity_ranks
import torch
from parity_ranks import LR, NoisyWeights, arch_of, build
from torch import Tensor
from torch.distributed.tensor import DTensor

from seatrial.job.schema import OptimizerSection
from seatrial.parallel.mesh import Mesh
from seatrial.train.optimizer import build_optimizer

UPDATES, SCALE = 3, 0.37


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """Whole, the same in every layout."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
    return torch.randn(shape, generator=generator)


def update(case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Updates with `gradient`, scaled as clipping does it; this rank's weights and states after them."""
    model = build(case, mesh, NoisyWeights(arch_of(case), seed=1))
    optimizer = build_optimizer(model.shards, OptimizerSection(**{"lr": LR, **case["optimizer"]}), mesh)
    scale = torch.tensor(SCALE)
    for step in range(UPDATES):
        for s in model.shards:
            own = gradient(s.name, s.whole, step)[s.box.slices()].clone()
            p = s.parameter
            if isinstance(p, DTensor):
                own = DTensor.from_local(
                    own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )
            p.grad = own
        optimizer.prepare(scale)
        optimizer.update(LR, scale)
    return {
        "weights": [(s.name, s.box.offsets, s.local.clone()) for s in model.shards],
        "states": [(f"{kind}/{s.name}", s.box.offsets, v.clone()) for kind, s, v in optimizer.state()],
    }


def work(case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    return parity_ranks.train(case, mesh) if "steps" in case else update(case, mesh)


if __name__ == "__main__":
    sys.exit(parity_ranks.main(work))
