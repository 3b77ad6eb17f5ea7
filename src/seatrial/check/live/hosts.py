"""The hosts of a check: their names, their addresses, and how to start a command on them."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import read_named
from seatrial.check.names import hostlist
from seatrial.job.finding import RuleViolation
from seatrial.job.schema_launchers import SshSection

if TYPE_CHECKING:
    from seatrial.job import Job

LOOPBACK = "127.0.0.1"
# BatchMode: never ask for a password. ServerAlive: the connection to a dead host closes within 15 s. ControlMaster: use
# a connection that the user keeps open, but open none for others to share, who would lose it when we exit. Forwardings
# and a command in the user's configuration are meant for the user's own sessions.
_SSH_OPTIONS = (
    *("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3"),
    *("ControlMaster=no", "ClearAllForwardings=yes", "RemoteCommand=none", "RequestTTY=no"),
)
SSH = ("ssh", *(f"-o{option}" for option in _SSH_OPTIONS))
# A step that overlaps others in the same allocation: one task on one node, unbuffered, not bound to one core.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--unbuffered", "--quiet")

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_KEYS = ("slots", "max_slots", "max-slots")  # of Open MPI; the job file sets the number of ranks


@dataclass(frozen=True)
class Host:
    """One node to check. `prefix` plus a command starts the command on it: () here, ("ssh", ..., "node7") elsewhere.

    `address` is where other hosts reach it (a name or an IP address). `interface` is the network device that gloo and
    NCCL must use, None for the one that leads to the others. `environment` is set for everything started there.
    """

    name: str
    address: str
    prefix: tuple[str, ...] = ()
    interface: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, *words: str, environment: Mapping[str, str] | None = None) -> list[str]:
        """The command to execute here so that the host executes `words`, with `environment` added to the host's own."""
        variables = {**self.environment, **(environment or {})}
        there = [*(["env", *(f"{k}={v}" for k, v in variables.items())] if variables else []), *words]
        if self.prefix and os.path.basename(self.prefix[0]) == "ssh":
            # A shell on the host interprets what follows the host's name.
            return [*self.prefix, f"exec {shlex.join(there)}"]
        return [*self.prefix, *there]


def hosts_of(
    job: Job | None = None,
    *,
    hostfile: Path | None = None,
    nodes: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Host]:
    """The hosts to check, by the first source given: `hostfile`, `nodes` ("node[01-16]"), `job`, the current Slurm job.

    Otherwise only this host. `environment` defaults to os.environ. Named hosts are reached by ssh, in a Slurm job by
    srun. A job with the local launcher is checked as its virtual cluster: hosts on the loopback address that share this
    machine. Raises InputError with every problem at once.
    """
    variables = os.environ if environment is None else environment
    if hostfile is not None:
        return remote(read_hostfile(hostfile), variables)
    if nodes is not None:
        return remote(_listed(nodes, "--nodes"), variables)
    if job is not None and job.cluster.launcher == "local":
        count = job.cluster.nodes + job.cluster.spares
        return [Host(f"node{n}", LOOPBACK) for n in range(count)]
    if job is not None and job.cluster.launcher == "ssh" and job.file.ssh is not None:
        return ssh_hosts(job)
    allocated = variables.get("SLURM_JOB_NODELIST")
    if allocated:
        return remote(_listed(allocated, "SLURM_JOB_NODELIST"), variables)
    if job is not None:
        raise InputError(
            f"cluster.launcher is {job.cluster.launcher!r}, so the hosts are unknown",
            hint="give them with --hostfile or --nodes, or run it in a Slurm allocation (salloc)",
        )
    return [Host(_own_name(), LOOPBACK)]


def ssh_hosts(job: Job) -> list[Host]:
    """The hosts of the job's [ssh], all by ssh. Raises InputError with every problem: invalid names, or too few."""
    section = job.file.ssh or SshSection()
    if section.hostfile is not None and section.hosts:
        raise job.refusal("ssh.hostfile", "[ssh] has both `hosts` and `hostfile`", "keep one of them")
    names = section.hosts if section.hostfile is None else read_hostfile(Path(section.hostfile))
    key = "ssh.hosts" if section.hostfile is None else "ssh.hostfile"
    need = job.cluster.nodes + job.cluster.spares
    problems = list(_problems(names))
    if len(names) < need:
        problems.append(f"{len(names)} hosts, but nodes + spares = {need} are needed")
    if problems:
        hint = "use host names as for `ssh NAME`; set users and ports in ssh's own configuration"
        raise InputError([job.located(RuleViolation((key,), problem, hint)) for problem in problems])
    config = () if section.config is None else ("-F", section.config)
    return [Host(name, name, (*SSH, *config, name)) for name in names]


