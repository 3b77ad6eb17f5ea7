"""`seatrial train` on Kubernetes with the real agents and kubectl: what a cluster does to its pods, and that the run goes on.

The cluster is the stand-in of kubernetes_server.py, whose pods are processes on this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recovery_runs import STEPS, Trial, assert_same, lines, make_folder

from kubernetes_server import Cluster
from seatrial.base import process
from seatrial.record.folder import RunFolder
from seatrial.record.launches import known_launch, read_outcome

pytestmark = [
    pytest.mark.ci,
    pytest.mark.cluster,
    pytest.mark.timed,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl"),
]
# One rank a node: whoever is lost takes a replica along.
LAYOUT = (
    "cluster.nodes=4",
    "cluster.gpus_per_node=1",
    "cluster.device=cpu",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "parallel.replicate=4",
    "resilience.silence_s=30",  # of a machine that computes for others as well; who is lost closes its connection
)
LONG = ("train.steps=200", "checkpoint.every_steps=10")  # long enough for a machine to be lost in its midst
_WITHIN_S = 150.0


class Kubernetes:
    """A cluster, and runs that are submitted to it from a folder of the test's own."""

    def __init__(self, path: Path) -> None:
        (path / "pods").mkdir()
        self.cluster = Cluster(path / "pods", machines=5)
        self.folder = make_folder(path / "work")
        self.settings = (
            *LAYOUT,
            "cluster.launcher=kubernetes",
            "cluster.bind=127.0.0.1",  # no network knows the addresses of these pods
            f"cluster.python={sys.executable}",
            "kubernetes.image=x",
            "kubernetes.volume_claim=files",
            f"kubernetes.mount={path}",
            "resilience.preempt_grace_s=15",
        )
        self.trials: list[Trial] = []

    def train(self, *settings: str) -> Trial:
        self.trials.append(Trial(self.folder, *self.settings, *settings))
        return self.trials[-1]

    def stop(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*process.python("seatrial"), "stop", "runs/small"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )

    def ended(self, trial: Trial) -> tuple[int, str]:
        """(exit code, stderr) of `seatrial train`."""
        _, err = trial.process.communicate(timeout=_WITHIN_S)
        return trial.process.returncode, f"{err}\n{self.cluster.story()}"

    def conditions(self) -> list[str]:
        (job,) = self.cluster.all("jobs")
        return [c["type"] for c in job["status"].get("conditions", [])]

    def name(self) -> str:
        (job,) = self.cluster.all("jobs")
        return str(job["metadata"]["name"])

    def close(self) -> None:
        self.cluster.close()
        for trial in self.trials:
            trial.process.kill()
            trial.process.communicate()


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubernetes]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv(
        "HOME", str(tmp_path)
    )  # kubectl caches what it discovers; and the mark of all that is begun
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = Kubernetes(tmp_path)
    (tmp_path / "config").write_text(found.cluster.kubeconfig())
    yield found
    found.close()
    end = time.monotonic() + 5.0  # ranks see the end of their agent, and end
    while left := _begun(tmp_path):
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.02)


