"""A job on the test device matches the CPU; without any one of its waits it differs or fails."""

from __future__ import annotations

import os
import queue
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from loop_cases import Copies, Run, same
from torch import Tensor

import late_device
from late_device import LateDevice
from missing_waits import JOB_WAITS
from seatrial.base.box import Box
from seatrial.checkpoint.manifest import named, step_of
from seatrial.checkpoint.staging import _plan
from seatrial.checkpoint.staging_memory import StagingMemory
from seatrial.checkpoint.stream import raw_bytes
from seatrial.checkpoint.write import Piece
from seatrial.hardware import accelerator
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import read_metrics
from seatrial.train.checkpointing import snapshot
from seatrial.train.checkpointing.snapshot import Snapshots, restore_from_memory
from seatrial.train.records import into_file

STEPS = 10
JOB = (
    f"train.steps={STEPS}",
    "checkpoint.every_steps=4",
    "checkpoint.keep=9",
    "data.validation=other",
    "train.validate_every_steps=5",
)


class SlowWriter(queue.SimpleQueue[Any]):
    """Orders of snapshots, each of which is carried out only once another has been given."""

    def __init__(self) -> None:
        self._given: list[Any] = []

    def get(self, *_: Any, **__: Any) -> Any:
        while len(self._given) < 2 and None not in self._given:
            self._given.append(super().get())
        return self._given.pop(0)


