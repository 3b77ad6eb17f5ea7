"""The views of `seatrial watch` on a terminal, drawn into text."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.frontier import account
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.stages import BACKWARD, FORWARD, OWN, REPLICATE, STAGES, RankStages
from seatrial.record.view import read_view
from seatrial.ui.dashboard import KEYS, ViewName, ViewState, draw

NODES, GPUS, SLOW, STEP_S = 128, 8, 517, 10.0


@pytest.fixture
def shown(tmp_path: Path) -> ViewState:
    """128 nodes of 8 GPUs in two pipeline stages, the second of which has twice the work; rank 517 takes 8 % of a step more."""
    folder = RunFolder(tmp_path / "a-run")
    folder.control.mkdir(parents=True)
    folder.job_toml.write_text("[train]\nsteps = 1000\nglobal_batch = 2\nsequence_length = 8\n")
    slots = {str(slot): slot for slot in range(NODES)}
    events.append(folder, "run_started", "x", generation=1)
    events.append(folder, "generation_started", "first start", generation=1, data={"slots": slots})
    events.append(folder, "straggler", "rank 517 is slow", severity="warning", generation=1)
    metrics = MetricsWriter(folder)
    for n in range(1, 21):
        metrics.write(
            MetricsRecord(n, n, 5.0 - n / 10, 0.5, 1e-3, STEP_S, 0.0, 64.0, 1.0, 0.4, 1, time.time(), 1)
        )
    metrics.close()
    steps, found = np.arange(1, 21), {}
    for rank in range(NODES * GPUS):
        row = np.zeros(len(STAGES))
        row[[FORWARD, BACKWARD]] = (1.0, 2.0) if rank < NODES * GPUS // 2 else (2.0, 4.0)
        row[FORWARD] += 0.08 * STEP_S if rank == SLOW else 0.0
        row[REPLICATE] = STEP_S - row[:OWN].sum()
        found[rank] = RankStages(
            1, rank, NODES * GPUS, "cuda", 1, {}, steps, np.repeat(row[None], len(steps), 0)
        )
    return ViewState(read_view(folder), time.time(), account(found), 2, None, "no GPU", None)


def lines(shown: ViewState, which: ViewName, width: int, height: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=True, color_system=None).print(
        draw(shown, which, width, height)
    )
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("which", KEYS.values())
@pytest.mark.parametrize(("width", "height"), [(200, 60), (110, 34), (80, 24), (20, 8)])
def test_a_view_fills_the_terminal_and_no_more(
    shown: ViewState, which: ViewName, width: int, height: int
) -> None:
    text = lines(shown, which, width, height)
    assert len(text) == height
    assert max(map(len, text)) <= width
    assert "1 overview" in text[-1]


def test_the_slow_rank_comes_first_with_its_node(shown: ViewState) -> None:
    text = lines(shown, "ranks", 110, 34)
    first = text[next(i for i, line in enumerate(text) if line.startswith("rank  node")) + 1]
    assert first.split() == ["517", "64", "6.8", "s", "+8.0", "%", "of", "a", "step"]
    # The busier stage is not a deviation: no other rank has any.
    assert sum("+0.0 %" in line for line in text) > 3
    assert "nodes that deviate less are not shown" in " ".join(lines(shown, "ranks", 200, 20))


def test_a_late_step_is_marked(shown: ViewState) -> None:
    shown.view.state = "running"
    late = replace(shown, now=shown.now + 60)
    marked = []
    for each in (shown, late):
        out = io.StringIO()
        console = Console(file=out, width=110, force_terminal=True, color_system="standard")
        console.print(draw(each, "overview", 110, 34))
        marked.append(any(f"\x1b[1;31m{age}" in out.getvalue() for age in ("0 s ago", "1 s ago", "1 min")))
    assert marked == [False, True]


def test_what_needs_attention_comes_first(shown: ViewState) -> None:
    data = {
        "rule": "gpu_hot",
        "since": 1.0,
        "evidence": {},
        "nodes": [7],
        "command": "seatrial check job.toml",
    }
    for key, state in (("gpu_hot", "firing"), ("storage", "firing"), ("storage", "resolved")):
        named = {**data, "key": key, "state": state}
        events.append(
            shown.view.folder, "alert", f"{key} of node 7", severity="warning", generation=1, data=named
        )
    view = read_view(shown.view.folder)
    view.state = "running"
    text = lines(replace(shown, view=view), "overview", 110, 34)
    assert [line for line in text if line.startswith("alert")] == [
        "alert        gpu_hot of node 7: seatrial check job.toml"
    ]


def test_an_empty_run_shows_what_is_missing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "empty")
    folder.control.mkdir(parents=True)
    nothing = ViewState(read_view(folder), time.time(), None, 1, None, "", None)
    assert "no step yet" in " ".join(lines(nothing, "overview", 80, 24))
    assert "job.toml:0: cannot be used" in " ".join(lines(nothing, "overview", 80, 24))
    for which in ("ranks", "step"):
        assert "have not recorded" in " ".join(lines(nothing, which, 80, 24))
