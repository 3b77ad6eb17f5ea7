"""Where the time of steps goes, in real ranks: the stages add up, and a planted delay is found where it was planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accounting_ranks import DELAY_S, SLOW_RANK, STEPS, is_delayed
from numpy.typing import NDArray

from conftest import records, run_cases
from seatrial.job.layout import Layout
from seatrial.record.collectives import read_collectives
from seatrial.record.folder import RunFolder
from seatrial.record.frontier import WARM_UP, split_step
from seatrial.record.stages import STAGES, RankStages, read_generation
from seatrial.scale.cause import find_causes
from seatrial.scale.observed import Observed, steady_steps

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "replicate2-fsdp2": {"replicate": 2, "shard": 2},
}
CAUSES = {"data": "data", "forward": "straggler", "backward": "straggler"}
SHORT = 6  # steps, where none is compared with another
DELAYS = {"data": "data", "forward": "forward", "backward": "backward", "collective": "tensor"}
# A rank that sleeps leaves its processor to others, which then wait less: where waiting is compared, there are few.
FEW = {"tensor": 2}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("accounting")
    common = {"tied": True, "root": str(out)}
    cases: list[dict[str, Any]] = [
        *({"name": name, "layout": layout, "steps": SHORT, **common} for name, layout in LAYOUTS.items()),
        *(
            {"name": d, "layout": FEW if d == "collective" else LAYOUTS["tp2-pp2"], "delay": d, **common}
            for d in DELAYS
        ),
        {
            "name": "unrecorded",
            "layout": LAYOUTS["tp2-pp2"],
            "recorded": False,
            "steps": SHORT,
            **common,
        },
    ]
    done = run_cases(cases, out, timeout_s=240, script="accounting_ranks.py")
    assert done.returncode == 0, done.stderr
    return out


def recorded(out: Path, name: str) -> dict[int, RankStages]:
    found, problems = read_generation(RunFolder(out / name), 1)
    assert not problems
    assert sorted(found) == list(range(found[0].ranks))
    for each in found.values():
        assert each.steps.tolist() == list(range(1, (STEPS if name in DELAYS else SHORT) + 1))
    return found


def splits(out: Path, name: str) -> NDArray[np.float64]:
    """Steps x STAGES."""
    cube = np.stack([each.seconds for each in recorded(out, name).values()], axis=1)
    return np.stack([split_step(table).seconds for table in cube])


@pytest.mark.parametrize("name", [*LAYOUTS, *DELAYS])
def test_the_stages_add_up_to_the_time_of_the_step(out: Path, name: str) -> None:
    found = recorded(out, name)
    totals = np.stack([each.seconds.sum(axis=1) for each in found.values()])
    assert splits(out, name).sum(axis=1) == pytest.approx(totals.max(axis=0), rel=1e-6)
    measured = [m["step_time_s"] for m in records(out / name / "metrics.jsonl")]
    assert totals[0].sum() == pytest.approx(np.sum(measured), rel=0.01)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_dimension_has_its_time_and_no_other(out: Path, name: str) -> None:
    for each in recorded(out, name).values():
        spent = {stage for stage, seconds in zip(STAGES, each.seconds.sum(axis=0), strict=True) if seconds}
        own = {"data", "host", "forward", "backward", "optimizer"}
        assert spent == own | set(LAYOUTS[name]) | {"step_sum"}
        assert not each.not_separated


def test_collectives_are_counted_with_their_bytes(out: Path) -> None:
    for name, layout in LAYOUTS.items():
        found, problems = read_collectives(RunFolder(out / name), 1)
        assert not problems
        assert sorted(found) == [0, 1, 2, 3]
        for lines in found.values():
            assert len(lines) <= 2  # at first the pipeline exchanges shapes too
            usual = lines[-1].issued
            assert usual.keys() == {*layout, "step_sum"}
            assert {usual[d].ranks for d in layout} == {2}
            if "pipeline" in layout:
                # Eight activations and eight gradients of 2 sequences, half of their 64 positions, 64 features; and the
                # gradient of half of the tied embedding.
                assert usual["pipeline"].bytes == 16 * 2 * 32 * 64 * 4 + 264 // 2 * 64 * 4
                assert usual["pipeline"].calls == 17
            else:
                # Two microbatches gather five FSDP units forward and all but the last again backward.
                assert usual["shard"].calls == 2 * (5 + 4) + 5


@pytest.mark.parametrize(("delay", "stage"), DELAYS.items())
def test_a_delay_is_charged_to_its_stage_and_its_rank(out: Path, delay: str, stage: str) -> None:
    split, i = splits(out, delay), STAGES.index(stage)
    steps = np.arange(1, STEPS + 1)
    slow = np.array([is_delayed(step) for step in steps])
    plain = ~slow & (steps > WARM_UP)
    grown = np.median(split[slow], axis=0) - np.median(split[plain], axis=0)
    # Other work on the machine only adds to a wait: the lower quarter of the steps is the least disturbed.
    least = np.quantile(split[slow, i], 0.25) - np.quantile(split[plain, i], 0.25)
    assert least == pytest.approx(DELAY_S[delay], rel=0.1)
    assert np.delete(grown, i).max() < 0.3 * DELAY_S[delay]
    cube = np.stack([each.seconds for each in recorded(out, delay).values()])
    sums = np.median(cube.cumsum(axis=2)[:, slow, i], axis=1)
    if stage != "tensor":  # there the others of its group wait as long
        assert int(sums.argmax()) == SLOW_RANK


@pytest.fixture(scope="module", params=["tp2-pp2", pytest.param("replicate2-fsdp2", marks=pytest.mark.long)])
def delayed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Layout]:
    """The run folders of the delays in `CAUSES`, and their layout."""
    at = LAYOUTS[request.param]
    if request.param == "tp2-pp2":
        found: Path = request.getfixturevalue("out")
    else:
        found = tmp_path_factory.mktemp(request.param)
        cases = [{"name": d, "layout": at, "delay": d, "tied": True, "root": str(found)} for d in CAUSES]
        done = run_cases(cases, found, timeout_s=240, script="accounting_ranks.py")
        assert done.returncode == 0, done.stderr
    return found, Layout(**at)


@pytest.mark.parametrize("delay", CAUSES)
def test_the_delayed_rank_is_the_first_cause(delayed: tuple[Path, Layout], delay: str) -> None:
    """Of the time that delayed steps lose against the others."""
    out, layout = delayed
    cube = steady_steps(recorded(out, delay), WARM_UP)
    assert cube is not None
    slow = np.array([is_delayed(step) for step in range(1 + WARM_UP, STEPS + 1)])
    base, here = (Observed(cube[which], layout, 1, 1.0, microbatches=4) for which in (~slow, slow))
    first = find_causes(base, here)[0]
    assert (first.kind, first.ranks) == (CAUSES[delay], (SLOW_RANK,))
    # Roughly: a rank that sleeps leaves its processor to the others, whose own work then takes less.
    assert 0.5 * DELAY_S[delay] < first.seconds < 1.5 * DELAY_S[delay]


def test_training_has_the_same_bits_without_it(out: Path) -> None:
    for rank in range(4):
        ours = torch.load(out / f"tp2-pp2.{rank}.pt", weights_only=True)["weights"]
        theirs = torch.load(out / f"unrecorded.{rank}.pt", weights_only=True)["weights"]
        assert [w[:2] for w in ours] == [w[:2] for w in theirs]
        assert all(torch.equal(a[2], b[2]) for a, b in zip(ours, theirs, strict=True))
    for each in read_generation(RunFolder(out / "unrecorded"), 1)[0].values():
        assert not each.steps.size
