"""The file of a rank's connections: what is written is read, damage is a problem, loopback is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.hardware.tcp import Connection
from seatrial.record.connections import read_connections, write_connections
from seatrial.record.folder import RunFolder

LEAVING = Connection("10.0.0.1", "10.0.0.2", 5_000_000, 0.5, 0.001, 3)
SIXTH = Connection("fe80::1", "fe80::2", 1, 0.0, 0.0, 0)
OWN = Connection("10.0.0.1", "10.0.0.1", 5_000_000, 0.5, 0.001, 3)
SILENT = Connection("10.0.0.1", "10.0.0.2", 0, 0.0, 0.001, 0)
LOCAL = Connection("127.0.0.1", "127.0.0.1", 5_000_000, 0.5, 0.001, 3)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "ranks/000002").mkdir(parents=True)
    return RunFolder(tmp_path)


def test_round_trip(folder: RunFolder) -> None:
    write_connections(folder, 2, 7, [LEAVING, LOCAL, SIXTH, OWN, SILENT])
    write_connections(folder, 2, 8, [LOCAL])
    assert read_connections(folder, 2) == ({7: [LEAVING, SIXTH]}, [])
    assert read_connections(folder, 3) == ({}, [])


@pytest.mark.parametrize("text", ["", "{}x", "3", '[{"here": 1}]', "[4]"])
def test_damage_is_a_problem_of_that_file(folder: RunFolder, text: str) -> None:
    write_connections(folder, 2, 7, [LEAVING])
    folder.connections(2, 1).write_text(text)
    found, problems = read_connections(folder, 2)
    assert list(found) == [7]
    assert [p.file for p in problems] == ["ranks/000002/rank1.tcp.json"]
