"""Saving a step once more: after it was quarantined, late, or where an abandoned course had saved it too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import add, rows, state

from seatrial.base.box import Box
from seatrial.checkpoint.commit import Superseded, fence
from seatrial.checkpoint.local_place import LocalPlace
from seatrial.checkpoint.object_place import ObjectPlace
from seatrial.checkpoint.place import Place
from seatrial.checkpoint.retention import retire, stand_for
from seatrial.record.folder import RunFolder
from seatrial.storage import StorageError
from seatrial.storage.local import LocalStore


@pytest.fixture(params=["folder", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return LocalPlace(folder) if request.param == "folder" else ObjectPlace(LocalStore(folder))


def save(
    place: Place, *steps: int, seed: int | None = None, generation: int = 3, commit: bool = True
) -> None:
    for step in steps:
        whole = state(step if seed is None else seed)
        add(place, step, [rows(whole, rank, 2) for rank in range(2)], generation=generation, commit=commit)


def read(place: Place, step: int) -> torch.Tensor:
    weights = place.open(step)
    try:
        return weights.read("w", Box.whole((10, 7)), torch.float32)
    finally:
        weights.close()


def evidence(place: Place) -> dict[str, bytes]:
    """Every part that there is."""
    root = Path(place.url)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")}


# -- after it was quarantined


def test_quarantined_checkpoint_is_not_overwritten_by_a_save(place: Place) -> None:
    """A rollback sets the checkpoint of step 6 aside; the same generation comes to step 6 once more."""
    save(place, 5, 6)
    place.set_aside(6, "the run rolled back to step 5")
    before = {path.read_bytes() for path in Path(place.url).rglob("*.safetensors")}
    save(place, 6, seed=60)
    assert torch.equal(read(place, 6), state(60)["model/w"])
    place.verify(6)
    after = {path.read_bytes() for path in Path(place.url).rglob("*.safetensors")}
    assert before < after, "it is evidence"
    assert place.remove_leftovers() == []
    place.set_aside(6, "and once more")
    save(place, 6, seed=61)
    assert torch.equal(read(place, 6), state(61)["model/w"])
    assert len(place.set_aside_names()) == 2
    assert len(evidence(place)) == 2 + 3 * 2


def test_only_the_new_one_is_removed_or_given_up(place: Place) -> None:
    save(place, 5)
    place.set_aside(5, "of a wrong course")
    before = evidence(place)
    save(place, 5, seed=50)
    place.remove(5)
    assert set(evidence(place).values()) == set(before.values())
    save(place, 5, seed=51, commit=False)
    assert len(evidence(place)) == 4
    place.abandon(5, 3)
    assert set(evidence(place).values()) == set(before.values())
    assert place.steps() == []


# -- where an abandoned course had saved it too


@pytest.mark.parametrize("generation", [3, 4])
def test_what_was_saved_of_the_step_before_makes_way(place: Place, generation: int) -> None:
    """It was out of sight: when generation 4 went on from memory, or when generation 3 itself went back."""
    save(place, 5)
    save(place, 5, seed=50, generation=generation)
    assert place.steps() == [5]
    assert place.manifest(5).progress.generation == generation
    assert torch.equal(read(place, 5), state(50)["model/w"])
    assert len(place.set_aside_names()) == 1
    assert len(evidence(place)) == 4
    place.remove(5)
    assert len(evidence(place)) == 2, "only what was quarantined"


def test_what_a_later_generation_saved_stays(place: Place, tmp_path: Path) -> None:
    save(place, 5, generation=4)
    with pytest.raises(StorageError, match="exists"):
        save(place, 5, seed=50)
    assert torch.equal(read(place, 5), state(5)["model/w"])
    run = RunFolder(tmp_path / "run")
    run.control.mkdir(parents=True)
    run.generation_file.write_text("6\n")
    parts = [rows(state(51), rank, 2) for rank in range(2)]
    with pytest.raises(Superseded):
        add(place, 5, parts, generation=5, fence=fence(run, 5))
    assert (place.steps(), place.set_aside_names()) == ([5], [])


# -- which are kept


def test_late_save_is_kept_for_the_step_it_stands_for(place: Place) -> None:
    """100 and 300 were due while another one was being written; of 200 there is none at all."""
    save(place, 90, 101, 110, 250, 260, 302, 310, 320, 330)
    retire(place, 2, 100)  # type: ignore[arg-type]
    assert place.steps() == [330, 320, 302, 250, 101]


def test_what_stands_for_a_step() -> None:
    assert stand_for([10, 20, 30, 40, 61, 70], 30) == {30, 61}
    assert stand_for([70, 61, 40, 30, 20, 10], 30) == {30, 61}
    assert stand_for([1, 2, 3], 1) == {1, 2, 3}
    assert stand_for([1, 2, 3], 0) == set()
    assert stand_for([], 5) == set()


def test_the_last_one_that_no_rollback_can_touch_stays(place: Place) -> None:
    """A rollback may go to step 48: with keep = 1 it would set the only checkpoint aside."""
    save(place, 30, 40, 45, 49, 50)
    done = retire(place, 1, 0, sure=48)  # type: ignore[arg-type]
    assert place.steps() == [50, 45]
    assert len(done.removed) == 3
    assert retire(place, 1, 0, sure=50).removed == ["step-00000045"]  # type: ignore[arg-type]


def test_a_damaged_one_is_not_what_a_rollback_leaves(place: Place) -> None:
    save(place, 30, 40, 50)
    add(place, 45, [rows(state(45), rank, 2) for rank in range(2)], read_back=False)
    (path,) = (Path(place.url) / "step-00000045").rglob("rank-00001.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    done = retire(place, 1, 0, sure=48)  # type: ignore[arg-type]
    assert (place.steps(), done.removed) == ([50, 45, 40], ["step-00000030"])


def test_where_nothing_is_old_enough_only_the_newest_stay(place: Place) -> None:
    save(place, 30, 40, 50)
    retire(place, 1, 0, sure=20)  # type: ignore[arg-type]
    assert place.steps() == [50]
