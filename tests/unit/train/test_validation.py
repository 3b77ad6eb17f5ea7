"""Validation in the loop: when it runs, that training is unchanged, and that an interrupted one is repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loop_cases import BATCH, LENGTH, Run, ValidationBatches, same
from torch import Tensor

from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import read_metrics
from seatrial.train.validation import Validation

EVERY = ("data.validation=other", "train.validate_every_steps=3")


def losses(folder: RunFolder) -> dict[int, float | None]:
    found, problems = read_metrics(folder)
    assert problems == []
    assert [r.step for r in found] == list(range(1, 9))
    return {r.step: r.validation_loss for r in found if r.validation_loss is not None}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing happens to."""
    run = Run(tmp_path_factory.mktemp("good"), *EVERY, validates=True)
    run.loop.run(1)
    return run


def test_steps_at_which_validation_runs_and_its_records(tmp_path: Path, good: Run, late: bool) -> None:
    run = Run(tmp_path / "run", *EVERY, validates=True, copies=True, late=late)
    assert run.loop.run(1) == "done"
    found = losses(run.folder)
    assert found == losses(good.folder)
    assert list(found) == [3, 6, 8], "and after the last step"
    assert run.watcher.validated == [(step, batch) for step in found for batch in (1, 2)]
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    assert len(lines) == 8, "one record a step"
    assert [("validation_time_s" in m, "validation_loss" in m) for m in lines].count((True, True)) == 3


def test_validation_does_not_change_training(tmp_path: Path, good: Run) -> None:
    without = Run(tmp_path / "without", copies=True)
    without.loop.run(1)
    assert same(good.state(), without.state())
    (mine, _), (other, _) = read_metrics(good.folder), read_metrics(without.folder)
    assert [(m.loss, m.grad_norm) for m in mine] == [(m.loss, m.grad_norm) for m in other]


def test_loss_is_the_mean_over_the_validation_samples(good: Run) -> None:
    """The last of eight sequences does not."""
    batches, model = ValidationBatches(), good.model.stages[0]
    each = []
    with torch.no_grad():
        for number in (1, 2):
            ids, target, _ = batches.batch(number, 0, BATCH)
            each += [torch.nn.functional.cross_entropy(x, y) for x, y in zip(model(ids), target, strict=True)]
    assert len(each) == 8
    wanted = float(torch.stack(each[:-1]).double().mean())
    assert losses(good.folder)[8] == pytest.approx(wanted, abs=1e-6)


def test_validation_time_is_not_step_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run", *EVERY, validates=True)
    now = [0.0]
    measure = Validation.measure

    def slow(*args: object) -> object:
        now[0] += 1000.0
        return measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Validation, "measure", slow)
    monkeypatch.setattr("seatrial.train.loop.time.perf_counter", lambda: now[0])
    start = run.loop._start

    def a_second(step: int) -> None:
        now[0] += 1.0
        start(step)

    run.loop._start = a_second  # type: ignore[method-assign]
    run.loop.run(1)
    assert [m.step_time_s for m in read_metrics(run.folder)[0]] == [1.0] * 8


@pytest.mark.cluster  # slow: saves twice
@pytest.mark.parametrize("when", ["at the step", "meanwhile"])
def test_a_leave_request_interrupts_validation(tmp_path: Path, good: Run, when: str) -> None:
    """The next generation measures it in the same state."""
    # Questions: one for each step, then one for each batch.
    run = Run(
        tmp_path / "run", *EVERY, validates=True, leave={3 if when == "at the step" else 5: "preempted"}
    )
    assert run.loop.run(1) == "preempted"
    assert run.passes == [1, 2, 3]
    assert run.watcher.validated == ([] if when == "at the step" else [(3, 1), (3, 2)])
    assert read_metrics(run.folder)[0][-1].validation_loss is None
    again = Run(tmp_path / "run", *EVERY, validates=True, generation=2)
    again.resume_from(run)
    assert again.loop.run(4) == "done"
    assert losses(run.folder) == losses(good.folder)
    (third,) = [m for m in read_metrics(run.folder)[0] if m.step == 3]
    assert third.generation == 1, "the generation that did the step"
    assert same(again.state(), good.state())


def test_validation_after_a_failure_is_repeated(
    tmp_path: Path, good: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run", *EVERY, validates=True)
    whole, calls = run.model.validation_loss, [0]

    def lost(*batch: Tensor | None) -> Tensor:
        calls[0] += 1
        if calls[0] == 4:
            raise ConnectionError("a peer is gone")
        return whole(*batch)

    monkeypatch.setattr(run.model, "validation_loss", lost)
    with pytest.raises(ConnectionError):
        run.loop.run(1)
    assert run.loop.applied == 6, "this state can be carried into the next generation"
    again = Run(tmp_path / "run", *EVERY, validates=True, generation=2)
    again.resume_from(run)
    assert again.loop.run(7) == "done"
    assert again.passes == [7, 8]
    assert losses(run.folder) == losses(good.folder)


def test_a_measured_validation_is_not_repeated(tmp_path: Path, good: Run) -> None:
    again = Run(good.folder.path, *EVERY, validates=True, generation=2)
    again.resume_from(good)
    again.loop.run(9)
    assert again.watcher.validated == []


def test_a_nonfinite_validation_loss_is_only_reported(tmp_path: Path, good: Run, late: bool) -> None:
    run = Run(tmp_path / "run", *EVERY, validates=True, late=late)
    whole = run.model.validation_loss
    run.model.validation_loss = lambda *batch: whole(*batch) * float("nan")  # type: ignore[method-assign]
    assert run.loop.run(1) == "done"
    assert [str(loss) for loss in losses(run.folder).values()] == ["nan"] * 3
    told = [e for e in read_events(run.folder)[0] if e.kind == "validation_not_finite"]
    assert [(e.severity, e.data) for e in told] == [("warning", {"step": step}) for step in (3, 6, 8)]
    assert run.watcher.findings == []
    assert same(run.state(), good.state())


def test_no_validation_after_a_skipped_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *EVERY, validates=True)
    run.spoil(3, times=99)
    assert run.loop.run(1) == "done"
    assert {step for step, _ in run.watcher.validated} == {6, 8}


def test_validation_is_not_compute_time(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *EVERY, validates=True)
    clock = run.loop._work_timer
    assert clock is not None
    clock.watch(run.model)
    run.loop._validate(run.loop._validation, 3)  # type: ignore[arg-type]
    assert clock.read() == 0.0
    run.model.stages[0](torch.zeros((1, LENGTH), dtype=torch.long))
    assert clock.read() > 0.0
    clock.unwatch()
    run.loop._recorder.close()