def _begun(home: Path) -> list[str]:
    """Command lines of the processes with this HOME, but for our own."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                variables = (entry / "environ").read_bytes().split(b"\0")
                if f"HOME={home}".encode() in variables:
                    found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """The same layout on the virtual cluster."""
    trial = Trial(make_folder(tmp_path_factory.mktemp("undisturbed") / "work"), *LAYOUT)
    assert trial.wait(_WITHIN_S)[0] == 0
    return trial


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    trial = Trial(make_folder(tmp_path_factory.mktemp("long") / "work"), *LAYOUT, *LONG)
    assert trial.wait(_WITHIN_S)[0] == 0
    return trial


@pytest.mark.long
def test_kubernetes_run_is_bitwise_equal_to_virtual_cluster(
    kubernetes: Kubernetes, undisturbed: Trial
) -> None:
    trial = kubernetes.train()
    code, err = kubernetes.ended(trial)
    assert code == 0, err
    assert f"finished: step {STEPS} of {STEPS}" in err
    assert_same(trial, undisturbed)
    kubernetes.cluster.until(lambda: kubernetes.conditions() == ["Complete"], "the Job's end")


def test_a_lost_machine_makes_it_smaller_until_there_is_another(kubernetes: Kubernetes) -> None:
    trial = kubernetes.train(*LONG, "train.steps=3000")
    trial.until_step(20)
    lost = kubernetes.cluster.machine_of(2)
    free = [*kubernetes.cluster.free]
    kubernetes.cluster.free.clear()  # the pod that replaces it waits
    kubernetes.cluster.lose(lost)
    trial.until_event("shrunk")
    assert (2, "Pending") in kubernetes.cluster.phases()
    kubernetes.cluster.free.extend(free)
    trial.until_event("grown")
    assert [e["node"] for e in trial.events("node_lost")] == [2]
    assert kubernetes.stop().returncode == 0
    code, err = kubernetes.ended(trial)
    assert code == 75, err
    # With fewer replicas the sums are rounded in another order, but no data is skipped or repeated.
    found = trial.samples()
    assert found == [(8 * step, 8 * step + 8) for step in range(len(found))]
    assert any(m["generation"] > 1 for m in lines(trial.run / "metrics.jsonl"))


@pytest.mark.long
def test_an_agent_that_is_asked_to_leave_is_restarted(
    kubernetes: Kubernetes, undisturbed_long: Trial
) -> None:
    """As a machine does that shuts down: its pod gets SIGTERM, and nobody deletes it."""
    trial = kubernetes.train(*LONG, "cluster.spares=1")
    trial.until_step(20)
    os.kill(trial.agents()[1], signal.SIGTERM)
    trial.until_event("node_left")
    trial.until_event("agent_started", count=2, node=1)
    (left,) = [
        pod["status"]["containerStatuses"][0]["state"]["terminated"]
        for pod in kubernetes.cluster.all("pods")
        if pod["status"]["phase"] == "Failed"
    ]
    assert left == {"exitCode": 75}
    code, err = kubernetes.ended(trial)
    assert code == 0, err
    assert_same(trial, undisturbed_long)


@pytest.mark.long  # the stop is that of test_slurm_train, and the other test here shows that pods are managed
def test_stop_saves_and_the_same_command_goes_on(kubernetes: Kubernetes, undisturbed_long: Trial) -> None:
    trial = kubernetes.train(*LONG)
    trial.until_step(20)
    done = kubernetes.stop()
    assert done.returncode == 0, done.stderr
    code, err = kubernetes.ended(trial)
    assert code == 75, err
    assert not kubernetes.cluster.objects
    stopped_at = max(trial.steps())
    assert stopped_at < 200
    assert f"{stopped_at:08d}" in (trial.run / "checkpoints/latest").read_text()
    again = kubernetes.train(*LONG)
    code, err = kubernetes.ended(again)
    assert code == 0, err
    assert_same(again, undisturbed_long)


@pytest.mark.long
def test_a_queue_takes_it_back_and_admits_it_again(kubernetes: Kubernetes, undisturbed_long: Trial) -> None:
    trial = kubernetes.train(*LONG, "kubernetes.queue=h100")
    folder = RunFolder(trial.run)
    trial.until(lambda: kubernetes.cluster.all("jobs"))
    kubernetes.cluster.suspend(kubernetes.name(), False)
    trial.until_step(20)
    kubernetes.cluster.suspend(kubernetes.name(), True)
    kubernetes.cluster.until(lambda: kubernetes.cluster.phases() == [], "all have saved")
    outcome = read_outcome(folder, 1)
    assert outcome is not None
    assert outcome.exit_code == 75
    stopped_at = max(trial.steps())
    assert 20 <= stopped_at < 200
    kubernetes.cluster.suspend(kubernetes.name(), False)
    code, err = kubernetes.ended(trial)  # it has followed the run all the time
    assert code == 0, err
    assert len(trial.events("run_started")) == 2
    launch = known_launch(folder)
    assert launch is not None
    assert [e["generation"] for e in trial.events("run_started")] == [1, launch.generation]
    first = trial.events("generation_started")
    assert [e["generation"] for e in first] == [1, launch.generation], "neither start recovered from anything"
    assert_same(trial, undisturbed_long)


@pytest.mark.long
def test_a_run_that_fails_is_not_started_again_by_its_job(kubernetes: Kubernetes) -> None:
    trial = kubernetes.train(*LONG, "resilience.max_restarts=0")
    trial.until_step(5)
    trial.kill_rank(1)
    code, err = kubernetes.ended(trial)
    assert code == 1, err
    assert "rank 1 on node 1 was killed by SIGKILL" in err
    kubernetes.cluster.until(lambda: not kubernetes.cluster.objects, "nothing is left of it", limit_s=30.0)


@pytest.mark.long
def test_stop_ends_the_rest_of_a_failed_run(kubernetes: Kubernetes) -> None:
    trial = kubernetes.train(*LONG, "resilience.max_restarts=0")
    trial.until_step(5)
    kubernetes.cluster.backoff_s = 3600.0
    trial.process.send_signal(signal.SIGINT)  # ends the following alone
    assert kubernetes.ended(trial)[0] == 130
    trial.kill_rank(1)
    kubernetes.cluster.until(
        lambda: kubernetes.cluster.phases() == [(n, "Failed") for n in range(4)], "failure"
    )
    assert kubernetes.conditions() == []
    done = kubernetes.stop()
    assert (done.returncode, done.stdout) == (0, "runs/small is not running\n")
    kubernetes.cluster.until(lambda: not kubernetes.cluster.objects, "nothing is left of it", limit_s=30.0)
