"""Which checkpoint a run goes on from, with damage of every kind in the newer ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from seatrial.base.box import Box
from seatrial.checkpoint import write
from seatrial.checkpoint.manifest import Manifest, Progress
from seatrial.job.layout import Layout
from seatrial.parallel.mesh import Mesh
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.train.resume import choose_checkpoint


def one_rank() -> Mesh:
    layout = Layout()
    groups = dict.fromkeys(("tensor", "pipeline", "shard", "replicate", "ends"))
    return Mesh(layout, 0, layout.coordinates(0), torch.device("cpu"), **groups)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def save(folder: RunFolder, step: int) -> Path:
    manifest = Manifest(Progress(step, 0, 0, 1), 0.0, 0, {}, {}, "", "", [], {})
    piece = write.Piece("model/w", torch.ones(3), Box.whole((3,)), (3,))
    return write.save(
        folder.checkpoints, manifest, [piece], rank=0, world_size=1, agree=lambda ok: 0 if ok else 1
    )


def test_no_checkpoint(folder: RunFolder) -> None:
    assert choose_checkpoint(folder, 1, one_rank()) is None


def test_the_newest_undamaged_one(folder: RunFolder) -> None:
    good = save(folder, 1)
    (save(folder, 2) / "rank-00000.safetensors").unlink()
    os.truncate(save(folder, 3) / "rank-00000.safetensors", 10)
    (save(folder, 4) / "manifest.json").write_text("{}")
    (save(folder, 5) / "manifest.json").write_bytes(b"\xff\x00")
    (save(folder, 6) / "manifest.json").unlink()
    half = folder.checkpoints / "step-00000007.tmp-1"
    half.mkdir()
    chosen = choose_checkpoint(folder, 2, one_rank())
    assert chosen is not None
    assert chosen.folder == good
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == [
        "latest",
        "step-00000001",
        *(f"step-0000000{n}.damaged" for n in (2, 3, 4, 5, 6)),
    ]
    told = [(e.kind, e.message) for e in read_events(folder)[0]]
    assert [kind for kind, _ in told] == [
        "checkpoint_removed",
        *["checkpoint_damaged", "checkpoint_set_aside"] * 5,
        "resumed",
    ]
    damage = [message for kind, message in told if kind == "checkpoint_damaged"]
    for message, wanted in zip(
        damage,
        ("not complete", "not a checkpoint", "not a checkpoint", "10 bytes", "is missing"),
        strict=True,
    ):
        assert wanted in message


def test_all_are_damaged(folder: RunFolder) -> None:
    for step in (1, 2):
        (save(folder, step) / "rank-00000.safetensors").write_bytes(b"")
    assert choose_checkpoint(folder, 1, one_rank()) is None
    assert len(list(folder.checkpoints.glob("*.damaged"))) == 2
