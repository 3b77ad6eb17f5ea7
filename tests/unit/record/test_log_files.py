"""Which logs a run has, and where the last lines of one begin."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.record import logs
from seatrial.record.folder import RunFolder


@given(text=st.lists(st.sampled_from([b"\n", b"a", b"bc"]), max_size=40), count=st.integers(0, 12))
def test_last_lines(text: list[bytes], count: int) -> None:
    data = b"".join(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_BLOCK_BYTES", 3)
        at = logs.last_lines_at(io.BytesIO(data), count)
    lines = data.splitlines(keepends=True)
    assert data[at:] == b"".join(lines[max(0, len(lines) - count) :])


def test_a_log_without_line_ends_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BLOCK_BYTES", 10)
    monkeypatch.setattr(logs, "_FARTHEST_BYTES", 100)
    assert 0 < 10_000 - logs.last_lines_at(io.BytesIO(b"x" * 10_000), 5) <= 110


class Counted(io.BytesIO):
    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


def test_only_the_end_of_a_long_log_is_read() -> None:
    file = Counted(b"a line of the log\n" * 1_000_000)
    assert file.getbuffer().nbytes - logs.last_lines_at(file, 20) == 20 * 18
    assert file.taken < 100_000


def write(folder: RunFolder, *names: str) -> None:
    for name in names:
        path = folder.logs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a line\n")


def test_the_logs_of_a_generation(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    assert (logs.generations(folder), logs.logs_of(folder, 1)) == ([], [])
    for generation in (1, 3):  # two starts; the second recovers twice
        for node in (0, 1):
            write(
                folder, f"{generation:06d}/node{node}/agent.log", f"{generation:06d}/node{node}/nursery.log"
            )
    write(folder, "000001/node0/rank0.log", "000001/node1/rank1.log")
    write(folder, "000003/node0/rank0.log", "000003/node1/rank1.log")
    write(folder, "000005/node0/rank0.log", "000005/node2/rank10.log", "000005/node2/rank2.log")
    write(
        folder, "000005/node0/rank0.error.json", "000005/nodeX/rank0.log", "slurm-4711-node2.log", "notes.txt"
    )
    assert logs.generations(folder) == [1, 3, 5]
    found = logs.logs_of(folder, 5)
    assert [(log.title, log.generation) for log in found] == [
        ("node 0, rank 0", 5),
        ("node 0, agent", 3),
        ("node 0, nursery", 3),
        ("node 1, agent", 3),
        ("node 1, nursery", 3),
        ("node 2, rank 2", 5),
        ("node 2, rank 10", 5),
        ("node 2, slurm-4711-node2", 0),
    ]
    assert all(log.path.is_file() for log in found)
    assert [log.title for log in logs.logs_of(folder, 1) if log.rank is not None] == [
        "node 0, rank 0",
        "node 1, rank 1",
    ]
