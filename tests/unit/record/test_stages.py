"""The file of a rank's stages: what is written is read, a torn end is ignored, and damage is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from seatrial.record.folder import RunFolder
from seatrial.record.stages import (
    BACKWARD,
    DATA,
    PART,
    STAGES,
    TENSOR,
    StageWriter,
    read_generation,
    read_stages,
)


def writer(folder: RunFolder, rank: int = 3) -> StageWriter:
    return StageWriter(
        folder,
        2,
        rank,
        ranks=4,
        clock="cpu",
        first_step=7,
        not_separated={"tensor": "it is compiled"},
        gpu="0000:3b:00",
    )


def row(step: int) -> list[float]:
    return [step + i / 8 for i in range(len(STAGES))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Steps 7 to 9 of rank 3."""
    folder = RunFolder(tmp_path)
    out = writer(folder)
    for step in (7, 8, 9):
        out.add(step, row(step))
    out.close()
    return folder.stages(2, 3)


def test_what_is_written_is_read(file: Path) -> None:
    read = read_stages(file)
    assert read is not None
    assert (read.generation, read.rank, read.ranks, read.clock, read.first_step) == (2, 3, 4, "cpu", 7)
    assert read.not_separated == {"tensor": "it is compiled"}
    assert read.gpu == "0000:3b:00"
    assert read.steps.tolist() == [7, 8, 9]
    assert read.seconds.tolist() == [row(7), row(8), row(9)]


def test_a_record_is_60_bytes(file: Path) -> None:
    head = file.read_bytes().index(b"\n") + 1
    assert file.stat().st_size - head == 3 * 60


@pytest.mark.parametrize("lost", [1, 4, 47])
def test_a_torn_last_record_is_ignored(file: Path, lost: int) -> None:
    file.write_bytes(file.read_bytes()[:-lost])
    read = read_stages(file)
    assert read is not None
    assert read.steps.tolist() == [7, 8]


def test_a_torn_first_line_is_nothing_yet(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])
    assert read_stages(file) is None
    assert read_generation(RunFolder(file.parents[2]), 2) == ({}, [])


def test_only_the_last_records_are_read(file: Path) -> None:
    read = read_stages(file, most=2)
    assert read is not None
    assert read.steps.tolist() == [8, 9]
    assert read.seconds.tolist() == [row(8), row(9)]


def test_a_step_that_was_done_again_counts_once(tmp_path: Path) -> None:
    out = writer(RunFolder(tmp_path))
    for step, first in ((7, 1.0), (8, 2.0), (7, 3.0)):
        out.add(step, [first] + [0.0] * (len(STAGES) - 1))
    out.close()
    read = read_stages(RunFolder(tmp_path).stages(2, 3))
    assert read is not None
    assert read.steps.tolist() == [7, 8]
    assert read.seconds[:, DATA].tolist() == [3.0, 2.0]


def test_stages_of_a_file_may_be_fewer_and_in_another_order(file: Path) -> None:
    head = (
        b'{"seatrial_stages":1,"generation":2,"rank":3,"ranks":4,"clock":"cuda","first_step":1,'
        b'"stages":["tensor","backward"],"not_separated":{}}\n'
    )
    record = np.array([(5, [0.5, 0.25])], dtype=[("step", "<u4"), ("seconds", "<f4", (2,))])
    file.write_bytes(head + record.tobytes())
    read = read_stages(file)
    assert read is not None
    assert read.gpu is None  # as in older records
    assert (read.seconds[0, TENSOR], read.seconds[0, BACKWARD], read.seconds.sum()) == (0.5, 0.25, 0.75)


def test_it_is_written_about_every_64_steps(tmp_path: Path) -> None:
    out = writer(RunFolder(tmp_path))
    file = RunFolder(tmp_path).stages(2, 3)
    for step in range(7, 7 + 63):
        out.add(step, row(step))
    read = read_stages(file)
    assert read is not None
    assert not read.steps.size
    out.add(70, row(70))
    read = read_stages(file)
    assert read is not None
    assert read.steps.size == 64
    out.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((b'{"seatrial_stages"', b'{"seatrial_staged"'), "does not begin with the line of such a file"),
        ((b'{"seatrial_stages":1', b'{"seatrial_stages":9'), "of version 9"),
        ((b'"clock":"cpu"', b'"clock":12345'), "no clock"),
        ((b'"context","shard"', b'"context","shirt"'), r"not those of this version \(shirt\)"),
        ((b'"context","shard"', b'"shard",  "shard"'), "repeated"),
        ((b'{"seatrial', b'<"seatrial'), "line of JSON"),
        ((np.float32(9.875).tobytes(), np.float32(-8).tobytes()), "step 9 are not times"),
        ((np.float32(9.875).tobytes(), np.float32("nan").tobytes()), "step 9 are not times"),
    ],
)
def test_what_is_wrong_is_reported(file: Path, change: tuple[bytes, bytes], reason: str) -> None:
    data = file.read_bytes()
    assert change[0] in data
    file.write_bytes(data.replace(change[0], change[1], 1))
    with pytest.raises(ValueError, match=reason):
        read_stages(file)
    found, problems = read_generation(RunFolder(file.parents[2]), 2)
    assert not found
    assert [problem.file for problem in problems] == ["ranks/000002/rank3.stages"]


