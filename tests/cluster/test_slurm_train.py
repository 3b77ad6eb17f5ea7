"""`seatrial train` through a real Slurm: what a cluster does to a job, and that the run goes on with the same bits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from recovery_runs import STEPS, Trial, assert_same, lines, make_folder, one_node

from seatrial.base import process
from seatrial.record.folder import RunFolder
from seatrial.record.launches import known_launch

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timed,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-"),
]
NODES = ("n1", "n2", "n3", "n4", "n5")
# One rank a node: whoever is lost takes a replica along.
LAYOUT = (
    "cluster.nodes=4",
    "cluster.gpus_per_node=1",
    "cluster.device=cpu",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "parallel.replicate=4",
)
SLURM = (*LAYOUT, "cluster.launcher=slurm", "resilience.preempt_grace_s=15")
LONG = ("train.steps=80", "checkpoint.every_steps=10")  # long enough for a node to be lost in its midst
# Where two nodes are enough: each imports torch once.
TWO = (*SLURM, *LONG, "cluster.nodes=2", "parallel.replicate=2")
LIMITED_STEPS = 400  # longer than Slurm's shortest time limit
LIMITED = (f"train.steps={LIMITED_STEPS}", "checkpoint.every_steps=10")
_WITHIN_S = 300.0


@pytest.fixture
def slurm(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[slurm_cluster.Slurm]:
    """A new one for each test: after the loss of a node Slurm 22.05 may not give free nodes to the next job.

    Its switches can be the fixture's parameter.
    """
    switches = getattr(request, "param", None)
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm") / "s", NODES, switches) as cluster:
        yield cluster


class Cluster:
    """The daemons, and runs that are submitted to them from a folder of the test's own."""

    def __init__(self, slurm: slurm_cluster.Slurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.trials: list[Trial] = []

    def train(self, *settings: str) -> Trial:
        self.trials.append(Trial(self.folder, *settings))
        return self.trials[-1]

    def jobs(self) -> dict[str, str]:
        """Job id -> state of all that wait or run."""
        text = self.slurm.run("squeue", "--noheader", "--array", "--format=%i %T")
        return dict(line.split() for line in text.splitlines())

    def job(self, number: str) -> dict[str, str]:
        text = self.slurm.run("scontrol", "show", "job", number, "--oneliner")
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def host(self, node: int, job: str) -> str:
        """Which of Slurm's nodes runs our node: tasks are numbered in the order of the job's list."""
        listed = self.slurm.run("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()
        return listed[node]

    def down(self, host: str) -> None:
        self.slurm.run("scontrol", "update", f"nodename={host}", "state=down", "reason=test")

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*process.python("seatrial"), *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )

    def clean(self) -> None:
        for number in {name.partition("_")[0] for name in self.jobs()}:
            self.slurm.run("scancel", number)
        for trial in self.trials:
            trial.process.kill()
            trial.process.communicate()
        slurm_cluster.wait_until(lambda: not self.jobs())
        for trial in self.trials:
            trial.wait_gone(5.0)


@pytest.fixture
def cluster(slurm: slurm_cluster.Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = Cluster(slurm, make_folder(tmp_path / "work"))
    yield found
    found.clean()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """The same layout on the virtual cluster."""
    trial = Trial(make_folder(tmp_path_factory.mktemp("undisturbed") / "work"), *LAYOUT, *one_node(4))
    assert trial.end()[0] == 0
    return trial


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    trial = Trial(make_folder(tmp_path_factory.mktemp("long") / "work"), *LAYOUT, *LONG, *one_node(4))
    assert trial.end()[0] == 0
    return trial


@pytest.fixture(scope="module")
def undisturbed_two(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    settings = (*TWO, "cluster.launcher=local", *one_node(2))
    trial = Trial(make_folder(tmp_path_factory.mktemp("two") / "work"), *settings)
    assert trial.end()[0] == 0
    return trial


def ended(trial: Trial) -> tuple[int, str]:
    """(exit code, stderr) of `seatrial train`."""
    _, err = trial.process.communicate(timeout=_WITHIN_S)
    return trial.process.returncode, err


def handle_now(trial: Trial) -> str | None:
    launch = known_launch(RunFolder(trial.run))
    return None if launch is None else launch.handle


def handle(trial: Trial) -> str:
    """The job of the first start, once it is submitted."""
    return str(trial.until(lambda: handle_now(trial)))


@pytest.mark.ci
@pytest.mark.parametrize("slurm", [{"left": "n[1,3]", "right": "n[2,4-5]"}], indirect=True)
def test_slurm_run_is_bitwise_equal_to_virtual_cluster(cluster: Cluster, undisturbed: Trial) -> None:
    """And its nodes take their places in the order of the switches."""
    trial = cluster.train(*SLURM)
    job = handle(trial)
    started = trial.until_event("generation_started")
    assert started["data"]["slots"] == {"0": 0, "1": 2, "2": 1, "3": 3}  # n1 and n3, then n2 and n4
    code, err = ended(trial)
    assert code == 0, err
    assert_same(trial, undisturbed)
    slurm_cluster.wait_until(lambda: not cluster.jobs())  # the follow-up job is cancelled
    assert cluster.job(job)["ExitCode"] == "0:0"
    script = trial.run / "launch" / "000001" / "job.sh"
    rendered = cluster.verb("train", "job.toml", "--render", *_sets(SLURM), "--set", "train.steps=16").stdout
    # What `--render` printed, but for settings that the job script does not depend on.
    assert script.read_text() == rendered
    assert "job.sh" in script.name
    assert f"finished: step {STEPS} of {STEPS}" in err


def _sets(settings: tuple[str, ...]) -> list[str]:
    return [word for entry in settings for word in ("--set", entry)]


@pytest.mark.long  # the agents replace it by themselves: test_hosts_apart; here the follow-up job takes over
def test_a_node_that_is_lost_is_replaced_by_the_spare(cluster: Cluster, undisturbed_long: Trial) -> None:
    trial = cluster.train(*SLURM, *LONG, "cluster.spares=1")
    job = handle(trial)
    trial.until_step(20)
    cluster.down(cluster.host(2, job))
    code, err = ended(trial)
    assert code == 0, err
    assert [e["node"] for e in trial.events("node_lost")] == [2]
    assert_same(trial, undisturbed_long)


@pytest.mark.long  # the agents shrink a run by themselves, under any launcher: test_recovery, test_kubernetes_train
def test_without_a_spare_it_goes_on_smaller(cluster: Cluster, undisturbed_long: Trial) -> None:
    trial = cluster.train(*SLURM, *LONG)
    job = handle(trial)
    trial.until_step(20)
    cluster.down(cluster.host(3, job))
    code, err = ended(trial)
    assert code == 0, err
    assert trial.events("shrunk")
    assert trial.samples() == undisturbed_long.samples()


@pytest.mark.ci
def test_follow_up_job_resumes_after_loss_of_the_batch_node(cluster: Cluster, undisturbed_two: Trial) -> None:
    trial = cluster.train(*TWO)
    job = handle(trial)
    trial.until_step(20)
    trial.until(lambda: len(cluster.jobs()) == 2)
    cluster.down(cluster.job(job)["BatchHost"])
    code, err = ended(trial)
    assert code == 0, err
    assert handle_now(trial) != job
    # What was left of the first job may have gone on with fewer replicas for a moment: the data are the same.
    assert trial.samples() == undisturbed_two.samples()


@pytest.mark.long  # the wait for a limit in whole minutes; saving on a signal: test_stop_saves_and_leaves_no_job
def test_time_limit_saves_and_follow_up_job_is_bitwise_identical(cluster: Cluster, tmp_path: Path) -> None:
    trial = cluster.train(*SLURM, *LIMITED, 'slurm.time="1"')
    trial.until(lambda: trial.events("run_interrupted"))
    job, stopped_at = handle(trial), max(trial.steps())
    assert 0 < stopped_at < LIMITED_STEPS
    assert f"{stopped_at:08d}" in (trial.run / "checkpoints/latest").read_text()
    slurm_cluster.wait_until(lambda: cluster.job(job)["JobState"] != "RUNNING")
    assert cluster.job(job)["ExitCode"] == "75:0"
    code, err = ended(trial)
    assert code == 0, err
    steps = [m["step"] for m in lines(trial.run / "metrics.jsonl")]
    assert steps == list(range(1, LIMITED_STEPS + 1))  # nothing is done twice
    undisturbed = Trial(make_folder(tmp_path / "undisturbed"), *LAYOUT, *LIMITED)
    assert undisturbed.end()[0] == 0
    assert_same(trial, undisturbed)


def test_stop_saves_and_leaves_no_job(cluster: Cluster, undisturbed_two: Trial) -> None:
    trial = cluster.train(*TWO)
    trial.until_step(20)
    done = cluster.verb("stop", "runs/small")
    assert done.returncode == 0, done.stderr
    assert ended(trial)[0] == 75
    assert not cluster.jobs()
    stopped_at = max(trial.steps())
    assert f"{stopped_at:08d}" in (trial.run / "checkpoints/latest").read_text()
    again = cluster.train(*TWO)
    assert ended(again)[0] == 0
    assert_same(again, undisturbed_two)


@pytest.mark.ci
def test_exit_code_of_a_failed_run_is_the_jobs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started from a login node, which needs neither GPUs nor torch."""
    absent = cluster.folder / "absent" / "torch"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('no torch on this host')\n")
    monkeypatch.setenv("PYTHONPATH", os.fspath(absent.parent))
    check = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False)
    assert check.returncode == 1
    settings = ("resilience.max_restarts=0", 'slurm.setup=["unset PYTHONPATH"]')
    trial = cluster.train(*TWO, *settings)
    job = handle(trial)
    trial.until_step(5)
    trial.kill_rank(1)
    code, err = ended(trial)
    assert code == 1, err
    assert "rank 1 on node 1 was killed by SIGKILL" in err
    slurm_cluster.wait_until(lambda: not cluster.jobs())
    assert cluster.job(job)["ExitCode"] == "1:0"


@pytest.mark.ci
def test_second_start_is_refused_and_excluded_nodes_are_not_used(cluster: Cluster) -> None:
    options = 'slurm.options=["--comment=what the team calls it"]'
    trial = cluster.train(*TWO, 'slurm.exclude="n[1,3,5]"', options)
    job = handle(trial)
    second = cluster.train(*TWO)
    code, err = ended(second)
    assert code == 1
    assert f"is run by slurm as {job}" in err
    trial.until_step(1)
    assert cluster.slurm.run("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split() == [
        "n2",
        "n4",
    ]
    comment = cluster.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%k").strip()
    assert comment == "what the team calls it"
    status = cluster.verb("status", "runs/small").stdout
    assert re.search(rf"launcher +slurm {job}\n +scheduler +RUNNING", status), status


@pytest.mark.long  # without a scheduler: tests/unit/launch
def test_unrecorded_job_yields_the_run_to_a_later_start(
    cluster: Cluster, undisturbed_long: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`seatrial train` is killed between sbatch and its note of the job's number."""
    tools = cluster.folder / "tools"
    tools.mkdir()
    sbatch = tools / "sbatch"
    real = shutil.which("sbatch")
    sbatch.write_text(
        f'#!/bin/bash\n[ "$1" = --test-only ] && exec {real} "$@"\n'
        f'{real} --begin=now+1hour "$@" > {tools}/job; kill -KILL $PPID\n'
    )
    sbatch.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        assert cluster.train(*SLURM, *LONG).process.wait(_WITHIN_S) == -9
    unknown = (tools / "job").read_text().strip()
    assert known_launch(RunFolder(cluster.folder / "runs/small")).handle is None  # type: ignore[union-attr]
    trial = cluster.train(*SLURM, *LONG)
    trial.until_step(10)
    cluster.slurm.run("scontrol", "update", f"jobid={unknown}", "starttime=now")
    code, err = ended(trial)
    assert code == 0, err
    assert trial.samples() == undisturbed_long.samples()
    slurm_cluster.wait_until(lambda: not cluster.jobs())
    log = cluster.folder / f"runs/small/logs/slurm-{unknown}.out"
    assert "the run is over: a later start was submitted" in log.read_text()


@pytest.mark.long  # a node that joins later: test_supervision
def test_a_cold_spare_of_an_array_joins_after_a_node_is_lost(
    cluster: Cluster, undisturbed_long: Trial
) -> None:
    trial = cluster.train(*SLURM, *LONG, "slurm.form=array", "slurm.cold_spares=1")
    job = handle(trial)
    trial.until_step(20)
    lost = cluster.slurm.run("squeue", "--noheader", f"--jobs={job}_3", "--format=%N").strip()
    cluster.down(lost)
    joined = trial.until_event("node_joined", node=4)
    assert joined["data"]["spare"] is True
    code, err = ended(trial)
    assert code == 0, err
    assert trial.samples() == undisturbed_long.samples()
