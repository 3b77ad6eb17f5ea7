"""The Kubernetes launcher with the real kubectl, against a stand-in for the cluster whose pods are processes.

Each pod runs a stand-in for the agent, which keeps its environment and waits to be told how to end.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubernetes_server import Cluster
from seatrial.base.errors import RunFailed
from seatrial.job import Job, job_from_text, preset_text
from seatrial.launch.base import Scheduled
from seatrial.launch.kubernetes import FILE, KubernetesLauncher
from seatrial.record.folder import RunFolder

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl"),
]

# Called as `PYTHON -P -m seatrial agent --run FOLDER`. SIGTERM: it saves and ends with 75. A file FOLDER/end: with that code.
AGENT = """\
import json, os, pathlib, signal, sys

assert sys.argv[1:6] == ["-P", "-m", "seatrial", "agent", "--run"], sys.argv
folder = pathlib.Path(sys.argv[6])
index, uid = os.environ["JOB_COMPLETION_INDEX"], os.environ["SEATRIAL_POD_UID"]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("agent of node", index, flush=True)
(folder / f"new-{uid}").write_text(json.dumps(dict(os.environ)))
(folder / f"new-{uid}").rename(folder / f"joined-{index}-{uid}")
while not (folder / "end").exists():
    if signal.sigtimedwait([signal.SIGTERM], 0.02):
        if (folder / "deaf").exists():
            continue
        (folder / f"saved-{index}-{uid}").touch()
        sys.exit(75)
