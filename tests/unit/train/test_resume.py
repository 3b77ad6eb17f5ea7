"""The checkpoint a run resumes from, with damage of every kind in newer ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from saving import new_manifest, save_whole
from seatrial.base.box import Box
from seatrial.base.errors import RunFailed
from seatrial.checkpoint.manifest import Progress
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.optimizers import ADAMW
from seatrial.job.schema import CheckpointSection, OptimizerSection
from seatrial.model.decoder import whole_shapes
from seatrial.parallel.mesh import Mesh
from seatrial.record import events
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.train.records import into_file
from seatrial.train.recovery.resume import Resume


def one_rank() -> Mesh:
    layout = Layout()
    groups = dict.fromkeys(("tensor", "pipeline", "shard", "replicate", "ends"))
    return Mesh(layout, 0, layout.coordinates(0), torch.device("cpu"), **groups)


ARCH = Architecture(
    family="qwen2",
    vocab_size=8,
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "checkpoints").mkdir()
    return RunFolder(tmp_path)


def save(folder: RunFolder, step: int, *, arch: Architecture = ARCH, lacking: str = "") -> Path:
    tensors = {
        f"{kind}/{name}": torch.ones(shape)
        for kind in ("model", *ADAMW.states)
        for name, shape in whole_shapes(arch).items()
        if f"{kind}/{name}" != lacking
    }
    manifest = new_manifest(Progress(step, 0, 0, 1), architecture=arch.as_dict())
    return save_whole(folder.checkpoints, manifest, tensors)


def read_all(checkpoint: CheckpointWeights) -> Progress:
    """What a rank does that needs all of it."""
    for kind in ("model", *ADAMW.states):
        for name, shape in whole_shapes(ARCH).items():
            assert checkpoint.read_kind(kind, name, Box.whole(shape), torch.float32).eq(1).all()
    return checkpoint.manifest.progress


def choose(folder: RunFolder, *, fallback: Path | None = None) -> int:
    """The step that a start goes on from; 0: from the beginning."""
    section = CheckpointSection(every_steps=4, fallback=str(fallback) if fallback else None)
    job: Any = SimpleNamespace(
        architecture=ARCH, name="small", checkpoint=section, optimizer=OptimizerSection(lr=1e-3)
    )
    resume = Resume(job, folder, into_file(folder, 2, 0), one_rank())
    while resume.find_newest():
        progress = resume.fill(read_all)
        if progress is not None:
            assert progress.step == resume.step
            return progress.step
    resume.refuse_fresh_start()
    return 0


def test_no_checkpoint(folder: RunFolder) -> None:
    assert choose(folder) == 0


def test_a_run_without_its_checkpoints_does_not_start_over(folder: RunFolder) -> None:
    events.append(folder, "checkpoint_saved", "", generation=1, data={"step": 40})
    with pytest.raises(RunFailed, match=r"has saved step 40, but .* has no usable checkpoint") as caught:
        choose(folder)
    assert "--fresh" in (caught.value.hint or "")


def test_an_incomplete_checkpoint_is_refused(folder: RunFolder) -> None:
    save(folder, 1)
    save(folder, 2, lacking="exp_avg/model.norm.weight")
    save(folder, 3, arch=replace(ARCH, rope_theta=2e4))
    save(folder, 4, lacking="model/model.embed_tokens.weight")
    assert choose(folder) == 1
    damage = [e.message for e in read_events(folder)[0] if e.kind == "checkpoint_damaged"]
    assert "no tensor model/model.embed_tokens.weight" in damage[0]
    assert "another model" in damage[1]
    assert "no tensor exp_avg/model.norm.weight" in damage[2]


def test_a_folder_that_is_not_a_checkpoint(folder: RunFolder) -> None:
    save(folder, 1)
    (folder.checkpoints / "step-00000002").write_text("a file")
    manifest = save(folder, 3) / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    (save(folder, 4) / "manifest.json").write_text("[" * 200_000)
    save(folder, 5).rename(folder.checkpoints / "step-00000006")
    assert choose(folder) == 1
    assert len(list(folder.checkpoints.glob("*.damaged"))) == 4


def test_the_newest_undamaged_checkpoint_is_used(folder: RunFolder) -> None:
    save(folder, 1)
    (save(folder, 2) / "rank-00000.safetensors").unlink()
    os.truncate(save(folder, 3) / "rank-00000.safetensors", 10)
    (save(folder, 4) / "manifest.json").write_text("{}")
    (save(folder, 5) / "manifest.json").write_bytes(b"\xff\x00")
    (save(folder, 6) / "manifest.json").unlink()
    half = folder.checkpoints / "step-00000007.tmp-1"
    half.mkdir()
    assert choose(folder) == 1
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


def test_all_checkpoints_damaged(folder: RunFolder) -> None:
    for step in (1, 2):
        (save(folder, step) / "rank-00000.safetensors").write_bytes(b"")
    assert choose(folder) == 0
    assert len(list(folder.checkpoints.glob("*.damaged"))) == 2


def test_one_damaged_byte_is_detected(folder: RunFolder) -> None:
    save(folder, 1)
    path = save(folder, 2) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert choose(folder) == 1
    (damage,) = [e.message for e in read_events(folder)[0] if e.kind == "checkpoint_damaged"]
    assert "rank-00000.safetensors" in damage


def test_the_newest_checkpoint_of_both_places(folder: RunFolder, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other" / "small")
    other.checkpoints.mkdir(parents=True)
    save(folder, 4)
    save(other, 8).rename(other.path / "step-00000008")
    save(other, 4).rename(other.path / "step-00000004")
    assert choose(folder, fallback=tmp_path / "other") == 8
    (other.path / "step-00000008" / "rank-00000.safetensors").write_bytes(b"")
    assert choose(folder, fallback=tmp_path / "other") == 4
    told = [e for e in read_events(folder)[0] if e.kind == "resumed"]
    assert str(other.path) in told[0].data["checkpoint"]  # type: ignore[index]
    assert str(folder.checkpoints) in told[1].data["checkpoint"]  # type: ignore[index]
    assert (other.path / "step-00000008.damaged").is_dir()
