"""The same guarantees in a folder and in an object store: complete or absent, never half."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add, make_manifest, names, rows, state

from seatrial.base.box import Box
from seatrial.checkpoint.commit import Superseded, fence
from seatrial.checkpoint.local_place import LocalPlace
from seatrial.checkpoint.manifest import Damaged
from seatrial.checkpoint.object_place import ObjectPlace
from seatrial.checkpoint.place import Place, checkpoint_urls, open_place
from seatrial.checkpoint.retention import retire
from seatrial.checkpoint.verified import Stopped
from seatrial.job.schema import CheckpointSection
from seatrial.record.folder import RunFolder
from seatrial.storage import StorageError
from seatrial.storage.local import LocalStore

BOTH = ["folder", "objects"]


def make(kind: str, folder: Path) -> Place:
    """`objects`: a store as an object store is used; that it is a folder the place does not know."""
    folder.mkdir(exist_ok=True)
    return LocalPlace(folder) if kind == "folder" else ObjectPlace(LocalStore(folder))


@pytest.fixture(params=BOTH)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return make(request.param, tmp_path / "checkpoints")


def save(place: Place, *steps: int, **options: Any) -> None:
    for step in steps:
        add(place, step, [rows(state(step), rank, 2) for rank in range(2)], **options)


def read(place: Place, step: int) -> torch.Tensor:
    weights = place.open(step)
    try:
        return weights.read("w", Box.whole((10, 7)), torch.float32)
    finally:
        weights.close()


def root(place: Place) -> Path:
    return Path(place.url)


# -- writing


def test_complete_checkpoints_newest_first(place: Place) -> None:
    assert place.steps() == []
    save(place, 5, 100_000_000, 20)
    assert place.steps() == [100_000_000, 20, 5]
    for step in place.steps():
        assert torch.equal(read(place, step), state(step)["model/w"])
        assert place.verify(step).progress.step == step
        assert place.manifest(step).read_back
        assert f"step-{step:08d}" in place.where(step)
    assert (root(place) / "latest").read_text() == "step-00000020\n", "the last one that was completed"
    assert [name for name in names(root(place)) if "index" in name or "tmp" in name] == []


def test_before_the_commit_there_is_nothing(place: Place) -> None:
    save(place, 5)
    save(place, 6, commit=False)
    assert place.steps() == [5]
    with pytest.raises(Damaged, match="is missing"):
        place.manifest(6)
    place.abandon(6, 3)
    assert not [name for name in names(root(place)) if "00006" in name]
    place.abandon(6, 3)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_part_that_is_missing_is_missed(missing: int, place: Place) -> None:
    parts = [rows(state(), rank, 2) for rank in range(2)]
    add(place, 5, parts, commit=False)
    (index,) = root(place).rglob(f"index-{missing:05d}.json")
    index.unlink()
    with pytest.raises((Damaged, StorageError), match=f"index-{missing:05d}.json"):
        place.commit(5, 3, make_manifest(5), 2, lambda: None)
    assert place.steps() == []


def test_incomplete_parts_are_not_a_checkpoint(place: Place) -> None:
    parts = [rows(state(), rank, 2) for rank in range(2)]
    with pytest.raises(ValueError, match=r"two parts that overlap|do not have as many values"):
        add(place, 5, [parts[0], parts[0]])
    with pytest.raises(ValueError, match="do not have as many values"):
        add(place, 6, [parts[0]])
    assert place.steps() == []


def test_a_part_is_replaced_by_a_second_attempt(place: Place) -> None:
    save(place, 5, commit=False)
    add(place, 5, [rows(state(9), rank, 2) for rank in range(2)])
    assert torch.equal(read(place, 5), state(9)["model/w"])


def test_ranks_and_agents_of_one_generation_do_not_mix(place: Place) -> None:
    """Rank 1's part of step 5 is an unfinished one of the ranks; the agents' is complete."""
    save(place, 5, commit=False)
    fd = os.memfd_create("x")
    os.write(fd, b"x" * 100)
    with pytest.raises(Damaged, match=r"rank 0's state of step 5 in memory has XXH3-128 \w+, not 0000"):
        place.put_part(5, 3, 0, fd, 100, {"pieces": []}, True, origin="memory", expected="0" * 32)
    with pytest.raises(Damaged, match="has 100 bytes, not 101"):
        place.put_part(5, 3, 0, fd, 101, {"pieces": []}, True, origin="memory")
    os.close(fd)
    with pytest.raises((Damaged, StorageError), match="index"):
        place.commit(5, 3, make_manifest(5), 1, lambda: None, origin="memory")
    assert place.steps() == []


def test_what_a_later_generation_has_saved_is_not_saved_again(place: Place) -> None:
    save(place, 5)
    with pytest.raises(StorageError) as caught:
        add(place, 5, [rows(state(9), 0, 1)], generation=2)
    assert caught.value.kind == "exists"
    assert torch.equal(read(place, 5), state(5)["model/w"])


@pytest.mark.parametrize("when", [1, 2])
def test_a_generation_that_is_over_publishes_nothing(when: int, place: Place, tmp_path: Path) -> None:
    """Also where it is over while the last files are being looked at."""
    run = RunFolder(tmp_path)
    run.control.mkdir()
    run.generation_file.write_text("3\n")
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == when:
            run.generation_file.write_text("4\n")
        fence(run, 3)()

    with pytest.raises(Superseded, match="generation 4 has begun"):
        save(place, 5, fence=check)
    assert place.steps() == []


def test_generation_without_the_run_folder_publishes_nothing(place: Place, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "mounted no more")
    with pytest.raises(Superseded, match="cannot see the run folder"):
        save(place, 5, fence=fence(run, 3))
    assert place.steps() == []


# -- verified or not


def test_checkpoint_not_read_back_is_unverified_until_marked(place: Place) -> None:
    save(place, 5, read_back=False)
    assert not place.manifest(5).read_back
    assert not place.is_verified(5)
    place.verify(5)
    place.mark_verified(5)
    assert place.is_verified(5)
    place.verify(5)
    save(place, 6)
    assert place.is_verified(6)


def test_a_write_that_does_not_read_back_is_not_a_part(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage takes it and has something else."""
    if isinstance(place, LocalPlace):
        from seatrial.checkpoint import local_place

        real: Callable[..., None] = local_place.write_file

        def worse(path: Path, *more: Any) -> None:
            real(path, *more)
            _flip(path)

        monkeypatch.setattr(local_place, "write_file", worse)
    else:
        upload = LocalStore.upload

        def uploaded(self: LocalStore, name: str, *more: Any, **keys: Any) -> None:
            upload(self, name, *more, **keys)
            _flip(self.root / name)

        monkeypatch.setattr(LocalStore, "upload", uploaded)
    with pytest.raises(Damaged, match=r"differs from what was written: .*rank-00000.* has XXH3-128"):
        save(place, 5)
    assert not [name for name in names(root(place)) if "index" in name]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# -- quarantined, removed


