"""Kernel logs given as text (dmesg, journal, syslog, /dev/kmsg): driver messages and other lines about hardware."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seatrial.check.judging.findings import ORDER, Expected, Finding, Target, Verdict
from seatrial.check.names import is_host, same_host
from seatrial.check.outputs.kernel_links import LinkWatch, link_event
from seatrial.check.outputs.kernel_rules import (
    accessed_disk,
    device_of,
    have_words,
    is_no_disk,
    pci_of,
    removable_disk,
    rule_of,
)
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool, evidence, lines_of, quoted
from seatrial.check.ranges import listed
from seatrial.hardware.xid import NVLINK5_CODES, XidMessage, address, catalogue
from seatrial.hardware.xid import parse as parse_xid

# NVIDIA's buckets (hardware/xid.toml) for which the hardware must be serviced before a job may run.
_HARDWARE = (
    "RESET_GPU",
    "RESTART_BM",
    "RESTART_VM",
    "CHECK_MECHANICALS",
    "WORKFLOW_XID_48",
    "WORKFLOW_NVLINK_ERR",
)
# Xid 63 and 92 are just recorded, a reset can wait (operators' reports); 94 lost memory, its row is in use until a reset.
# 167 and 169 have no bucket; control/machine/policy.toml evicts the node for them, as leptonai/gpud reboots it.
_FAIL_CODES = frozenset({48, 64, 94, 95, 140, 167, 169})
_WATCHED_CODES = frozenset({63, 92})
_SAME = 8  # program names that a message lists
_QUOTED = 160  # characters

# Syslog (RFC 3164 and 5424) and the journal, month names in any language: time, host, program.
_SYSLOG = (
    r"(?:<[0-9]{1,3}>(?P<new>1 )?)?(?:\S{2,6} [ 0-9][0-9] [0-9:]{8}(?:\.[0-9]+)?"
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:]{8}(?:\.[0-9]+)?(?:Z|[+-][0-9:]{4,5})?"  # rsyslog, journal -o short-iso
    r"|\S{2,6} [0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}\S* \S+"  # journal -o short-full
    r"|[0-9]{9,11}\.[0-9]{6})"  # journal -o short-unix
    r" (?P<host>\S+) (?(new)\S+ \S+ \S+ (?:-|(?:\[[^\]]*\])+) |[^\s:]+(?:\[[0-9]+\])?: )"
)
LINE = re.compile(
    r"^(?:"
    r"(?:<[0-9]{1,3}>)?\[ *[0-9]+\.[0-9]{2,9}(?: < *[0-9.]+>)?\]"  # dmesg, with its level in -r, with deltas in -d
    r"|\[\S{1,6} +\S{1,6} +[0-9]{1,2} [0-9:]{8} [0-9]{4}\] "  # dmesg -T, in any language
    r"|\[[A-Z][a-z]{2} ?[0-9]{1,2} [0-9]{2}:[0-9]{2}\] |\[ +\+[0-9]+\.[0-9]{6}\] "  # dmesg -H
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8},[0-9]{3,9}[+-][0-9:]{4,5} "  # dmesg --time-format=iso
    r"|[0-9]{1,3},[0-9]+,[0-9]+,[^;\s]*;"  # /dev/kmsg
    r"|(?:kern|user|daemon|syslog) *:[a-z]+ *: "  # dmesg -x
    rf"|{_SYSLOG}|(?:kernel: )?NVRM: )"
)
# Long numbers only: not a code of a few digits, nor a part of an address or a name.
_NUMBERS = re.compile(r"(?<![\w.:(-])(?:0x)?[0-9a-fA-F]{4,}(?![\w.:)-])")
# Separators of the journal between boots, and detail lines of /dev/kmsg.
_BESIDE = re.compile(r"-- (?:Boot|Reboot|Logs begin|Journal begins|No entries|Hint:).*| [A-Z][A-Z_]*=\S.*")
_LOOKS = re.compile(r"\bS?Xid", re.IGNORECASE)
# The patterns of other lines about hardware are in kernel_rules.py.
_PCIE = re.compile(
    r"\b(?P<driver>[A-Za-z0-9_-]{1,40}) (?P<pci>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]): (?P<have>[0-9]{1,6}\.[0-9]{1,6}) Gb/s available PCIe bandwidth, "
    r"limited by (?P<link>.{3,60}?) link at \S{1,40} \(capable of (?P<can>[0-9]{1,6}\.[0-9]{1,6}) Gb/s"
)


@dataclass(frozen=True)
class Message:
    """A driver message and its line. `host`: the host named in the log."""

    line: int
    xid: XidMessage
    host: str | None = None
    times: int = 1


@dataclass(frozen=True)
class Other:
    """Another line about hardware: its meaning, the message, and its subject."""

    line: int
    code: str
    verdict: Verdict
    what: str
    quote: str = ""
    device: str | None = None
    pci: str | None = None
    measured: float | None = None
    expected: float | None = None
    port: str | None = None
    host: str | None = None
    times: int = 1


@dataclass(frozen=True)
class KernelText:
    """The relevant content of a log. `hosts`: the hosts named in its lines."""

    file: str
    lines: int
    messages: tuple[Message, ...]
    others: tuple[Other, ...]
    hosts: tuple[str, ...] = ()


def matches(text: str) -> bool:
    """Whether most of the first lines are kernel log lines, or any is a driver message."""
    lines = [x for x in lines_of(text[:50_000]) if x.strip()][:200]
    if not lines:
        return False
    if any(parse_xid(x) is not None for x in lines):
        return True
    return sum(LINE.match(x) is not None for x in lines) * 2 > len(lines)


def is_relevant(line: str) -> bool:
    """Whether parse() would use this line; the others can be dropped from a log that is too long to pass on."""
    return (
        parse_xid(line) is not None
        or _LOOKS.search(line) is not None
        or "PCIe bandwidth, limited by" in line
        or rule_of(line) is not None
        or link_event(line) is not None
        or removable_disk(line) is not None
        or accessed_disk(line) is not None
    )


def quiet_of(lines: Sequence[str]) -> list[bool]:
    """For each line, whether it is a log line that parse() ignores; the result does not depend on digits."""
    return [
        LINE.match(line) is not None and not has_words
        for line, has_words in zip(lines, have_words(lines), strict=True)
    ]


def repetition_key(line: str) -> str | None:
    """The message without times and long numbers, to find repetitions; None if it is not a log line."""
    head = LINE.match(line)
    return None if head is None else f"{host_of(line)} {_NUMBERS.sub('', line[head.end() :])}"


def host_of(line: str) -> str | None:
    """The host named in a line of syslog or the journal, or None."""
    found = LINE.match(line)
    return found["host"] if found is not None and is_host(found["host"] or "") else None


def parse(lines: Lines, file: str) -> KernelText:
    """Parse the log. Raises ParseError if it is empty: a missing log does not mean that there was no fault."""
    messages: list[Message] = []
    others: list[Other] = []
    links: dict[str | None, LinkWatch] = {}
    hosts: dict[str, None] = {}
    removable: set[str] = set()
    count = lines.passed
    column = 0  # column of the last line's text, where continuation lines start
    for number, line in lines:
        if not line.strip():
            continue
        count += 1
        head = LINE.match(line)
        if head is not None:
            column = len(line) - len(line[head.end() :].lstrip())
        elif line[:column].strip() or not line[column : column + 1].strip():
            column = 0
        xid = parse_xid(line)
        if (column or xid is not None or _BESIDE.match(line)) and not _unread(line, xid):
            lines.claim(number)
        text, host = line[column:], host_of(line)
        if host is not None:
            hosts.setdefault(host)
        more = lines.repeated.get(number, 0)
        if xid is not None:
            messages.append(Message(number, xid, host, 1 + more))
        elif found := _PCIE.search(line):
            others.append(_narrow(number, found, host))
        elif rule := rule_of(line):
            pci = None if (named := pci_of(text)) is None else address(named)
            code, level, _, what = rule
            about = device_of(rule, text)
            others.append(Other(number, code, level, what, text, about, pci, host=host, times=1 + more))
        elif (disk := accessed_disk(line)) and others and others[-1].device is None:
            others[-1] = replace(others[-1], device=disk)
        elif (disk := removable_disk(line)) is not None:
            removable.add(disk)
        links.setdefault(host, LinkWatch()).add_line(number, line, 1 + more)
    if not count:
        raise ParseError("the log is empty: kernel messages are unknown", file=file)
    others = [
        o
        for o in others
        if not is_no_disk(o.device) and (o.device or "").rstrip("0123456789") not in removable
    ]
    others += [
        Other(n, "NET014", verdict, link.text(), port=link.port, quote=link.quote, host=host)
        for host, watch in links.items()
        for link in watch.links.values()
        if (verdict := link.verdict()) is not None
        for n in link.lines or link.dark
    ]
    return KernelText(file, count, tuple(messages), tuple(others), tuple(hosts))


def _narrow(number: int, found: re.Match[str], host: str | None) -> Other:
    """A device with a degraded PCIe link."""
    what = f"{found['driver']}: {found['have']} Gb/s of PCIe bandwidth, limited by a {found['link']} link, {found['can']} supported"
    have, can = float(found["have"]), float(found["can"])
    return Other(
        number, "SYS001", "WARN", what, pci=address(found["pci"]), measured=have, expected=can, host=host
    )


def _unread(line: str, xid: XidMessage | None) -> bool:
    """Whether a line mentions hardware but could not be parsed."""
    if xid is None:
        return (_LOOKS.search(line) is not None and re.search(r"NVRM|nvswitch|PCI:", line) is not None) or (
            "PCIe bandwidth, limited by" in line and _PCIE.search(line) is None
        )
    # NVLink 5 messages include a severity.
    return xid.kind == "xid" and xid.code in NVLINK5_CODES and xid.severity is None and "atal" in line


def judge(log: KernelText, context: Context) -> list[Finding]:
    """One finding per code and GPU or switch, and per other kind of fault; one PASS if there is none."""
    found = [*_driver(log, context), *_others(log, context)]
    strangers = [] if context.node is None else [h for h in log.hosts if not same_host(h, context.node)]
    if not found:
        only = log.hosts[0] if len(log.hosts) == 1 else None
        text = f"no GPU or NVSwitch driver message indicating a fault, in {log.lines} lines"
        text += f" of host {only}" if strangers and only else ""
        target = Target(node=context.node or only)
        found.append(Finding("XID004", "PASS", target, text, evidence=(log.file,)))
    if len(strangers) > 1 and len(strangers) == len(log.hosts):
        why = f"a log of several hosts, {listed(strangers)}, none of them {context.node}: it is unknown which node these messages are from"
        found.append(Finding("FILE008", "UNJUDGED", Target(node=context.node), why, evidence=(log.file,)))
    return found


def _node(log: KernelText, context: Context, host: str | None) -> str | None:
    """The node of a message: the one the log was submitted for; another host only if the log names both."""
    if context.node is None or host is None or same_host(host, context.node):
        return context.node or host
    return host if any(same_host(h, context.node) for h in log.hosts) else context.node


def _driver(log: KernelText, context: Context) -> Iterator[Finding]:
    groups: dict[tuple[str | None, int, str, str, int, Verdict], tuple[XidMessage, list[Message]]] = {}
    # An SXid line with data but no severity belongs to the line that stated the severity.
    seen = {
        (m.host, m.xid.pci, m.xid.code)
        for m in log.messages
        if m.xid.kind == "sxid" and m.xid.severity is not None
    }
    worst: dict[tuple[str | None, str, int], XidMessage] = {}
    for message in (m for m in log.messages if m.xid.kind == "xid"):
        xid = message.xid
        of = (_node(log, context, message.host), xid.pci, xid.code)
        if ORDER.index(verdict_of(xid)) < ORDER.index(verdict_of(worst.setdefault(of, xid))):
            worst[of] = xid
    for message in log.messages:
        xid, node = message.xid, _node(log, context, message.host)
        if xid.kind == "sxid" and xid.severity is None and (message.host, xid.pci, xid.code) in seen:
            continue
        # A consequential message is judged as its cause; if the cause is not in the log, by the code of the cause.
        if xid.cause is not None:
            xid = worst.get((node, xid.pci, xid.cause)) or replace(xid, code=xid.cause, message="")
        key = (node, message.xid.code, xid.kind, xid.pci, xid.code, verdict_of(xid))
        groups.setdefault(key, (xid, []))[1].append(message)
    for (node, code, kind, pci, _, verdict), (first, same) in groups.items():
        named = "NVL007" if kind == "sxid" else _code(first, verdict)
        target = Target(node, None, pci, _one(m.xid.link for m in same))
        places, action = evidence(log.file, (m.line for m in same)), _action(first, verdict)
        expected, text = Expected("none", "", _source(first)), _text(same)
        yield Finding(named, verdict, target, text, code, "", expected, action=action, evidence=places)


def verdict_of(xid: XidMessage) -> Verdict:
    """FAIL if the hardware must be serviced before a job may run, PASS if NVIDIA says to ignore it, else WARN."""
    if xid.kind == "sxid":
        return "FAIL" if xid.severity == "fatal" else "WARN"
    if xid.code in NVLINK5_CODES:
        if xid.benign:
            return "PASS"
        return "WARN" if xid.severity == "nonfatal" else "FAIL"
    if xid.code == 154:
        return {"none": "PASS", None: "WARN"}.get(xid.recovery, "FAIL")  # type: ignore[return-value]
    known = catalogue().get(xid.code)
    if xid.code in _FAIL_CODES or (known is not None and known.bucket in _HARDWARE):
        return "FAIL"
    if (
        known is not None
        and known.bucket == "IGNORE"
        and known.cls not in ("application", "gpu")
        and xid.code not in _WATCHED_CODES
    ):
        return "PASS"
    return "WARN"


def _code(xid: XidMessage, verdict: Verdict) -> str:
    if verdict == "FAIL":
        return "XID001"
    known = catalogue().get(xid.code)
    return "XID002" if known is not None and known.cls == "application" else "XID003"


def _text(same: list[Message]) -> str:
    first = same[0].xid
    known = catalogue().get(first.code) if first.kind == "xid" else None
    text = f"{'SXid' if first.kind == 'sxid' else 'Xid'} {first.code}"
    if known is not None and known.meaning != "Unused":
        text += f" ({known.meaning})"
    if (count := sum(m.times for m in same)) > 1:
        text += f", {count} times"
    if first.message:
        text += f": {first.message}"
    names = sorted({m.xid.name for m in same if m.xid.name})
    if names:
        text += f"; program: {listed(names, _SAME)}"
    times = [m.xid.time for m in same if m.xid.time]
    if times:
        text += f"; at {times[0]}" + (f" to {times[-1]}" if times[-1] != times[0] else "")
    return text


def _source(xid: XidMessage) -> str:
    if xid.kind == "sxid":
        return "docs.nvidia.com, Fabric Manager user guide: SXid errors"
    known = catalogue().get(xid.code)
    if known is None:
        return "this code is not in NVIDIA's catalogue"
    return f"Xid catalog: {known.bucket or 'no bucket'}" + (f", then {known.then}" if known.then else "")


def _action(xid: XidMessage, verdict: Verdict) -> str:
    """The action from NVIDIA's catalog; empty to use the action of the finding's code."""
    if verdict == "PASS" or xid.kind == "sxid":
        return ""
    if xid.code == 154 and xid.recovery is not None:
        return {
            "reset": "the driver requests a GPU reset: nvidia-smi --gpu-reset",
            "reboot": "the driver requests a reboot of the node",
            "drain_p2p": "the driver requests to end peer-to-peer work, then to reset this GPU",
        }.get(xid.recovery, "")
    if xid.code == 79:
        return "the GPU cannot be reset: reboot the node; if it recurs, replace the GPU"
    if xid.code == 74:
        return "drain the node, reset the GPU, and check the other end of the link"
    known = catalogue().get(xid.code)
    bucket = None if known is None else known.bucket
    if xid.code in _FAIL_CODES or xid.code in NVLINK5_CODES or bucket == "RESET_GPU":
        return "reset the GPU (nvidia-smi --gpu-reset) before running any job there; if it recurs, replace it"
    return {
        "RESTART_BM": "reboot the node",
        "RESTART_VM": "reboot the virtual machine",
        "CHECK_MECHANICALS": "check power and cabling of the GPU",
        "UPDATE_SWFW": "update driver and firmware",
    }.get(bucket or "", "")


def _one(links: Iterator[int | None]) -> int | None:
    known = set(links)
    return known.pop() if len(known) == 1 else None


def _others(log: KernelText, context: Context) -> Iterator[Finding]:
    groups: dict[tuple[str | None, ...], list[Other]] = {}
    for other in log.others:
        # A NIC's measured values change when its link is retrained.
        kind = None if other.measured is not None else other.what
        node = _node(log, context, other.host)
        groups.setdefault(
            (node, other.code, other.verdict, other.pci, other.device, other.port, kind), []
        ).append(other)
    for (node, *_), same in groups.items():
        last = same[-1]  # the most recent
        text = last.what + ("" if last.device is None else f" ({last.device})")
        times = sum(other.times for other in same)
        if times > 1 and last.port is None:
            text += f", {times} times" + (", the last" if last.quote else "")
        if last.quote:
            text += f": {quoted(last.quote, _QUOTED)}"
        expected = None if last.expected is None else Expected(last.expected, "Gb/s", "the NIC's driver")
        target, unit = Target(node=node, pci=last.pci, port=last.port), "Gb/s" * (last.measured is not None)
        places = evidence(log.file, (o.line for o in same))
        yield Finding(last.code, last.verdict, target, text, last.measured, unit, expected, evidence=places)


TOOLS: tuple[Tool[KernelText], ...] = (Tool("kernel log", matches, parse, judge, log_line=LINE),)
