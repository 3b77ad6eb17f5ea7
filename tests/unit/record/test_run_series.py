"""The series of a run, from its records: what is known of it, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.record import jsonl
from seatrial.record.folder import RunFolder
from seatrial.record.run_series import RunSeries, run_values
from seatrial.record.stages import STAGES, StageWriter
from seatrial.record.view import read_view

START = 1_764_000_000.0


def event(folder: RunFolder, after_s: float, kind: str, node: int | None = None, **data: Any) -> None:
    values = {"time": START + after_s, "generation": 1, "kind": kind, "severity": "info", "message": kind}
    jsonl.append_line(folder.events, {**values, "node": node, "rank": None, "data": data})


def step(folder: RunFolder, number: int, **more: Any) -> None:
    values = {
        "step": number, "tokens": number * 64, "loss": 3.0 - number / 10, "grad_norm": 0.5, "lr": 1e-3, "step_time_s": 2.0,
        "data_wait_s": 0.1, "tokens_per_s": 32.0, "tokens_per_s_per_gpu": 8.0, "mfu": None, "memory_bytes": None,
        "time": START + 20 + 2 * number, "generation": 1,
    }  # fmt: skip
    jsonl.append_line(folder.metrics, values | more)


@pytest.fixture
def run(folder: RunFolder) -> RunFolder:
    """Two nodes of two ranks and a spare, five steps, a checkpoint after the fourth."""
    folder.job_toml.write_text("[train]\nsteps = 100\nglobal_batch = 4\nsequence_length = 16\n")
    folder.control.mkdir()
    folder.generation_file.write_text("1")
    event(folder, 0, "run_started")
    for node in range(3):
        event(folder, 5 + node, "node_joined", node, spare=node == 2)
    event(folder, 10, "generation_started", layout={"world_size": 4}, slots={"0": 0, "1": 1})
    for number in range(1, 6):
        step(folder, number)
    (folder.checkpoints / "step-00000004").mkdir(parents=True)
    (folder.checkpoints / "step-00000004/manifest.json").write_text("{}")
    for rank in range(4):
        out = StageWriter(folder, 1, rank, ranks=4, clock="cpu", first_step=1, not_separated={})
        for number in range(1, 6):
            out.add(number, [0.0, 0.5, 0.5, 1.0, *[0.0] * (len(STAGES) - 4)])
        out.close()
    return folder


def test_values_of_a_run(run: RunFolder) -> None:
    found = RunSeries(run).read(START + 100)
    values = {
        key.replace('run="a-run"', "").replace("{}", "").replace("{,", "{"): v for key, v in found.items()
    }
    expected = {
        "run_running": 0,
        "run_generation": 1,
        "run_step": 5,
        "run_target_step": 100,
        "run_last_step_timestamp_seconds": START + 30,
        "run_loss": 2.5,
        "run_tokens": 320,
        "run_tokens_per_second": 32,
        "run_step_seconds": 2,
        'run_step_stage_seconds{stage="backward"}': 1,
        "run_checkpoints": 1,
        "run_checkpoint_step": 4,
        "run_ranks": 4,
        "run_nodes": 2,
        "run_spare_nodes": 1,
    }
    assert {key: values.get(key) for key in expected} == expected
    causes = {key: value for key, value in values.items() if key.startswith("run_goodput")}
    assert sum(causes.values()) == pytest.approx(30)
    absent = {
        "run_mfu_ratio",
        "run_memory_bytes",
        "run_validation_loss",
        "run_eta_seconds",
        "run_mtbf_seconds",
        "run_router_aux_loss",
        "run_idle_experts",
    }
    assert not absent & values.keys()


def test_the_last_validation_counts(run: RunFolder) -> None:
    for number, loss in ((6, 2.75), (7, None)):
        step(run, number, validation_loss=loss)
    values = run_values(read_view(run), START + 50)
    assert values['run_validation_loss{run="a-run"}'] == 2.75


def test_the_load_of_experts(run: RunFolder) -> None:
    step(run, 6, router_aux_loss=2.5, expert_load_max=1.5, expert_load_min=0.0, idle_experts=3)
    values = run_values(read_view(run), START + 50)
    names = ("router_aux_loss", "expert_load_max_ratio", "expert_load_min_ratio", "idle_experts")
    assert [values[f'run_{name}{{run="a-run"}}'] for name in names] == [2.5, 1.5, 0.0, 3]


def test_a_run_that_has_not_begun(folder: RunFolder) -> None:
    values = run_values(read_view(folder), START)
    assert values['run_step{run="a-run"}'] == 0
    assert 'run_loss{run="a-run"}' not in values
    assert 'run_nodes{run="a-run"}' not in values


def test_a_lost_node_counts_no_more(run: RunFolder) -> None:
    event(run, 40, "node_lost", 1, cause="silence", certain=False)
    values = run_values(read_view(run), START + 50)
    assert values['run_nodes{run="a-run"}'] == 1
    assert values['run_spare_nodes{run="a-run"}'] == 1
