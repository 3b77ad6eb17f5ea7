"""A worker between two generations: it finishes the step that others finished, and finds the newest state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.job.layout import Layout
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.storage import StorageError
from seatrial.train import generation as generation_module
from seatrial.train.generation import GenerationSpec, TrainWorker
from seatrial.train.rank import RankEnvironment
from seatrial.train.recorder import SummedStep
from seatrial.train.records import Records, into_file
from seatrial.train.recovery import recover as recover_module
from seatrial.train.recovery.recover import NO_SNAPSHOT, NO_STEP, Offer, Source
from seatrial.train.step import StepValues, vector_length
from seatrial.train.worker import is_consequence

PAIR = Layout(shard=2)
used_to_look: list[bool] = []  # in the last `sources`


def known(step: int, norm_squared: float = 4.0, *, skipped: bool = False) -> SummedStep:
    """What a rank has heard of a step."""
    vector = (1.0, norm_squared, *[0.0] * (vector_length(2) - 2))
    return SummedStep(1, step, StepValues(vector), 0.5, 0.0, skipped)


class Loop:
    """The loop of a generation that has ended, as `keep` holds it."""

    known_width = SummedStep.width(2)

    def __init__(self, applied: int, ready: int | None, heard: SummedStep | None) -> None:
        self.applied, self.ready, self.known = applied, ready, heard
        self.updates: list[float] = []
        self.optimizer = SimpleNamespace(set_step=lambda step: self.set_to.append(step))
        self.set_to: list[int] = []

    def apply_ready(self, norm_squared: float) -> None:
        assert self.ready is not None
        self.updates.append(norm_squared)
        self.applied, self.ready = self.ready, None


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainWorker:
    monkeypatch.setattr(generation_module, "job_of", lambda folder, inputs: None)
    monkeypatch.delenv("SEATRIAL_SNAPSHOT_FDS", raising=False)
    return TrainWorker(RunFolder(tmp_path), SimpleNamespace(send=None), {})  # type: ignore[arg-type]


def mesh(rank: int) -> Any:
    return SimpleNamespace(rank=rank, layout=PAIR)


def records(worker: TrainWorker, rank: int = 0) -> Records:
    return into_file(worker.folder, 2, rank)


def kept(loop: Loop) -> Any:
    return SimpleNamespace(loop=loop)


def shared(monkeypatch: pytest.MonkeyPatch, row: list[float] | None = None) -> list[tuple[int, list[float]]]:
    """What a rank puts into the exchange; all hear `row`, or else that."""
    told: list[tuple[int, list[float]]] = []

    def broadcast_from(mesh: Any, rank: int, values: list[float]) -> list[float]:
        told.append((rank, list(values)))
        return list(values) if row is None else row

    monkeypatch.setattr(generation_module, "broadcast_from", broadcast_from)
    return told


# -- a step that not everybody has heard of


def test_rank_without_the_sum_applies_the_same_update(
    worker: TrainWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = known(18, 9.0)
    shared(monkeypatch, heard.as_row())
    loop = Loop(17, 18, known(17, 1.0))
    worker._finish_step(mesh(1), loop, kept(loop), [Offer(18), Offer(17, 18)], 18)  # type: ignore[arg-type]
    assert loop.updates == [9.0]
    assert (loop.applied, loop.ready) == (18, None)


def test_it_can_then_broadcast_the_values_of_that_step(
    worker: TrainWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the one that knew dies now, this one tells the next that is behind: not of the step before."""
    shared(monkeypatch, known(18, 9.0).as_row())
    loop = Loop(17, 18, known(17, 1.0))
    worker._finish_step(mesh(1), loop, kept(loop), [Offer(18), Offer(17, 18)], 18)  # type: ignore[arg-type]
    told = shared(monkeypatch, known(18, 9.0).as_row())
    worker._finish_step(mesh(0), loop, kept(loop), [Offer(18), Offer(17, 18)], 18)  # type: ignore[arg-type]
    ((rank, row),) = told
    assert rank == 0
    assert (SummedStep.from_row(row).step, SummedStep.from_row(row).norm_squared) == (18, 9.0)
    assert loop.updates == [9.0], "it is not made twice"


