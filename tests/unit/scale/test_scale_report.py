"""The report of a measurement on GPUs, from records made by hand: waterfall beside its prediction, heat map, planned gains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scale_cases import STORE, job

from seatrial.job import job_from_text, preset_text
from seatrial.job.layout import Layout
from seatrial.plan.report.step_waterfall import TABLE
from seatrial.record.folder import RunFolder
from seatrial.record.stages import (
    BACKWARD,
    FORWARD,
    HOST,
    OPTIMIZER,
    PIPELINE,
    SHARD,
    STAGES,
    StageWriter,
)
from seatrial.scale.cause import Cause, lines
from seatrial.scale.conduct import Measurement, MeasurementOptions
from seatrial.scale.gain import gains
from seatrial.scale.heat import MOST_ROWS, heat
from seatrial.scale.judge import Gates
from seatrial.scale.observed import Observed
from seatrial.scale.report import document, waterfall_rows
from seatrial.scale.results import Results, results_of
from seatrial.scale.sizes import Size, sizes_of
from seatrial.scale.state import State
from seatrial.scale.trial import Figures, Trial
from seatrial.ui.scale_html import page

SLOW = 11  # a rank of the larger size
STEPS = 12


def run_of(folder: Path, size: Size, passes_s: float) -> Trial:
    """One run of a pipeline of two; on two nodes half of the work, the same idle time, and a slow rank."""
    name, table = f"{size.nodes}-nodes-1", np.zeros((size.gpus, len(STAGES)))
    table[:, [FORWARD, BACKWARD, OPTIMIZER, HOST]] = (passes_s / 3, passes_s * 2 / 3, 0.02, 0.01)
    table[:, PIPELINE], table[:, SHARD] = 0.2, 0.1
    if size.nodes > 1:
        table[SLOW, BACKWARD] += 0.3
        table[np.arange(size.gpus) != SLOW, SHARD] += 0.3
    for rank, row in enumerate(table):
        out = StageWriter(
            RunFolder(folder / name), 1, rank, ranks=size.gpus, clock="cuda", first_step=1, not_separated={}
        )
        for step in range(1, STEPS + 1):
            out.add(step, row.tolist())
        out.close()
    step_s = float(table[0].sum())
    figures = Figures(
        2, STEPS - 2, step_s, size.tokens_per_step / step_s, 0.4 / size.nodes / step_s, [4.0] * STEPS
    )
    return Trial(size.nodes, size.gpus, 1.0, 60.0, name, figures=figures)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("report")
    text = preset_text("qwen2.5-7b-h200")
    more = (
        "cluster.launcher=slurm",
        "cluster.nodes=2",
        "parallel.pipeline=2",
        "train.global_batch=32",
        "data.tokenizer=x.json",
    )
    given = job_from_text(text, name="job.toml", base_folder=folder, overrides=more)
    made = Measurement(given, folder, MeasurementOptions((1, 2), "strong", steps=STEPS))
    made.sizes = sizes_of(given, (1, 2), "strong", steps=STEPS, stores=[STORE])
    made.state = State(folder, {}, [run_of(folder, size, 1.2 / size.nodes) for size in made.sizes])
    return results_of(made, Gates())


def test_predictions_are_shown_with_measurements(results: Results) -> None:
    one, two = document(results)["sizes"]
    for size in (one, two):
        rows = {row["name"]: row for row in size["waterfall"]["rows"]}
        assert list(rows) == ["model FLOPs", *(name for name, *_ in TABLE)]
        assert sum(row["seconds"] for row in rows.values()) == pytest.approx(size["step_split"]["step_s"])
        assert rows["model FLOPs"]["seconds"] == pytest.approx(0.4 / size["nodes"])
        assert rows["computation below peak"]["ratio"] == pytest.approx(
            rows["computation below peak"]["seconds"] / rows["computation below peak"]["predicted_s"]
        )
        assert size["waterfall"]["mfu"] == pytest.approx(size["mfu"], rel=1e-6)
    headings, rows = waterfall_rows(results)
    assert headings == ("step part", "1 node", "plan", "ratio", "2 nodes", "plan", "ratio")
    assert {len(row) for row in rows} == {len(headings)}
    names = [row[0] for row in rows]
    assert names[0] == "model FLOPs"
    assert names[-1] == "step"
    assert "tensor-parallel communication" not in names
    assert dict(zip(names, (row[1:4] for row in rows), strict=True))["host"] == ("10 ms 1 %", "-", "-")


def test_the_page_has_a_picture_of_each_size_and_plan(results: Results) -> None:
    found = page(results)
    for title in (
        "1 node: where the dense peak goes, measured",
        "2 nodes: where the dense peak goes, predicted",
    ):
        assert title in found
    ids = re.findall(r' id="([^"]+)"', found)
    assert len(ids) == len(set(ids))
    assert f"rank {SLOW} deviates most from its peers, in backward, by 300 ms" in found
    assert "http" not in found.replace("http://www.w3.org", "")


def test_a_bubble_has_predicted_gains_of_changes(results: Results) -> None:
    causes = results.sizes[1].causes
    (bubble,) = (cause for cause in causes if cause.kind == "bubble")
    found = {gain.change: gain for gain in bubble.gains}
    batch = found[f"train.global_batch = {2 * results.sizes[1].size.job.train.global_batch}"]
    assert batch.gain is not None
    assert 0.05 < batch.gain < 0.4
    assert "predicted by seatrial plan" in batch.words
    assert ("plan", batch.words) in lines([bubble])


def cause(kind: Any, *dimensions: str) -> Cause:
    return Cause(kind, 1.0, 0.5, None, dimensions, (), (), None, (), None, ())


def test_without_a_known_gpu_only_the_schedule_is_known() -> None:
    small = job(
        *("cluster.nodes=1", "cluster.gpus_per_node=2", "parallel.pipeline=2"),
        *(
            "parallel.tensor=1",
            "parallel.shard=1",
            "train.global_batch=4",
            "train.microbatch=1",
            "model.num_hidden_layers=4",
        ),
    )
    table = np.zeros((1, 2, len(STAGES)))
    table[:, :, FORWARD], table[:, :, PIPELINE] = 0.8, 0.2
    here = Observed(table, small.layout, 1, 512.0, microbatches=4)
    found = gains(cause("bubble", "pipeline"), small, here, None, "no GPU")
    # Idle for the time of 1 microbatch in 4; then of 1 in 8, or half of that of 1 in 4.
    assert [(g.change.split(" =")[0], g.gain and round(g.gain, 6)) for g in found] == [
        ("train.global_batch", round(1 / 0.9 - 1, 6)),
        ("parallel.schedule", round(1 / 0.9 - 1, 6)),
        ("parallel.pipeline", None),
    ]
    assert found[-1].words.endswith("gain unknown: no GPU")
    unknown = gains(cause("communication", "shard"), small, here, None, "no GPU")
    assert [g.gain for g in unknown] == [None, None]
    long = job("parallel.tensor=1", "parallel.pipeline=1", "parallel.context=4", "parallel.shard=2")
    (smaller,) = gains(cause("communication", "context"), long, here, None, "no GPU")
    assert smaller.change == "parallel.context = 2, shard = 4"
    assert gains(cause("straggler"), small, here, None, "no GPU") == ()


def test_a_change_that_the_rules_refuse_is_not_named() -> None:
    few = job("parallel.pipeline=2", "model.num_hidden_layers=2")  # too few for two stages on each rank
    here = Observed(np.ones((1, 8, len(STAGES))), few.layout, 4, 512.0, microbatches=4)
    found = gains(cause("bubble", "pipeline"), few, here, None, "no GPU")
    assert found
    assert not [g.change for g in found if "schedule" in g.change]


def observed(layout: Layout, *late: int, per_node: int = 8) -> Observed:
    table = np.zeros((3, layout.world_size, len(STAGES)))
    table[:, :, FORWARD] = 1.0
    table[:, layout.world_size // 2 :, FORWARD] += 0.5 * (layout.pipeline > 1)
    for rank in late:
        table[:, rank, FORWARD] += 0.25
    return Observed(table, layout, per_node, 1.0)


def test_heat_is_the_deviation_from_peers() -> None:
    found = heat(observed(Layout(pipeline=2, shard=4), 6))
    assert found is not None
    assert (found.unit, found.rows, found.stages, found.left_out) == (
        "rank",
        tuple(range(8)),
        ("forward",),
        0,
    )
    assert found.values[:, 0] == pytest.approx([0.25 * (rank == 6) for rank in range(8)])
    assert heat(observed(Layout(pipeline=8))) is None


def test_heat_of_many_ranks_is_per_node() -> None:
    found = heat(observed(Layout(shard=1024), 700))
    assert found is not None
    assert (found.unit, len(found.rows), found.left_out) == ("node", MOST_ROWS, 64)
    assert found.values[found.rows.index(700 // 8), 0] == pytest.approx(0.25)
    assert np.count_nonzero(found.values) == 1
