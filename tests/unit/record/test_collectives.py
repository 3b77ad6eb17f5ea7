"""The record of a rank's collectives: lines only where a step differs, steps done again, means, damage."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


VERIFYING = USUAL | {"step_sum": (2, 128)}


def rhythmic(
    steps: range, every: int = 10, at: int = 1, save: int = 0
) -> list[tuple[int, dict[str, tuple[int, int]]]]:
    return [(s, SAVING if save and s % save == 0 else VERIFYING if s % every == at else USUAL) for s in steps]


def expanded(folder: RunFolder, last: int) -> list[dict[str, tuple[float, float]]]:
    """What the record says of each step from 1 to `last`."""
    found, problems = read_collectives(folder, 2)
    assert not problems
    means = [of_a_step(found, step, step) for step in range(1, last + 1)]
    return [{name: (each.calls, each.bytes) for name, each in mean.items()} for mean in means]


@pytest.mark.parametrize(("save", "lines"), [(0, 5), (50, 5 + 2 * 19), (37, None), (11, None)])
def test_a_rhythm_is_one_line(folder: RunFolder, save: int, lines: int | None) -> None:
    steps = rhythmic(range(1, 1000), at=3, save=save)
    write(folder, 0, steps)
    if lines is not None:
        assert abs(folder.collectives(2, 0).read_text().count("\n") - lines) <= 2
    assert expanded(folder, 999) == [counted for _, counted in steps]


def test_a_rhythm_that_ends_or_changes(folder: RunFolder) -> None:
    steps = rhythmic(range(1, 100)) + rhythmic(range(100, 200), every=1000)
    steps += rhythmic(range(200, 300), every=7, at=2) + rhythmic(range(300, 400), at=4)
    write(folder, 0, steps)
    assert expanded(folder, 399) == [counted for _, counted in steps]
    mean = of_a_step(read_collectives(folder, 2)[0], 30, 89)["step_sum"]
    assert mean.calls == pytest.approx(1.1)


def test_a_rhythm_and_steps_done_again(folder: RunFolder) -> None:
    write(folder, 0, rhythmic(range(1, 60)) + rhythmic(range(45, 100), at=5))
    expected = rhythmic(range(1, 45)) + rhythmic(range(45, 100), at=5)
    assert expanded(folder, 99) == [counted for _, counted in expected]


@pytest.mark.cluster  # slow
@settings(max_examples=50)
@given(st.lists(st.sampled_from([USUAL, SAVING, VERIFYING]), min_size=1, max_size=60), st.integers(1, 60))
def test_any_order_of_steps(order: list[Any], again: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, first = RunFolder(Path(name)), list(enumerate(order, 1))
        steps = first + first[again - 1 :]
        write(folder, 0, steps)
        assert expanded(folder, len(order)) == order


def test_a_line_at_a_step_that_is_an_exception_of_its_period(folder: RunFolder) -> None:
    a, b = SAVING, USUAL
    order = [a, b, a, a, a, b, a, b, b, a]
    write(folder, 0, list(enumerate(order, 1)))
    assert expanded(folder, len(order)) == order


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
