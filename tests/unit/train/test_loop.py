"""The loop under a supervisor: bad steps, the state after a lost peer, leaving."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from loop_cases import BATCH, Run, flip_bit, make_job, same
from torch import Tensor

import late_device
from seatrial.base.batches import BatchSizes
from seatrial.base.errors import RunFailed
from seatrial.checkpoint.manifest import named, step_of
from seatrial.checkpoint.write import SaveFailed
from seatrial.job.layout import Layout
from seatrial.parallel.mesh import Mesh
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import ledger_gaps, read_ledger
from seatrial.record.metrics import read_metrics
from seatrial.train.checkpointing import saver
from seatrial.train.health.replicas import CorruptState
from seatrial.train.recorder import SummedStep
from seatrial.train.schedule import learning_rate

SKIP = "resilience.on_spike=skip"


def values(folder: RunFolder) -> list[tuple[int, float, float, float]]:
    return [(m.step, m.loss, m.grad_norm, m.lr) for m in read_metrics(folder)[0]]


def assert_ledger_is_whole(folder: RunFolder, steps: int = 8, skipped: tuple[int, ...] = ()) -> None:
    records, problems = read_ledger(folder)
    assert problems == []
    assert ledger_gaps(records, BatchSizes.of(BATCH)) == []
    assert [r.step for r in records] == list(range(1, steps + 1))
    assert tuple(r.step for r in records if r.skipped) == skipped


def kinds(folder: RunFolder) -> list[str]:
    return [e.kind for e in read_events(folder)[0]]


@pytest.fixture
def good(tmp_path: Path) -> Run:
    """A run that nothing happens to, and nobody watches."""
    run = Run(tmp_path / "good", watched=False)
    assert run.loop.run(1) == "done"
    return run


def test_supervision_does_not_change_training(tmp_path: Path, good: Run, late: bool) -> None:
    run = Run(tmp_path / "watched", copies=True, late=late)
    assert run.loop.run(1) == "done"
    assert same(run.state(), good.state())
    assert values(run.folder) == values(good.folder)
    assert run.watcher.beats == [(1, True), *((s, False) for s in range(2, 9))]
    assert run.watcher.findings == []
    assert sorted(run.copies.taken) == [3, 6]
    assert_ledger_is_whole(run.folder)


# -- numbers that are not finite


UPDATES = ["optimizer.clip_norm=1.0", "optimizer.clip_norm=0", "optimizer.name=muon", "optimizer.name=lion"]


@pytest.mark.parametrize("how", UPDATES)
def test_a_transient_fault_is_redone_bit_identically(tmp_path: Path, late: bool, how: str) -> None:
    good = Run(tmp_path / "good", how, watched=False)
    good.loop.run(1)
    run = Run(tmp_path / "bad", how, copies=True, late=late)
    run.spoil(4)
    assert run.loop.run(1) == "done"
    assert same(run.state(), good.state())
    assert values(run.folder) == values(good.folder)
    assert_ledger_is_whole(run.folder)
    assert run.passes == [1, 2, 3, 4, 4, 5, 6, 7, 8], "step 4 is verified, so nothing was begun after it"
    assert run.watcher.findings == [("nonfinite", 4, {"action": "redo"}, [])]


def test_on_a_gpu_the_next_step_is_discarded_too(
    tmp_path: Path, good: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_device.install(monkeypatch.setattr)
    run = Run(tmp_path / "bad", "resilience.verify_every_steps=0", late=True)
    run.spoil(4)
    assert run.loop.run(1) == "done"
    assert run.passes == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert same(run.state(), good.state())
    assert [step for step, _ in run.watcher.beats] == list(range(1, 9))


def test_a_fault_on_two_attempts_is_rolled_back(tmp_path: Path, good: Run, late: bool) -> None:
    run = Run(tmp_path / "bad", copies=True, late=late)
    run.spoil(5, times=2)
    assert run.loop.run(1) == "done"
    assert same(run.state(), good.state())
    assert values(run.folder) == values(good.folder)
    assert_ledger_is_whole(run.folder)
    assert run.passes.count(4) == 2, "replayed from the snapshot of step 3"
    assert [f[2]["action"] for f in run.watcher.findings] == ["redo", "roll back"]


@pytest.mark.parametrize("complete", [True, False])
def test_checkpoint_after_a_rollbacks_step_is_written_again(
    tmp_path: Path, good: Run, complete: bool
) -> None:
    run = Run(tmp_path / "bad", "checkpoint.every_steps=4", copies=True)
    if complete:
        run.wait_for_saves()
    run.spoil(5, times=2)
    assert run.loop.run(1) == "done"
    assert [step_of(p) for p in named(run.folder.checkpoints)] == [8, 4]
    aside = [p.name for p in run.folder.checkpoints.glob("*.damaged*")]
    assert aside == (["step-00000004.damaged"] if complete else []), "what is not complete never will be"
    assert "checkpoint_failed" not in kinds(run.folder)
    assert same(run.state(), good.state())


@pytest.mark.parametrize("copies", [False, True], ids=["nothing to go back to", "a snapshot"])
def test_a_persistent_fault_is_skipped(tmp_path: Path, late: bool, copies: bool) -> None:
    run = Run(tmp_path / "bad", copies=copies, late=late)
    run.spoil(5, times=99)
    assert run.loop.run(1) == "done"
    assert_ledger_is_whole(run.folder, skipped=(5,))
    assert [step for step, *_ in values(run.folder)] == [1, 2, 3, 4, 6, 7, 8]
    (event,) = [e for e in read_events(run.folder)[0] if e.kind == "step_skipped"]
    assert event.data is not None
    assert event.data["step"] == 5
    assert run.passes.count(5) == (3 if copies else 2)
    # As if step 5 had been there without an update: its number and its learning rate are used up.
    other = Run(tmp_path / "other", watched=False)
    job = make_job(tmp_path)
    for step in (1, 2, 3, 4, 6, 7, 8):
        other.optimizer.set_step(step - 1)
        other.train_one(step)
    assert same(run.state(), other.state())
    lr = {step: lr for step, _, _, lr in values(run.folder)}
    assert lr[6] == learning_rate(6, 8, job.optimizer)


def test_more_than_max_skipped_steps_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "bad", "resilience.max_skipped_steps=1")
    run.spoil(3, times=2)
    second = run.model.forward_backward

    def always_from_5(*batch: Tensor | None) -> Tensor:
        loss = second(*batch)
        return loss * (float("nan") if run.passes[-1] >= 5 else 1.0)

    run.model.forward_backward = always_from_5  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match=r"the loss is nan and the gradient norm .* at step 5") as caught:
        run.loop.run(1)
    assert "--fresh" in (caught.value.hint or "")
    assert read_ledger(run.folder)[0][-1].step == 4
    assert run.watcher.findings[-1][2] == {"action": "stop"}


def test_unsupervised_a_nonfinite_step_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "bad", watched=False)
    run.spoil(3)
    with pytest.raises(RunFailed, match=r"the loss is .* and the gradient norm nan at step 3") as caught:
        run.loop.run(1)
    assert "--fresh" in (caught.value.hint or "")
    assert [r.step for r in read_ledger(run.folder)[0]] == [1, 2]


def test_a_later_generation_skips_the_same_step_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.spoil(5, times=2)
    run.loop.run(1)
    shutil.rmtree(run.folder.checkpoints)
    again = Run(tmp_path / "run", generation=2)
    assert again.loop.run(1) == "done"
    assert 5 not in again.passes
    assert_ledger_is_whole(run.folder, skipped=(5,))
    assert kinds(run.folder).count("step_skipped") == 1
    assert same(run.state(), again.state())


def test_a_save_due_at_a_skipped_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "checkpoint.every_steps=5", copies=True)
    run.spoil(5, times=99)
    run.loop.run(1)
    assert [step_of(p) for p in named(run.folder.checkpoints)] == [8, 5]


# -- spikes


def test_a_spike_is_skipped_on_the_second_attempt(tmp_path: Path, late: bool) -> None:
    run = Run(tmp_path / "run", "train.steps=24", SKIP, copies=True, late=late)
    run.spoil(20, times=99, factor=1e4)
    assert run.loop.run(1) == "done"
    assert_ledger_is_whole(run.folder, 24, skipped=(20,))
    assert [(f[0], f[1]) for f in run.watcher.findings] == [("loss_spike", 20)] * 2
    assert run.passes.count(20) == 2
    assert run.passes.count(19) == 3


@pytest.mark.parametrize("how", ["warn", "skip"])
def test_a_spike_without_a_snapshot_is_accepted_and_reported(tmp_path: Path, how: str) -> None:
    run = Run(tmp_path / "run", "train.steps=24", f"resilience.on_spike={how}")
    run.spoil(20, factor=1e4)
    assert run.loop.run(1) == "done"
    assert_ledger_is_whole(run.folder, 24)
    assert [(f[0], f[1]) for f in run.watcher.findings] == [("loss_spike", 20)]


@pytest.mark.cluster  # slow
def test_a_transient_spike_is_replayed_bit_identically(tmp_path: Path) -> None:
    good = Run(tmp_path / "good", "train.steps=24")
    good.loop.run(1)
    run = Run(tmp_path / "bad", "train.steps=24", SKIP, copies=True)
    run.spoil(20, factor=1e4)
    run.loop.run(1)
    assert same(run.state(), good.state())
    assert values(run.folder) == values(good.folder)


# -- leaving


@pytest.mark.parametrize("how", ["yielded", "preempted"])
def test_leaving_saves_a_checkpoint_first(tmp_path: Path, good: Run, late: bool, how: str) -> None:
    run = Run(tmp_path / "run", "resilience.verify_every_steps=0", late=late, leave={4: how})  # type: ignore[dict-item]
    assert run.loop.run(1) == how
    last = 5 if late else 4
    assert run.passes[-1] == last, "a step late, all know it a step later"
    assert [step_of(p) for p in named(run.folder.checkpoints)] == [last]
    assert_ledger_is_whole(run.folder, last)
    assert same(run.state(), run_until(tmp_path, last).state())


def run_until(tmp_path: Path, step: int) -> Run:
    run = Run(tmp_path / f"until-{step}", watched=False)
    for s in range(1, step + 1):
        run.train_one(s)
    return run


def test_leaving_at_a_save_step_saves_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "checkpoint.every_steps=4", leave={4: "yielded"})
    assert run.loop.run(1) == "yielded"
    assert kinds(run.folder).count("checkpoint_saved") == 1


def test_recovery_after_the_last_step_saves_a_checkpoint(tmp_path: Path) -> None:
    """The ranks had it, and were waiting for its checkpoint when one of them was lost."""
    run = Run(tmp_path / "run")
    assert run.loop.run(9) == "done", "the job has 8 steps"
    assert run.passes == []
    assert [step_of(p) for p in named(run.folder.checkpoints)] == [8]
    again = Run(tmp_path / "run", generation=2)
    assert again.loop.run(9) == "done"
    assert kinds(run.folder).count("checkpoint_saved") == 1, "it is there"


def test_leaving_at_the_last_step_ends_the_run(tmp_path: Path) -> None:
    assert Run(tmp_path / "run", leave={8: "preempted"}).loop.run(1) == "done"


def test_leaving_at_a_step_that_is_redone(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", leave={4: "yielded"})
    run.spoil(4)
    assert run.loop.run(1) == "yielded"
    assert run.passes == [1, 2, 3, 4, 4]
    assert same(run.state(), run_until(tmp_path, 4).state())


@pytest.mark.cluster  # slow
def test_preempted_with_a_full_disk_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver.AsyncWriter, "stage", full)
    with pytest.raises(SaveFailed):
        Run(tmp_path / "preempted", leave={4: "preempted"}).loop.run(1)
    run = Run(tmp_path / "yielded", leave={4: "yielded"}, copies=True)
    assert run.loop.run(1) == "yielded"
    assert max(run.copies.taken) == 4, "what goes on without the disk goes on from memory"


# -- what this rank holds when its peers go away


class PeerGone(Exception):
    pass


def break_exchange(run: Run, monkeypatch: pytest.MonkeyPatch, step: int, *, dimensions: int = 1) -> None:
    """Lose the peers in the sum of the vector of `step`, or of the norm, a scalar."""
    whole = run.model.mesh.sum_over_ranks

    def sum_over_ranks(self: object, summed: Tensor) -> Tensor:
        if run.passes and run.passes[-1] == step and summed.dim() == dimensions:
            raise PeerGone
        return whole(summed)

    monkeypatch.setattr(type(run.model.mesh), "sum_over_ranks", sum_over_ranks)


def test_muon_needs_no_peer_after_the_sum_and_all_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient norm is summed first, for clipping: a rank that has lost its peers then has the step before."""
    run = Run(tmp_path / "run", "optimizer.name=muon")
    break_exchange(run, monkeypatch, 5, dimensions=0)
    with pytest.raises(PeerGone):
        run.loop.run(1)
    assert (run.loop.applied, run.loop.ready) == (4, None)


