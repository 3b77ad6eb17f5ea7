"""Goodput of real runs with random faults: the test observes from outside when each was hit, and when it went on."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from recovery_runs import REPLICAS, Begin, Trial, beginning, lines

from seatrial.record.folder import RunFolder
from seatrial.record.goodput import goodput
from seatrial.record.straggling import straggling
from seatrial.record.view import read_view

pytestmark = [pytest.mark.cluster, pytest.mark.ci, pytest.mark.timed]

_SLACK_S = 0.35  # of each moment that the test observes: two busy cores, and files that it polls
_DEFAULT = 1  # seeds of the default suite


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with beginning(tmp_path / "job") as start:
        yield start


class Observed:
    """When the test saw each step and each recovery, by its own clock."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.steps: list[tuple[float, int, int]] = []  # (seen, generation, step)
        self.recovering: list[float] = []
        self.began = self.ended = 0.0

    def look(self) -> None:
        now = time.time()
        records = lines(self.trial.run / "metrics.jsonl")
        self.steps += [(now, r["generation"], r["step"]) for r in records[len(self.steps) :]]
        kinds = self.trial.kinds()
        self.began = self.began or (now if "run_started" in kinds else 0.0)
        self.ended = self.ended or (now if "run_finished" in kinds else 0.0)
        self.recovering += [now] * (kinds.count("recovering") - len(self.recovering))

    def recovered_from(self, hits: int) -> bool:
        """Whether so many failures have been detected."""
        self.look()
        return len(self.recovering) >= hits

    def reached(self, step: int, generation: int) -> bool:
        self.look()
        return any(s >= step and g >= generation for _, g, s in self.steps)


@pytest.mark.parametrize(
    "seed", [*range(_DEFAULT), *(pytest.param(n, marks=pytest.mark.long) for n in range(_DEFAULT, 20))]
)
def test_random_faults_cost_what_was_observed(begin: Begin, seed: int) -> None:
    pick = random.Random(seed)
    layout = pick.choice([REPLICAS, ()])  # a replica's state, or snapshots in memory: steps are done again
    trial = begin(*layout, "cluster.spares=1", "train.steps=50", "checkpoint.every_steps=10")
    seen, hits = Observed(trial), []
    at = 0
    for generation in range(1, 1 + pick.choice([1, 2])):
        at += pick.randint(4, 12)
        trial.until(lambda at=at, generation=generation: seen.reached(at, generation))
        hits.append(time.time())
        if pick.random() < 0.3 and len(hits) == 1:
            trial.kill_agent(1)
        else:
            trial.kill_rank(pick.choice([0, 1, 2, 3]))
        trial.until(lambda: seen.recovered_from(len(hits)))
    while trial.process.poll() is None:
        seen.look()
        time.sleep(0.01)
    seen.look()
    code, err = trial.end()
    assert code == 0, err

    folder = RunFolder(trial.run)
    view = read_view(folder)
    found = goodput(view, time.time(), straggling=straggling(folder, view.log))
    total = math.fsum(found.seconds.values())
    assert total == pytest.approx(seen.ended - seen.began, rel=0.01, abs=2 * _SLACK_S)
    assert total == pytest.approx(found.wall_s, rel=1e-6)

    times = [t for t, _, _ in seen.steps]
    step_s = median(b - a for a, b in itertools.pairwise(times))
    slack = _SLACK_S * len(hits) + step_s
    detection = recovery = interrupted = 0.0
    for hit, detected in zip(hits, seen.recovering, strict=True):
        last = max(t for t in times if t <= detected)
        following = min(t for t in times if t > detected)
        detection += detected - hit
        interrupted += detected - last
        recovery += following - detected - step_s
    again, best = 0.0, math.inf
    for (before, *_), (now, _, step) in reversed([*itertools.pairwise(seen.steps)]):
        again += (now - before) * (step >= best)
        best = min(best, step)
    assert len(found.interruptions) == len(hits)
    assert found.seconds["detection"] == pytest.approx(detection, abs=slack + len(hits) * step_s)
    assert found.seconds["recovery"] == pytest.approx(recovery, abs=slack)
    lost = found.seconds["detection"] + found.seconds["redone"]
    assert lost == pytest.approx(interrupted + again, abs=slack)
    assert sum(found.by_class.values()) == pytest.approx(
        lost + found.seconds["recovery"] + found.seconds["waiting"]
    )
    start = found.seconds["start"] + found.seconds["warm_up"]
    assert start == pytest.approx(times[0] - seen.began - step_s, abs=2 * _SLACK_S)
    assert found.seconds["unknown"] + found.seconds["stopped"] + found.seconds["queue"] <= 0.01 * total
