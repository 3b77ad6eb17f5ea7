"""Checkpoints on disk: complete or absent, verified, readable as any box."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_manifest

import saving
from seatrial.base.box import Box, chunk
from seatrial.checkpoint.local_place import LocalPlace, set_aside
from seatrial.checkpoint.manifest import (
    Damaged,
    OtherVersion,
    _hash,
    complete,
    leftovers,
    read_manifest,
)
from seatrial.checkpoint.place import Place
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.checkpoint.verified import verify
from seatrial.checkpoint.write import PeerSaveFailed, Piece, SaveFailed

WHOLE = torch.arange(70, dtype=torch.float32).reshape(10, 7)


def save(folder: Path, step: int = 5, *, ranks: int = 3) -> Path:
    """Save WHOLE cut into rows over `ranks` threads, as ranks would."""
    barrier = threading.Barrier(ranks)
    oks: dict[int, bool] = {}
    results: dict[int, Path | Exception] = {}

    def one(rank: int) -> None:
        offset, size = chunk(10, ranks, rank)
        box = Box.whole((10, 7)).narrow(0, offset, size)

        def agree(ok: bool) -> int:
            oks[rank] = ok
            barrier.wait(10)
            failed = sum(not o for o in oks.values())
            barrier.wait(10)
            return failed

        piece = Piece("model/w", WHOLE[box.slices()], box, (10, 7))
        try:
            results[rank] = saving.save(
                folder, make_manifest(step), [piece] if size else [], rank=rank, world_size=ranks, agree=agree
            )
        except SaveFailed as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, Exception):
            assert all(isinstance(r, SaveFailed) for r in results.values()), "all ranks fail together"
            own = [r for r in results.values() if not isinstance(r, PeerSaveFailed)]
            assert len(own) == 1, "one rank knows why, and only that one is to blame"
            assert isinstance(own[0], SaveFailed)
            raise own[0]
    done = results[0]
    assert isinstance(done, Path)
    return done


@pytest.mark.parametrize("ranks", [1, 3, 4, 11])
def test_any_box_of_any_layout(ranks: int, tmp_path: Path) -> None:
    weights = CheckpointWeights(save(tmp_path, ranks=ranks))
    for box in (Box.whole((10, 7)), Box((2, 3), (5, 4)), Box((9, 0), (1, 7)), Box((0, 6), (10, 1))):
        assert torch.equal(weights.read("w", box, torch.float32), WHOLE[box.slices()])
    assert weights.read("w", Box.whole((10, 7)), torch.bfloat16).dtype == torch.bfloat16
    assert weights.dtype("w") == torch.float32
    assert weights.step == 5


def test_what_is_missing_is_never_invented(tmp_path: Path) -> None:
    weights = CheckpointWeights(save(tmp_path))
    with pytest.raises(Damaged, match="no tensor model/v"):
        weights.read("v", Box((0,), (1,)), torch.float32)
    weights.manifest.tensors["model/w"].parts.pop()
    with pytest.raises(Damaged, match="56 of 70 values"):
        weights.read("w", Box.whole((10, 7)), torch.float32)


def test_a_complete_folder(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == [
        "manifest.json",
        *(f"rank-{rank:05d}.safetensors" for rank in range(3)),
    ]
    assert (tmp_path / "latest").read_text() == "step-00000005\n"
    assert verify(folder).progress.tokens == 50
    assert LocalPlace(tmp_path).steps() == [5]


def test_step_saved_twice_is_complete_and_first_is_quarantined(tmp_path: Path) -> None:
    folder = save(tmp_path)
    save(tmp_path, ranks=1)
    assert len(verify(folder).files) == 1
    aside = "step-00000005.damaged"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000005", aside]
    assert (tmp_path / aside / "set-aside.txt").read_text() == "this step was saved again\n"
    (tmp_path / aside).rename(tmp_path / "step-00000006")
    assert len(list((tmp_path / "step-00000006").glob("*.safetensors"))) == 3


@pytest.mark.parametrize("position", [0, 8, 60, -1])
def test_one_flipped_bit_is_named(position: int, tmp_path: Path) -> None:
    folder = save(tmp_path)
    victim = folder / "rank-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[position] ^= 1
    victim.write_bytes(data)
    with pytest.raises(
        Damaged,
        match=r"rank-00001\.safetensors \(rank 1\) has XXH3-128 \w{32} in bytes 0 to \d+, the manifest has \w{32}",
    ):
        verify(folder)


def test_every_part_of_the_files_has_one_verifier(tmp_path: Path) -> None:
    folder = save(tmp_path, ranks=4)
    (folder / "rank-00002.safetensors").unlink()
    assert verify(folder, 1, 3).progress.step == 5
    verify(folder, 0, 3)
    with pytest.raises(Damaged, match=r"rank-00002\.safetensors is missing"):
        verify(folder, 2, 3)


def test_quarantine_keeps_earlier_quarantined_checkpoints(tmp_path: Path) -> None:
    names = [set_aside(save(tmp_path, 5, ranks=1)).name for _ in range(3)]
    assert names == [f"step-00000005.damaged{end}" for end in ("", "-2", "-3")]
    assert complete(tmp_path) == []


def test_nothing_there(tmp_path: Path) -> None:
    assert LocalPlace(tmp_path).steps() == []
    assert LocalPlace(tmp_path / "none").steps() == []
    with pytest.raises(Damaged, match="not complete"):
        read_manifest(tmp_path)


def test_one_changed_character_of_the_manifest(tmp_path: Path) -> None:
    folder = save(tmp_path)
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step":5', '"step":6'))
    with pytest.raises(Damaged, match="its content has sha256"):
        read_manifest(folder)


def test_latest_changes_when_its_checkpoint_is_quarantined(tmp_path: Path) -> None:
    save(tmp_path, 1)
    set_aside(save(tmp_path, 2))
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    set_aside(tmp_path / "step-00000001")
    assert not (tmp_path / "latest").exists()


def test_a_closed_one_lets_go_of_its_files(tmp_path: Path) -> None:
    weights = CheckpointWeights(save(tmp_path))
    weights.read("w", Box.whole((10, 7)), torch.float32)
    assert str(tmp_path) in opened()
    weights.close()
    assert str(tmp_path) not in opened()
    assert torch.equal(weights.read("w", Box.whole((10, 7)), torch.float32), WHOLE), "it opens them again"
    weights.close()


def opened() -> str:
    """The paths of all open files of this process."""
    return " ".join(str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m["files"][0].update(file="../rank-00000.safetensors"), "not the name of a file"),
        (lambda m: m["files"][0].update(file=""), "not the name of a file"),
        (lambda m: m["files"][0].update(file=".."), "not the name of a file"),
        (lambda m: m["tensors"]["model/w"]["parts"][0].__setitem__(0, "other"), "not among the files"),
        (lambda m: m["tensors"]["model/w"]["parts"][0].__setitem__(1, [9, 0]), "outside its shape"),
        (lambda m: m["tensors"]["model/w"]["parts"][0].__setitem__(2, [-1, 7]), "no negative"),
        (lambda m: m["tensors"]["model/w"]["parts"][1].__setitem__(1, [1, 0]), "two parts that overlap"),
        (lambda m: m["tensors"]["model/w"]["parts"].pop(), "do not have as many values"),
        (lambda m: m["files"][0].update(bytes=-1), "bytes in chunks"),
        (lambda m: m["files"][0].update(bytes=True), "not integers"),
        (lambda m: m["files"][0].update(chunk_bytes=0), "in chunks of 0"),
        (lambda m: m["files"][0]["hashes"].append("0" * 32), "2 hashes for"),
        (lambda m: m["files"][0].update(hashes=["x"]), "is malformed"),
        (lambda m: m["files"][0].update(sha256="0"), "unexpected keyword argument"),
        (lambda m: m["files"].append(m["files"][0]), "is listed twice"),
        (lambda m: m.update(read_back=1), "neither true nor false"),
        (lambda m: m.pop("progress"), "progress"),
        (lambda m: m.update(tensors=[]), "not a checkpoint manifest"),
        (lambda m: m["tensors"]["model/w"].update(dtype=3, parts=7), "not a checkpoint manifest"),
    ],
)
def test_a_manifest_with_impossible_values(
    change: Callable[[dict[str, Any]], object], why: str, tmp_path: Path
) -> None:
    folder = save(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    change(manifest)
    manifest["sha256"] = _hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Damaged, match=why):
        read_manifest(folder)


@pytest.mark.parametrize("version", [1, 99])
def test_another_versions_checkpoint_is_not_damaged_and_not_read(version: int, tmp_path: Path) -> None:
    folder = save(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    manifest |= {"schema_version": version, "code": "0.1.0+abc"}
    if version == 1:
        manifest["files"] = [
            {"file": f["file"], "bytes": f["bytes"], "sha256": "0" * 64} for f in manifest["files"]
        ]
    manifest["sha256"] = _hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(OtherVersion, match=f"manifest.json: it has schema_version {version}") as caught:
        CheckpointWeights(folder)
    assert "0.1.0+abc" in (caught.value.hint or "")
    assert not isinstance(caught.value, Damaged)


def test_leftovers_are_recognised_and_complete_ones_kept(tmp_path: Path) -> None:
    good = save(tmp_path)
    for name in ("step-00000006.tmp-3", "step-00000004.tmp-removed-77"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"x")
    (tmp_path / "step-00000003.damaged").mkdir()
    (tmp_path / "notes").mkdir()
    assert [p.name for p in leftovers(tmp_path)] == [
        "step-00000004.tmp-removed-77",
        "step-00000006.tmp-3",
    ]
    (tmp_path / ".latest.77.tmp").write_text(
        "step-0"
    )  # written by a process that was killed before it could rename it
    removed = LocalPlace(tmp_path).remove_leftovers()
    assert removed == [".latest.77.tmp", "step-00000004.tmp-removed-77", "step-00000006.tmp-3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "notes",
        "step-00000003.damaged",
        good.name,
    ]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_full_disk_in_one_rank_leaves_what_was_there(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(tmp_path, 1)
    real = saving._write_part

    def full(place: Place, step: int, generation: int, own: int, pieces: list[Piece]) -> None:
        if own == rank:
            raise OSError(28, "No space left on device")
        real(place, step, generation, own, pieces)

    monkeypatch.setattr(saving, "_write_part", full)
    with pytest.raises(SaveFailed, match=r"step-00000002: .*No space left on device"):
        save(tmp_path, 2)
    assert complete(tmp_path) == [before]
    assert leftovers(tmp_path) == []
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


def test_a_failure_to_commit_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = save(tmp_path, 1)

    def refuse(source: object, target: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(SaveFailed):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert complete(tmp_path) == [before]
    verify(before)
