"""What a rank can do to itself: each fault fires once, in its step and rank, and nothing else is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drill_jobs import job

from seatrial.base.box import Box
from seatrial.checkpoint.staging import AsyncWriter
from seatrial.checkpoint.write import Piece
from seatrial.drill import worker
from seatrial.drill.injection import Planted


@pytest.fixture
def fault(tmp_path: Path) -> Planted:
    return Planted("nan", 1, 3, "as the test wants", str(tmp_path / "marker.json"))


def now(step: int, rank: int = 1) -> Any:
    return worker._Now(rank, step)


def shard(values: torch.Tensor, grad: torch.Tensor | None = None) -> Any:
    return SimpleNamespace(local=values, grad=grad, counted=True)


def test_a_fault_fires_once_and_records_when(fault: Planted) -> None:
    assert fault.fired() is None
    assert not worker._fires(fault, now(2))
    assert not worker._fires(fault, now(3, rank=0))
    assert worker._fires(fault, now(3))
    told = fault.fired()
    assert told is not None
    assert (told.kind, told.step, told.rank, told.message) == ("nan", 3, 1, "as the test wants")
    assert not worker._fires(fault, now(3)), "a second time, as after a restart"


def test_later_is_good_enough_for_a_save(fault: Planted) -> None:
    assert not worker._fires(fault, now(4))
    assert worker._fires(fault, now(4), or_later=True)


def test_a_replay_ends_after_its_step_as_if_it_were_the_last(tmp_path: Path) -> None:
    """In the ranks alone: a job file may not have a warm-up longer than the run."""
    given = job("optimizer.warmup_steps=16", "train.steps=20")
    stop = Planted.stop(9, tmp_path / "run.log")
    found = worker._ends_early(lambda folder, digests: given, fault=stop, now=now(1))("folder", {})
    assert (found.train.steps, found.optimizer, given.train.steps) == (9, given.optimizer, 20)
    assert found.layout == given.layout
    assert stop.fired() is None


def test_a_marker_that_is_half_written_has_not_fired(fault: Planted) -> None:
    Path(fault.marker).write_text('{"time": 1.0, "ki')
    assert fault.fired() is None


def test_one_gradient_becomes_nan(fault: Planted) -> None:
    grads = [torch.ones(2, 3), torch.ones(4)]
    model = SimpleNamespace(shards=[shard(torch.ones(1), g) for g in grads])
    call = worker._spoils_a_gradient(lambda self, ids, target: torch.tensor(1.5), fault=fault, now=now(3))
    assert call(model, None, None) == 1.5
    assert [int(g.isnan().sum()) for g in grads] == [1, 0]
    grads[0].fill_(1)
    call(model, None, None)
    assert not grads[0].isnan().any()


def test_a_flipped_bit_is_one_bit() -> None:
    values = torch.tensor([0.5, -3.0, 1.0])
    before = values.clone()
    worker.flip_bit(values)
    changed = values.view(torch.int32) ^ before.view(torch.int32)
    assert [bin(int(c)).count("1") for c in changed] == [0, 1, 0]
    assert torch.isfinite(values).all()


def test_a_weight_changes_at_rest_or_in_its_update(fault: Planted) -> None:
    for wrap, arguments in ((worker._flips_at_rest, (None, None)), (worker._flips_in_update, (0.1, None))):
        values = torch.ones(4)
        owner = SimpleNamespace(shards=[shard(values)], _shards=[shard(values)])
        seen: list[float] = []
        call = wrap(
            lambda self, *_, v=values, s=seen: s.append(float(v.sum())),
            fault=replace(fault, marker=fault.marker + wrap.__name__),
            now=now(3),
        )
        call(owner, *arguments)
        assert float(values.sum()) != 4
        assert (seen[0] != 4) == (wrap is worker._flips_at_rest)


def test_no_space_is_left_once(fault: Planted, tmp_path: Path) -> None:
    """The kernel refuses it to the writing process, which is as real as a full disk."""
    (tmp_path / "checkpoints").mkdir()
    place = str(tmp_path / "checkpoints")
    writer = AsyncWriter(rank=1, world_size=2, device=torch.device("cpu"))
    order_part = worker._has_no_space(AsyncWriter.order_part, fault=fault, now=now(5))
    weight = torch.arange(70.0)
    try:
        writer.stage([Piece("model/w", weight, Box.whole((70,)), (70,))])
        told = []
        for attempt in (1, 2):
            order_part(writer, attempt, place, 5, 1, True)
            while not (outcomes := writer.poll()):
                writer.wait(10.0)
            told += outcomes
    finally:
        writer.close()
    assert [outcome.ok for outcome in told] == [False, True]
    assert "File too large" in (told[0].problem or "")
    written = sorted(p.name for p in (tmp_path / "checkpoints" / "step-00000005.tmp-1").iterdir())
    assert written == ["index-00001.json", "rank-00001.safetensors"]


def test_every_seam_is_there() -> None:
    for owner, name, _ in worker._SEAMS.values():
        assert callable(getattr(owner, name))
    with pytest.raises(AttributeError):
        worker._around(SimpleNamespace(), "gone", lambda call: call)


@pytest.mark.cluster  # for its time only
def test_the_gil_is_held_whatever_signal_comes(tmp_path: Path) -> None:
    """In a process of its own: it never comes back."""
    program = (
        "import signal\n"
        "from seatrial.drill import worker\n"
        "from seatrial.drill.injection import Planted\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('awake', flush=True))\n"
        f"fault = Planted('gil', 0, 1, '', {str(tmp_path / 'marker.json')!r})\n"
        "call = worker._holds_the_gil(lambda *_: None, fault=fault, now=worker._Now(0, 1))\n"
        "print('ready', flush=True)\n"
        "call(None, None)\n"
    )
    held = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert held.stdout is not None
        assert held.stdout.readline() == "ready\n"
        marker = tmp_path / "marker.json"
        stat = Path(f"/proc/{held.pid}/stat")
        # Once it has told that it fires, the lock is the first thing that it waits for.
        while not marker.exists() or stat.read_text().rpartition(")")[2].split()[0] != "S":
            assert held.poll() is None
        os.kill(held.pid, 10)  # SIGUSR1: its handler would need the lock
        with pytest.raises(subprocess.TimeoutExpired):
            held.communicate(timeout=0.3)
    finally:
        held.kill()
        out, _ = held.communicate()
    assert "awake" not in out
