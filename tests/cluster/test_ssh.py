"""Training over ssh: three real sshd in network namespaces, the launcher in a fourth one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ssh_hosts import SSHD, SshHosts

from conftest import Run, records
from seatrial.base import process
from seatrial.base.errors import InputError
from seatrial.job import load_job
from seatrial.launch import named
from seatrial.launch.netns import Hosts, Unavailable
from seatrial.record.folder import RunFolder

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

LAUNCHER = 3  # the host that the launcher runs on


@pytest.fixture
def cluster(folder: Path) -> Iterator[SshHosts]:
    if not os.path.exists(SSHD) or shutil.which("ssh") is None:
        pytest.skip("sshd (openssh-server) or ssh is not installed")
    text = (folder / "job.toml").read_text()
    for old, new in {
        "nodes = 2\ngpus_per_node = 2": 'launcher = "ssh"\nnodes = 3\ngpus_per_node = 1\ndevice = "cpu"',
        "tensor = 2\npipeline = 2": "replicate = 3",
        "global_batch = 8\nmicrobatch = 2": "global_batch = 6\nmicrobatch = 1",
    }.items():
        assert old in text
        text = text.replace(old, new)
    ssh = '[ssh]\nhosts = ["n0", "n1", "n2"]\nconfig = "config"\n'
    (folder / "job.toml").write_text(
        f"{text}\n[resilience]\nsilence_s = 2.0\nsnapshot_every_steps = 2\n\n{ssh}"
    )
    try:
        with Hosts(LAUNCHER + 1) as hosts:
            made = SshHosts(hosts, folder)
            try:
                yield made
                # An agent whose run is over exits by itself, a moment after the launcher.
                made.wait(lambda: not made.remote(), "left on the hosts", 10)
            finally:
                process.kill_all(made.remote)
                made.close()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def train(cluster: SshHosts, start: Callable[..., Run]) -> Callable[..., Run]:
    return lambda *arguments: start(*arguments, prefix=cluster.prefix)


def losses(folder: Path) -> list[float]:
    last = {r["step"]: r["loss"] for r in records(folder / "runs/small/metrics.jsonl")}
    return [last[step] for step in sorted(last)]


def test_three_hosts_train_as_three_local_ranks(
    cluster: SshHosts, train: Callable[..., Run], start: Callable[..., Run]
) -> None:
    run = train()
    code, _, said = run.wait(240)
    assert code == 0, said
    over_ssh = losses(cluster.folder)
    events = records(cluster.folder / "runs/small/events.jsonl")
    assert {e["node"] for e in events if e["kind"] == "node_joined"} == {0, 1, 2}
    assert len(over_ssh) == 12
    run.wait_gone(5)
    cluster.wait(lambda: not cluster.remote(), "left on the hosts", 10)
    words = ("cluster.launcher=local", "cluster.nodes=1", "cluster.gpus_per_node=3")
    local = start("--fresh", *(word for entry in words for word in ("--set", entry)))
    assert local.wait(240)[0] == 0
    assert losses(cluster.folder) == over_ssh


@pytest.mark.long  # on virtual nodes: test_processes
@pytest.mark.parametrize("victim", ["launcher", "everything here"])
def test_kill_9_of_the_launcher_leaves_nothing(
    cluster: SshHosts, train: Callable[..., Run], victim: str
) -> None:
    run = train("--set", "train.steps=2000")
    run.wait_line("step   ")
    here = run.processes()
    if victim == "launcher":
        run.process.kill()
    else:
        run.kill_all()
    run.wait_gone(10)
    assert len(here) > LAUNCHER, "the launcher and one ssh client for each host"
    cluster.wait(lambda: not cluster.remote(), "left on the hosts", 10)


# The test before shows that an agent ends with its ssh, the next one that a host rejoins.
@pytest.mark.long
def test_killed_ssh_ends_its_agent_and_the_host_rejoins(cluster: SshHosts, train: Callable[..., Run]) -> None:
    run = train("--set", "train.steps=2000")
    run.wait_line("step   ")
    before = process.marked(f"{cluster.folder}/runs/small/node1")
    (client,) = (p for p in run.processes() if clients_host(p) == "n1")
    os.kill(client, signal.SIGKILL)
    cluster.wait(lambda: not before & set(process.living()), "its agent or a rank lives on", 15)
    run.wait_line("recovered after ")
    cluster.wait(lambda: len(told(cluster, "grown")) == 1, "it did not come back")
    (lost,) = told(cluster, "agent_failed")
    assert lost["message"] == "agent of node 1 on n1 lost its connection: ssh was killed by SIGKILL"
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 75


@pytest.mark.long  # a host that is cut off: test_hosts_apart; shrinking and growing: test_recovery
def test_a_cut_network_shrinks_and_grows(cluster: SshHosts, train: Callable[..., Run]) -> None:
    run = train("--set", "train.steps=4000")
    run.wait_line("step   ")
    before = process.marked(f"{cluster.folder}/runs/small/node1")
    cluster.hosts.down(1)
    try:
        cluster.wait(lambda: told(cluster, "shrunk"), "it did not shrink")
        # Long enough for ssh to give the connection up: the agent there hears nothing of that.
        cluster.wait(lambda: told(cluster, "agent_failed"), "ssh noticed nothing")
        assert before & set(process.living())
    finally:
        cluster.hosts.up(1)
    # The agent from before the cut may join again first; its successor, which the launcher can reach, ends it.
    cluster.wait(
        lambda: len([e for e in told(cluster, "agent_started") if e["node"] == 1]) == 2, "no successor"
    )
    cluster.wait(lambda: told(cluster, "grown"), "it did not grow")
    assert not before & set(process.living()), (
        "the agent from before the cut still lives beside its successor"
    )
    (lost,) = told(cluster, "agent_failed")
    assert lost["message"].startswith("agent of node 1 on n1 is unreachable, or was killed there")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 75


@pytest.mark.long
def test_launcher_death_during_network_cut_leaves_no_processes(
    cluster: SshHosts, train: Callable[..., Run]
) -> None:
    run = train("--set", "train.steps=4000")
    run.wait_line("step   ")
    cluster.hosts.down(1)
    try:
        run.kill_all()
        on_1 = process.marked(f"{cluster.folder}/runs/small/node1")
        cluster.wait(lambda: not cluster.remote() - on_1, "left on the hosts that are not cut off", 20)
    finally:
        cluster.hosts.up(1)
    cluster.wait(lambda: not cluster.remote(), "left on the host that was cut off")


def clients_host(pid: int) -> str | None:
    """The host that an ssh client was called with."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return words[-3] if words[0] == "ssh" else None


