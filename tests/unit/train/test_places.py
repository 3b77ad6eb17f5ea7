"""Checkpoint places of which one does not answer: calls time out, and distrusted checkpoints stay so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.checkpoint.local_place import LocalPlace
from seatrial.record import events
from seatrial.record.events import Event, read_events
from seatrial.record.folder import RunFolder
from seatrial.storage import StorageError
from seatrial.train.checkpointing import places as places_module
from seatrial.train.checkpointing.call_with_timeout import call_with_timeout
from seatrial.train.checkpointing.places import Distrusted, Places

WAIT_S = 20.0


class Mount:
    """Hangs from the moment that it is told to, until it is let go of."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.calls = 0

    def wait(self) -> None:
        self.calls += 1
        assert self.free.wait(WAIT_S)


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    """Under every place whose folder is called main."""
    made = Mount()
    steps = LocalPlace.steps

    def slow(self: LocalPlace) -> list[int]:
        if self.folder.parent.name == "main":
            made.wait()
        return steps(self)

    monkeypatch.setattr(LocalPlace, "steps", slow)
    for name in ("_LIST_TIMEOUT_S", "_QUARANTINE_TIMEOUT_S"):
        monkeypatch.setattr(places_module, name, 0.05)
    yield made
    made.free.set()
    for thread in threading.enumerate():
        if thread.name == "storage":
            thread.join(WAIT_S)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    section = SimpleNamespace(folder=str(tmp_path / "main"), fallback=str(tmp_path / "other"))
    job: Any = SimpleNamespace(checkpoint=section, name="trial")
    (tmp_path / "run").mkdir()
    found = Places(job, RunFolder(tmp_path / "run"))
    found.prepare()
    return found


def have(places: Places, index: int, *steps: int) -> None:
    for step in steps:
        (Path(places.urls[index]) / f"step-{step:08d}").mkdir()


def tell(places: Places, kind: str, **data: Any) -> None:
    events.append(places._folder, kind, "", generation=1, data=data)


def test_a_hung_place_times_out_and_is_called_once(places: Places, mount: Mount) -> None:
    have(places, 0, 10)
    have(places, 1, 20)
    assert places.find_newest() == 20
    mount.free.clear()
    for _ in range(3):
        with pytest.raises(StorageError, match=r"answer") as caught:
            places.find_newest()
        assert caught.value.kind == "unreachable"
    assert mount.calls == 2, "one call hangs, and no more are made"
    mount.free.set()
    for thread in threading.enumerate():
        if thread.name == "storage":
            thread.join(WAIT_S)
    assert places.find_newest() == 20


def test_newest_step_falls_back_to_the_events(places: Places, mount: Mount) -> None:
    have(places, 0, 10)
    mount.free.clear()
    assert places.newest_step() == 0
    for step in (10, 20):
        tell(places, "checkpoint_saved", step=step)
    tell(places, "checkpoint_set_aside", step=20)
    assert places.newest_step() == 10


def test_errors_of_the_call_are_re_raised() -> None:
    def refuse(_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(PermissionError):
        call_with_timeout(WAIT_S, "/mnt/x", refuse)


def test_a_timed_out_quarantine_is_not_applied_later(places: Places, mount: Mount) -> None:
    """By then the run has gone on, and has saved that step again."""
    have(places, 0, 10, 20)
    have(places, 1, 15, 25)
    mount.free.clear()
    told = list(places.set_aside_after(12, "it went back"))
    assert [(name, at) for name, at, problem in told if problem] == [(places.urls[0], 12)]
    assert [at for _, at, problem in told if not problem] == [25, 15]
    mount.free.set()
    for thread in threading.enumerate():
        if thread.name == "storage":
            thread.join(WAIT_S)
    assert places.place(0).steps() == [20, 10]
    assert places.place(1).steps() == []


def test_later_steps_of_a_hung_place_are_distrusted(places: Places) -> None:
    """Until it is saved anew."""
    main, other = places.urls

    def passed(step: int, index: int = 0) -> bool:
        found = Distrusted(read_events(places._folder)[0])
        return found.has(places.urls[index], places.name_of(index, step), step)

    tell(places, "checkpoint_saved", step=20, folder=places.name_of(0, 20))
    assert not passed(20)
    tell(places, "checkpoint_failed", step=12, distrusted=main)
    assert [passed(step) for step in (10, 12, 13, 20)] == [False, False, True, True]
    assert not passed(20, index=1), f"{other} was seen"
    tell(places, "checkpoint_saved", step=20, folder=places.name_of(0, 20))
    assert (passed(20), passed(30)) == (False, True)
    tell(places, "checkpoint_failed", step=20, distrusted=places.name_of(0, 20))
    assert passed(20)
    tell(places, "checkpoint_saved", step=20, folder=places.name_of(0, 20))
    assert not passed(20)


def test_late_distrust_record_does_not_affect_a_newer_save(places: Places) -> None:
    """Generation 3 saved step 8 anew; then the word of generation 2 arrives that step 8 must not be used."""
    name = places.name_of(0, 8)
    late = [
        Event(3.0, 3, "checkpoint_saved", "info", "", data={"step": 8, "folder": name}),
        Event(2.0, 2, "checkpoint_failed", "error", "", data={"step": 8, "distrusted": name}),
    ]
    assert not Distrusted(late).has(places.urls[0], name, 8)
    assert Distrusted(late[1:]).has(places.urls[0], name, 8)
