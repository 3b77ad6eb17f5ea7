"""Agents on other hosts, started by the system's OpenSSH client.

The client's stdin and stdout are the channel to the agent. If the client ends, so does the agent, on EOF on stdin or by
heartbeat timeout (control/agent/launcher_link.py). The run continues without that node, and the connection is retried.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import seatrial
from seatrial.base import process
from seatrial.base.errors import InputError
from seatrial.check.live.agent_pool import AgentPool
from seatrial.check.live.hosts import Host, ssh_hosts
from seatrial.check.live.messages import RunTool
from seatrial.control.agent.local_settings import ssh_route
from seatrial.control.node.spec import AUTO, AgentSpec, spec_of
from seatrial.hardware.devices import choose_device
from seatrial.job.finding import RuleViolation
from seatrial.job.schema import ClusterSection
from seatrial.launch.agents import AgentHandle, start_agent
from seatrial.launch.attended import attend
from seatrial.launch.base import Outcome
from seatrial.record.filesystem import check_token
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.job import Job

_AGAIN_S = 5.0  # back-off before reconnecting to a host whose connection broke
_AT_ONCE = 64  # connections opened in parallel for a check
_GREET_S, _PROBE_S = 60.0, 60.0
_SEEN_S = 5.0  # a shared file system may show a new file this much later
_NO_CONNECTION = 255  # ssh's own exit code; also if the command was killed by a signal
_ENVIRONMENT = {"SSH_ASKPASS_REQUIRE": "never"}  # no password prompt in a window either

# Messages of ssh or the remote shell, and what they mean.
_CAUSES = (
    ("Host key verification failed", "its host key differs from the known one", "if it is the right host: "
     "`ssh-keygen -R HOST`, then `ssh HOST` once"),
    ("Permission denied", "no login without a password", "install a key there (`ssh-copy-id HOST`) or load it (ssh-agent)"),
    ("Could not resolve hostname", "no such host", "name it in ~/.ssh/config, /etc/hosts or DNS"),
    ("exit code 127", "no Python at {python}", "set cluster.python to the path on the hosts"),
    ("exit code 126", "{python} cannot be executed", "set cluster.python to the path on the hosts"),
    ("No module named", "{python} has no Seatrial", "install it there, or set cluster.python"),
)  # fmt: skip


class SshLauncher:
    """Starts one agent on each host of [ssh] and stays connected to them."""

    name = "ssh"

    def check(self, job: Job) -> None:
        """Raise InputError with the problems of each host: login, Python, versions, device."""
        _refuse(job, _problems(job, None))

    def specs(self, job: Job, folder: RunFolder, generation: int) -> list[AgentSpec]:
        """The spec of each agent; spares come last."""
        cluster = job.cluster
        return [
            spec_of(
                job,
                folder,
                generation,
                node,
                address=AUTO,
                device=cluster.device,
            )
            for node in range(cluster.nodes + cluster.spares)
        ]

    def render(self, job: Job, folder: RunFolder, generation: int = 1) -> dict[str, str]:
        """The ssh command of each node: the text of `commands.sh`."""
        specs = self.specs(job, folder, generation)
        lines = []
        for host, spec in zip(ssh_hosts(job), specs, strict=False):
            what = "" if spec.node < spec.nodes else ", a spare"
            lines.append(f"# node {spec.node}{what}; output of ssh goes to {_log(spec)}")
            lines.append(shlex.join(_command(job, host, spec)))
        return {"commands.sh": "\n".join([*lines, ""])}

    def launch(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        *,
        tick: Callable[[], None] | None = None,
    ) -> Outcome:
        """Run the job to its end. Signals as with `LocalLauncher.launch`.

        Raises InputError like `check`, and for hosts that do not see the run folder.
        """
        _refuse(job, _problems(job, (folder, generation)))
        specs, hosts = self.specs(job, folder, generation), ssh_hosts(job)
        launch_id, numbers = f"{os.getpid()}-{secrets.token_hex(4)}", itertools.count()

        def start(node: int) -> AgentHandle:
            host = hosts[node].name
            return start_agent(
                specs[node],
                f"{launch_id}/{next(numbers)}/ssh{node}",
                _command(job, hosts[node], specs[node]),
                environment=_ENVIRONMENT,
                log=_log(specs[node]),
                status_text=lambda status: _how_it_ended(host, status),
                own_session=True,
            )

        def returns(agent: AgentHandle) -> float | None:
            assert agent.status is not None
            return _AGAIN_S if agent.status == _NO_CONNECTION or agent.status < 0 else None

        return attend(job, folder, generation, specs, start, returns=returns, tick=tick, heartbeats=True)


def _command(job: Job, host: Host, spec: AgentSpec) -> list[str]:
    # The same mark in each start, so that an agent finds processes that a previous one left on its host.
    mark = {process.MARK: f"{spec.run}/node{spec.node}"}
    agent = spec.agent_command(job.cluster.python)
    return host.command(*agent, "--attended", environment=mark)


def _log(spec: AgentSpec) -> Path:
    return spec.log.with_name("ssh.log")


def _how_it_ended(host: str, status: int) -> str:
    if status == _NO_CONNECTION:
        return f"on {host} is unreachable, or was killed there (ssh ended with exit code {status})"
    if status < 0:
        return f"on {host} lost its connection: ssh {process.status_text(status)}"
    return f"on {host} {process.status_text(status)}"


# -- before the start


def _refuse(job: Job, problems: list[tuple[str, str, str]]) -> None:
    section = job.file.ssh
    key = "ssh.hostfile" if section is not None and section.hostfile is not None else "ssh.hosts"
    if problems:
        raise InputError(
            [job.located(RuleViolation((key,), f"{host}: {text}", hint)) for host, text, hint in problems]
        )


def _problems(job: Job, run: tuple[RunFolder, int] | None) -> list[tuple[str, str, str]]:
    """(host, problem, what to do) for all hosts that the job would use."""
    hosts = ssh_hosts(job)[: job.cluster.nodes + job.cluster.spares]
    problems: list[tuple[str, str, str]] = []
    facts: dict[str, dict[str, Any]] = {}
    for first in range(0, len(hosts), _AT_ONCE):
        _probe(job, hosts[first : first + _AT_ONCE], run, problems, facts)
    return [*problems, *_compared(facts, _torch())]


def _probe(
    job: Job,
    hosts: list[Host],
    run: tuple[RunFolder, int] | None,
    problems: list[tuple[str, str, str]],
    facts: dict[str, dict[str, Any]],
) -> None:
    python = job.cluster.python or sys.executable
    values = {
        "cluster": job.cluster.model_dump(),
        "run": None if run is None else [str(run[0].path.absolute()), run[1]],
    }
    order = RunTool([python, "-P", "-c", f"from {__name__} import examine; examine()", json.dumps(values)])
    with AgentPool(hosts, python) as agent_pool:
        greetings = agent_pool.greet(_GREET_S)
        asked = {}
        for n, greeting in greetings.items():
            if greeting.value is None:
                problems.append(_unreached(hosts[n].name, greeting.problem, python))
                continue
            ours = {"Seatrial": seatrial.__version__, "Python": _minor(platform.python_version())}
            theirs = {"Seatrial": greeting.value.version, "Python": _minor(greeting.value.python)}
            for what in (w for w in ours if ours[w] != theirs[w]):
                text = f"has {what} {theirs[what]}, but this host has {ours[what]}"
                problems.append(
                    (hosts[n].name, text, f"install {what} {ours[what]} there, or set cluster.python")
                )
            if ours == theirs:
                asked[n, 0] = order
        for (n, _), reply in agent_pool.ask(asked, limit_s=_PROBE_S).items():
            name, value = hosts[n].name, reply.value
            if value is None or value.rc != 0:
                reason = reply.problem if value is None else value.err.strip()[-300:]
                problems.append(
                    (
                        name,
                        f"could not be examined: {reason}",
                        f"run `seatrial check --nodes {name}`",
                    )
                )
                continue
            facts[name] = found = json.loads(value.out)
            problems += [(name, text, hint) for text, hint in found["problems"]]


def _unreached(host: str, words: str, python: str) -> tuple[str, str, str]:
    for sign, meaning, hint in _CAUSES:
        if sign in words:
            return host, f"{meaning.format(python=python)} ({words})", hint.replace("HOST", host)
    return host, words, f"see the output of `ssh -oBatchMode=yes {host} true`"


def _compared(facts: dict[str, dict[str, Any]], torch: str | None) -> Iterator[tuple[str, str, str]]:
    """Differences of a host from this one, or from the first."""
    first = next(iter(facts), "")
    for host, found in facts.items():
        wanted, whose = (torch, "this host") if torch is not None else (facts[first]["torch"], first)
        if found["torch"] != wanted and found["torch"] is not None:
            yield host, f"has torch {found['torch']}, but {whose} {wanted}", f"install torch {wanted} there"
        if found["device"] != facts[first]["device"] and None not in (
            found["device"],
            facts[first]["device"],
        ):
            yield (
                host,
                f"would compute on {found['device']} ({found['reason']}), but {first} on {facts[first]['device']}",
                "name hosts of one kind, or set cluster.device",
            )
        known = None not in (found["address"], facts[first]["address"])
        if known and _loops(found["address"]) != _loops(facts[first]["address"]):
            at = f"{host} is {found['address']}, {first} is {facts[first]['address']}"
            yield host, f"the hosts do not reach each other: {at}", "name hosts by addresses of their network"


def _loops(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _torch() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def examine() -> None:
    """Run on the host itself: print what `_compared` compares, and [problem, what to do] of this host alone."""
    given = json.loads(sys.argv[1])
    problems: list[tuple[str, str]] = []
    device = reason = address = None
    cluster = ClusterSection(**given["cluster"])
    try:
        address = ssh_route(cluster, os.environ).address
        device, reason = choose_device(cluster)
    except InputError as error:
        problems.append((error.message, error.diagnostics[0].hint or ""))
    if _torch() is None:
        problems.append((f"{sys.executable} has no torch", "install it there, or set cluster.python"))
    if given["run"] is not None:
        try:
            check_token(RunFolder(Path(given["run"][0])), given["run"][1], wait_s=_SEEN_S)
        except InputError as error:
            problems.append((error.message, error.diagnostics[0].hint or ""))
    found = {"device": device, "reason": reason, "torch": _torch(), "address": address}
    print(json.dumps({**found, "problems": problems}))