def told(cluster: SshHosts, kind: str) -> list[dict[str, Any]]:
    return [e for e in records(cluster.folder / "runs/small/events.jsonl") if e["kind"] == kind]


@pytest.mark.ci
def test_problems_of_each_host_are_reported_before_starting(
    cluster: SshHosts, train: Callable[..., Run]
) -> None:
    other = next(line for line in (cluster.folder / "known").read_text().splitlines() if line)
    wrong = " ".join([cluster.hosts.address(0), *(cluster.folder / "user.pub").read_text().split()[:2]])
    (cluster.folder / "known").write_text((cluster.folder / "known").read_text().replace(other, wrong))
    config = (cluster.folder / "config").read_text()
    (cluster.folder / "config").write_text("Host n1\n  User nobody\n" + config)
    code, _, said = train().wait()
    assert code == 2
    assert "n0: its host key differs from the known one" in said
    assert "n1: no login without a password" in said
    assert "n2" not in said.partition("2 problems")[0].replace('"n2"', "")
    assert not (cluster.folder / "runs").exists(), "nothing was made"
    (cluster.folder / "config").write_text(
        config.replace("StrictHostKeyChecking yes", "StrictHostKeyChecking no")
    )
    (cluster.folder / "known").unlink()
    code, _, said = train("--set", "cluster.python=/no/python").wait()
    assert code == 2
    assert said.count("no Python at /no/python") == 3
    other_python = cluster.folder / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(other_python)], check=True)
    code, _, said = train("--set", f"cluster.python={other_python}/bin/python").wait()
    assert code == 2
    assert said.count(f"{other_python}/bin/python has no Seatrial") == 3


@pytest.mark.ci
def test_a_run_folder_that_a_host_does_not_see(cluster: SshHosts, train: Callable[..., Run]) -> None:
    """Host 1 has a file system of its own where the runs are."""
    (cluster.folder / "runs").mkdir()
    server = cluster.servers[1]
    server.terminate()
    server.wait()
    hide = f"mount -t tmpfs tmpfs {cluster.folder}/runs && exec {SSHD} -D -f {cluster.folder}/sshd1"
    cluster.servers[1] = subprocess.Popen([*cluster.hosts.prefix(1), "unshare", "--mount", "sh", "-c", hide])
    cluster.wait(lambda: cluster.ssh("n1", "true") == 0, "no sshd")
    code, _, said = train().wait()
    assert code == 2
    assert re.search(rf"n1: node \S+ does not see the run folder {cluster.folder}/runs/small", said), said
    assert "n0:" not in said


def test_render_shows_the_commands(folder: Path) -> None:
    job = load_job(
        folder / "job.toml",
        ["cluster.launcher=ssh", "cluster.python=/opt/py", 'ssh.hosts=["a", "b", "c"]', "ssh.config=conf"],
    )
    text = named("ssh").render(job, RunFolder(Path("/share/runs/small")))["commands.sh"]
    commands = [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]
    assert [c[-2] for c in commands] == ["a", "b"]
    assert all("-oBatchMode=yes" in c and c[c.index("-F") + 1] == str(Path.cwd() / "conf") for c in commands)
    assert commands[1][-1] == (
        "exec env SEATRIAL_AGENT=/share/runs/small/node1 /opt/py -P -m seatrial.control.agent "
        "--run /share/runs/small --generation 1 --node 1 --nodes 2 --spares 0 --ranks-per-node 2 "
        "--address auto --device auto --attended"
    )


def test_all_invalid_hosts_are_reported(folder: Path) -> None:
    (folder / "hosts").write_text("a\nb -oProxyCommand=x\n")
    for hosts, problems in (
        ('ssh.hosts=["-oProxyCommand=x", "a", "a"]', ["is not a host name", "a is listed twice"]),
        ('ssh.hosts=["a"]', ["1 hosts, but nodes + spares = 2 are needed"]),
        (f"ssh.hostfile={folder}/hosts", ["unknown option '-oProxyCommand=x'"]),
    ):
        job = load_job(folder / "job.toml", ["cluster.launcher=ssh", hosts])
        with pytest.raises(InputError) as error:
            named("ssh").check(job)
        assert all(p in error.value.render() for p in problems)