def remote(names: Iterable[str], environment: Mapping[str, str]) -> list[Host]:
    """Hosts by name: by srun in a Slurm job that contains them, else by ssh; this machine itself needs neither."""
    allocated = set(_listed(environment.get("SLURM_JOB_NODELIST", ""), "SLURM_JOB_NODELIST"))
    own = {_own_name(), _own_name().partition(".")[0], "localhost"}
    hosts = []
    for name in names:
        prefix: tuple[str, ...]
        if name in allocated:
            prefix = (*SRUN, f"--nodelist={name}")
        else:
            prefix = () if name in own else (*SSH, name)
        hosts.append(Host(name, name, prefix))
    if len(hosts) > 1:
        # To the other hosts, the loopback address would mean themselves.
        return [replace(h, address=_own_name()) if h.name == "localhost" else h for h in hosts]
    return hosts


def _own_name() -> str:
    return socket.gethostname()


def _listed(expression: str, source: str) -> list[str]:
    if not expression:
        return []
    try:
        names = hostlist(expression)
    except ValueError as error:
        raise InputError(
            Diagnostic(f"{source}: {error}", hint="as Slurm writes it: node[01-16],login")
        ) from None
    problems = [Diagnostic(f"{source}: {p}") for p in _problems(names)]
    if problems or not names:
        raise InputError(problems or Diagnostic(f"{source}: no host in {expression[:60]!r}"))
    return names


def _problems(names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if not _NAME.fullmatch(name):
            yield f"{name[:60]!r} is not a host name"
        elif name.casefold() in seen:
            yield f"{name} is listed twice"
        seen.add(name.casefold())


# -- hostfiles


def read_hostfile(path: Path) -> list[str]:
    """The hosts of a file: one per line, optionally with Open MPI's "slots=8" or MPICH's ":8", or as "node[01-16]".

    "#" begins a comment; brackets are Slurm's. Raises InputError with each problem and its place: a name that no host
    can have, a duplicate, an unknown key, an empty file.
    """
    try:
        text = read_named(path).decode("utf-8-sig")
    except OSError as error:
        raise InputError(Diagnostic(f"cannot read the hostfile: {error.strerror}", file=str(path))) from error
    except UnicodeDecodeError as error:
        problem = Diagnostic("not a hostfile: it is not text", file=str(path))
        raise InputError(problem) from error
    reader = _Hostfile(str(path))
    for number, line in enumerate(text.splitlines(), 1):
        reader.take(number, line)
    if not reader.first and not reader.problems:
        reader.problems.append(Diagnostic("it contains no host", file=str(path), hint="one host per line"))
    if reader.problems:
        raise InputError(reader.problems)
    return [name for name, _ in reader.first.values()]


class _Hostfile:
    def __init__(self, file: str) -> None:
        self.file = file
        self.first: dict[str, tuple[str, int]] = {}  # by the case-folded name: the name, and its line
        self.problems: list[Diagnostic] = []

    def take(self, number: int, line: str) -> None:
        words = list(re.finditer(r"(?:\[[^\]]*\]|\S)+", line.partition("#")[0]))
        for word in words[1:]:
            self._setting(word, number, line)
        if words:
            self._host(words[0], number, line)

    def _host(self, word: re.Match[str], number: int, line: str) -> None:
        expression, colon, ranks = word[0].partition(":")
        if colon and not (ranks.isdecimal() and int(ranks)):
            hint = "NAME or NAME:RANKS; an IPv6 address needs a name (/etc/hosts)"
            self._problem(f"{word[0][:60]!r} is not a host", word, number, line, hint)
            return
        try:
            names = hostlist(expression)
        except ValueError as error:
            self._problem(str(error), word, number, line, "as Slurm writes it: node[01-16]")
            return
        for name in names or [expression]:
            if not _NAME.fullmatch(name):
                hint = "letters, digits, dots and hyphens; set users in ssh's own configuration"
                self._problem(f"{name[:60]!r} is not a host name", word, number, line, hint)
            elif name.casefold() in self.first:
                before = self.first[name.casefold()][1]
                hint = "list every host once"
                self._problem(f"{name} is already in line {before}", word, number, line, hint)
            else:
                self.first[name.casefold()] = (name, number)

    def _setting(self, word: re.Match[str], number: int, line: str) -> None:
        key, equals, value = word[0].partition("=")
        if key not in _KEYS or not equals:
            hint = f"known: {', '.join(_KEYS[:2])}; one host per line"
            self._problem(f"unknown option {word[0][:60]!r}", word, number, line, hint)
        elif not (value.isdecimal() and value.isascii() and int(value)):
            self._problem(f"{key} must be an integer of at least 1", word, number, line, "as in slots=8")

    def _problem(self, text: str, word: re.Match[str], number: int, line: str, hint: str) -> None:
        place = (self.file, number, word.start() + 1, len(word[0]), line)
        self.problems.append(Diagnostic(text, *place, hint=hint))
