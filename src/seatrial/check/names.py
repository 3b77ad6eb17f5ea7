"""Names of hosts: which names can be one and which cannot (dates, numbers, programs), and Slurm's lists of them."""

from __future__ import annotations

import re
from functools import lru_cache

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]*::?[0-9A-Fa-f:]+")
_ADDRESS = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}|[0-9A-Fa-f]*(?::[0-9A-Fa-f]*){2,7}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}(?:-[0-9]{2}.*)?|[0-9]{8}T[0-9]{4,6}.*")
# Syslog facilities, prefixes of kernel and driver messages, shells and tools that print their own name.
_OTHERS = frozenset(
    """
    kernel kern emerg alert crit user mail daemon auth authpriv syslog lpr news uucp cron ftp local0 local1 local2 local3 local4 local5 local6 local7
    localhost localdomain unknown nvrm audit systemd ipv6 acpi pci usb mce edac rcu nfs xfs btrfs info warning warn error err debug notice fatal
    note bash sh dash zsh ksh timeout sudo env nohup srun sbatch slurmstepd exec ssh pdsh clush mpirun prterun prte orterun orted
    xargs grep cat nvidia-smi dcgmi ibstat ibstatus ibwarn ibpanic iberror ibv_devinfo mlxlink ib_write_bw ib_read_bw ib_send_bw
    dmesg journalctl python python3 docker kubectl
    """.split()  # noqa: SIM905
)
_LONGEST_LIST = 100_000  # hosts in one expression


@lru_cache(1 << 14)
def is_host(name: str) -> bool:
    """Whether this can be a host name or address; not a date, a bare number, a facility or a program name."""
    if _ADDRESS.fullmatch(name):
        return True
    return (
        _NAME.fullmatch(name) is not None
        and any(c.isalpha() for c in name)
        and not _DATE.fullmatch(name)
        and not all(part in _OTHERS for part in name.lower().split("."))
    )


def same_host(one: str, other: str) -> bool:
    """Whether two names mean one host: equal, or with and without the domain."""
    one, other = one.lower(), other.lower()
    return one == other or (
        one.partition(".")[0] == other.partition(".")[0] and not ("." in one and "." in other)
    )


def hostlist(expression: str) -> list[str]:
    """Expand Slurm's host expression: "a[01-03,7],b" is a01 a02 a03 a7 b. Raises ValueError."""
    hosts: list[str] = []
    if set("[]") & set(re.sub(r"\[[^\[\]]*\]", "", expression)):
        raise ValueError(f"{expression[:60]!r} is not a list of hosts: its brackets do not match")
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", expression):
        names = [""]
        for text, inside in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            endings = [text] if text else _range(inside, expression)
            if len(names) * len(endings) + len(hosts) > _LONGEST_LIST:
                raise ValueError(f"{expression[:60]!r} stands for more than {_LONGEST_LIST} hosts")
            names = [name + ending for name in names for ending in endings]
        if any(c.isspace() for name in names for c in name):
            raise ValueError(f"{expression[:60]!r} is not a list of hosts")
        hosts += names
    return hosts


def _range(text: str, expression: str) -> list[str]:
    found = []
    for item in text.split(","):
        bounds = re.fullmatch(r"(?P<low>\d+)(?:-(?P<high>\d+))?", item.strip())
        low, high = (int(bounds["low"]), int(bounds["high"] or bounds["low"])) if bounds else (1, 0)
        if bounds is None or low > high or high - low >= _LONGEST_LIST:
            raise ValueError(f"{item!r} in {expression[:60]!r} is not a range")
        found += [str(n).zfill(len(bounds["low"])) for n in range(low, high + 1)]
    return found
