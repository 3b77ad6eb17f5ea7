"""The hosts of a check: what they are called, where they listen, and how a command is started on them."""

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
from seatrial.check.blame.topology import hostlist

if TYPE_CHECKING:
    from seatrial.job import Job

LOOPBACK = "127.0.0.1"
# BatchMode: never ask for a password. ServerAlive: a host that dies takes its connection along, within 15 s.
SSH = ("ssh", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3")
# A step beside others in the same allocation, of one task on one node, unbuffered, not held to one core.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--unbuffered", "--quiet")

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_KEYS = ("slots", "max_slots", "max-slots")  # Open MPI; how many ranks there may be is the job file's matter


@dataclass(frozen=True)
class Host:
    """One node to check. `prefix` and a command start the command on it: () here, ("ssh", ..., "node7") there.

    `address` is what the other hosts reach it at (a name or an IP address). `interface` is the network device that gloo and
    NCCL must use, None for the one that leads to the others. `environment` is set for everything that is started there.
    """

    name: str
    address: str
    prefix: tuple[str, ...] = ()
    interface: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, *words: str, environment: Mapping[str, str] | None = None) -> list[str]:
        """What to execute here so that `words` are executed there, with `environment` beside the host's own."""
        variables = {**self.environment, **(environment or {})}
        there = [*(["env", *(f"{k}={v}" for k, v in variables.items())] if variables else []), *words]
        if self.prefix and os.path.basename(self.prefix[0]) == "ssh":
            # What follows the host's name goes through a shell there.
            return [*self.prefix, shlex.join(there)]
        return [*self.prefix, *there]


def hosts_of(
    job: Job | None = None,
    *,
    hostfile: Path | None = None,
    nodes: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Host]:
    """The hosts to check: those of `hostfile`, else of `nodes` ("node[01-16]"), else of `job`, else of the Slurm job that
    this process is in, else this one alone.

    `environment` is os.environ, or what stands for it. Hosts that are named are started on by ssh, in a Slurm job by srun.
    A job whose launcher is local is checked as its virtual cluster: hosts on the loopback address that share this machine.
    Raises InputError with every problem at once.
    """
    variables = os.environ if environment is None else environment
    if hostfile is not None:
        return remote(read_hostfile(hostfile), variables)
    if nodes is not None:
        return remote(_listed(nodes, "--nodes"), variables)
    if job is not None and job.cluster.launcher == "local":
        count = job.cluster.nodes + job.cluster.spares
        return [Host(f"node{n}", LOOPBACK) for n in range(count)]
    allocated = variables.get("SLURM_JOB_NODELIST")
    if allocated:
        return remote(_listed(allocated, "SLURM_JOB_NODELIST"), variables)
    if job is not None:
        raise InputError(
            f"cluster.launcher is {job.cluster.launcher!r}, and nothing says which hosts that are",
            hint="name them with --hostfile or --nodes, or run it in a Slurm allocation (salloc)",
        )
    return [Host(_own_name(), LOOPBACK)]


def remote(names: Iterable[str], environment: Mapping[str, str]) -> list[Host]:
    """Hosts by their names: by srun in a Slurm job that has them, else by ssh; this machine's own name needs neither."""
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
        # To the others this machine's loopback address would be themselves.
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
            yield f"{name[:60]!r} is no name of a host"
        elif name.casefold() in seen:
            yield f"{name} is named twice"
        seen.add(name.casefold())


# -- hostfiles


def read_hostfile(path: Path) -> list[str]:
    """The hosts of a file: one a line, with Open MPI's "slots=8" or MPICH's ":8" or without, or Slurm's "node[01-16]".

    "#" begins a comment. Raises InputError with each problem and its place: a name that no host can have, one that stands
    there twice, an unknown key, an empty file.
    """
    try:
        text = read_named(path).decode("utf-8-sig")
    except OSError as error:
        raise InputError(Diagnostic(f"cannot read the hostfile: {error.strerror}", file=str(path))) from error
    except UnicodeDecodeError as error:
        problem = Diagnostic("no hostfile: it is not text", file=str(path))
        raise InputError(problem) from error
    reader = _Hostfile(str(path))
    for number, line in enumerate(text.splitlines(), 1):
        reader.take(number, line)
    if not reader.first and not reader.problems:
        reader.problems.append(Diagnostic("no host in it", file=str(path), hint="one host a line"))
    if reader.problems:
        raise InputError(reader.problems)
    return [name for name, _ in reader.first.values()]


class _Hostfile:
    def __init__(self, file: str) -> None:
        self.file = file
        self.first: dict[str, tuple[str, int]] = {}  # by the name in small letters: the name, and its line
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
            self._problem(f"{word[0][:60]!r} is no host", word, number, line, hint)
            return
        try:
            names = hostlist(expression)
        except ValueError as error:
            self._problem(str(error), word, number, line, "as Slurm writes it: node[01-16]")
            return
        for name in names or [expression]:
            if not _NAME.fullmatch(name):
                hint = "letters, digits, dots and hyphens; users belong into ssh's own configuration"
                self._problem(f"{name[:60]!r} is no name of a host", word, number, line, hint)
            elif name.casefold() in self.first:
                before = self.first[name.casefold()][1]
                hint = "name every host once"
                self._problem(f"{name} stands in line {before} already", word, number, line, hint)
            else:
                self.first[name.casefold()] = (name, number)

    def _setting(self, word: re.Match[str], number: int, line: str) -> None:
        key, equals, value = word[0].partition("=")
        if key not in _KEYS or not equals:
            hint = f"known are {', '.join(_KEYS[:2])}; one host a line"
            self._problem(f"{word[0][:60]!r} is not understood", word, number, line, hint)
        elif not (value.isdecimal() and value.isascii() and int(value)):
            self._problem(f"{key} must be a whole number from 1 on", word, number, line, "as in slots=8")

    def _problem(self, text: str, word: re.Match[str], number: int, line: str, hint: str) -> None:
        place = (self.file, number, word.start() + 1, len(word[0]), line)
        self.problems.append(Diagnostic(text, *place, hint=hint))