def test_a_file_of_another_rank_is_not_used(file: Path) -> None:
    file.rename(file.with_name("rank1.stages"))
    found, problems = read_generation(RunFolder(file.parents[2]), 2)
    assert not found
    assert "is of generation 2, rank 3" in problems[0].message


def test_an_old_run_folder_has_none(tmp_path: Path) -> None:
    assert read_generation(RunFolder(tmp_path), 1) == ({}, [])
    (tmp_path / "ranks").mkdir()
    assert read_generation(RunFolder(tmp_path), 1) == ({}, [])


RECORD = 4 + 4 * len(STAGES)  # bytes


class TestPacked:
    """Older records are compressed: PART at a time."""

    STEPS = 2 * PART + 100

    @pytest.fixture
    def folder(self, tmp_path: Path) -> RunFolder:
        """Steps 1 to STEPS of rank 3, with noise of a percent."""
        folder, random = RunFolder(tmp_path), np.random.default_rng(1)
        out = writer(folder)
        for step in range(1, self.STEPS + 1):
            out.add(step, [0.0, *random.normal(1.0, 0.01, len(STAGES) - 1)])
        out.close()
        return folder

    def test_old_steps_are_read_to_a_fiftieth_of_a_percent(self, folder: RunFolder) -> None:
        found, problems = read_generation(folder, 2)
        assert not problems
        assert found[3].steps.tolist() == list(range(1, self.STEPS + 1))
        random = np.random.default_rng(1)
        exact = random.normal(1.0, 0.01, (self.STEPS, len(STAGES) - 1))
        assert np.allclose(found[3].seconds[:, 1:], exact, rtol=2**-12)
        assert not found[3].seconds[:, 0].any()

    def test_they_take_a_third(self, folder: RunFolder) -> None:
        size = folder.stages(2, 3).stat().st_size + folder.packed_stages(2, 3).stat().st_size
        assert folder.stages(2, 3).stat().st_size < 101 * RECORD + 500
        assert size < self.STEPS * RECORD / 3

    def test_short_steps_of_many_ranks_are_sampled(self, tmp_path: Path) -> None:
        folder, count = RunFolder(tmp_path), 8 * PART
        for rank, step_s in enumerate((0.9, 0.7)):  # one in 4, one in 8
            out = StageWriter(folder, 2, rank, ranks=1024, clock="cuda", first_step=1, not_separated={})
            for step in range(1, count + 1):
                out.add(step, [0.0] * (len(STAGES) - 1) + [step_s])
            out.close()
        first, second = (each.steps for each in read_generation(folder, 2)[0].values())
        assert 0.9 < len(first) / (count / 4) < 1.1
        assert 0.9 < len(second) / (count / 8) < 1.1
        assert np.isin(second, first).all(), "steps that all ranks have"
        found, _ = read_generation(folder, 2, most=8, until=3 * PART)
        for each in found.values():
            assert 3 * PART - 100 < each.steps[-1] <= 3 * PART
            assert each.steps.size == 8

    @pytest.mark.parametrize("most", [1, 100, 101, PART + 100, PART + 101, 10**6])
    def test_the_last_ones(self, folder: RunFolder, most: int) -> None:
        found, _ = read_generation(folder, 2, most=most)
        assert found[3].steps.tolist() == list(range(max(1, self.STEPS - most + 1), self.STEPS + 1))

    @pytest.mark.parametrize("until", [4, 9, PART - 1, PART + 3, 2 * PART, STEPS - 3])
    def test_up_to_a_step(self, folder: RunFolder, until: int) -> None:
        found, _ = read_generation(folder, 2, most=4, until=until)
        assert found[3].steps.tolist() == [until - 3, until - 2, until - 1, until]
        found, _ = read_generation(folder, 2, most=2, until=self.STEPS + 9)
        assert found[3].steps.tolist() == [self.STEPS - 1, self.STEPS]
        assert not read_generation(folder, 2, most=4, until=0)[0][3].steps.size

    def test_killed_between_the_two_writes(self, folder: RunFolder) -> None:
        path = folder.packed_stages(2, 3)
        path.write_bytes(path.read_bytes()[:-1])
        found, problems = read_generation(folder, 2)
        assert not problems
        assert found[3].steps.tolist() == [*range(1, PART + 1), *range(2 * PART + 1, self.STEPS + 1)]

    def test_damage_is_reported(self, folder: RunFolder) -> None:
        path = folder.packed_stages(2, 3)
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
        found, problems = read_generation(folder, 2)
        assert not found
        assert "is damaged" in problems[0].message
        path.write_bytes(b"x" * 100)
        assert "does not begin with the same line" in read_generation(folder, 2)[1][0].message

    def test_a_new_writer_begins_anew(self, folder: RunFolder) -> None:
        out = writer(folder)
        out.add(7, row(7))
        out.close()
        assert read_generation(folder, 2)[0][3].steps.tolist() == [7]
