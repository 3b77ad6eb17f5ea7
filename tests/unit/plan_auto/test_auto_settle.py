"""A run keeps its chosen layout until the cluster changes; plan.json, notes and events record it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from auto_cases import edit, gpu_rates, made, open_job, rails, report

from seatrial.base.errors import InputError
from seatrial.hardware import devices
from seatrial.job import Job, load_job
from seatrial.job.layout import Layout
from seatrial.plan.search import settle as settle_module
from seatrial.plan.search.settle import fingerprint, place_here, settle
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.run import open_run
from seatrial.record.view import read_view


def first_voyage(*overrides: str) -> Job:
    return open_job("first-voyage", "cluster.device=cpu", *overrides)


def start(job: Job, root: Path, **how: Any) -> tuple[Job, list[str]]:
    """One start of a run: the job as it is settled, and what the user is told."""
    settled = settle(job, RunFolder(root / job.name), **how)
    with open_run(settled, root, fresh=how.get("fresh", False)) as opened:
        return settled, opened.notes


def plan(root: Path) -> dict[str, Any]:
    found = json.loads((root / "first-voyage" / "plan.json").read_text())
    assert isinstance(found, dict)
    return found


def told(root: Path) -> list[str]:
    return [e.message for e in read_events(RunFolder(root / "first-voyage"))[0] if e.kind == "layout_chosen"]


def test_a_choice_with_context_parallel_is_taken_again() -> None:
    job, place = first_voyage(), place_here(first_voyage())
    layout = Layout(shard=8, context=2)
    recorded = {"cluster": fingerprint(place), "layout": layout.as_dict(), "reshard_after_forward": True}
    recorded |= {"microbatch": 4, "activation_checkpointing": "none", "accumulate": "whole"}
    settled, why = settle_module._reused(job, place, recorded)
    assert settled is not None, why
    assert settled.layout == layout
    assert (settled.parallel.shard, settled.parallel.context) == (4, 2)


def test_a_job_with_a_layout_is_unchanged(tmp_path: Path) -> None:
    settled = settle(first_voyage(), RunFolder(tmp_path / "x"))
    assert settle(settled, RunFolder(tmp_path / "x")) is settled


def test_the_choice_is_in_plan_json_job_toml_and_events(tmp_path: Path) -> None:
    settled, notes = start(first_voyage(), tmp_path)
    chosen = plan(tmp_path)["chosen"]
    assert chosen["layout"] == plan(tmp_path)["layout"] == settled.layout.as_dict()
    assert chosen["why_now"] == "the first choice of this run"
    assert chosen["basis"] == "memory and traffic"
    assert chosen["runners_up"]
    assert chosen["reasons"]
    assert any('parallel = "auto"' in note for note in notes)
    assert len(told(tmp_path)) == 1
    text = RunFolder(tmp_path / "first-voyage").job_toml.read_text()
    assert '# chosen by parallel = "auto"' in text
    again = load_job(RunFolder(tmp_path / "first-voyage").job_toml)
    assert (again.layout, again.is_open) == (settled.layout, False)


def test_a_resume_reuses_the_recorded_choice(tmp_path: Path) -> None:
    """Also one that would not be chosen today."""
    start(first_voyage(), tmp_path)
    other = {**plan(tmp_path)["layout"], "tensor": 2, "shard": 4}
    chosen = {**plan(tmp_path)["chosen"], "layout": other}
    del chosen["accumulate"]  # as in records of older versions
    edit(tmp_path / "first-voyage" / "plan.json", chosen=chosen, layout=other)
    settled, notes = start(first_voyage("train.steps=300"), tmp_path)
    assert (settled.layout.tensor, settled.layout.shard) == (2, 4)
    assert settled.train.accumulate == "whole"
    assert any("as chosen by an earlier start of this run" in note for note in notes)
    assert plan(tmp_path)["chosen"] == chosen
    assert len(told(tmp_path)) == 1


def test_a_changed_cluster_is_planned_again_with_a_reason(tmp_path: Path) -> None:
    start(first_voyage(), tmp_path)
    settled, notes = start(first_voyage("cluster.nodes=1"), tmp_path)
    assert settled.layout.world_size == 4
    assert any("the cluster changed: nodes 2 -> 1" in note for note in notes)
    assert plan(tmp_path)["chosen"]["why_now"] == "the cluster changed: nodes 2 -> 1"
    assert len(told(tmp_path)) == 2
    assert "nodes 2 -> 1" in told(tmp_path)[1]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("train.microbatch=2", "train.microbatch changed: 4 -> 2"),
        ("train.activation_checkpointing=full", "train.activation_checkpointing changed: none -> full"),
        ("train.accumulate=whole", "train.accumulate changed: sharded -> whole"),
    ],
)
def test_a_chosen_setting_that_the_job_now_sets(tmp_path: Path, override: str, why: str) -> None:
    start(first_voyage(), tmp_path)
    settled, _ = start(first_voyage(override), tmp_path)
    assert settled.chosen is not None
    assert settled.chosen["why_now"] == why


def test_a_recorded_layout_that_the_rules_refuse_now(tmp_path: Path) -> None:
    start(first_voyage(), tmp_path)
    other = {**plan(tmp_path)["layout"], "tensor": 3}
    edit(tmp_path / "first-voyage" / "plan.json", chosen={**plan(tmp_path)["chosen"], "layout": other})
    settled, _ = start(first_voyage(), tmp_path)
    assert settled.chosen is not None
    assert str(settled.chosen["why_now"]).startswith("the rules reject the layout of the previous start")


@pytest.mark.parametrize(
    "damage",
    [
        {"layout": None},
        {"layout": {"tensor": "x"}},
        {"layout": {"strange": 1}},
        {"cluster": 5},
        {"microbatch": -1},
        {"activation_checkpointing": "half"},
        {"accumulate": "half"},
        {"reshard_after_forward": "perhaps"},
        {"async_tensor": "perhaps"},
    ],
)
def test_with_a_damaged_record_it_chooses_again(tmp_path: Path, damage: dict[str, object]) -> None:
    first, _ = start(first_voyage(), tmp_path)
    path = tmp_path / "first-voyage" / "plan.json"
    edit(path, chosen={**plan(tmp_path)["chosen"], **damage})
    if "microbatch" in damage or "activation_checkpointing" in damage:
        j = open_job("first-voyage", "cluster.device=cpu", drop=("microbatch", "activation_checkpointing"))
    else:
        j = first_voyage()
    settled = settle(j, RunFolder(tmp_path / "first-voyage"))
    assert settled.layout.world_size == first.layout.world_size
    path.write_text("{")
    assert settle(first_voyage(), RunFolder(tmp_path / "first-voyage")).layout == first.layout


@pytest.mark.cluster  # slow
def test_async_tensor_parallel_is_chosen_recorded_and_resumed(tmp_path: Path) -> None:
    """70B on two nodes of H100 needs tensor parallel; the choice stands in plan.json and job.toml, and a resume takes it."""
    j = open_job(
        "llama3-8b-h100", "name=auto", "model.preset=llama3-70b", "cluster.nodes=2", "cluster.launcher=slurm",
        drop=("microbatch", "activation_checkpointing"),
    )  # fmt: skip
    first = settle(j, RunFolder(tmp_path / "auto"))
    assert first.parallel.tensor > 1
    assert first.parallel.async_tensor
    with open_run(first, tmp_path) as opened:
        folder = opened.folder
    chosen = json.loads(folder.plan_json.read_text())["chosen"]
    assert chosen["async_tensor"] is True
    assert all(isinstance(r["async_tensor"], bool) for r in chosen["runners_up"])
    assert "async_tensor = true" in folder.job_toml.read_text()
    again = settle(j, folder)
    assert again.chosen == chosen
    assert again.parallel == first.parallel
    # A record of a version that did not know it: then it was not so.
    edit(folder.plan_json, chosen={k: v for k, v in chosen.items() if k != "async_tensor"})
    assert settle(j, folder).parallel == first.parallel.model_copy(update={"async_tensor": False})


def test_without_speeds_async_tensor_is_not_chosen() -> None:
    settled = settle(first_voyage("cluster.nodes=2"), RunFolder(Path("/nowhere")))
    assert settled.chosen is not None
    assert settled.chosen["async_tensor"] is False
    assert not settled.parallel.async_tensor


def test_fresh_chooses_again(tmp_path: Path) -> None:
    start(first_voyage(), tmp_path)
    settled, _ = start(first_voyage(), tmp_path, fresh=True)
    assert settled.chosen is not None
    assert settled.chosen["why_now"] == "the first choice of this run"
    assert len(told(tmp_path)) == 1  # in the new folder


def test_reasons_are_kept_with_the_layout_by_every_start(tmp_path: Path) -> None:
    """torchrun reads job.toml, where the layout is written out."""
    start(first_voyage(), tmp_path)
    chosen = plan(tmp_path)["chosen"]
    by_hand = load_job(RunFolder(tmp_path / "first-voyage").job_toml)
    with open_run(by_hand, tmp_path):
        pass
    assert plan(tmp_path)["chosen"] == chosen
    assert len(told(tmp_path)) == 1
    other = load_job(RunFolder(tmp_path / "first-voyage").job_toml, ["parallel.tensor=2", "parallel.shard=4"])
    with open_run(other, tmp_path):
        pass
    assert "chosen" not in plan(tmp_path)


def test_view_ignores_a_start_that_did_nothing(tmp_path: Path) -> None:
    """As a start that finds all steps done: the view is of the one that did something."""
    folder = made(tmp_path, settle(first_voyage(), RunFolder(tmp_path / "first-voyage")), 1.0)
    before = read_view(folder).generation
    start(first_voyage("cluster.nodes=1"), tmp_path)
    assert read_view(folder).generation == before


def test_a_virtual_cluster_uses_this_machines_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    j = open_job("qwen2.5-7b-h200")
    monkeypatch.setattr(
        settle_module, "choose_device", lambda cluster: ("cpu", "no CUDA device on this host")
    )
    here = place_here(j)
    assert here.gpu is None
    assert "no CUDA device on this host" in here.why_no_gpu
    monkeypatch.setattr(settle_module, "choose_device", lambda cluster: ("cuda", "8 GPUs"))
    monkeypatch.setattr(settle_module, "driver_names", lambda: ["NVIDIA H100 80GB HBM3"] * 8)
    gpu = place_here(j).gpu
    assert gpu is not None
    assert gpu.name == "H100 SXM"
    monkeypatch.setattr(settle_module, "driver_names", lambda: ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
    gpu = place_here(j).gpu
    assert gpu is not None
    assert gpu.name == "H200 SXM"  # unlike cards: the job's word stands


def test_other_launchers_use_the_jobs_gpu() -> None:
    gpu = place_here(open_job("qwen2.5-72b-b300")).gpu
    assert gpu is not None
    assert gpu.name == "B300 SXM"


def test_the_choice_uses_measured_rates(tmp_path: Path) -> None:
    j = open_job("llama3-8b-h100", "cluster.nodes=2")
    report(tmp_path / j.name, {"gpu": gpu_rates(gemm=600.0), "rail": rails(50.0)})
    settled = settle(j, RunFolder(tmp_path / j.name))
    assert settled.chosen is not None
    assert any("measured" in reason and "600" in reason for reason in settled.chosen["reasons"])
    assert settled.chosen["basis"] == "speed"


def test_no_run_is_started_if_nothing_fits(tmp_path: Path) -> None:
    j = open_job("qwen2.5-72b-b300", "cluster.nodes=1", "cluster.gpu=A100-40GB SXM")
    with pytest.raises(InputError):
        settle(j, RunFolder(tmp_path / j.name))
    assert not (tmp_path / j.name).exists()


def test_gpu_names_from_the_driver(tmp_path: Path) -> None:
    for i, text in enumerate(("Model: \t\t NVIDIA H200\nIRQ: 5\n", "Model:  NVIDIA H200\n", "IRQ: 7\n")):
        folder = tmp_path / "driver/nvidia/gpus" / f"0000:{i}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(text)
    assert devices.driver_names(tmp_path) == ["NVIDIA H200", "NVIDIA H200"]
    assert devices.driver_names(tmp_path / "none") == []


@pytest.mark.parametrize("text", ["", "[]", '{"chosen": 7}', '{"chosen": {"cluster": [], "layout": 7'])
def test_unreadable_plan_record_is_not_called_the_first_choice(tmp_path: Path, text: str) -> None:
    start(first_voyage(), tmp_path)
    RunFolder(tmp_path / "first-voyage").plan_json.write_text(text)
    settled = settle(first_voyage(), RunFolder(tmp_path / "first-voyage"))
    assert settled.chosen is not None
    assert settled.chosen["why_now"] == "the recorded choice of an earlier start is unreadable"
