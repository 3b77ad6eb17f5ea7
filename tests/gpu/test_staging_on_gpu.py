"""The copy of a state on a CUDA device: pinned, in the stream's order, and what is saved is what it was."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from seatrial.base.box import Box
from seatrial.checkpoint.local_place import LocalPlace
from seatrial.checkpoint.manifest import Manifest, Progress
from seatrial.checkpoint.staging import AsyncWriter, Outcome
from seatrial.checkpoint.write import Piece

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device (torch.cuda.is_available() is false)"
    ),
]

VALUES = 1 << 26  # 256 MiB


def _outcome(writer: AsyncWriter) -> Outcome:
    until = time.monotonic() + 120
    while not (told := writer.poll()):
        assert time.monotonic() < until
        writer.wait(10.0)
    return told[0]


def test_what_the_device_had_is_saved_though_it_goes_on_at_once(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    (tmp_path / "control").mkdir()
    place = LocalPlace(tmp_path / "checkpoints")
    place.prepare()
    weight = torch.randn(VALUES, device=device)
    half = torch.randn(1000, 7, device=device).bfloat16()
    step = torch.tensor(3.0)  # AdamW's count of its updates stays on the host
    pieces = [
        Piece("model/w", weight, Box.whole((VALUES,)), (VALUES,)),
        Piece("model/half", half.t(), Box.whole((7, 1000)), (7, 1000)),
        Piece("optimizer/updates", step.view(1), Box.whole((1,)), (1,)),
    ]
    writer = AsyncWriter(rank=0, world_size=1, device=device)
    try:
        writer.prepare(pieces)
        for number in (1, 2):
            before = weight.cpu()
            writer.stage(pieces)
            weight.mul_(2.0).add_(1.0)  # the next update, on the same stream
            writer.order_part(number, place.url, number, 1, True)
            assert writer._memory._pinned
            assert _outcome(writer).ok
            manifest = Manifest(Progress(number, number, number, 1), 1.0, 1, {}, {}, "", "", False, [], {})
            writer.order_commit(number, place.url, manifest, tmp_path, 9, 0)
            assert all(outcome.ok for outcome in writer.wait_removed(120))
            opened = place.open(number)
            assert torch.equal(opened.read("w", Box.whole((VALUES,)), torch.float32), before)
            assert torch.equal(opened.read("half", Box.whole((7, 1000)), torch.bfloat16), half.t().cpu())
            opened.close()
    finally:
        writer.close()
