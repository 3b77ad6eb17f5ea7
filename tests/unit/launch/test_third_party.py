"""A launcher of another package: the example under examples/, with stand-ins for the commands of LSF."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from installed import install, install_examples
from seatrial.cli.main import main
from seatrial.launch import named
from seatrial.launch.base import Identity, Scheduled

COMMANDS = {"bsub": "cat >&2; echo 'Job <4711> is submitted to queue <normal>.'", "bjobs": "echo PEND"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples, and LSF's commands."""
    install_examples(tmp_path / "site", monkeypatch)
    (tmp_path / "bin").mkdir()
    for name, body in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.fspath(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_installed_package_adds_a_launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert main(["agent", "--run", "runs/first-voyage"]) == 2
    assert "this is not a task of an LSF job" in capsys.readouterr().err
    # A bug of the package, not an end of the run.
    monkeypatch.setattr(
        type(named("lsf")), "identity", lambda _self, environment: environment["LSF_PM_TASKID"]
    )
    assert main(["agent", "--run", "runs/first-voyage"]) == 3
    assert "internal error: KeyError: 'LSF_PM_TASKID'" in capsys.readouterr().err
    assert main(["agent", "--run", "runs/second-voyage"]) == 2
    assert main(["train", "first-voyage.toml", "--set", "cluster.launcher=lsg"]) == 2
    assert "there are: " in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_a_class_that_is_not_a_launcher_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install({"seatrial.launchers": {"none": "seatrial_none:NoLauncher"}}, tmp_path / "other", monkeypatch)
    (tmp_path / "other" / "seatrial_none.py").write_text("class NoLauncher:\n    name = 'none'\n")
    assert main(["init", "--preset", "first-voyage"]) == 0
    assert main(["validate", "first-voyage.toml", "--set", "cluster.launcher=none"]) == 2
    assert "is neither attended nor scheduled" in capsys.readouterr().err