@pytest.mark.parametrize("how", UPDATES)
def test_apply_ready_makes_the_same_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    other = Run(tmp_path / "other", how, leave={5: "yielded"})
    other.loop.run(1)
    assert other.loop.known is not None
    assert (other.loop.applied, other.loop.ready, other.loop.known.step) == (5, None, 5)
    run = Run(tmp_path / "run", how)
    break_exchange(run, monkeypatch, 5)
    with pytest.raises(PeerGone):
        run.loop.run(1)
    assert run.loop.known is not None
    assert (run.loop.applied, run.loop.ready, run.loop.known.step) == (4, 5, 4)
    run.loop.apply_ready(other.loop.known.norm_squared)
    assert (run.loop.applied, run.loop.ready) == (5, None)
    assert same(run.state(), other.state())


def test_a_failed_backward_pass_leaves_the_previous_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    whole = run.model.forward_backward

    def breaks(*batch: Tensor | None) -> Tensor:
        loss = whole(*batch)
        if run.passes[-1] == 5:
            raise PeerGone
        return loss

    run.model.forward_backward = breaks  # type: ignore[method-assign]
    with pytest.raises(PeerGone):
        run.loop.run(1)
    assert (run.loop.applied, run.loop.ready) == (4, None)
    assert same(run.state(), run_until(tmp_path, 4).state())


