"""Every second of a run has one cause: runs with random faults whose true losses are known."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goodput_histories import BEGIN, CLASSES, Story

from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.frontier import split_step
from seatrial.record.goodput import CAUSES, LABELS, NOT_FAILED, Goodput, goodput
from seatrial.record.mtbf import mtbf
from seatrial.record.stages import STAGES, StageWriter, read_generation
from seatrial.record.straggling import straggling
from seatrial.record.timeline import median, timeline
from seatrial.record.view import RunView, read_view

DOCS = Path(__file__).parents[3] / "docs"
JOB = "[train]\nsteps = 400\nglobal_batch = 8\nsequence_length = 16\n"


def view_of(story: Story, folder: RunFolder, state: str = "finished") -> RunView:
    folder.job_toml.write_text(JOB)
    view = read_view(folder)
    view.events, view.log, view.state = story.events, story.log, state  # type: ignore[assignment]
    return view


def of(story: Story, folder: RunFolder, **more: Any) -> Goodput:
    return goodput(view_of(story, folder), story.now, **more)


@pytest.mark.parametrize("seed", range(40))
def test_random_faults_cost_what_they_cost(folder: RunFolder, seed: int) -> None:
    story = Story(seed).play()
    found = of(story, folder)
    truth = {cause: story.truth[cause] for cause in CAUSES}
    wall = story.now - found.begin
    assert sum(truth.values()) == pytest.approx(wall, abs=1e-3), "the test's own account"
    assert math.fsum(found.seconds.values()) == pytest.approx(wall, abs=1e-3)
    # How far a step had come when it was interrupted nobody records; the rest is records' jitter.
    slack = 0.002 * len(story.log.times) + 0.03 * story.step_s * (story.faults + 20)
    for cause, seconds in truth.items():
        unknown = story.partial if cause in ("redone", "detection") else 0.0
        assert found.seconds[cause] == pytest.approx(seconds, abs=slack + unknown), cause
    both = found.seconds["redone"] + found.seconds["detection"]
    assert both == pytest.approx(truth["redone"] + truth["detection"], abs=slack)
    for cls in {*CLASSES.values(), "numerics"}:
        assert found.by_class.get(cls, 0.0) == pytest.approx(story.by_class[cls], abs=slack), cls
    assert sum(each.restarted for each in found.interruptions) == story.faults


def test_every_cause_has_a_row_in_the_document() -> None:
    text = (DOCS / "watch.md").read_text()
    assert [cause for cause in LABELS if f"| `{cause}` |" not in text] == []


@pytest.mark.parametrize("seed", range(5))
def test_a_part_of_the_time_adds_up_too(folder: RunFolder, seed: int) -> None:
    story = Story(seed).play()
    view = view_of(story, folder)
    whole = goodput(view, story.now)
    middle = (whole.begin + whole.end) / 2
    late, early = goodput(view, story.now, since=middle), view_of(story, folder)
    assert math.fsum(late.seconds.values()) == pytest.approx(whole.end - middle, abs=1e-3)
    assert late.begin == middle
    assert early.log is view.log
    assert all(late.seconds[cause] <= whole.seconds[cause] + 1e-6 for cause in CAUSES)
    assert late.mtbf == whole.mtbf, "of the whole run"


def test_a_running_run_counts_up_to_now(folder: RunFolder) -> None:
    story = Story(1)
    story.start()
    story.train(20)
    view = view_of(story, folder, "running")
    soon, later = goodput(view, story.now + 2.0), goodput(view, story.now + 100.0)
    assert soon.seconds["unknown"] == 0.0
    assert soon.seconds["productive"] == pytest.approx(story.truth["productive"] + 2.0, abs=0.2)
    assert later.seconds["unknown"] == pytest.approx(97.0, abs=0.2), "three medians of a step may be work"
    assert math.fsum(later.seconds.values()) == pytest.approx(later.wall_s, abs=1e-3)


def test_steps_to_redo_are_lost_before_they_are_redone(folder: RunFolder) -> None:
    story = Story(2)
    story.start()
    story.train(27)
    story.fail("worker_killed", "memory")
    found = of(story, folder)
    assert story.step == 20
    assert found.seconds["redone"] == pytest.approx(story.truth["redone"], abs=1.1)
    (failure,) = found.interruptions
    assert failure.redone_s == pytest.approx(found.seconds["redone"])
    assert failure.lost_s == pytest.approx(sum(found.by_class.values()))


def test_ranks_of_an_abandoned_generation_do_not_count(folder: RunFolder) -> None:
    story = Story(3)
    story.start()
    story.train(20)
    story.fail("worker_killed", "carried")
    story.train(5)
    story.generation -= 1
    story.record(23, 1.0)  # written late, by a rank that had not been stopped yet
    story.generation += 1
    story.train(5)
    found = of(story, folder)
    assert found.seconds["redone"] == pytest.approx(story.truth["redone"], abs=1.1)
    assert found.seconds["productive"] == pytest.approx(story.truth["productive"], abs=0.1)


@pytest.mark.parametrize("offset", [-30.0, 30.0])
def test_a_coordinator_with_another_clock(folder: RunFolder, offset: float) -> None:
    """The order of what happened counts, and the sum stays exact."""
    story = Story(4).play()
    story.events = [events.Event(**vars(e) | {"time": e.time + offset}) for e in story.events]
    found = of(story, folder)
    assert math.fsum(found.seconds.values()) == pytest.approx(found.wall_s, abs=1e-3)
    assert all(seconds >= 0 for seconds in found.seconds.values())


def test_without_records_there_is_no_time_and_no_ratio(folder: RunFolder) -> None:
    found = goodput(read_view(folder), BEGIN)
    assert (found.wall_s, found.ettr, found.mtbf.mean_s, found.mtbf.low_s) == (0.0, None, None, None)
    assert set(found.seconds.values()) == {0.0}


def test_records_with_impossible_times(folder: RunFolder) -> None:
    story = Story(5)
    story.start()
    for seconds in (math.nan, math.inf, -5.0, 1e12, 0.0):
        story.train(3)
        story.record(story.step + 1, seconds)
    story.events.append(events.Event(math.nan, 1, "recovering", "warning", "x"))
    found = of(story, folder)
    assert math.fsum(found.seconds.values()) == pytest.approx(found.wall_s, rel=1e-9)
    assert all(seconds >= 0 for seconds in found.seconds.values())


def test_a_clock_that_is_set_is_unknown_time(folder: RunFolder) -> None:
    story = Story(6)
    story.start()
    story.train(10)
    story.now += 3600
    story.train(10)
    assert of(story, folder).seconds["unknown"] == pytest.approx(3600, abs=0.1)


def test_spares_are_idle_and_lost_nodes_are_not(folder: RunFolder) -> None:
    story = Story(7, nodes=2)
    story.start()
    story.event("node_joined", node=2, spare=True)
    before = story.now
    story.train(50)
    idle = story.now - before
    story.event("node_lost", "error", 2)
    story.train(50)
    found = of(story, folder)
    assert found.idle_node_s[2] == pytest.approx(idle, abs=0.1)
    assert found.node_mtbf.exposure_s == pytest.approx(2 * found.mtbf.exposure_s)
    view = view_of(story, folder, "running")
    assert goodput(view, story.now).idle_nodes == []
    story.event("node_joined", node=3, spare=True)
    assert goodput(view, story.now + 5).idle_nodes == [3]


# Exact 95 % limits of the mean of a Poisson variable: Pearson and Hartley, Biometrika Tables for Statisticians, table 40.
@pytest.mark.parametrize(
    ("failures", "least", "most"),
    [
        (1, 0.0253, 5.572),
        (2, 0.2422, 7.225),
        (5, 1.6235, 11.668),
        (10, 4.795, 18.390),
        (40, 28.58, 54.47),
        (100, 81.36, 121.63),
    ],
)
def test_mtbf_has_the_exact_interval(failures: int, least: float, most: float) -> None:
    found = mtbf(failures, 1e6)
    assert found.mean_s == 1e6 / failures
    assert found.low_s == pytest.approx(1e6 / most, rel=2e-4)
    assert found.high_s == pytest.approx(1e6 / least, rel=2e-3)


def test_without_a_failure_only_a_lower_bound_is_known() -> None:
    found = mtbf(0, 1e6)
    assert (found.mean_s, found.high_s) == (None, None)
    assert found.low_s == pytest.approx(1e6 / 2.9957, rel=1e-4)


@pytest.mark.long
def test_a_month_of_steps_takes_a_third_of_a_second() -> None:
    story = Story(8, nodes=128, step_s=10.0)
    story.start("submitted")
    block = 260_000 // 200
    for _ in range(200):
        first, story.first = story.first, ""
        for _ in range(block):  # as `one_step` does, without its cost
            story.step += 1
            story.now += 10.0
            story.record(story.step, 10.0)
        story.first = first
        story.done = [(step, 10.0, 1.0) for step in range(story.step - 20, story.step + 1)]
        story.snapshot = story.step // 10 * 10
        story.save()
        story.fail("worker_killed", "memory")
    took = []
    for _ in range(3):
        began = time.process_time()
        found = timeline(story.events, story.log, None)
        took.append(time.process_time() - began)
    assert len(story.log.times) == 260_000
    assert found.end > found.begin
    assert min(took) < 0.3


def test_stragglers_are_measured_on_a_sample(folder: RunFolder) -> None:
    story = Story(9)
    story.start()
    story.train(300)
    for rank in range(4):
        writer = StageWriter(folder, 1, rank, ranks=4, clock="cpu", first_step=1, not_separated={})
        for step in range(1, 301):
            own = 0.5 + 0.1 * (rank == 2)
            seconds = dict.fromkeys(STAGES, 0.0) | {"forward": own, "step_sum": 1.0 - own}
            writer.add(step, list(seconds.values()))
        writer.close()
    found = straggling(folder, story.log)
    assert found is not None
    stages, _ = read_generation(folder, 1)
    split = split_step(np.stack([stages[rank].seconds[50] for rank in range(4)]))
    assert found.share == pytest.approx(split.pace_ahead_s / split.step_s, rel=1e-5)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert (found.rank, found.rank_steps == found.steps) == (2, True)
    assert 200 <= found.steps <= 298  # without the first two
    assert found.of_steps == 300
    with_it, without = of(story, folder, straggling=found), of(story, folder)
    assert with_it.seconds["straggler"] == pytest.approx(0.1 * without.seconds["productive"], rel=1e-4)
    assert with_it.ettr == without.ettr
    assert math.fsum(with_it.seconds.values()) == pytest.approx(with_it.wall_s, abs=1e-3)
    assert NOT_FAILED not in with_it.by_class


def test_a_rank_without_stages_leaves_stragglers_unknown(folder: RunFolder) -> None:
    story = Story(9)
    story.start()
    story.train(20)
    assert straggling(folder, story.log) is None
    StageWriter(folder, 1, 0, ranks=2, clock="cpu", first_step=1, not_separated={}).close()
    assert straggling(folder, story.log) is None
    assert any("stragglers" in note for note in of(story, folder).notes)


@pytest.mark.parametrize(
    "values", [[3.0], [2.0, 1.0], [5.0, 1.0, 4.0], [1.0, math.nan, 2.0], [*range(9), 0.5]]
)
def test_the_median_is_that_of_numpy(values: list[float]) -> None:
    assert median(values) == pytest.approx(np.median(values), abs=0, nan_ok=True)
