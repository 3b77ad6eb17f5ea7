"""The cause of lost time in real ranks: a delay planted in one rank, in half of the steps, against the other half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accounting_ranks import DELAY_S, SLOW_RANK, STEPS, is_delayed

from conftest import run_cases
from seatrial.job.layout import Layout
from seatrial.record.folder import RunFolder
from seatrial.record.frontier import WARM_UP
from seatrial.record.stages import read_generation
from seatrial.scale.cause import find_causes
from seatrial.scale.observed import Observed, steady_steps

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "replicate2-fsdp2": {"replicate": 2, "shard": 2},
}
DELAYS = {"data": "data", "forward": "straggler", "backward": "straggler"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cause")
    cases = [
        {"name": f"{name}-{delay}", "layout": layout, "delay": delay, "tied": True, "root": str(out)}
        for name, layout in LAYOUTS.items()
        for delay in DELAYS
    ]
    done = run_cases(cases, out, timeout_s=240, script="accounting_ranks.py")
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_delayed_rank_is_the_first_cause(out: Path, name: str, delay: str) -> None:
    found, problems = read_generation(RunFolder(out / f"{name}-{delay}"), 1)
    assert not problems
    cube = steady_steps(found, WARM_UP)
    assert cube is not None
    slow = np.array([is_delayed(step) for step in range(1 + WARM_UP, STEPS + 1)])
    base, here = (
        Observed(cube[which], Layout(**LAYOUTS[name]), 1, 1.0, microbatches=4) for which in (~slow, slow)
    )
    first = find_causes(base, here)[0]
    assert (first.kind, first.ranks) == (DELAYS[delay], (SLOW_RANK,))
    # Roughly: a rank that sleeps leaves its processor to the others, whose own work then takes less.
    assert 0.5 * DELAY_S[delay] < first.seconds < 1.5 * DELAY_S[delay]