class InMemory:
    """Snapshots in memory files, each of which is written before training goes on, unless the writer is slow."""

    def __init__(self, folder: Path, slow: bool, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer, self.slow = model, optimizer, slow
        self.fds = (os.memfd_create("a"), os.memfd_create("b"))
        records = into_file(RunFolder(folder), 1, 0)
        with pytest.MonkeyPatch.context() as patch:
            if slow:
                patch.setattr(snapshot, "queue", SimpleNamespace(SimpleQueue=SlowWriter))
            self.snapshots = Snapshots(
                self.fds, model, optimizer, records=records, every=3, report=lambda _: None
            )
        self.snapshots.settle()
        self.due = self.snapshots.due

    @property
    def busy(self) -> bool:
        return self.snapshots.busy

    @property
    def rollback_bound(self) -> int | None:
        return self.snapshots.rollback_bound

    def take(self, step: int) -> bool:
        taken = self.snapshots.take(step)
        if not self.slow:
            self.snapshots.settle()
        return taken

    def back(self) -> int:
        newest = max(self.snapshots.settle(), key=lambda entry: entry["step"])
        self.snapshots.forget_after(newest["step"])
        return restore_from_memory(self.fds[newest["slot"]], newest, self.model, self.optimizer)

    def close(self) -> None:
        self.snapshots.close()
        for fd in self.fds:
            os.close(fd)


class OnCpu:
    """The undisturbed job: its records, and its state after each step."""

    def __init__(self, folder: Path) -> None:
        run = Run(
            folder,
            *JOB,
            copies=True,
            validates=True,
            keeping=lambda model, optimizer: Copies(model, optimizer, 1),
        )
        skip_no_save(run)
        assert run.loop.run(1) == "done"
        self.metrics = metrics(run)
        self.states = run.copies.taken | {STEPS: run.state()}
        self.checkpoints = checkpoints(run)
        self.run = run


def skip_no_save(run: Run) -> None:
    """Let each save wait for the one before, which otherwise delays it by a step or more where writing is slow."""
    saver = run.loop._saver
    begin = saver.begin

    def wait_and_begin(step: int) -> bool:
        saver._wait()
        return begin(step)

    saver.begin = wait_and_begin  # type: ignore[method-assign]


def metrics(run: Run) -> list[tuple[Any, ...]]:
    return [(m.step, m.loss, m.grad_norm, m.validation_loss) for m in read_metrics(run.folder)[0]]


def checkpoints(run: Run) -> dict[int, dict[str, Tensor]]:
    """Step -> tensors, without the random state of a device."""
    found = {}
    for path in named(run.folder.checkpoints):
        (file,) = path.glob("*.safetensors")
        found[step_of(path)] = {
            k: v for k, v in safetensors.torch.load_file(file).items() if "rng/cuda" not in k
        }
    return found


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    return OnCpu(tmp_path_factory.mktemp("cpu"))


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs the test device, whose events complete only when they are waited for."""
    late_device.install(monkeypatch.setattr)
    monkeypatch.setattr(late_device, "LAG_S", float("inf"))
    return monkeypatch.setattr


@pytest.fixture
def at_end() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def problems(folder: Path, on_cpu: OnCpu, at_end: ExitStack, *, slow: bool = False) -> list[str]:
    """In what the job on the test device, with a step that is rolled back, differs from that on the CPU."""
    run = Run(
        folder,
        *JOB,
        copies=True,
        validates=True,
        late=True,
        keeping=lambda model, optimizer: InMemory(folder, slow, model, optimizer),
    )
    copies: Any = run.copies
    at_end.callback(copies.close)
    skip_no_save(run)
    if not slow:
        run.spoil(8, times=2)
    try:
        run.loop.run(1)
    except Exception as error:  # noqa: BLE001  whatever it is
        return [f"it failed: {error!r}"]
    found = []
    if metrics(run) != on_cpu.metrics:
        found.append("metrics")
    if not same(run.state(), on_cpu.states[STEPS]):
        found.append("state")
    saved = checkpoints(run)
    if saved.keys() != on_cpu.checkpoints.keys():
        found.append(f"checkpoints of {sorted(saved)}")
    for step, tensors in on_cpu.checkpoints.items():
        if any(
            not torch.equal(values, saved.get(step, {}).get(key, values + 1))
            for key, values in tensors.items()
        ):
            found.append(f"checkpoint of step {step}")
    copies.snapshots._orders.put(None)
    copies.snapshots._thread.join()
    entries = copies.snapshots.settle()
    assert entries
    for entry in entries:
        other = Run(folder / f"step{entry['step']}")
        try:
            step = restore_from_memory(copies.fds[entry["slot"]], entry, other.model, other.optimizer)
        except RuntimeError as error:  # of torch, that this is no random state
            found.append(f"snapshot: {error}")
        else:
            if not same(other.state(), on_cpu.states[step]):
                found.append(f"snapshot of step {step}")
    return found


@pytest.mark.parametrize("slow", [False, True])
def test_with_all_waits_results_match_the_cpu(
    tmp_path: Path, patch: Any, on_cpu: OnCpu, at_end: ExitStack, slow: bool
) -> None:
    assert problems(tmp_path, on_cpu, at_end, slow=slow) == []
    assert late_device.left() == 0


# What is found, so that no test passes because something else is wrong.
FOUND = {
    "step_result": "changed between two updates",  # one of the numbers of the vector
    "snapshot": "snapshot|mt19937",
    "checkpoint": "checkpoint of step 10",  # earlier ones are ordered after the next step's result, which is waited for
    "time": "both events must be completed",
    "in_flight": "metrics",
}


@pytest.mark.parametrize("wait", JOB_WAITS)
def test_without_a_wait_results_differ_or_fail(
    tmp_path: Path, patch: Any, on_cpu: OnCpu, at_end: ExitStack, wait: str
) -> None:
    JOB_WAITS[wait](patch)
    found = problems(tmp_path, on_cpu, at_end, slow=wait == "snapshot_is_taken_while_one_is_written")
    (expected,) = (text for part, text in FOUND.items() if part in wait)
    assert re.search(expected, " ".join(found)), found


# -- the memory of checkpoints, beyond what one job does with it


def filled(memory: StagingMemory, *shapes: tuple[int, ...]) -> bytes:
    """Fill `memory` with tensors of these shapes; what it must hold after the copy."""
    pieces = [
        Piece(f"model/{'long name ' * n}", torch.full(shape, n + 1.5), Box.whole(shape), shape)
        for n, shape in enumerate(shapes)
    ]
    plan, head, index = _plan(pieces)
    memory.fill(head, pieces, plan, index)
    return head + b"".join(raw_bytes(piece.tensor) for piece in pieces) + index


@pytest.mark.parametrize("waits", [True, False])
def test_staging_memory_is_refilled_after_the_copy(patch: Any, waits: bool) -> None:
    memory = StagingMemory(LateDevice())  # type: ignore[arg-type]
    filled(memory, (300, 300))
    if not waits:
        memory._copied = None
    wanted = filled(memory, (300, 299), (7,), (8,), (9,))  # its head is longer
    memory.copied()
    assert (os.pread(memory.fd, len(wanted), 0) == wanted) == waits
    memory.close()


@pytest.mark.parametrize("waits", [True, False])
def test_staging_memory_is_released_after_the_copy(patch: Any, waits: bool) -> None:
    memory = StagingMemory(LateDevice())  # type: ignore[arg-type]
    filled(memory, (300, 300))
    if waits:
        memory.close()
        return
    memory._copied = None
    with pytest.raises(RuntimeError, match="unpinned while the device copies"):
        memory.close()
    late_device.stream.pass_until(late_device.stream.count)


def test_host_memory_is_not_changed_before_its_upload(patch: Any) -> None:
    """Nothing in src does that: a batch is copied into pinned memory of its own."""
    rows = torch.arange(8).pin_memory()
    on_device = rows.to(LateDevice(), non_blocking=True)  # type: ignore[call-overload]
    rows.zero_()
    assert on_device[7] == 7, "what the device would have, had it been in time"
    with pytest.raises(RuntimeError, match="changed before the device had copied it"):
        accelerator.record().synchronize()
