"""The last sign of life of a run, as a process on another host reads it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from seatrial.control.net.lease import Lease, Leases
from seatrial.record.alive import Beat, last_beat
from seatrial.record.folder import RunFolder


def test_each_sign_of_life_is_seen(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert last_beat(folder) is None
    folder.control.mkdir()
    hold = Leases(folder.leases).claim(Lease(1, 3, "10.0.0.3", 4711, 1e9), 3.0)
    assert hold is not None
    first = last_beat(folder)
    hold.beat()
    second = last_beat(folder)
    assert first is not None
    assert second is not None
    assert (first.term, first.node, first.address, first.port) == (1, 3, "10.0.0.3", 4711)
    assert (first.count, second.count) == (1, 2)
    assert 1e9 < first.time <= second.time, "of the sign, not of the claim"


WHOLE = asdict(Beat(2, 0, "10.0.0.1", 1000, 1e9, 7))


@pytest.mark.parametrize(
    "wrong",
    [{}, {"term": 0}, {"term": True}, {"port": 1 << 16}, {"count": "x"}, {"node": None}, {"time": "x"}],
)
def test_a_damaged_file_is_none(tmp_path: Path, wrong: dict[str, object]) -> None:
    folder = RunFolder(tmp_path)
    folder.control.mkdir()
    folder.lease_json.write_text(json.dumps(WHOLE | wrong))
    assert (last_beat(folder) == Beat(**WHOLE)) == (wrong == {})
    folder.lease_json.write_text(json.dumps(WHOLE | wrong)[:-5])
    assert last_beat(folder) is None


def test_what_is_no_file_is_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.control.mkdir()
    (folder.control / "else").write_text(json.dumps(WHOLE))
    folder.lease_json.symlink_to("else")
    assert last_beat(folder) is None
