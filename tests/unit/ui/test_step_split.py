"""The step of a finished run in the planner's categories, in its summary and as JSON."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
import pytest

from presets import preset_job
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.stages import BACKWARD, FORWARD, HOST, SHARD, STAGES, StageWriter
from seatrial.record.view import read_view
from seatrial.ui.out import Out
from seatrial.ui.summary import print_summary, summary_json

STEP_S, MFU, STEPS = 10.0, 0.4, 40


def run_on(tmp_path: Path, device: str, ranks: int = 8, *changes: str) -> RunFolder:
    """A run of eight ranks, whose steps are steady enough to give a pace to others."""
    folder = RunFolder(tmp_path / "runs" / "a-run")
    folder.control.mkdir(parents=True)
    job = preset_job("qwen2.5-7b-h200", "data.tokenizer=x.json", *changes, folder=tmp_path)
    folder.job_toml.write_text(job.to_toml())
    plan = {"layout": job.layout.as_dict(), "architecture": job.architecture.as_dict()}
    folder.plan_json.write_text(json.dumps(plan))
    events.append(folder, "device", "x", generation=1, data={"device": device})
    events.append(folder, "run_started", "x", generation=1)
    metrics = MetricsWriter(folder)
    mfu = None if device == "cpu" else MFU
    for n in range(1, STEPS + 1):
        speed = 1e6 / STEP_S
        metrics.write(
            MetricsRecord(
                n, n * 10**6, 2.0, 1.0, 1e-3, STEP_S, 0.0, speed, speed / ranks, mfu, 0, time.time(), 1
            )
        )
    metrics.close()
    row = np.zeros(len(STAGES))
    row[[FORWARD, BACKWARD, SHARD, HOST]] = (0.3 * STEP_S, 0.5 * STEP_S, 0.15 * STEP_S, 0.05 * STEP_S)
    for rank in range(ranks):
        out = StageWriter(folder, 1, rank, ranks=ranks, clock="cuda", first_step=1, not_separated={})
        for n in range(1, STEPS + 1):
            out.add(n, row.tolist())
        out.close()
    return folder


def told(folder: RunFolder) -> str:
    """The waterfall in the summary."""
    out = io.StringIO()
    print_summary(Out(out), read_view(folder), [])
    text = out.getvalue()
    return text[text.index("  waterfall") : text.index("  ledger")]


def test_each_part_has_its_ratio_to_the_plan(tmp_path: Path) -> None:
    folder = run_on(tmp_path, "NVIDIA H200")
    found = json.loads(summary_json(read_view(folder), time.time()))["waterfall"]
    rows = {row["name"]: row for row in found["rows"]}
    assert found["mfu"] == pytest.approx(MFU, rel=1e-6)
    assert rows["computation below peak"]["seconds"] == pytest.approx(0.4 * STEP_S, rel=1e-6)
    assert found["why_not_predicted"] is None
    ratio = STEP_S / found["predicted_step_s"]
    # A prediction calibrated by this very run would be its own measurement.
    assert not 0.99 < ratio < 1.01
    text = told(folder)
    assert f"model FLOPs 40 % ({rows['model FLOPs']['ratio']:.2f} x plan)" in text
    assert f"host 5 %, step {ratio:.2f} x plan" in text
    assert "computation below peak: GEMMs below peak" in text
    assert "not part of a predicted step: host" in text


def test_on_a_cpu_it_is_seconds_of_a_step_only(tmp_path: Path) -> None:
    folder = run_on(tmp_path, "cpu")
    text = told(folder)
    assert "forward and backward 80 %, data-parallel communication 15 %, host 5 %" in text
    assert "no prediction: ranks are CPU processes" in text
    assert "MFU unknown" in text
    found = json.loads(summary_json(read_view(folder), time.time()))["waterfall"]
    assert (found["mfu"], found["predicted_step_s"]) == (None, None)
    assert "CPU" in found["why_not_predicted"]


def test_fewer_ranks_than_the_job_has_are_not_compared(tmp_path: Path) -> None:
    assert "no prediction: 6 ranks ran, the job has 8" in told(run_on(tmp_path, "NVIDIA H200", 6))


def test_steps_of_a_batch_that_still_grows_are_not_compared(tmp_path: Path) -> None:
    ramp = f"train.batch_ramp=[{{steps={STEPS}, global_batch=64}}]"
    folder = run_on(tmp_path, "NVIDIA H200", 8, ramp)
    assert "no prediction: the batch is still growing, and the prediction is of steps of" in told(folder)


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    folder = run_on(tmp_path, "NVIDIA H200")
    folder.job_toml.write_text("[train]\nsteps = 40\nglobal_batch = 256\nsequence_length = 4096\n")
    assert "no prediction: job.toml cannot be used" in told(folder)
    folder.plan_json.write_text('{"layout": {"pipeline": 3}}')
    assert "unknown: plan.json cannot be used: a pipeline of 3 for 8 ranks" in told(folder)
