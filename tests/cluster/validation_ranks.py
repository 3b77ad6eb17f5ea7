"""Trains a small job with a validation in many layouts, and leaves the run folder of each.

    python validation_ranks.py CASES.json OUT_FOLDER

A case is {"name", "layout", "tied", "root", "stores": [training, validation], "validates", "documents"}.
"""

from __future__ import annotations

import sys
from typing import Any

import parity_ranks
import torch
from parity_ranks import LENGTH, SEQUENCES, NoisyWeights

from seatrial.base.batches import BatchSizes
from seatrial.data.loader import BatchLoader
from seatrial.data.store import TokenStore
from seatrial.parallel.mesh import Mesh
from seatrial.train.loop import Loop
from seatrial.train.optimizer import build_optimizer
from seatrial.train.records import into_file
from seatrial.train.validation import ValidationSet

STEPS, EVERY = 3, 2
SAMPLES = 21  # not a whole number of batches, and in data parallel one rank's part of the last is empty
SEED = 0


def loader(folder: str, case: dict[str, Any], **more: Any) -> BatchLoader:
    return BatchLoader(
        TokenStore.open(folder),
        sequence_length=LENGTH,
        batches=BatchSizes.of(SEQUENCES),
        vocab_size=parity_ranks.ARCH.vocab_size,
        attend_across_documents=not case.get("documents"),
        **more,
    )


def work(case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    job, folder = parity_ranks.job_and_folder(
        case,
        mesh,
        *(f"train.steps={STEPS}", "optimizer.warmup_steps=1"),
        *(f"data.validation={case['stores'][1]}", f"train.validate_every_steps={EVERY}"),
    )
    torch.manual_seed(7 + mesh.rank)
    model = parity_ranks.build(case, mesh, NoisyWeights(parity_ranks.arch_of(case), seed=1))
    optimizer = build_optimizer(model.shards, job.optimizer)
    validation = None
    if case.get("validates", True):
        batches = -(-SAMPLES // SEQUENCES)
        validation = ValidationSet(loader(case["stores"][1], case, seed=SEED, last_step=batches), SAMPLES)
    training = loader(case["stores"][0], case, seed=5, last_step=STEPS)
    records = into_file(folder, 1, mesh.rank)
    Loop(job, folder, records, model, optimizer, training, validation=validation).run(1)
    return {
        "weights": [(s.name, s.box.offsets, s.local.clone()) for s in model.shards],
        "gathered": [s.name for s in model.shards if s.parameter.numel() != s.local.numel()],
        "random": torch.random.get_rng_state(),
    }


if __name__ == "__main__":
    sys.exit(parity_ranks.main(work))