sys.exit(int((folder / "end").read_text()))
"""


class Trial:
    """A cluster, a run on it, and what to ask of both."""

    def __init__(self, folder: Path, machines: int) -> None:
        self.folder = folder
        self.run = RunFolder(folder / "runs" / "first-voyage")
        self.run.path.mkdir(parents=True)
        (folder / "pods").mkdir()
        self.stand_in = folder / "python"
        self.stand_in.write_text(f"#!{sys.executable} -IS\n{AGENT}")
        self.stand_in.chmod(0o755)
        self.cluster = Cluster(folder / "pods", machines)
        self.launcher = KubernetesLauncher()
        self.handle = ""

    def job(self, *overrides: str) -> Job:
        section = f'\n[kubernetes]\nimage = "x"\nvolume_claim = "files"\nmount = "{self.folder}"\n'
        # With a GPU each pod repels the others: one a machine.
        first = ["cluster.launcher=kubernetes", "cluster.device=cuda", f"cluster.python={self.stand_in}"]
        text = preset_text("first-voyage") + section
        return job_from_text(text, name="job.toml", base_folder=self.folder, overrides=[*first, *overrides])

    def submit(self, *overrides: str, generation: int = 1) -> str:
        file = self.folder / FILE
        file.write_text(self.launcher.render(self.job(*overrides), self.run, generation)[FILE])
        self.handle = self.launcher.submit({FILE: file})
        return self.handle

    @property
    def name(self) -> str:
        return self.handle.rpartition("/")[2]

    def state(self) -> str:
        return self.launcher.status(self.handle).state

    def joined(self) -> list[int]:
        """The index of each agent that ever began; one more for each replacement."""
        return sorted(int(path.name.split("-")[1]) for path in self.run.path.glob("joined-*"))

    def saved(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self.run.path.glob("saved-*"))

    def until_joined(self, *nodes: int) -> None:
        self.cluster.until(lambda: self.joined() == list(nodes), f"agents of {nodes}")

    def end(self, code: int) -> None:
        """The run is over: every agent that runs, or starts from now on, ends so."""
        (self.run.path / "end.new").write_text(str(code))
        (self.run.path / "end.new").rename(self.run.path / "end")

    def conditions(self) -> list[str]:
        (job,) = self.cluster.all("jobs")
        return [c["type"] for c in job["status"].get("conditions", [])]


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    trial = Trial(tmp_path, machines=4)
    (tmp_path / "config").write_text(trial.cluster.kubeconfig())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl caches what it discovers
    yield trial
    trial.cluster.close()


def test_a_run_from_submit_to_its_end(trial: Trial) -> None:
    assert isinstance(trial.launcher, Scheduled)
    trial.submit("cluster.spares=1")
    assert trial.handle == f"default/jobs.batch/{trial.name}"
    trial.until_joined(0, 1, 2)
    status = trial.launcher.status(trial.handle)
    assert (status.state, status.words) == ("running", "3 pods running")
    # Each agent has an address of its own and knows the names of the others.
    told = [trial.launcher.identity(json.loads(p.read_text())) for p in trial.run.path.glob("joined-*")]
    assert sorted(who.node for who in told) == [0, 1, 2]
    assert len({who.address for who in told}) == len({who.incarnation for who in told}) == 3
    assert {who.peers for who in told if who.node == 0} == {(f"{trial.name}-1.{trial.name}",)}
    (service,) = trial.cluster.all("services")
    (job,) = trial.cluster.all("jobs")
    assert service["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    trial.end(0)
    trial.cluster.until(lambda: trial.conditions() == ["Complete"], "the Job's end")
    status = trial.launcher.status(trial.handle)
    assert (status.state, status.words) == ("gone", "Complete")
    subprocess.run(
        ["kubectl", "delete", f"job/{trial.name}", "--wait=false"], check=True, capture_output=True
    )
    trial.cluster.until(lambda: not trial.cluster.objects, "the Service and pods go with the Job")


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_stop_lets_every_pod_save(trial: Trial, form: str) -> None:
    trial.submit(f"kubernetes.form={form}")
    trial.until_joined(0, 1)
    assert trial.state() == "running"
    trial.launcher.signal(trial.handle, "preempt")
    trial.cluster.until(lambda: not trial.cluster.objects, "everything is gone")
    assert trial.saved() == [0, 1]
    assert trial.joined() == [0, 1]  # nothing was started again
    status = trial.launcher.status(trial.handle)
    assert (status.state, status.words) == ("gone", "deleted")
    trial.launcher.signal(trial.handle, "preempt")  # nothing is left to stop


def test_ending_does_not_wait_for_an_agent_that_does_not_listen(trial: Trial) -> None:
    trial.submit("resilience.preempt_grace_s=3600")
    (trial.run.path / "deaf").touch()
    trial.until_joined(0, 1)
    trial.launcher.signal(trial.handle, "preempt")
    trial.cluster.until(
        lambda: [phase for _, phase in trial.cluster.phases()] == ["Terminating"] * 2, "leaving"
    )
    trial.launcher.signal(trial.handle, "end")
    trial.cluster.until(lambda: not trial.cluster.objects, "everything is gone")
    assert trial.saved() == []


def test_lost_machine_is_replaced_while_its_pod_terminates(trial: Trial) -> None:
    trial.submit("cluster.spares=1")
    trial.until_joined(0, 1, 2)
    trial.cluster.lose(trial.cluster.machine_of(1))
    trial.until_joined(0, 1, 1, 2)  # the same index, another incarnation
    assert trial.cluster.phases() == [(0, "Running"), (1, "Running"), (1, "Terminating"), (2, "Running")]
    assert trial.launcher.status(trial.handle).words == "3 pods running"
    trial.launcher.signal(trial.handle, "preempt")
    trial.cluster.until(lambda: trial.cluster.phases() == [(1, "Terminating")], "all that can end have ended")
    assert trial.state() == "gone"  # though nobody will ever tell that of the lost machine's pod
    assert trial.saved() == [0, 1, 2]


def test_a_drained_machine_hands_over(trial: Trial) -> None:
    trial.submit()
    trial.until_joined(0, 1)
    trial.cluster.drain(trial.cluster.machine_of(0))
    trial.until_joined(0, 0, 1)
    trial.cluster.until(lambda: trial.saved() == [0], "it was signalled")


def test_the_end_does_not_wait_for_a_spare_that_has_no_machine(trial: Trial) -> None:
    trial.submit("cluster.nodes=3", "parallel.shard=3", "train.global_batch=24", "cluster.spares=1")
    trial.until_joined(0, 1, 2, 3)
    trial.cluster.lose(trial.cluster.machine_of(3))
    trial.cluster.until(lambda: (3, "Pending") in trial.cluster.phases(), "there is no fifth machine")
    words = trial.launcher.status(trial.handle).words
    assert (
        words == "3 pods running; 1 waiting: 0/4 nodes are available: didn't match pod anti-affinity rules."
    )
    trial.end(0)
    trial.cluster.until(lambda: trial.conditions() == ["Complete"], "the Job's end")


def test_a_failed_run_fails_the_job_after_its_restarts(trial: Trial) -> None:
    trial.submit("kubernetes.restarts=2")
    trial.until_joined(0, 1)
    trial.end(1)
    trial.cluster.until(lambda: trial.conditions() == ["Failed"], "the Job's end")
    assert trial.joined() == [0, 0, 0, 1, 1, 1]
    status = trial.launcher.status(trial.handle)
    assert (status.state, status.words) == ("gone", "Failed FailedIndexes Job has failed indexes")


def test_a_queue_admits_takes_back_and_admits_again(trial: Trial) -> None:
    trial.submit("kubernetes.queue=h100", "kubernetes.restarts=0")
    status = trial.launcher.status(trial.handle)
    assert (status.state, status.words) == ("queued", "suspended: its queue has not admitted it")
    assert trial.cluster.phases() == []
    trial.cluster.suspend(trial.name, False)
    trial.until_joined(0, 1)
    trial.cluster.suspend(trial.name, True)
    trial.cluster.until(
        lambda: trial.saved() == [0, 1] and trial.cluster.phases() == [], "all were preempted"
    )
    assert trial.state() == "queued"
    trial.cluster.suspend(trial.name, False)
    trial.until_joined(0, 0, 1, 1)  # though no restart is left: a suspension is no failure
    assert trial.state() == "running"


def test_unschedulable_pods_are_reported(trial: Trial) -> None:
    trial.cluster.free.clear()
    trial.submit()
    trial.cluster.until(lambda: trial.cluster.phases() == [(0, "Pending"), (1, "Pending")], "two pods")
    trial.cluster.until(lambda: all(p["status"].get("conditions") for p in trial.cluster.all("pods")), "why")
    status = trial.launcher.status(trial.handle)
    assert status.state == "queued"
    assert status.words == "2 waiting: 0/0 nodes are available: didn't match pod anti-affinity rules."


def test_the_same_start_twice_is_refused_and_the_first_goes_on(trial: Trial) -> None:
    trial.submit()
    with pytest.raises(RunFailed, match="already exists"):
        trial.submit()
    assert [len(trial.cluster.all(r)) for r in ("jobs", "services")] == [1, 1]
    trial.submit(generation=2)  # the next start has another name
    assert [len(trial.cluster.all(r)) for r in ("jobs", "services")] == [2, 2]


def test_a_refused_object_is_reported_and_nothing_is_created(trial: Trial) -> None:
    """Found by the dry run: the Job alone would have been accepted."""
    file = trial.folder / FILE
    text = trial.launcher.render(trial.job(), trial.run)[FILE]
    file.write_text(text.replace("publishNotReadyAddresses", "publishNotReady"))
    with pytest.raises(RunFailed, match=r"spec\.publishNotReady: unknown key"):
        trial.launcher.submit({FILE: file})
    assert trial.cluster.objects == {}
    assert all("dryRun=All" in request for request in trial.cluster.requests)


def test_a_service_that_cannot_be_made_takes_the_job_with_it(trial: Trial) -> None:
    """Between the dry run and the start somebody took its name."""
    create = trial.cluster.create

    def taken(
        resource: str, namespace: str, body: dict[str, object], dry_run: bool
    ) -> tuple[int, dict[str, object]]:
        if resource == "services" and not dry_run:
            return 403, {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "code": 403,
                "reason": "Forbidden",
                "message": "services is forbidden: quota",
            }
        return create(resource, namespace, body, dry_run)

    trial.cluster.create = taken  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match="services is forbidden: quota"):
        trial.submit()
    trial.cluster.until(lambda: not trial.cluster.objects, "nothing is left")


def test_the_commands_for_logs_work_as_they_are(trial: Trial) -> None:
    trial.submit()
    trial.until_joined(0, 1)
    outputs = []
    for command in trial.launcher.logs(trial.handle):
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        outputs.append(done.stdout)
    pods, described, logs = outputs
    assert pods.count(f"{trial.name}-") == 2
    assert "Completion Mode:" in described
    assert "agent of node 0\n" in logs
    assert "agent of node 1\n" in logs
    assert f"[pod/{trial.name}-0-" in logs


def test_a_missing_server_or_kubectl_is_reported(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.submit()
    config = trial.folder / "config"
    config.write_text(config.read_text().replace(str(trial.cluster.server_port), "1"))
    status = trial.launcher.status(trial.handle)
    assert status.state == "unknown"
    assert "refused" in status.words
    with pytest.raises(RunFailed, match="refused"):
        trial.launcher.signal(trial.handle, "end")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunFailed, match="kubectl: not installed") as caught:
        trial.submit()
    assert "install kubectl" in (caught.value.hint or "")
    assert trial.launcher.status(trial.handle).words == "kubectl: not installed"