def test_a_step_that_others_skipped_is_skipped(worker: TrainWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    shared(monkeypatch, known(18, skipped=True).as_row())
    loop = Loop(17, 18, known(17))
    worker._finish_step(mesh(1), loop, kept(loop), [Offer(18), Offer(17, 18)], 18)  # type: ignore[arg-type]
    assert loop.updates == []
    assert loop.set_to == [18]
    assert (loop.applied, loop.ready) == (18, None)


def test_no_broadcast_if_no_rank_is_behind(worker: TrainWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    told = shared(monkeypatch)
    loop = Loop(18, None, known(18))
    worker._finish_step(mesh(0), loop, kept(loop), [Offer(18), Offer(NO_STEP)], 18)  # type: ignore[arg-type]
    assert told == []


def test_the_sum_of_another_step_is_refused(worker: TrainWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    shared(monkeypatch, [0.0] * SummedStep.width(2))
    loop = Loop(17, 18, known(17))
    with pytest.raises(AssertionError, match="not of step 18"):
        worker._finish_step(mesh(1), loop, kept(loop), [Offer(18), Offer(17, 18)], 18)  # type: ignore[arg-type]
    assert loop.updates == []


# -- where to go on


def make_generation_spec(
    *, again: bool = True, snapshots: list[dict[str, Any]] | None = None
) -> GenerationSpec:
    place = RankEnvironment(rank=0, local_rank=0, world_size=2, node=0, device="cpu")
    return GenerationSpec(2, place, PAIR, snapshots or [], Path("log"), {}, again)


@pytest.fixture
def sources(worker: TrainWorker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Source]]:
    """Decide with what the ranks offer and the checkpoints there are, of which those in `damaged` cannot be read."""

    def prepare(
        offers: list[Offer], *disk: int, damaged: tuple[int, ...] = (), silent: bool = False
    ) -> tuple[str, Source]:
        used: list[str] = []
        left = list(disk)

        class Resume:
            def __init__(self, *_: Any) -> None:
                self.step = 0

            def find_newest(self) -> int:
                self.step = left[0] if left else 0
                return self.step

        def load(job: Any, at: Any, resume: Resume, loader: Any, worth: Callable[[int], bool]) -> Any:
            while (step := resume.find_newest()) and worth(step):
                if step not in damaged:
                    used.append("disk")
                    return None, None, None
                left.pop(0)
            return None

        monkeypatch.setattr(generation_module, "gather_offers", lambda mesh, own: offers)

        def find_newest() -> int:
            used_to_look.append(True)
            if silent:
                raise StorageError("unreachable", "read", "/mnt/gone", "no answer within 3 s")
            return max(disk, default=0)

        used_to_look.clear()
        monkeypatch.setattr(generation_module, "Places", lambda *_: SimpleNamespace(find_newest=find_newest))
        monkeypatch.setattr(recover_module, "sum_value", lambda mesh, value: value)
        monkeypatch.setattr(generation_module, "Resume", Resume)
        monkeypatch.setattr(generation_module, "load", load)
        monkeypatch.setattr(generation_module, "build", lambda *_: (None, None))
        monkeypatch.setattr(generation_module, "build_first", lambda *_: used.append("begin") or (None, None))
        monkeypatch.setattr(worker, "_make_loop", lambda *_: None)
        monkeypatch.setattr(worker, "_from_processes_or_memory", lambda *a: used.append("here"))
        _, source = worker._prepare(
            SimpleNamespace(architecture=None), make_generation_spec(), records(worker), mesh(0), None
        )  # type: ignore[arg-type]
        (how,) = used
        return how, source

    return prepare


IN_MEMORY = [Offer(memory=((1, 15), NO_SNAPSHOT))] * 2


def test_the_newest_intact_checkpoint_is_used(sources: Any) -> None:
    assert sources(IN_MEMORY, 20) == ("disk", Source("disk", 20))


def test_memory_is_used_if_newer_than_intact_checkpoints(sources: Any) -> None:
    assert sources(IN_MEMORY, 20, 10, damaged=(20,)) == ("here", Source("memory", 15, 1))


def test_an_older_checkpoint_is_used_without_snapshots(sources: Any) -> None:
    assert sources([Offer()] * 2, 20, 10, damaged=(20,)) == ("disk", Source("disk", 10))


def test_without_any_state_it_starts_fresh(sources: Any) -> None:
    assert sources([Offer()] * 2) == ("begin", Source("fresh", 0))
    assert sources([Offer()] * 2, 20, damaged=(20,)) == ("begin", Source("fresh", 0))


def test_state_of_live_processes_needs_no_checkpoint(sources: Any) -> None:
    assert sources([Offer(20)] * 2, 20) == ("here", Source("carried", 20))
    assert not used_to_look, "a mount that hangs must not hold them up"


def test_resumes_from_memory_and_reports_unresponsive_disk(sources: Any, worker: TrainWorker) -> None:
    assert sources(IN_MEMORY, 20, silent=True) == ("here", Source("memory", 15, 1))
    (event,) = read_events(worker.folder)[0]
    assert (event.kind, event.data) == ("checkpoints_unseen", {"step": 15})
    assert "cannot read /mnt/gone: no answer within 3 s" in event.message


def test_without_snapshots_the_disk_is_waited_for(sources: Any, worker: TrainWorker) -> None:
    assert sources([Offer()] * 2, 20, silent=True) == ("disk", Source("disk", 20))
    assert read_events(worker.folder)[0] == []


def test_snapshots_of_later_steps_are_not_kept(worker: TrainWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may still hold a later step of a course that was left."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(generation_module, "Snapshots", lambda *_, **more: made.update(more))
    monkeypatch.setattr(generation_module, "Loop", lambda *_, **__: None)
    worker._fds = (1, 2)
    entries = [{"slot": 0, "step": 10, "generation": 1}, {"slot": 1, "step": 20, "generation": 1}]
    job: Any = SimpleNamespace(resilience=SimpleNamespace(snapshot_every_steps=10, copies=2))
    worker._make_loop(
        job, make_generation_spec(snapshots=entries), records(worker), None, None, None, Source("disk", 15)
    )  # type: ignore[arg-type]
    assert made["held"] == entries[:1]


@pytest.mark.parametrize(("again", "count"), [(True, 1), (False, 0)])
def test_only_a_restart_is_recorded_as_recovered(worker: TrainWorker, again: bool, count: int) -> None:
    worker._announce(records(worker), make_generation_spec(again=again), Source("disk", 15))
    told = [e for e in read_events(worker.folder)[0] if e.kind == "recovered"]
    assert len(told) == count
    worker._announce(records(worker, 1), make_generation_spec(), Source("disk", 15))
    assert len(read_events(worker.folder)[0]) == count, "rank 0 tells"


def test_a_restart_without_state_is_recorded(worker: TrainWorker) -> None:
    worker._announce(records(worker), make_generation_spec(), Source("fresh", 0))
    (event,) = read_events(worker.folder)[0]
    assert (event.kind, event.data) == ("recovered", {"step": 0, "source": "fresh", "redone": 0})


def test_a_taken_store_port_is_a_consequence() -> None:
    """It was free when it was chosen; the rank keeps what it has and tries the next one."""
    assert is_consequence(ConnectionError("the store's port was taken by another process: port 1 is in use"))
    assert not is_consequence(ValueError("the store's port was taken"))
