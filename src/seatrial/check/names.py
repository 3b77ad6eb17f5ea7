"""Which names can be a host's, and which cannot: dates, numbers, syslog facilities, programs."""

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
