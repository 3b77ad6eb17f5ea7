"""`seatrial check` for real: a virtual cluster, an interrupt, a kill, and an allocation of a real Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster

from conftest import JOB, Run

pytestmark = pytest.mark.cluster

_WITHIN_S = 10.0  # until everything of an ended check is gone
_CHECK_S = 180.0


class Check(Run):
    """One start of `seatrial check` in a folder."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.mark = os.urandom(16).hex()
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "seatrial", "check", *arguments],
            cwd=folder,
            env={**os.environ, "SEATRIAL_TEST_RUN": self.mark, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=_CHECK_S)
        return self.process.returncode, out, err


@pytest.fixture
def check(tmp_path: Path) -> Iterator[Callable[..., Check]]:
    """Start a check; at the end of the test nothing of any may be alive."""
    (tmp_path / "job.toml").write_text(JOB)
    checks: list[Check] = []

    def begin(*arguments: str, **environment: str) -> Check:
        checks.append(Check(tmp_path, *arguments, **environment))
        return checks[-1]

    yield begin
    left = {c.mark: c.processes() for c in checks}
    for one in checks:
        one.kill_all()
        one.process.wait()
        for stream in (one.process.stdout, one.process.stderr):
            if stream is not None:
                stream.close()
    assert not any(left.values()), f"left behind: {left}"


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_a_virtual_cluster_is_measured_and_nothing_is_left(
    check: Callable[..., Check], tmp_path: Path
) -> None:
    run = check("job.toml", "--json")
    code, out, err = run.end()
    document: dict[str, Any] = json.loads(out)
    assert set(document["nodes"]) == {"node0", "node1"}, err
    assert document["blames"] == []
    assert code == (1 if document["verdict"] == "FAIL" else 0)
    assert document["measured"]["send_recv"]["unit"] == "Gb/s"
    assert document["measured"]["send_recv"]["median"] > 0
    assert document["rounds"]["pair"] >= 1
    assert document["seconds"]["total"] < _CHECK_S
    assert "node" in err
    assert files(tmp_path) == {"job.toml"}
    run.wait_gone(_WITHIN_S)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("signum", "at"),
    [
        (signal.SIGINT, "starting"),
        (signal.SIGINT, "pairs, round 1"),
        (signal.SIGTERM, "node stage"),
        pytest.param(signal.SIGKILL, "pairs, round 1", marks=pytest.mark.long),  # test_check_agents
    ],
)
def test_a_check_that_is_stopped_leaves_nothing(
    check: Callable[..., Check], tmp_path: Path, signum: signal.Signals, at: str
) -> None:
    run = check("job.toml", "--html", "r.html")
    run.wait_line(at)
    run.process.send_signal(signum)
    code, out, err = run.end()
    assert out == ""
    if signum == signal.SIGINT:
        assert (code, err.splitlines()[-1]) == (130, "interrupted")
    else:
        assert code == -signum
    run.wait_gone(_WITHIN_S)
    assert files(tmp_path) == {"job.toml"}


@pytest.mark.ci
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-")
def test_in_an_allocation_of_slurm_its_nodes_are_measured(
    check: Callable[..., Check], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The daemons share this machine, so each node is its own host to Slurm, and all have the same address."""
    folder = tmp_path_factory.mktemp("slurm") / "s"
    with slurm_cluster.slurm(folder, ("n1", "n2", "n3")) as slurm:
        allocated = slurm.run("salloc", "--nodes=2", "--no-shell", "--quiet", "--job-name=check")
        assert allocated == ""
        (job,) = slurm.run("squeue", "--noheader", "--format=%i").split()
        names = slurm.run("squeue", "--noheader", "--format=%N").strip()
        inside = {"SLURM_JOB_ID": job, "SLURM_JOBID": job, "SLURM_JOB_NODELIST": names}
        run = check("--stage", "node", "--json", **slurm.environment, **inside)
        _, out, err = run.end()
        slurm.run("scancel", job)
        document = json.loads(out)
        assert set(document["nodes"]) == {"n1", "n2"}, err
        unreached = [f["message"] for f in document["findings"] if f["code"] in ("LIV001", "LIV002")]
        assert unreached == []
        run.wait_gone(_WITHIN_S)
