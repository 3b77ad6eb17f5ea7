"""`seatrial scale` in one allocation of a real Slurm: each run is a job step, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster

from conftest import JOB, seatrial, write_corpus

pytestmark = [
    pytest.mark.ci,
    pytest.mark.cluster,
    pytest.mark.timed,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-"),
]
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Slurm]:
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm") / "s", ("n1", "n2", "n3")) as cluster:
        yield cluster


@pytest.fixture
def folder(slurm: slurm_cluster.Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    write_corpus(tmp_path)
    text = JOB.replace(
        "nodes = 2\ngpus_per_node = 2", 'launcher = "slurm"\nnodes = 2\ngpus_per_node = 1\ndevice = "cpu"'
    ).replace("tensor = 2\npipeline = 2", "replicate = 2")
    (tmp_path / "job.toml").write_text(text)
    return tmp_path


@pytest.fixture
def allocation(folder: Path, slurm: slurm_cluster.Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two of three nodes, allocated."""
    done = subprocess.run(
        ["salloc", "--nodes=2", "--no-shell"], capture_output=True, text=True, timeout=WITHIN_S, check=True
    )
    job = done.stderr.partition("job allocation ")[2].split()[0]
    monkeypatch.setenv("SLURM_JOB_ID", job)
    yield job
    slurm.run("scancel", job)
    slurm_cluster.wait_until(lambda: not slurm.run("squeue", "--noheader"))


def steps(slurm: slurm_cluster.Slurm) -> str:
    return slurm.run("squeue", "--steps", "--noheader", "--format=%i %j")


def trials(folder: Path) -> list[dict[str, Any]]:
    (state,) = folder.glob("runs/.scale/*/scale.json")
    found: list[dict[str, Any]] = json.loads(state.read_text())["trials"]
    return found


def test_outside_an_allocation_the_error_has_the_command(folder: Path) -> None:
    done = seatrial(folder, "scale", "job.toml", "--nodes", "1,2")
    assert done.returncode == 2
    assert "SLURM_JOB_ID is not set" in done.stderr
    assert "salloc --nodes=2 --job-name=small" in done.stderr
    assert "seatrial scale job.toml --nodes 1,2" in done.stderr
    assert not (folder / "runs").exists()


def test_two_sizes_in_one_allocation(folder: Path, allocation: str, slurm: slurm_cluster.Slurm) -> None:
    done = seatrial(
        folder, "scale", "job.toml", "--nodes", "1,2", "--steps", "12", "--repeats", "1", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(s["nodes"], s["runs"]) for s in report["sizes"]] == [(1, 1), (2, 1)]
    assert all(s["tokens_per_s"]["mean"] > 0 for s in report["sizes"])
    assert sorted(t["hosts"] for t in trials(folder)) == [["n1"], ["n1", "n2"]]
    assert not steps(slurm)
    assert slurm.run("squeue", "--noheader", "--format=%i").split() == [allocation]
    large = seatrial(folder, "scale", "job.toml", "--nodes", "1,4")
    assert large.returncode == 2
    assert f"the allocation {allocation} has 2 nodes, but the largest size needs 4" in large.stderr


def test_killed_it_leaves_no_step(folder: Path, allocation: str, slurm: slurm_cluster.Slurm) -> None:
    mark = uuid.uuid4().hex
    started = subprocess.Popen(
        [sys.executable, "-m", "seatrial", "scale", "job.toml", "--nodes", "2", "--steps", "5000", "--plain"],
        cwd=folder, env={**os.environ, "MARK": mark}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    slurm_cluster.wait_until(lambda: any(folder.glob("runs/.scale/*/2-nodes-1/metrics.jsonl")))
    assert steps(slurm)
    started.send_signal(signal.SIGKILL)
    started.communicate()
    slurm_cluster.wait_until(lambda: not steps(slurm))
    end = time.monotonic() + WITHIN_S
    while left := [p for p in Path("/proc").glob("[0-9]*") if mark.encode() in environment(p)]:
        assert time.monotonic() < end, f"left running: {left}"
        time.sleep(0.1)


def environment(of: Path) -> bytes:
    try:
        return (of / "environ").read_bytes()
    except OSError:
        return b""
