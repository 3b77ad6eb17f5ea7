"""A few of the mutations of `tests/record_fuzz.py`; many more: `python tests/record_fuzz.py --count 20000`."""

from __future__ import annotations

from pathlib import Path

import pytest

from record_fuzz import campaign
from seatrial.cli import verify

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster


def test_damage_is_never_a_crash_and_never_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts, failures = campaign(tmp_path, 120, seed=12)
    assert not failures
    assert sum(n for name, n in counts.items() if name.startswith("exit ")) > 200
    assert {"exit 0", "exit 1", "exit 2"} <= counts.keys()


def test_a_verifier_that_believes_everything_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify, "_verify_run", lambda *args: 0)
    _, failures = campaign(tmp_path, 30, seed=12)
    assert failures
    assert all("verified, though it is damaged" in failure for failure in failures)