def test_a_quarantined_checkpoint_is_kept_and_never_chosen(place: Place) -> None:
    save(place, 5, 6)
    first = place.set_aside(6, "of a wrong course")
    assert place.steps() == [5]
    assert (root(place) / "latest").read_text() == "step-00000005\n"
    save(place, 6, generation=4)
    second = place.set_aside(6, "again")
    assert sorted({first, second}) == place.set_aside_names()
    before = names(root(place))
    assert place.remove_leftovers() == []
    assert names(root(place)) == before
    save(place, 7, 8)
    assert retire(place, 1, 0).removed == ["step-00000007", "step-00000005"]
    assert sorted({first, second}) == place.set_aside_names()
    assert len([n for n in names(root(place)) if "00006" in n and n.endswith(".safetensors")]) == 4
    assert "of a wrong course" in "".join(p.read_text() for p in root(place).rglob("set-aside*"))


def test_the_last_checkpoint_can_be_quarantined(place: Place) -> None:
    save(place, 5)
    place.set_aside(5, "damaged")
    assert place.steps() == []
    assert not (root(place) / "latest").exists()


def test_one_with_a_damaged_manifest_can_be_quarantined(place: Place) -> None:
    save(place, 5)
    path = root(place) / "step-00000005" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20] + b"\xff\xff")
    with pytest.raises(Damaged, match="not a checkpoint manifest"):
        place.open(5)
    assert place.remove_leftovers() == [], "whoever looks into it needs everything"
    place.set_aside(5, "damaged")
    assert place.remove_leftovers() == []
    assert len(list(root(place).rglob("*.safetensors"))) == 2


def test_leftovers_are_removed_and_nothing_else(place: Place) -> None:
    save(place, 5)
    save(place, 6, generation=4, commit=False)
    save(place, 5, generation=9, commit=False)
    (root(place) / "notes.txt").write_text("of a person")
    before = names(root(place))
    assert place.remove_leftovers(before=4) == []
    assert names(root(place)) == before, "of no earlier generation"
    assert len(place.remove_leftovers(before=9)) == 1
    assert not [n for n in names(root(place)) if "00006" in n]
    assert [n for n in names(root(place)) if "g9" in n or "tmp-9" in n], "it may still write"
    assert place.remove_leftovers()
    left = names(root(place))
    assert [n for n in before if n not in left]
    assert not [n for n in left if "00006" in n or "tmp" in n or "index" in n or "g9" in n]
    assert "notes.txt" in left
    assert place.steps() == [5]
    place.verify(5)
    assert place.remove_leftovers() == []


@pytest.mark.parametrize("kind", BOTH)
def test_a_missing_place_has_no_checkpoints(kind: str, tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "none") if kind == "folder" else ObjectPlace(LocalStore(tmp_path / "none"))
    if kind == "folder":
        assert place.steps() == []
        assert place.remove_leftovers() == []
        assert place.set_aside_names() == []
    with pytest.raises(StorageError):
        save(place, 5)
    assert list(tmp_path.iterdir()) == [], "it does not come back half"


