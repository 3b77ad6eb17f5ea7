"""Launchers before they launch: the choice of one, the port, and what render shows."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.base.errors import InputError
from seatrial.control.spec import parse_agent_arguments
from seatrial.launch import LocalLauncher, launcher_for, local
from seatrial.launch.ports import check_port, free_port, is_free
from seatrial.record.folder import RunFolder


def job(**changes: object) -> Any:
    cluster = {"launcher": "local", "nodes": 2, "gpus_per_node": 4, "device": "cpu", "port": 20500}
    return SimpleNamespace(cluster=SimpleNamespace(**(cluster | changes)))


def test_launchers() -> None:
    assert isinstance(launcher_for(job()), LocalLauncher)
    with pytest.raises(InputError, match='launcher = "slurm" is not in this version') as caught:
        launcher_for(job(launcher="slurm"))
    assert caught.value.diagnostics[0].hint == 'set launcher = "local" under [cluster] to run on this machine'


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_somebody_listens_on_is_not_free(address: str) -> None:
    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(InputError, match=f"port {port} is in use"):
            check_port(port)
    assert is_free(port)


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen(1)


def test_render_shows_the_commands_that_launch_runs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    text = LocalLauncher().render(job(), folder, 5)
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    specs = [parse_agent_arguments(shlex.split(c)[4:])[0] for c in commands]
    assert specs == LocalLauncher().specs(job(), folder, 5, port=20500)
    assert "seatrial.train.worker" in text
    assert "MASTER_PORT=20500" in text
    assert not folder.path.exists()


def test_virtual_nodes_share_the_machines_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "choose_device", lambda _: ("cuda", "pretended"))
    monkeypatch.setattr(local, "visible_devices", lambda: list("abcdefgh"))
    text = LocalLauncher().render(job(), RunFolder(tmp_path))
    assert "CUDA_VISIBLE_DEVICES=a,b,c,d " in text
    assert "CUDA_VISIBLE_DEVICES=e,f,g,h " in text
