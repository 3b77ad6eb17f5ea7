"""Launchers before they launch: the choice of one, the port, and what render shows."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from presets import preset_job
from seatrial.base.errors import InputError
from seatrial.control.agent.ports import check_port, free_port, is_free
from seatrial.control.node import spec
from seatrial.control.node.spec import parse_agent_arguments
from seatrial.hardware.topology import Gpu
from seatrial.job import Job
from seatrial.launch import LocalLauncher, Outcome, launcher_for, local, session
from seatrial.launch.netns import Hosts
from seatrial.launch.session import Session
from seatrial.record.events import append, read_events
from seatrial.record.folder import RunFolder
from seatrial.record.run import open_run
from seatrial.record.view import read_view
from seatrial.storage import StorageError


def job(*overrides: str, port: int | None = 20500) -> Job:
    ports = [] if port is None else [f"cluster.port={port}"]
    return preset_job("first-voyage", "cluster.spares=1", "cluster.device=cpu", *ports, *overrides)


def test_launchers() -> None:
    assert isinstance(launcher_for(job()), LocalLauncher)
    with pytest.raises(InputError, match='there is no launcher "lsf"') as caught:
        launcher_for(job("cluster.launcher=lsf"))
    assert caught.value.diagnostics[0].hint == "there are: local, slurm, kubernetes, ssh"


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_with_a_listener_is_not_free(address: str) -> None:
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


def test_fresh_moves_nothing_if_old_checkpoints_are_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus.txt").write_text("some text\n" * 2000)
    again = job(f"data.train={tmp_path}/corpus.txt", "checkpoint.folder=s3://bucket/team", port=None)
    open_run(again, tmp_path / "runs").close()

    class Away:
        def steps(self) -> list[int]:
            raise StorageError("unreachable", "list", "s3://bucket/team", "it does not answer")

    monkeypatch.setattr(session, "open_place", lambda url: Away())
    with pytest.raises(StorageError):
        session.prepare_session(again, tmp_path / "runs", fresh=True)
    assert [p.name for p in (tmp_path / "runs").iterdir() if not p.name.startswith(".")] == ["first-voyage"]


def agent_lines(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]


def test_render_shows_the_commands_that_launch_runs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    text = LocalLauncher().render(job(), folder, 5)["commands.sh"]
    specs = [parse_agent_arguments(words[4:])[0] for words in agent_lines(text)]
    assert specs == LocalLauncher().specs(job(), folder, 5)
    assert [(s.node, s.nodes, s.spares) for s in specs] == [(0, 2, 1), (1, 2, 1), (2, 2, 1)]
    assert "seatrial.train.worker" in text
    assert "MASTER_PORT=20500" in text
    assert text.count("# rank 0 at first") == text.count("# rank 4 at first") == text.count("# a spare") == 1
    assert not folder.path.exists()


def test_render_in_hosts_of_their_own(tmp_path: Path) -> None:
    hosts = Hosts(3)  # not entered: nothing is made
    lines = agent_lines(LocalLauncher(hosts).render(job(), RunFolder(tmp_path))["commands.sh"])
    assert [words[1:4] for words in lines] == [["netns", "exec", hosts.name(i)] for i in range(3)]
    specs = [parse_agent_arguments(words[8:])[0] for words in lines]
    assert [(s.address, s.interface) for s in specs] == [(f"10.77.0.{i}", "eth0") for i in (1, 2, 3)]


def test_render_shows_the_reason_of_each_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    text = LocalLauncher().render(job(), RunFolder(tmp_path))["commands.sh"]
    assert (
        "#   GLOO_SOCKET_IFNAME=ib0   # yours: set by you; Seatrial would set GLOO_SOCKET_IFNAME=lo" in text
    )
    assert "#   WORLD_SIZE=8   # ranks of this generation" in text
    monkeypatch.setattr(local, "choose_device", lambda _: ("cuda", "pretended"))
    near = Gpu("0", "0000:18:00.0", 1, frozenset({0, 1, 2}), "near 0000:18:00.0")
    monkeypatch.setattr(spec, "local_gpus", lambda environment, affinity: [near])
    text = LocalLauncher().render(job(), RunFolder(tmp_path))["commands.sh"]
    assert "# local rank 0: CPUs 0-2 (near 0000:18:00.0)\n" in text
    assert "#   NCCL_SOCKET_IFNAME==lo   # lo has 127.0.0.1" in text
    assert "# InfiniBand and RoCE: " in text


def test_virtual_nodes_share_the_machines_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "choose_device", lambda _: ("cuda", "pretended"))
    monkeypatch.setattr(local, "visible_devices", lambda: list("abcdefghijkl"))
    text = LocalLauncher().render(job(), RunFolder(tmp_path))["commands.sh"]
    for devices in ("a,b,c,d", "e,f,g,h", "i,j,k,l"):
        assert f"CUDA_VISIBLE_DEVICES={devices} " in text


def test_spares_need_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "choose_device", lambda _: ("cuda", "pretended"))
    monkeypatch.setattr(local, "visible_devices", lambda: list("abcdefgh"))
    with pytest.raises(InputError, match=r"spares = 1: 2 \+ 1 nodes x 4 GPUs = 12, but there are 8"):
        LocalLauncher().check(job(port=None))
    LocalLauncher().check(job("cluster.spares=0", port=None))
    monkeypatch.setattr(local, "choose_device", lambda _: ("cpu", "asked for"))
    LocalLauncher().check(job(port=None))


class Ended:
    """A launcher whose launch is over at once; meanwhile the coordinator has started two more generations."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def render(self, job: Any, folder: RunFolder, generation: int) -> dict[str, str]:
        return {}

    def launch(self, job: Any, folder: RunFolder, generation: int, **options: Any) -> Outcome:
        folder.generation_file.write_text(f"{generation + 2}\n")
        return self.outcome


@pytest.mark.parametrize(
    ("code", "kind", "data", "state"),
    [
        (0, "run_finished", None, "finished"),
        (75, "run_interrupted", {"preempted": True}, "preempted"),
        (130, "run_interrupted", {"preempted": False}, "stopped"),
        (1, "run_failed", {}, "failed"),
    ],
)
def test_the_end_is_recorded_in_the_last_generation(
    tmp_path: Path, code: int, kind: str, data: object, state: str
) -> None:
    full = preset_job("first-voyage", folder=tmp_path)
    with open_run(full, tmp_path) as opened:
        ready = Session(full, opened, stores=[], device="cpu", device_reason="")  # type: ignore[arg-type]
        assert ready.run(launcher=Ended(Outcome(code))) == Outcome(code)  # type: ignore[arg-type]
    told = read_events(opened.folder)[0]
    assert [(e.kind, e.generation) for e in told] == [("run_started", 1), (kind, 3)]
    assert told[-1].data == data
    for generation in (2, 3):
        append(opened.folder, "generation_started", "g", generation=generation)
    view = read_view(opened.folder)
    assert (view.state, view.first_generation, view.generation) == (state, 1, 3)
