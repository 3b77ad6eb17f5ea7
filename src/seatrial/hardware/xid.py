"""Messages of NVIDIA's GPU driver (Xid) and NVSwitch driver (SXid): the catalogue of codes, and a log-line parser."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Severity = Literal["fatal", "nonfatal"]
Recovery = Literal["none", "reset", "reboot", "drain_p2p"]

NVLINK5_CODES = range(144, 151)
_LONGEST_MESSAGE = 500  # characters kept of the driver's message


@dataclass(frozen=True)
class Xid:
    """One code of NVIDIA's catalogue. xid.toml describes the fields."""

    code: int
    name: str
    meaning: str
    cls: str
    source: str
    bucket: str | None = None
    then: str | None = None
    gpud: str | None = None


@dataclass(frozen=True)
class XidMessage:
    """The content of one log line.

    `pci` is "domain:bus:device" in lower-case hexadecimal digits ("0000:3b:00"). `time` is the line's timestamp as
    written: its format varies, and plain seconds count from boot. `registers` are the hexadecimal words of an NVLink
    message.
    """

    kind: Literal["xid", "sxid"]
    code: int
    pci: str
    message: str
    time: str | None = None
    pid: int | None = None
    name: str | None = None  # of the process
    unit: str | None = None
    severity: Severity | None = None
    link: int | None = None
    registers: tuple[int, ...] = ()

    @property
    def subcode(self) -> int | None:
        """NVLink 5: bits 20 to 25 of the first register; None without registers."""
        return (self.registers[0] >> 20) & 0x3F if self.registers else None

    @property
    def benign(self) -> bool:
        """NVLink 5: whether NVIDIA's table says to ignore it although the message says Fatal."""
        units = (self.unit or "").split("/")
        return any(self.subcode in _nvlink5()["benign_subcodes"].get(unit, ()) for unit in units)

    @property
    def cause(self) -> int | None:
        """The code of the Xid that caused this one ("caused by previous Xid 149"); None if it names none."""
        found = _CAUSE.search(self.message)
        return None if found is None else int(found["code"])

    @property
    def recovery(self) -> Recovery | None:
        """Xid 154: the recovery that the driver now recommends; None if the message states none that we know."""
        found = _RECOVERY.search(self.message) if self.code == 154 else None
        if found is None:
            return None
        # The labels differ between drivers ("Node Reboot Required", "OS Reboot", "PF FLR"), and the same number has
        # had different ones: the label takes precedence, the number is used if the label is unknown.
        label = found["label"].lower()
        for part, meaning in _RECOVERY_LABELS:
            if part in label:
                return meaning
        return _RECOVERY_NUMBERS.get(int(found["number"], 16))


@cache
def catalogue() -> dict[int, Xid]:
    """Every known code, from xid.toml."""
    table = _table()
    return {
        int(code): Xid(int(code), cls=fields.pop("class"), source=table["source"], **fields)
        for code, fields in ((code, dict(fields)) for code, fields in table["xid"].items())
    }


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("seatrial.hardware").joinpath("xid.toml").read_text(encoding="utf-8"))


def _nvlink5() -> dict[str, Any]:
    table: dict[str, Any] = _table()["nvlink5"]
    return table


_PCI = r"(?:PCI:)?(?P<pci>(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-9a-f])?)"
_FLAGS = re.IGNORECASE | re.ASCII
_XID = re.compile(rf"\bNVRM: Xid \({_PCI}\): (?P<code>[0-9]{{1,6}})(?![0-9])(?P<rest>.*)", _FLAGS)
_SXID = re.compile(
    rf"\bnvidia-nvswitch[0-9]*: SXid \({_PCI}\): (?P<code>[0-9]{{1,6}})(?![0-9])(?P<rest>.*)", _FLAGS
)
# The same fault as Xid 79, in lines that carry no code.
_FALLEN = re.compile(rf"\bNVRM: GPU (?:at )?{_PCI}: (?P<rest>(?:GPU )?has fallen off the bus.*)", _FLAGS)
_PID = re.compile(r"\s*pid=(?:(?P<pid>[0-9]{1,10})|'?<unknown>'?)(?:,|$)", _FLAGS)
_NAME = re.compile(r"\s*name=(?:<unknown>|(?P<name>[^,]*))(?:,|$)", _FLAGS)
_NVLINK5 = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9]*(?:[_/][A-Z0-9]+)*)\s+(?P<severity>(?:Link )?Fatal|Non-?fatal)\b", re.ASCII
)
_LINK = re.compile(r"\blink\s+(?P<link>-?[0-9]{1,3})(?![0-9])", _FLAGS)
_REGISTERS = re.compile(r"\((?P<words>0x[0-9a-f]{1,8}(?:[,\s]+0x[0-9a-f]{1,8})*)\)", _FLAGS)
_RECOVERY = re.compile(
    r"changed from\s+\S+\s+\([^)]*\)\s+to\s+(?P<number>0x[0-9a-f]{1,4})\s+\((?P<label>[^)]*)\)", _FLAGS
)
# NVIDIA/open-gpu-kernel-modules, src/nvidia: a channel is removed because of an earlier error (Xid 45).
_CAUSE = re.compile(r"\bcaused by previous Xid (?P<code>[0-9]{1,6})(?![0-9])", _FLAGS)
_RECOVERY_LABELS: tuple[tuple[str, Recovery], ...] = (
    ("reboot", "reboot"),
    ("reset", "reset"),
    ("flr", "reset"),  # function level reset
    ("p2p", "drain_p2p"),
    ("none", "none"),
)
# nvmlDeviceGpuRecoveryAction_t
_RECOVERY_NUMBERS: dict[int, Recovery] = {0: "none", 1: "reset", 2: "reboot", 3: "drain_p2p", 4: "reset"}

