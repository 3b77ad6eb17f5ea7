"""Asynchronous saves: what all ranks decide from the status of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from seatrial.base.errors import RunFailed
from seatrial.checkpoint.staging import Outcome
from seatrial.checkpoint.write import PeerSaveFailed, SaveFailed
from seatrial.job import job_from_text
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.train.checkpointing import checkpoint_cadence as cadence_module
from seatrial.train.checkpointing import saver as saver_module
from seatrial.train.checkpointing.saver import Saver
from seatrial.train.records import Records
from seatrial.train.step import SaveStatus

RANKS = 3


@dataclass
class FakeWriter:
    """A writing process that answers when the test says so."""

    rank: int
    orders: list[tuple[Any, ...]] = field(default_factory=list)
    given_up: list[tuple[str, int]] = field(default_factory=list)
    staged: int = 0
    prepared: int = 0
    sure: Any = "no commit yet"
    abandoned: int = 0
    closed: bool = False
    no_memory: bool = False
    answers: list[Outcome] = field(default_factory=list)
    auto: Callable[[str, int], bool] | None = None  # what, attempt -> whether it goes well
    on_stage: Callable[[], None] = lambda: None

    def prepare(self, pieces: Any) -> None:
        self.prepared += 1

    def stage(self, pieces: Any) -> None:
        if self.no_memory:
            raise OSError(12, "Cannot allocate memory")
        self.staged += 1
        self.on_stage()

    def order_part(self, attempt: int, url: str, step: int, generation: int, read_back: bool) -> None:
        self.orders.append(("part", attempt, url, step))
        self._by_itself("part", attempt)

    def order_abandon(self, url: str, step: int, generation: int) -> None:
        self.given_up.append((url, step))

    def order_commit(self, attempt: int, url: str, manifest: Any, *rest: Any) -> None:
        self.orders.append(("commit", attempt, url, manifest.progress.step))
        self.sure = rest[-1]
        self._by_itself("commit", attempt)

    def _by_itself(self, what: str, attempt: int) -> None:
        if self.auto is not None:
            self.answer(what, attempt, None if self.auto(what, attempt) else "disk full")

    def answer(self, what: str, attempt: int, problem: str | None = None) -> None:
        self.answers.append(Outcome(attempt, what, problem is None, problem, 0.1, 100, []))

    def poll(self) -> list[Outcome]:
        answers, self.answers = self.answers, []
        return answers

    def wait(self, seconds: float) -> None:
        pass

    def wait_removed(self, seconds: float) -> list[Outcome]:
        return []

    def abandon(self) -> None:
        self.abandoned += 1

    def close(self, *, at_once: bool = False) -> None:
        self.closed = True


class Ranks:
    """All ranks of a run in one process, in step."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, checkpoint: str, device: str = "cpu"
    ) -> None:
        self._device = torch.device("cpu") if device == "cpu" else SimpleNamespace(type=device)
        monkeypatch.setattr(saver_module, "AsyncWriter", lambda rank, **_: FakeWriter(rank))
        monkeypatch.setattr(saver_module.state, "lasting_pieces", lambda *_: [])
        monkeypatch.setattr(saver_module.state, "random_pieces", lambda *_: [])
        text = (
            'name = "small"\n[model]\npreset = "qwen2.5-tiny"\n[data]\ntrain = "builtin:python-library"\n'
            f'tokenizer = "bytes"\n[cluster]\nlauncher = "local"\nnodes = 1\ngpus_per_node = {RANKS}\n'
            "[train]\nsteps = 1000\nsequence_length = 32\nglobal_batch = 6\nmicrobatch = 1\n"
            f'precision = "fp32"\n[optimizer]\nlr = 1e-3\n[checkpoint]\n{checkpoint}\n'
        )
        job = job_from_text(text, name="job.toml", base_folder=folder)
        self.folder = RunFolder(folder / "runs" / "small")
        self.folder.path.mkdir(parents=True)
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self._barrier = threading.Barrier(RANKS)
        self._rows: dict[int, Tensor] = {}
        self.now = 1000.0
        monkeypatch.setattr(cadence_module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(saver_module.time, "perf_counter", lambda: self.now)
        self.savers = [
            Saver(job, self.folder, 1, self._model(job, r), None, self._records(r))  # type: ignore[arg-type]
            for r in range(RANKS)
        ]
        self.writers: list[FakeWriter] = [s._writer for s in self.savers]  # type: ignore[misc]
        for s in self.savers:
            s.start(1)

    def _model(self, job: Any, rank: int) -> Any:
        def total(values: Tensor) -> Tensor:
            self._rows[rank] = values.clone()
            self._barrier.wait(10)
            values.copy_(sum(self._rows[r] for r in range(RANKS)))
            self._barrier.wait(10)
            return values

        layout = job.layout
        mesh = SimpleNamespace(rank=rank, layout=layout, device=self._device, sum_over_ranks=total)
        return SimpleNamespace(mesh=mesh)

    def _records(self, rank: int) -> Records:
        return Records(1, rank, self._record, lambda: None)

    def _record(self, event: Event) -> None:
        if event.rank == 0:
            self.events.append((event.kind, event.message, event.data or {}))

    def step(self, step: int, seconds: float = 1.0) -> None:
        """One step of training; then what is due."""
        due = {s.due(step) for s in self.savers}
        assert len(due) == 1, "all ranks decide alike"
        news = [s.status(seconds) for s in self.savers]
        self.now += seconds
        told = SaveStatus(0, news[0].committed, news[0].requested, news[0].interval, news[0].at_risk_s)
        for s in self.savers:
            s.process_reports([n.part for n in news], told)
            s.record_step(seconds)
        if due.pop() and not self.savers[0].overdue:
            assert len({s.begin(step) for s in self.savers}) == 1

    def steps(self, first: int, last: int, seconds: float = 1.0) -> None:
        for step in range(first, last + 1):
            self.step(step, seconds)

    def together(self, call: Callable[[Saver], None]) -> list[BaseException | None]:
        """Every rank makes a call that waits for the others; what each raised."""

        def one(saver: Saver) -> BaseException | None:
            try:
                call(saver)
            except Exception as error:  # noqa: BLE001
                return error
            return None

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(one, self.savers))

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.events]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    return lambda checkpoint, **more: Ranks(tmp_path, monkeypatch, checkpoint=checkpoint, **more)


