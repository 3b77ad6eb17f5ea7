"""`seatrial drill` on a small job: its verdicts, that a live run is not touched, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import ONE_NODE
from seatrial.job.huggingface import config_from_architecture
from seatrial.job.loading import load_job
from seatrial.model.decoder import whole_shapes
from seatrial.record import lock
from seatrial.record.folder import RunFolder

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

TIMEOUT_S = 300.0
_MARK = "SEATRIAL_TEST_DRILL"

Drill = Callable[..., subprocess.Popen[str]]


def processes(mark: str) -> set[int]:
    """Everything alive that a drill with this mark began, itself included."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def drill(folder: Path) -> Iterator[Drill]:
    """Start a drill of the small job; at the end of the test nothing of it may be alive."""
    started: list[tuple[str, subprocess.Popen[str]]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [sys.executable, "-m", "seatrial", "drill", "job.toml", *arguments],
            cwd=folder,
            env={**os.environ, _MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append((mark, process))
        return process

    yield begin
    left = {mark: processes(mark) for mark, _ in started}
    for mark, process in started:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    assert not any(left.values()), f"left behind: {left}"


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below `path`: when it was written, and what it holds."""
    return {
        str(p.relative_to(path)): (p.stat().st_mtime_ns, p.read_bytes())
        for p in path.rglob("*")
        if p.is_file()
    }


def wait_for(process: subprocess.Popen[str], wanted: str) -> None:
    """Read stderr until a line holds `wanted`."""
    assert process.stderr is not None
    end, read = time.monotonic() + TIMEOUT_S, [""]
    while select.select([process.stderr], [], [], max(0.0, end - time.monotonic()))[0]:
        read.append(process.stderr.readline())
        if wanted in read[-1]:
            return
        if not read[-1]:
            break
    raise AssertionError(f"no {wanted!r} in {''.join(read)}")


# A killed rank is survived in test_recovery, a preemption in test_train.
@pytest.mark.ci
@pytest.mark.parametrize(
    "names",
    [
        ("nan_gradient", "edited_job"),
        pytest.param(
            ("nan_gradient", "xid_94", "edited_job", "kill_rank", "preemption"), marks=pytest.mark.long
        ),
    ],
    ids=len,
)
def test_faults_are_survived_while_the_run_itself_is_under_way(
    drill: Drill, folder: Path, names: tuple[str, ...]
) -> None:
    live = RunFolder(folder / "runs" / "small")
    live.control.mkdir(parents=True)
    live.metrics.write_text("")
    held = lock.acquire(live.lock)
    before = contents(live.path)
    try:
        process = drill("--only", ",".join(names), "--json")
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        os.close(held)
    document: dict[str, Any] = json.loads(out)
    assert process.returncode == 0, err
    assert document["verdicts"] == {"PASS": len(names), "FAIL": 0, "UNJUDGED": 0}, err
    by_name = {s["name"]: s for s in document["scenarios"]}
    for name in {"kill_rank", "nan_gradient", "xid_94"} & by_name.keys():
        assert by_name[name]["largest_difference"] == 0.0
        assert by_name[name]["detected_in_s"] < by_name[name]["recovered_in_s"]
    if "preemption" in names:
        assert by_name["preemption"]["steps_redone"] == 0
    assert contents(live.path) == before
    root = folder / document["folder"]
    assert json.loads((root / "report.json").read_text())["seed"] == 0
    assert "## nan_gradient: PASS" in (root / "report.md").read_text()


@pytest.mark.ci
def test_a_run_that_shrinks_in_bf16_equals_its_replay(drill: Drill, folder: Path) -> None:
    """Its losses drift from a run that kept its size: only one in the same layouts has the same bits."""
    cluster = ("cluster.nodes=2", "cluster.gpus_per_node=2", "parallel.pipeline=1", "parallel.replicate=2")
    # Gradients in bf16 are summed in fp32: a few of them give the same bits in any order.
    train = ("train.precision=bf16", "train.global_batch=48", "train.microbatch=1")
    options = [word for key in (*cluster, *train) for word in ("--set", key)]
    process = drill("--only", "kill_agent_without_spare", "--json", *options)
    out, err = process.communicate(timeout=2 * TIMEOUT_S)
    assert process.returncode == 0, err
    (found,) = json.loads(out)["scenarios"]
    assert found["verdict"] == "PASS", found["why"]
    texts = {check["name"]: check["text"] for check in found["checks"]}
    assert "bit-equal" in texts["replay"]
    assert "tensors differ" in texts["weights"], "the sums gave the same bits: nothing was shown"


def test_an_interrupted_drill_leaves_a_report_and_nothing_else(drill: Drill, folder: Path) -> None:
    (folder / "job.toml").write_text(ONE_NODE)  # nothing is judged
    process = drill("--only", "freeze_rank,kill_rank")
    wait_for(process, "freeze_rank: step")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert "0 of 2 scenarios were run" in err
    assert list(folder.glob("runs/.drill/small-*/report.md"))


def test_a_job_that_does_not_run_cannot_be_drilled(drill: Drill, folder: Path) -> None:
    (folder / "job.toml").write_text(ONE_NODE)
    """The reference has to be one that never failed; with these weights no loss is finite."""
    arch = load_job(folder / "job.toml").architecture
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text(json.dumps(config_from_architecture(arch)))
    weights = {name: torch.full(shape, 1e38) for name, shape in whole_shapes(arch).items()}
    save_file(weights, folder / "hf/model.safetensors")
    process = drill("--only", "kill_rank", "--set", "model.init_from=hf")
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "the undisturbed copy of the job ended with exit code 1" in err
    assert "hint:" in err
