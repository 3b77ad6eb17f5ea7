"""What the Slurm launcher sends, and what it learns from a job's environment; the cluster tests run it."""

from __future__ import annotations

import json
import os
import shlex
import time
from functools import partial
from pathlib import Path

import pytest

from presets import preset_job
from seatrial.base.errors import InputError
from seatrial.launch.allocation import Allocation
from seatrial.launch.base import Identity
from seatrial.launch.slurm import SCRIPT, SlurmLauncher, salloc_command
from seatrial.launch.slurm_step import SlurmStepLauncher
from seatrial.record.folder import RunFolder

job = partial(preset_job, "first-voyage", "cluster.launcher=slurm")


def script(folder: Path, *overrides: str) -> str:
    return SlurmLauncher().render(job(*overrides), RunFolder(folder))[SCRIPT]


def options(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_the_options_of_an_allocation(tmp_path: Path) -> None:
    given = options(
        script(
            tmp_path,
            "cluster.spares=1",
            "slurm.partition=gpu,long",
            "slurm.account=team",
            "slurm.time=2-00:00:00",
            "slurm.segment=2",
            "slurm.switches=1@10:00",
            'slurm.options=["--comment=a b"]',
            "resilience.preempt_grace_s=90",
        )
    )
    assert given["nodes"] == "3"
    assert (given["ntasks-per-node"], given["gres"], given["mem"]) == ("1", "gpu:4", "0")
    assert (given["partition"], given["account"], given["time"]) == ("gpu,long", "team", "2-00:00:00")
    assert (given["segment"], given["switches"], given["comment"]) == ("2", "1@10:00", "'a b'")
    assert (
        given["signal"] == "USR1@120"
    )  # to the agents (no "B:"), the grace and half a minute before the limit
    assert {"exclusive", "no-kill", "no-requeue"} <= given.keys()
    assert given["output"] == f"{tmp_path}/logs/slurm-%j.out"


def test_cpu_job_requests_no_gpus_and_array_job_has_one_node(tmp_path: Path) -> None:
    text = script(
        tmp_path, "cluster.device=cpu", "slurm.form=array", "slurm.cold_spares=2", "cluster.spares=1"
    )
    given = options(text)
    assert "gres" not in given
    assert (given["nodes"], given["array"]) == ("1", "0-4%3")
    assert '--dependency=afterany:"$SLURM_ARRAY_JOB_ID"' in text


def test_a_container_gets_our_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    text = script(tmp_path, "slurm.container_image=site#image", "slurm.container_mounts=/shared:/shared")
    (agents,) = [line for line in text.splitlines() if "seatrial agent" in line]
    assert "'--container-image=site#image' --container-mounts=/shared:/shared --container-env=" in agents
    (environment,) = [word for word in agents.split() if word.startswith("--container-env=")]
    assert "NCCL_DEBUG" in environment.partition("=")[2].split(",")


def test_nodes_that_failed_the_last_check_are_excluded(tmp_path: Path) -> None:
    report = {
        "schema_version": 1,
        "simulated": False,
        "time": time.time() - 3600,
        "nodes": {"n1": "PASS", "n3": "FAIL", "n4": "FAIL", "n7": "WARN"},
    }
    file = RunFolder(tmp_path).reports / "check.json"
    file.parent.mkdir()
    file.write_text(json.dumps(report))
    assert options(script(tmp_path, "slurm.exclude=n9"))["exclude"] == "'n9,n[3-4]'"
    file.write_text(json.dumps({**report, "time": time.time() - 90 * 86_400}))
    assert "exclude" not in options(script(tmp_path)), "too old to be believed"
    file.write_text(json.dumps({**report, "simulated": True}))
    assert "exclude" not in options(script(tmp_path))


def test_the_identity_of_a_task() -> None:
    launcher = SlurmLauncher()
    task = {
        "SLURM_JOB_ID": "17",
        "SLURM_PROCID": "3",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
        "SLURM_TOPOLOGY_ADDR": "top.left.n3",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }
    assert launcher.identity(task) == Identity(3, "17.0", "17", order="top.left.n3", peers=("10.0.0.1",))
    plain = {**task, "SLURM_TOPOLOGY_ADDR": "n3", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    assert launcher.identity(plain).order == "", "a name alone says nothing about what is near"
    array = {**task, "SLURM_PROCID": "0", "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "4"}
    assert (launcher.identity(array).node, launcher.identity(array).attempt) == (4, "15")
    with pytest.raises(InputError, match="not a task of a Slurm job step: SLURM_PROCID not set"):
        launcher.identity({"SLURM_JOB_ID": "17"})


def test_all_mistakes_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError) as caught:
        SlurmLauncher().check(
            job(
                "slurm.cold_spares=1",
                "slurm.time=tomorrow",
                'slurm.options=["-p gpu"]',
                "slurm.container_mounts=/a:/a",
            )
        )
    told = " | ".join(problem.message for problem in caught.value.diagnostics)
    for part in (
        "cold spares",
        "not a Slurm time limit",
        "not a long option",
        "without an image",
        "not found on this machine",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("squeue", "cancelled"),
    [
        ("echo RUNNING None", ["--state=PENDING 7", "--signal=USR1 7"]),
        ("echo down >&2; exit 1", ["--state=PENDING 7", "--signal=USR1 7"]),
        ("echo PENDING Resources", ["7"]),
        ("echo 'Invalid job id specified' >&2; exit 1", ["7"]),
    ],
    ids=["running", "unknown", "queued", "gone"],
)
def test_save_request_never_cancels_what_may_be_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, cancelled: list[str]
) -> None:
    for name, body in {"squeue": squeue, "scancel": f'echo "$@" >> {tmp_path}/cancelled'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    SlurmLauncher().signal("7", "preempt")
    assert (tmp_path / "cancelled").read_text().splitlines() == cancelled


def test_salloc_has_the_options_of_the_job(tmp_path: Path) -> None:
    settings = ("slurm.form=array", "slurm.partition=gpu", 'slurm.options=["--comment=a b"]')
    words = salloc_command(job(*settings), RunFolder(tmp_path), 16)
    assert words[:2] == ["salloc", "--nodes=16"]
    assert {"--partition=gpu", "--gres=gpu:4", "--comment=a b", "--no-kill"} <= set(words)
    only_sbatch = ("--array", "--output", "--signal", "--no-requeue", "--open-mode")
    assert not [word for word in words if word.startswith(only_sbatch)]
    assert sum(word.startswith("--nodes") for word in words) == 1


def test_a_step_is_on_the_first_nodes_of_its_allocation(tmp_path: Path) -> None:
    own = job("cluster.nodes=2", 'slurm.setup=["module load cuda"]', "slurm.container_image=/i.sqsh")
    launcher = SlurmStepLauncher(Allocation("7", ("n3", "n4", "n9")))
    text = launcher.render(own, RunFolder(tmp_path))["step.sh"]
    setup, step = text.splitlines()[-2:]
    words = shlex.split(step)
    assert (setup, words[:2]) == ("module load cuda", ["exec", "srun"])
    assert {"--jobid=7", "--nodelist=n3,n4", "--nodes=2", "--ntasks=2", "--overlap"} <= set(words)
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--container-image=/i.sqsh"} <= set(words)
    assert words[-3:] == ["agent", "--run", str(tmp_path)]