def test_a_refused_update_is_not_resumed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    run.spoil(5)
    judge = run.loop._judge

    def then_gone(step: int, summed: object) -> object:
        if step == 5:
            raise PeerGone
        return judge(step, summed)  # type: ignore[arg-type]

    monkeypatch.setattr(run.loop, "_judge", then_gone)
    with pytest.raises(PeerGone):
        run.loop.run(1)
    assert run.loop.known is not None
    assert (run.loop.applied, run.loop.ready, run.loop.known.step) == (4, None, 5)
    assert not run.loop.known.values.finite


def test_corrupt_state_is_not_carried_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    break_exchange(run, monkeypatch, 5)
    whole = run.model.forward_backward

    def flips(*batch: Tensor | None) -> Tensor:
        if run.passes[-1] == 5:
            flip_bit(run.model.shards[1].local)
        return whole(*batch)

    run.model.forward_backward = flips  # type: ignore[method-assign]
    with pytest.raises(PeerGone):
        run.loop.run(1)
    assert (run.loop.applied, run.loop.ready) == (None, None)


def test_after_a_failed_update_no_state_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")

    def breaks(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(run.optimizer, "update", breaks)
    with pytest.raises(MemoryError):
        run.loop.run(1)
    assert (run.loop.applied, run.loop.ready) == (None, None)


# -- the records of a step whose writer died


def test_the_last_step_is_recorded_once_by_either_generation(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", leave={5: "yielded"})
    run.loop.run(1)
    assert run.loop.known is not None
    row = run.loop.known.as_row()
    assert len(row) == run.loop.known_width
    assert SummedStep.from_row(row) == run.loop.known
    # Rank 0 died before it wrote step 5.
    for path in (run.folder.ledger, run.folder.metrics):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:-1]))
    other = Run(tmp_path / "run", generation=2)
    for _ in range(2):
        other.loop.record_known(row, 5)
    other.loop.record_known(row, 4)  # of another step: nothing
    other.loop.record_known([0.0] * len(row), 0)
    other.loop._recorder.close()
    assert_ledger_is_whole(run.folder, 5)
    assert [(m.step, m.generation) for m in read_metrics(run.folder)[0]] == [(s, 1) for s in range(1, 6)]
    assert values(run.folder) == values_until(tmp_path, 5)