_TIMES = (
    re.compile(r"^[0-9]{1,3},[0-9]+,(?P<us>[0-9]+),[^;]*;"),  # /dev/kmsg: microseconds since boot
    re.compile(r"(?P<time>[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(?:[.,][0-9]+)?(?:Z|[+-][0-9:]{4,5})?)"),
    re.compile(r"\[(?P<time>[A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} [0-9]{4})\]"),
    re.compile(r"^(?P<time>[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8})\b"),
    re.compile(r"\[ *(?P<time>[0-9]+\.[0-9]{3,9})\]"),
)


def parse(line: str) -> XidMessage | None:
    """Parse the driver's message in one line of a kernel log; None if there is none.

    Reads what dmesg, journald, syslog and /dev/kmsg print, whatever timestamp and host precede the message.
    """
    found = _XID.search(line)
    if found is not None:
        return _xid(line, found)
    found = _SXID.search(line)
    if found is not None:
        return _sxid(line, found)
    found = _FALLEN.search(line)
    if found is not None:
        return XidMessage("xid", 79, _address(found["pci"]), _clean(found["rest"]), _time(line, found))
    return None


def _xid(line: str, found: re.Match[str]) -> XidMessage:
    code, rest = int(found["code"]), found["rest"].removeprefix(",")
    pid = name = unit = severity = None
    if process := _PID.match(rest):
        pid, rest = process["pid"], rest[process.end() :]
    if process := _NAME.match(rest):
        name, rest = process["name"], rest[process.end() :]
    link: int | None = None
    registers: tuple[int, ...] = ()
    if code == 74 or code in NVLINK5_CODES:
        link, registers = _link(rest), _registers(rest)
    if code in NVLINK5_CODES and (where := _NVLINK5.search(rest)):
        unit, severity = where["unit"], _severity(where["severity"])
    return XidMessage(
        "xid",
        code,
        _address(found["pci"]),
        _clean(rest),
        _time(line, found),
        None if pid is None else int(pid),
        None if name is None else _clean(name) or None,
        unit,
        severity,
        link,
        registers,
    )


def _sxid(line: str, found: re.Match[str]) -> XidMessage:
    rest = found["rest"].removeprefix(",").lstrip()
    first, _, _ = rest.partition(",")
    severity = _severity(first) if first.lower() in ("fatal", "non-fatal", "nonfatal") else None
    return XidMessage(
        "sxid",
        int(found["code"]),
        _address(found["pci"]),
        _clean(rest),
        _time(line, found),
        severity=severity,
        link=_link(rest),
    )


def _severity(text: str) -> Severity:
    return "nonfatal" if text.lower().startswith("non") else "fatal"


def _link(text: str) -> int | None:
    found = _LINK.search(text)
    link = int(found["link"]) if found else -1
    return link if link >= 0 else None  # the driver writes -1 if it is not a single link


def _registers(text: str) -> tuple[int, ...]:
    found = _REGISTERS.search(text)
    return tuple(int(word, 16) for word in re.split(r"[,\s]+", found["words"])) if found else ()


def address(text: str) -> str | None:
    """A PCI address in the form of `XidMessage.pci`, from any form that the tools print; None for anything else."""
    found = re.fullmatch(_PCI, text.strip(), _FLAGS)
    return _address(found["pci"]) if found else None


def _address(pci: str) -> str:
    *domain, bus, device = pci.lower().split(":")
    number = int(domain[0], 16) if domain else 0
    return f"{number:04x}:{bus}:{device[:2]}"


def _time(line: str, found: re.Match[str]) -> str | None:
    before = line[: found.start()]
    for pattern in _TIMES:
        if match := pattern.search(before):
            fields = match.groupdict()
            return f"{int(fields['us']) / 1e6:.6f}" if "us" in fields else fields["time"]
    return None


def _clean(text: str) -> str:
    """One line without control characters, of bounded length."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:_LONGEST_MESSAGE]).split())