def test_save_does_not_block_and_counts_only_when_complete(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 10")
    ranks.steps(1, 12)
    assert [w.orders[0][0:2] for w in ranks.writers] == [("part", 1)] * RANKS
    for writer in ranks.writers[:2]:
        writer.answer("part", 1)
    ranks.steps(13, 14)
    assert len(ranks.writers[0].orders) == 1, "one part is still being written"
    ranks.writers[2].answer("part", 1)
    ranks.step(15)
    assert ranks.writers[0].orders[1][:2] == ("commit", 1)
    assert [len(w.orders) for w in ranks.writers] == [2, 1, 1]
    ranks.step(16)
    assert ranks.kinds() == []
    ranks.writers[0].answer("commit", 1)
    ranks.step(17)
    assert ranks.kinds() == ["checkpoint_saved"]
    assert ranks.events[0][2]["step"] == 10


def test_the_device_copy_is_not_waited_for(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 10", device="cuda")
    ranks.steps(1, 10)
    assert {w.staged for w in ranks.writers} == {1}
    assert {w.prepared for w in ranks.writers} == {1}
    assert all(w.orders == [] for w in ranks.writers), "the host has not heard that the device is done"
    ranks.step(11)
    assert all(w.orders[0][:2] == ("part", 1) for w in ranks.writers)


def test_failed_part_aborts_the_save_on_all_ranks_and_is_retried(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 100")
    ranks.steps(1, 100)
    ranks.writers[1].answer("part", 1, "No space left on device")
    ranks.step(101)
    assert ranks.kinds() == [], "the others are still writing"
    for rank in (0, 2):
        ranks.writers[rank].answer("part", 1)
    ranks.step(102)
    assert ranks.kinds() == ["checkpoint_failed"]
    assert ranks.events[0][2]["ranks"] == [1]
    assert [[step for _, step in w.given_up] for w in ranks.writers] == [[100], [], []]
    assert [w.orders for w in ranks.writers] == [[("part", 1, w.orders[0][2], 100)] for w in ranks.writers]
    ranks.steps(103, 140)  # half a minute later
    assert {w.orders[-1][1] for w in ranks.writers} == {2}
    assert {w.orders[-1][3] for w in ranks.writers} == {134}


def test_the_fallback_writes_the_same_copy(make: Callable[..., Ranks], tmp_path: Path) -> None:
    ranks = make(f'every_steps = 10\nfallback = "{tmp_path}/other"')
    ranks.steps(1, 10)
    for rank, writer in enumerate(ranks.writers):
        writer.answer("part", 1, "Stale file handle" if rank == 2 else None)
    ranks.step(11)
    assert ranks.kinds() == ["checkpoint_failed"]
    for writer in ranks.writers:
        assert writer.orders[-1] == ("part", 2, f"{tmp_path}/other/small", 10)
        assert writer.staged == 1
        writer.answer("part", 2)
    ranks.step(12)
    ranks.writers[0].answer("commit", 2)
    ranks.step(13)
    assert ranks.kinds() == ["checkpoint_failed", "checkpoint_saved"]
    assert ranks.events[1][2]["fallback"] is True


def test_out_of_memory_for_the_copy_is_a_failed_save(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 10")
    ranks.writers[2].no_memory = True
    ranks.steps(1, 10)
    for writer in ranks.writers[:2]:
        writer.answer("part", 1)
    ranks.step(11)
    assert ranks.kinds() == ["checkpoint_failed"]


def test_save_due_during_another_starts_when_that_one_is_done(
    make: Callable[..., Ranks],
) -> None:
    ranks = make("every_steps = 10")
    ranks.steps(1, 31)
    assert ranks.kinds() == ["checkpoint_late"], "told once"
    assert {w.staged for w in ranks.writers} == {1}
    for writer in ranks.writers:
        writer.answer("part", 1)
    ranks.step(32)
    ranks.writers[0].answer("commit", 1)
    ranks.steps(33, 34)
    assert ranks.kinds() == ["checkpoint_late", "checkpoint_saved"]
    assert {w.orders[-1][1::2] for w in ranks.writers} == {(2, 34)}


def test_results_of_an_abandoned_save_attempt_are_ignored(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 10\nmax_unsaved_s = 100")
    ranks.steps(1, 10)
    ranks.steps(11, 62)  # longer than half of max_unsaved_s
    assert {w.abandoned for w in ranks.writers} == {1}
    assert "checkpoint_failed" in ranks.kinds()
    for writer in ranks.writers:
        writer.answer("part", 1)
    ranks.step(63)
    assert "checkpoint_saved" not in ranks.kinds()


def test_training_stops_at_max_unsaved_s(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 10\nmax_unsaved_s = 60")
    for writer in ranks.writers:
        writer.auto = lambda what, attempt: False
    step = 0
    while not ranks.savers[0].overdue:
        step += 1
        ranks.step(step)
    assert step == 60, "the next step would be beyond it"
    errors = ranks.together(lambda s: s.save_or_stop(step))
    assert all(isinstance(e, RunFailed) for e in errors)
    assert "disk full" in str(errors[0])
    assert "max_unsaved_s" in str(errors[1])


def test_training_continues_if_the_save_succeeds_at_the_limit(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 1000\nmax_unsaved_s = 60")
    ranks.steps(1, 33)
    assert {w.staged for w in ranks.writers} == {1}, "half of the limit is a reason to save"
    ranks.steps(34, 60)
    assert ranks.savers[0].overdue
    for writer in ranks.writers:
        writer.auto = lambda what, attempt: True
        writer.answer("part", 1)
    errors = ranks.together(lambda s: s.save_or_stop(60))
    assert errors == [None] * RANKS
    assert ranks.kinds() == ["checkpoint_overdue", "checkpoint_saved"]
    assert not ranks.savers[1].overdue
    ranks.step(61)
    assert not ranks.savers[1].overdue


def test_the_final_save_fails_in_all_ranks(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 10")
    ranks.steps(1, 15)
    for rank, writer in enumerate(ranks.writers):
        writer.answer("part", 1)
        writer.auto = lambda what, attempt, rank=rank: (what, rank) != ("part", 1)
    errors = ranks.together(lambda s: s.finish(15, must=True))
    assert [type(e) for e in errors] == [PeerSaveFailed, SaveFailed, PeerSaveFailed]
    assert ranks.kinds() == ["checkpoint_saved", "checkpoint_failed", "checkpoint_failed"]
    assert [step for _, step in ranks.writers[0].given_up] == [15], (
        "after the second attempt, which writes over the first"
    )
    for writer in ranks.writers:
        writer.auto = lambda what, attempt: True
    assert ranks.together(lambda s: s.finish(15, must=True)) == [None] * RANKS
    assert ranks.kinds()[-1] == "checkpoint_saved"
    staged = ranks.writers[0].staged
    assert ranks.together(lambda s: s.finish(15, must=True)) == [None] * RANKS
    assert ranks.writers[0].staged == staged, "what is saved is not saved again"


def test_final_save_is_retried_after_a_writer_failure(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 10")
    ranks.steps(1, 9)
    for rank, writer in enumerate(ranks.writers):
        writer.auto = lambda what, attempt, rank=rank: (what, attempt, rank) != ("part", 1, 1)
    assert ranks.together(lambda s: s.finish(9, must=True)) == [None] * RANKS
    assert ranks.kinds() == ["checkpoint_failed", "checkpoint_saved"]
    assert [w.given_up for w in ranks.writers] == [[]] * RANKS, (
        "nothing is removed that is being written again"
    )


def test_final_save_is_not_retried_on_hanging_storage(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 10")
    for rank, writer in enumerate(ranks.writers):
        writer.auto = lambda what, attempt, rank=rank: (what, rank) != ("part", 1)
    ranks.writers[1].on_stage = lambda: setattr(ranks.savers[1], "_hangs", True)
    errors = ranks.together(lambda s: s.finish(9, must=True))
    assert all(isinstance(e, SaveFailed) for e in errors)
    assert ranks.kinds() == ["checkpoint_failed"]


def test_final_save_is_retried_if_only_an_earlier_save_hung(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 10")
    for rank, writer in enumerate(ranks.writers):
        writer.auto = lambda what, attempt, rank=rank: (what, attempt, rank) != ("part", 1, 1)
    ranks.savers[1]._hangs = True
    assert ranks.together(lambda s: s.finish(9, must=True)) == [None] * RANKS
    assert ranks.kinds() == ["checkpoint_failed", "checkpoint_saved"]


def test_a_save_of_distrusted_state_is_not_committed(make: Callable[..., Ranks]) -> None:
    ranks = make("every_steps = 10")
    ranks.steps(1, 10)
    assert ranks.together(lambda s: s.distrust(8, "it was wrong")) == [None] * RANKS
    for writer in ranks.writers:
        writer.answer("part", 1)
    ranks.steps(9, 9)
    assert all(order[0] == "part" for w in ranks.writers for order in w.orders)
    ranks.steps(10, 10)
    assert {w.orders[-1][:2] for w in ranks.writers} == {("part", 2)}


def test_retention_gets_the_lowest_rollback_bound(make: Callable[..., Ranks]) -> None:
    """The lowest of all bounds counts."""
    ranks = make("every_steps = 10")
    for writer in ranks.writers:
        writer.auto = lambda what, attempt: True
    ranks.steps(1, 12)
    assert ranks.writers[0].sure is None, "nothing can"
    for saver in ranks.savers:
        saver.rollback_bounds = [SimpleNamespace(rollback_bound=bound) for bound in (16, None, 8)]  # type: ignore[list-item]
    ranks.steps(13, 22)
    assert ranks.writers[0].sure == 8


def test_keep_every_steps_are_saved_regardless_of_the_interval(make: Callable[..., Ranks]) -> None:
    ranks = make('every_steps = "auto"\nkeep_every_steps = 7')
    ranks.steps(1, 7)
    assert {w.orders[0][3] for w in ranks.writers} == {7}


def test_the_interval_follows_from_the_cost_of_a_save(make: Callable[..., Ranks]) -> None:
    ranks = make('every_steps = "auto"\nmax_unsaved_s = 400')
    for writer in ranks.writers:
        writer.auto = lambda what, attempt: True
        writer.on_stage = lambda: setattr(ranks, "now", ranks.now + 0.5)
    ranks.steps(1, 20)
    assert ranks.kinds() == ["checkpoint_saved", "checkpoint_interval"]
    chosen = ranks.events[1][2]["steps"]
    assert (ranks.folder.path / "interval.json").is_file()
    ranks.steps(21, 10 + chosen)
    assert ranks.kinds().count("checkpoint_saved") == 1
    ranks.steps(11 + chosen, 14 + chosen)
    assert ranks.kinds().count("checkpoint_saved") == 2
