"""What can be the name of a node, and what stands in such a place and is none: dates, numbers, facilities, programs."""

from __future__ import annotations

import re
from functools import lru_cache

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]*::?[0-9A-Fa-f:]+")
_ADDRESS = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}|[0-9A-Fa-f]*(?::[0-9A-Fa-f]*){2,7}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}(?:-[0-9]{2}.*)?|[0-9]{8}T[0-9]{4,6}.*")
# Facilities of syslog, what kernel and drivers begin their lines with, shells and tools that name themselves.
_OTHERS = frozenset(
    """
    kernel kern emerg alert crit user mail daemon auth authpriv syslog lpr news uucp cron ftp local0 local1 local2 local3 local4 local5 local6 local7
    localhost localdomain unknown nvrm audit systemd ipv6 acpi pci usb mce edac rcu nfs xfs btrfs info warning warn error err debug notice fatal
    note bash sh dash zsh ksh timeout sudo env nohup srun sbatch slurmstepd exec ssh pdsh clush mpirun prterun prte orterun orted
    xargs grep cat nvidia-smi dcgmi ibstat ibstatus ibwarn ibpanic iberror ibv_devinfo mlxlink ib_write_bw ib_read_bw ib_send_bw
    dmesg journalctl python python3 docker kubectl
    """.split()  # noqa: SIM905
)


@lru_cache(1 << 14)
def is_host(name: str) -> bool:
    """Whether this can be a host's name or address. A date, a bare number, a facility or a program's name is none."""
    if _ADDRESS.fullmatch(name):
        return True
    return (
        _NAME.fullmatch(name) is not None
        and any(c.isalpha() for c in name)
        and not _DATE.fullmatch(name)
        and not all(part in _OTHERS for part in name.lower().split("."))
    )


def same_host(one: str, other: str) -> bool:
    """Whether two names are of one host: equal, or one with its domain and one without."""
    one, other = one.lower(), other.lower()
    return one == other or (
        one.partition(".")[0] == other.partition(".")[0] and not ("." in one and "." in other)
    )
