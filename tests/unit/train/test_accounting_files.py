"""A step-time record that cannot be written ends the recording, not the training."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seatrial.job.layout import Layout
from seatrial.parallel.stage_clock import StageClock
from seatrial.record.collectives import CollectivesWriter
from seatrial.record.folder import RunFolder
from seatrial.record.stages import read_generation
from seatrial.train.accounting import Accounting


@pytest.fixture
def accounting(tmp_path: Path) -> Accounting:
    device = torch.device("cpu")
    names = ("tensor", "context", "expert", "shard", "expert_shard", "replicate", "pipeline", "ends", "stage")
    mesh = SimpleNamespace(rank=0, layout=Layout(), device=device, **dict.fromkeys(names))
    settings = SimpleNamespace(compile=False, async_tensor=False)
    model: Any = SimpleNamespace(mesh=mesh, clock=StageClock(device), settings=settings)
    return Accounting(RunFolder(tmp_path), 1, model)


@pytest.mark.parametrize("method", ["add", "close"])
def test_collectives_that_cannot_be_written(
    accounting: Accounting,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CollectivesWriter, method, full)
    accounting.begin(1)
    accounting.lap(1)
    accounting.close()
    assert "No space left on device" in capfd.readouterr().err
    found, problems = read_generation(RunFolder(tmp_path), 1)
    assert (found[0].steps.tolist(), problems) == ([1], [])
