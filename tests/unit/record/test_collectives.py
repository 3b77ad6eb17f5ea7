"""The record of a rank's collectives: lines only where a step differs, steps done again, means, damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.record.collectives import CollectivesWriter, Issued, of_a_step, read_collectives
from seatrial.record.folder import RunFolder

USUAL = {"tensor": (24, 2400), "step_sum": (1, 64)}
SAVING = USUAL | {"save": (2, 1000)}


def write(folder: RunFolder, rank: int, steps: list[tuple[int, dict[str, tuple[int, int]]]]) -> None:
    folder.stages(2, rank).parent.mkdir(parents=True, exist_ok=True)
    out = CollectivesWriter(folder, 2, rank, {"tensor": 8})
    for step, counted in steps:
        out.add(step, counted)
    out.close()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_a_line_holds_until_the_next(folder: RunFolder) -> None:
    write(folder, 0, [(1, USUAL), (2, USUAL), (3, USUAL), (4, SAVING), (5, USUAL), (6, USUAL)])
    assert folder.collectives(2, 0).read_text().count("\n") == 3
    found, problems = read_collectives(folder, 2)
    assert not problems
    assert [line.step for line in found[0]] == [1, 4, 5]
    assert found[0][0].issued == {"tensor": Issued(24, 2400, 8), "step_sum": Issued(1, 64, None)}
    assert of_a_step(found, 3, 6)["save"].calls == pytest.approx(2 / 4)
    assert of_a_step(found, 3, 6)["save"].message_bytes == pytest.approx(500)
    assert "save" not in of_a_step(found, 5, 6)


def test_a_mean_is_over_the_ranks(folder: RunFolder) -> None:
    write(folder, 0, [(1, {"tensor": (10, 1000)})])
    write(folder, 1, [(1, {"tensor": (30, 9000)})])
    assert of_a_step(read_collectives(folder, 2)[0], 4, 9)["tensor"] == Issued(
        pytest.approx(20), pytest.approx(5000), 8
    )


def test_a_step_that_was_done_again_counts_as_last(folder: RunFolder) -> None:
    write(folder, 0, [(1, USUAL), (2, SAVING), (3, USUAL), (2, USUAL), (3, SAVING)])
    found, _ = read_collectives(folder, 2)
    assert [(line.step, "save" in line.issued) for line in found[0]] == [(1, False), (2, False), (3, True)]


def test_a_repeated_line_names_only_its_step(folder: RunFolder) -> None:
    verifying = USUAL | {"step_sum": (2, 128)}
    write(folder, 0, [(s, USUAL if s % 10 else verifying) for s in range(1, 1001)])
    text = folder.collectives(2, 0).read_text()
    assert text.count("\n") == 200
    assert text.count("issued") == 2
    assert text.splitlines()[3] == '{"step":20,"like":10}'
    found, problems = read_collectives(folder, 2)
    assert not problems
    assert of_a_step(found, 995, 995)["step_sum"].calls == 1
    assert of_a_step(found, 990, 990)["step_sum"] == Issued(2, 128, None)
    folder.collectives(2, 0).write_text(text.replace('"step":10,', '"step":"x",'))
    found, problems = read_collectives(folder, 2)
    assert [line.step for line in found[0]] == [1, *range(11, 1000, 10)]
    assert len(problems) == 100, "what it names is not there"


def test_a_line_after_its_step_was_done_otherwise(folder: RunFolder) -> None:
    write(folder, 0, [(1, USUAL), (2, SAVING), (3, USUAL), (1, SAVING), (2, USUAL), (3, SAVING)])
    found, problems = read_collectives(folder, 2)
    assert not problems
    assert [(line.step, "save" in line.issued) for line in found[0]] == [(1, True), (2, False), (3, True)]


def test_a_damaged_line_is_reported_and_the_others_count(folder: RunFolder) -> None:
    write(folder, 0, [(1, USUAL), (4, SAVING)])
    path = folder.collectives(2, 0)
    path.write_text(path.read_text().replace('"step":4', '"step":"x"') + '{"step":9,"iss')
    found, problems = read_collectives(folder, 2)
    assert [line.step for line in found[0]] == [1]
    assert [p.line for p in problems] == [3, 2]


@pytest.mark.parametrize("calls", ["0", "-1", "NaN", "1e999"])
def test_counts_that_cannot_be_are_damage(folder: RunFolder, calls: str) -> None:
    write(folder, 0, [(1, USUAL)])
    path = folder.collectives(2, 0)
    path.write_text(path.read_text().replace('"calls":24', f'"calls":{calls}'))
    found, problems = read_collectives(folder, 2)
    assert (found, [p.line for p in problems]) == ({}, [1])


def test_an_old_run_folder_has_none(folder: RunFolder) -> None:
    assert read_collectives(folder, 1) == ({}, [])
    assert of_a_step({}, 1, 5) == {}
