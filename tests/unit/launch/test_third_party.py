"""A launcher that another package brings: the example of CONTRIBUTING.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from installed import install
from seatrial.cli.main import main
from seatrial.launch import named
from seatrial.launch.base import Identity, Scheduled

PACKAGE = """
from seatrial.launch.base import Identity, Status


class LsfLauncher:
    name = "lsf"
    restarts = False

    def check(self, job):
        pass

    def render(self, job, folder, generation=1):
        agent = f"seatrial agent --run {folder.path.absolute()}"
        return {"job.lsf": f"#BSUB -n {job.cluster.nodes}\\nblaunch -z \\"$LSB_HOSTS\\" {agent}\\n"}

    def identity(self, environment):
        return Identity(int(environment["LSF_PM_TASKID"]) - 1, environment["LSB_JOBID"], attempt=environment["LSB_JOBID"])

    def submit(self, files):
        return "4711"

    def status(self, handle):
        return Status("queued", "PEND")

    def signal(self, handle, how):
        pass

    def warnings(self, grace_s):
        return []

    def logs(self, handle):
        return [f"bpeek {handle}"]
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with that launcher."""
    install({"seatrial.launchers": {"lsf": "seatrial_lsf:LsfLauncher"}}, tmp_path / "site", monkeypatch)
    (tmp_path / "site" / "seatrial_lsf.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_installed_package_adds_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--preset", "first-voyage"]) == 0
    lsf = ["train", "first-voyage.toml", "--set", "cluster.launcher=lsf"]
    assert main([*lsf, "--render"]) == 0
    agent = f"seatrial agent --run {Path('runs/first-voyage').absolute()}"
    assert capsys.readouterr().out.endswith(f'#BSUB -n 2\nblaunch -z "$LSB_HOSTS" {agent}\n')
    assert isinstance(named("lsf"), Scheduled)
    assert named("lsf").identity({"LSF_PM_TASKID": "2", "LSB_JOBID": "4711"}) == Identity(1, "4711", "4711")
    assert main([*lsf, "--detach"]) == 0
    assert main(["status", "first-voyage"]) == 0
    out = capsys.readouterr().out
    assert "queued" in out
    assert "lsf 4711 has not started" in out
    # Its identity does not expect to be outside of a job: a bug, and not an end of the run.
    assert main(["agent", "--run", "runs/first-voyage"]) == 3
    assert "internal error: KeyError: 'LSF_PM_TASKID'" in capsys.readouterr().err
    assert main(["agent", "--run", "runs/second-voyage"]) == 2
    assert main(["train", "first-voyage.toml", "--set", "cluster.launcher=lsg"]) == 2
    assert "there are: " in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_a_class_that_is_not_a_launcher_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site" / "seatrial_lsf.py").write_text("class LsfLauncher:\n    name = 'lsf'\n")
    sys.modules.pop("seatrial_lsf", None)
    assert main(["init", "--preset", "first-voyage"]) == 0
    assert main(["validate", "first-voyage.toml", "--set", "cluster.launcher=lsf"]) == 2
    assert "is neither attended nor scheduled" in capsys.readouterr().err