def values_until(tmp_path: Path, step: int) -> list[tuple[int, float, float, float]]:
    return values(run_until(tmp_path, step).folder)


def test_only_the_missing_record_of_a_step_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", leave={5: "yielded"})
    run.loop.run(1)
    assert run.loop.known is not None
    lines = run.folder.metrics.read_text().splitlines(keepends=True)
    run.folder.metrics.write_text("".join(lines[:-1]))
    other = Run(tmp_path / "run", generation=2)
    other.loop.record_known(run.loop.known.as_row(), 5)
    assert_ledger_is_whole(run.folder, 5)
    assert [m.step for m in read_metrics(run.folder)[0]] == [1, 2, 3, 4, 5]


# -- state that changes by itself


@pytest.mark.parametrize("what", ["a weight", "a moment"])
def test_a_flipped_bit_is_detected_before_the_next_update(tmp_path: Path, late: bool, what: str) -> None:
    run = Run(tmp_path / "run", copies=True, late=late)
    whole = run.model.forward_backward

    def flips(*batch: Tensor | None) -> Tensor:
        loss = whole(*batch)
        if run.passes[-1] == 5:
            moments = [v for _, _, v in run.optimizer.state()]
            flip_bit(run.model.shards[1].local if what == "a weight" else moments[3])
        return loss

    run.model.forward_backward = flips  # type: ignore[method-assign]
    with pytest.raises(CorruptState, match="of rank 0 changed between two updates") as caught:
        run.loop.run(1)
    assert (caught.value.blamed, caught.value.last_good_step) == ((0,), 4)
    assert (run.loop.applied, run.loop.ready) == (None, None)
    assert run.watcher.findings == [("corruption", 5, {"last_good_step": 4}, [0])]
    assert sorted(run.copies.taken) == [3]


