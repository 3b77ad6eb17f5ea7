"""Every second of a run has one cause: runs with random faults whose true losses are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
from goodput_histories import CLASSES, Story

from seatrial.record.folder import RunFolder
from seatrial.record.goodput import CAUSES, Goodput, goodput
from seatrial.record.view import RunView, read_view

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
