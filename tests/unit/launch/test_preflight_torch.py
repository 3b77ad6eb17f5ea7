"""Expert parallel needs a torch whose FSDP2 can shard parts of a layer differently."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.job.layout import Layout
from seatrial.launch.preflight import _torch


@pytest.mark.parametrize(("version", "expert", "refused"), [("2.11.0+cu128", 2, True), ("2.11.0", 1, False), ("2.12.1", 2, False)])  # fmt: skip
def test_an_older_torch_is_refused(
    version: str, expert: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seatrial.launch.preflight.metadata.version", lambda _: version)
    facts: Any = SimpleNamespace(layout=Layout(shard=2, expert=expert))
    found = list(_torch(facts))
    assert bool(found) == refused
    assert all(f"expert 2 needs torch 2.12 or later, and {version}" in f.message for f in found)