@pytest.mark.parametrize("complete", [True, False])
def test_bit_flip_during_copying_invalidates_the_copy(tmp_path: Path, complete: bool) -> None:
    run = Run(tmp_path / "run", "checkpoint.every_steps=6", copies=True)
    if complete:
        run.wait_for_saves()

    def flips(step: int) -> None:
        if step == 6:
            flip_bit(run.model.shards[1].local)

    run.copies.after_take = flips
    with pytest.raises(CorruptState) as caught:
        run.loop.run(1)
    assert caught.value.last_good_step == 4, "6 was verified, but its copy is not to be trusted"
    assert named(run.folder.checkpoints) == []
    aside = [p.name for p in run.folder.checkpoints.glob("*.damaged*")]
    assert aside == (["step-00000006.damaged"] if complete else [])


def test_no_rank_takes_a_snapshot_while_one_is_busy(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", copies=True)
    run.copies.busy = True
    assert run.loop.run(1) == "done"
    assert run.copies.taken == {}


# -- compute time


def test_compute_time_is_a_part_of_the_step_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=0.001)
    monkeypatch.setattr("seatrial.train.meter.time.perf_counter", lambda: next(clock))
    run = Run(tmp_path / "run")
    run.loop.run(1)
    assert run.loop.known is not None
    (seconds,) = run.loop.known.values.local_seconds
    # Batch, norm and update, and in each of two microbatches attention, MLP and head; each took a tick.
    assert seconds == pytest.approx(9 * 0.001)
    assert not any(m._forward_hooks or m._forward_pre_hooks for s in run.model.stages for m in s.modules())


def test_the_row_of_a_run_that_skips_its_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.spoil(1, times=2)
    run.loop.run(1)
    again = Run(tmp_path / "run", "train.steps=1", "optimizer.warmup_steps=0", generation=2)
    again.loop.run(1)
    assert again.loop.known is not None
    assert again.loop.known.skipped
    assert len(again.loop.known.as_row()) == again.loop.known_width
    assert torch.equal(again.state()[0], Run(tmp_path / "fresh").state()[0])


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device (torch.cuda.is_available() is false)"
)
def test_a_transient_fault_on_a_gpu(tmp_path: Path) -> None:
    """Nothing but the order of sums in its kernels tells the run from one without the fault."""
    groups = dict.fromkeys(("tensor", "pipeline", "shard", "replicate", "ends"))
    layout = Layout()
    place = Mesh(layout, 0, layout.coordinates(0), torch.device("cuda", 0), **groups)
    good = Run(tmp_path / "good", "resilience.verify_every_steps=0", place=place)
    good.loop.run(1)
    run = Run(tmp_path / "bad", "resilience.verify_every_steps=4", copies=True, place=place)
    run.spoil(2)
    held: list[list[Tensor]] = []
    allow = run.optimizer.allow

    def then_allow() -> None:
        held.append(run.state())
        allow()

    run.optimizer.allow = then_allow  # type: ignore[method-assign]
    assert run.loop.run(1) == "done"
    assert run.passes == [1, 2, 3, 2, 3, 4, 5, 6, 7, 8]
    # Steps 2 and 3 were refused: what stood there when step 2 was begun again is the state after step 1.
    until = Run(tmp_path / "until", place=place)
    until.train_one(1)
    for ours, theirs in zip(held[0], until.state(), strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(run.state(), good.state(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert run.loop.known is not None
    assert 0 < run.loop.known.values.local_seconds[0] < 10
    assert run.watcher.findings == [("nonfinite", 2, {"action": "redo"}, [])]