def test_a_place_is_made_ready(place: Place, tmp_path: Path) -> None:
    before = names(root(place))
    place.prepare()
    assert names(root(place)) == before
    assert place.steps() == []
    new = LocalPlace(tmp_path / "a" / "b")
    new.prepare()
    assert new.folder.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="make"):
        LocalPlace(tmp_path / "file" / "c").prepare()


# -- retention


def test_retention_keeps_the_newest(place: Place) -> None:
    save(place, 1, 2, 3, 100_000_000)
    assert retire(place, 2, 0).removed == ["step-00000002", "step-00000001"]
    assert place.steps() == [100_000_000, 3]
    assert retire(place, 0, 0).removed == ["step-00000003"], "the last one is never removed"
    assert place.steps() == [100_000_000]
    assert not [n for n in names(root(place)) if "removed" in n or "00003" in n]


def test_every_mth_is_kept(place: Place) -> None:
    save(place, *range(10, 100, 10))
    assert retire(place, 2, 30).removed == [
        "step-00000070",
        "step-00000050",
        "step-00000040",
        "step-00000020",
        "step-00000010",
    ]
    assert place.steps() == [90, 80, 60, 30]
    assert retire(place, 2, 30).removed == []


def test_only_verified_ones_count(place: Place) -> None:
    """What nobody has read back is read before something older goes for it; a damaged one does not count."""
    save(place, 1, 2, 3)
    save(place, 4, 5, 6, read_back=False)
    _damage(place, 6)
    done = retire(place, 2, 0)  # type: ignore[arg-type]
    assert done.removed == ["step-00000003", "step-00000002", "step-00000001"]
    ((problem,),) = [done.problems]
    assert "rank-00001.safetensors (rank 1) has XXH3-128" in problem
    assert place.steps() == [6, 5, 4], "the damaged one stays for whoever looks into it"
    assert (place.is_verified(4), place.is_verified(5), place.is_verified(6)) == (True, True, False)


def test_the_last_good_one_stays_whatever_is_newer(place: Place) -> None:
    save(place, 1, 2)
    save(place, 3, 4, 5, read_back=False)
    for step in (3, 4, 5):
        _damage(place, step)
    done = retire(place, 1, 0)  # type: ignore[arg-type]
    assert done.removed == ["step-00000001"]
    assert len(done.problems) == 3
    assert place.steps() == [5, 4, 3, 2]
    place.verify(2)


def test_nothing_is_read_where_nothing_is_to_go(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    save(place, 1, 2, read_back=False)
    monkeypatch.setattr(type(place), "verify", None)
    assert retire(place, 2, 0).removed == []


def test_retention_makes_way(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    save(place, *range(1, 7))
    asked = iter([False] * 4 + [True])
    assert retire(place, 2, 0, stop=lambda: next(asked)).removed == ["step-00000004", "step-00000003"]
    assert retire(place, 2, 0).removed == ["step-00000002", "step-00000001"], "the rest is done the next time"
    save(place, 7, read_back=False)

    def verify(step: int, *_: Any, **__: Any) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(place, "verify", verify)
        assert retire(place, 2, 0).removed == []
    assert place.steps() == [7, 6, 5]


def test_a_failed_removal_is_reported_and_the_rest_is_removed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(place, *range(1, 5))
    real = type(place).remove

    def refuse(self: Any, step: int) -> str:
        if step == 2:
            raise StorageError("denied", "remove", "step-00000002", "Permission denied")
        return real(self, step)

    monkeypatch.setattr(type(place), "remove", refuse)
    done = retire(place, 2, 0)  # type: ignore[arg-type]
    assert done.removed == ["step-00000001"]
    assert done.problems == ["cannot remove step-00000002: Permission denied"]


def _damage(place: Place, step: int) -> None:
    (path,) = (root(place) / f"step-{step:08d}").rglob("rank-00001.safetensors")
    _flip(path)


# -- addresses


def test_where_a_job_saves(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "trial")

    def urls(**keys: Any) -> list[str]:
        return checkpoint_urls(CheckpointSection(every_steps=5, **keys), "trial", run)

    assert urls() == [str(run.checkpoints)]
    assert urls(folder="/mnt/big") == ["/mnt/big/trial"]
    assert urls(folder="s3://bucket/a/", fallback="/mnt/b") == ["s3://bucket/a/trial", "/mnt/b/trial"]
    assert urls(fallback="s3://bucket") == [str(run.checkpoints), "s3://bucket/trial"]
    assert isinstance(open_place("/mnt/big"), LocalPlace)
    assert open_place("file:///mnt/big").url == "/mnt/big"
    assert isinstance(open_place("s3://bucket/x"), ObjectPlace)


def test_the_index_is_plain(place: Place) -> None:
    save(place, 5, commit=False)
    for rank in range(2):
        (path,) = root(place).rglob(f"index-{rank:05d}.json")
        index = json.loads(path.read_text())
        assert set(index) == {"file", "read_back", "pieces"}
        assert index["file"]["file"] == f"rank-{rank:05d}.safetensors"
