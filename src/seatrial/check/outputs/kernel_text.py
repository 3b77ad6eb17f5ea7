"""Kernel logs handed in as text (dmesg, journal, syslog, /dev/kmsg): driver messages and what else tells of hardware."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from seatrial.check.findings import Expected, Finding, Target, Verdict
from seatrial.check.outputs.kernel_links import Watch, told
from seatrial.check.outputs.kernel_rules import rule_of
from seatrial.check.report import ORDER
from seatrial.check.tool import Context, Lines, ParseError, Tool, evidence, lines_of, listed
from seatrial.hardware.xid import NVLINK5_CODES, XidMessage, address, catalogue
from seatrial.hardware.xid import parse as parse_xid

# NVIDIA's buckets, see hardware/xid.toml, where hardware has to be seen to before a job may run.
_HARDWARE = (
    "RESET_GPU",
    "RESTART_BM",
    "RESTART_VM",
    "CHECK_MECHANICALS",
    "WORKFLOW_XID_48",
    "WORKFLOW_NVLINK_ERR",
)
# Xid 63 and 92 are to be recorded and a reset can wait (field notes 3); 94 has lost memory, and its row is in use until the reset.
# 167 and 169 have no bucket; control/policy.toml takes the node away for them, as leptonai/gpud restarts it.
_FAIL_CODES = frozenset({48, 64, 94, 95, 140, 167, 169})
_WATCHED_CODES = frozenset({63, 92})
_SAME = 8  # processes and times that a message lists

_TAG = r"\S+ [^\s:]+(?:\[[0-9]+\])?: "  # host and program
_LINE = re.compile(
    r"^(?:"
    r"(?:<[0-9]{1,3}>)?\[ *[0-9]+\.[0-9]{2,9}(?: < *[0-9.]+>)?\]"  # dmesg, with its level in -r, with steps in -d
    r"|\[\w{2,4}\.? +\w{3,5}\.? +[0-9]{1,2} [0-9:]{8} [0-9]{4}\] "  # dmesg -T, in any language
    r"|\[[A-Z][a-z]{2} ?[0-9]{1,2} [0-9]{2}:[0-9]{2}\] |\[ +\+[0-9]+\.[0-9]{6}\] "  # dmesg -H
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8},[0-9]{3,9}[+-][0-9:]{4,5} "  # dmesg --time-format=iso
    r"|[0-9]{1,3},[0-9]+,[0-9]+,[^;\s]*;"  # /dev/kmsg
    r"|(?:kern|user|daemon|syslog) *:[a-z]+ *: "  # dmesg -x
    rf"|(?:<[0-9]{{1,3}}>)?[A-Z][a-z]{{2}} [ 0-9][0-9] [0-9:]{{8}}(?:\.[0-9]+)? {_TAG}"  # syslog, journal
    rf"|[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}T[0-9:]{{8}}\S* {_TAG}"  # rsyslog, journal -o short-iso
    rf"|[A-Z][a-z]{{2}} [0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}} [0-9:]{{8}}\S* \S+ {_TAG}"  # journal -o short-full
    rf"|[0-9]{{9,11}}\.[0-9]{{6}} {_TAG}"  # journal -o short-unix
    r"|(?:kernel: )?NVRM: "
    r")"
)
# What the journal writes between boots, and the details of a record of /dev/kmsg.
_BESIDE = re.compile(r"-- (?:Boot|Reboot|Logs begin|Journal begins|No entries|Hint:).*| [A-Z][A-Z_]*=\S.*")
_LOOKS = re.compile(r"\bS?Xid", re.IGNORECASE)
# Other lines that tell of hardware are in kernel_rules.py.
_PCIE = re.compile(
    r"\b(?P<driver>[A-Za-z0-9_-]{1,40}) (?P<pci>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]): (?P<have>[0-9]{1,6}\.[0-9]{1,6}) Gb/s available PCIe bandwidth, "
    r"limited by (?P<link>.{3,60}?) link at \S{1,40} \(capable of (?P<can>[0-9]{1,6}\.[0-9]{1,6}) Gb/s"
)


@dataclass(frozen=True)
class Message:
    """A driver message and its line."""

    line: int
    xid: XidMessage


@dataclass(frozen=True)
class Other:
    """Another line that tells of hardware."""

    line: int
    code: str
    verdict: Verdict
    text: str
    pci: str | None = None
    measured: float | None = None
    expected: float | None = None
    port: str | None = None


@dataclass(frozen=True)
class KernelText:
    """What of a log matters."""

    file: str
    lines: int
    messages: tuple[Message, ...]
    others: tuple[Other, ...]


def matches(text: str) -> bool:
    """Whether most of the first lines are a kernel log's, or any has a driver message."""
    lines = [x for x in lines_of(text[:50_000]) if x.strip()][:200]
    if not lines:
        return False
    if any(parse_xid(x) is not None for x in lines):
        return True
    return sum(_LINE.match(x) is not None for x in lines) * 2 > len(lines)


def tells(line: str) -> bool:
    """Whether parse() would make anything of this line: the others can be left out where a log is too long to hand on."""
    return (
        parse_xid(line) is not None
        or _LOOKS.search(line) is not None
        or "PCIe bandwidth, limited by" in line
        or rule_of(line) is not None
        or told(line) is not None
    )


def parse(lines: Lines, file: str) -> KernelText:
    """Raises ParseError for an empty log: that nothing was seen is not that nothing was."""
    messages, others = [], []
    links, count = Watch(), lines.passed
    column = 0  # in which the text of the last line began: a message of several lines goes on there
    for number, line in lines:
        if not line.strip():
            continue
        count += 1
        head = _LINE.match(line)
        if head is None and not (column and not line[:column].strip() and line[column : column + 1].strip()):
            column = 0
        elif head is not None:
            column = head.end() + (len(line) - head.end() - len(line[head.end() :].lstrip()))
        xid = parse_xid(line)
        if (head is not None or column or xid is not None or _BESIDE.match(line)) and not _unread(line, xid):
            lines.claim(number)
        if xid is not None:
            messages.append(Message(number, xid))
        elif "PCIe bandwidth, limited by" in line:
            found = _PCIE.search(line)
            if found is None:
                continue
            text_ = f"{found['driver']}: {found['have']} Gb/s of PCIe bandwidth, limited by a {found['link']} link, {found['can']} possible"
            others.append(
                Other(
                    number,
                    "SYS001",
                    "WARN",
                    text_,
                    address(found["pci"]),
                    float(found["have"]),
                    float(found["can"]),
                )
            )
        else:
            if (rule := rule_of(line)) is not None:
                others.append(Other(number, rule[0], rule[1], rule[3]))
            links.take(number, line)
    if not count:
        raise ParseError("the log is empty: what the kernel said is not known", file=file)
    others += [
        Other(n, "NET014", verdict, link.text(), port=link.port)
        for link in links.links.values()
        if (verdict := link.verdict()) is not None
        for n in link.lines or link.dark
    ]
    return KernelText(file, count, tuple(messages), tuple(others))


def _unread(line: str, xid: XidMessage | None) -> bool:
    """Whether a line says something of hardware that could not be read."""
    if xid is None:
        return (_LOOKS.search(line) is not None and re.search(r"NVRM|nvswitch|PCI:", line) is not None) or (
            "PCIe bandwidth, limited by" in line and _PCIE.search(line) is None
        )
    # A line of an NVLink 5 message has a severity.
    return xid.kind == "xid" and xid.code in NVLINK5_CODES and xid.severity is None and "atal" in line


def judge(log: KernelText, context: Context) -> list[Finding]:
    """One finding for each code of each GPU or switch, and for each other kind of trouble; one PASS for none."""
    found = [
        *_driver(log, context),
        *_others(log, context),
    ]
    if not found:
        text = f"no message of the GPU or NVSwitch driver that tells of a fault, in {log.lines} lines"
        found.append(Finding("XID004", "PASS", Target(node=context.node), text, evidence=(log.file,)))
    return found


def _driver(log: KernelText, context: Context) -> Iterator[Finding]:
    groups: dict[tuple[int, str, str, int, Verdict], tuple[XidMessage, list[Message]]] = {}
    # A line with data belongs to the one that gave the severity.
    told = {
        (m.xid.pci, m.xid.code) for m in log.messages if m.xid.kind == "sxid" and m.xid.severity is not None
    }
    worst: dict[tuple[str, int], XidMessage] = {}
    for xid in (m.xid for m in log.messages if m.xid.kind == "xid"):
        known = worst.setdefault((xid.pci, xid.code), xid)
        if ORDER.index(verdict_of(xid)) < ORDER.index(verdict_of(known)):
            worst[xid.pci, xid.code] = xid
    for message in log.messages:
        xid = message.xid
        if xid.kind == "sxid" and xid.severity is None and (xid.pci, xid.code) in told:
            continue
        # A message that only follows from another is worth what that one is; where the log does not hold it, what its code is.
        if xid.cause is not None:
            xid = worst.get((xid.pci, xid.cause)) or replace(xid, code=xid.cause, message="")
        groups.setdefault((message.xid.code, xid.kind, xid.pci, xid.code, verdict_of(xid)), (xid, []))[
            1
        ].append(message)
    for (code, kind, pci, _, verdict), (first, same) in groups.items():
        yield Finding(
            "NVL007" if kind == "sxid" else _code(first, verdict),
            verdict,
            Target(node=context.node, pci=pci, link=_one(m.xid.link for m in same)),
            _text(same),
            measured=code,
            expected=Expected("none", "", _source(first)),
            action=_action(first, verdict),
            evidence=evidence(log.file, (m.line for m in same)),
        )


def verdict_of(xid: XidMessage) -> Verdict:
    """FAIL where hardware has to be seen to before a job may run, PASS where NVIDIA says to ignore it, else WARN."""
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
    if len(same) > 1:
        text += f", {len(same)} times"
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
        return "this code is in no list known here"
    return f"Xid catalog: {known.bucket or 'no bucket'}" + (f", then {known.then}" if known.then else "")


def _action(xid: XidMessage, verdict: Verdict) -> str:
    """What NVIDIA's catalog says; empty for what the finding's code says."""
    if verdict == "PASS" or xid.kind == "sxid":
        return ""
    if xid.code == 154 and xid.recovery is not None:
        return {
            "reset": "the driver asks for a reset of the GPU: nvidia-smi --gpu-reset",
            "reboot": "the driver asks for a restart of the node",
            "drain_p2p": "the driver asks to end what talks to other GPUs, then to reset this one",
        }.get(xid.recovery, "")
    if xid.code == 79:
        return "the GPU cannot be reset: restart the node; if it comes again, have the GPU replaced"
    if xid.code == 74:
        return "drain the node, reset the GPU, and look at the other end of the link"
    known = catalogue().get(xid.code)
    bucket = None if known is None else known.bucket
    if xid.code in _FAIL_CODES or xid.code in NVLINK5_CODES or bucket == "RESET_GPU":
        return "reset the GPU (nvidia-smi --gpu-reset) before any job runs there; if it comes again, have it replaced"
    return {
        "RESTART_BM": "restart the node",
        "RESTART_VM": "restart the virtual machine",
        "CHECK_MECHANICALS": "look at power and cabling of the GPU",
        "UPDATE_SWFW": "update driver and firmware",
    }.get(bucket or "", "")


def _one(links: Iterator[int | None]) -> int | None:
    known = set(links)
    return known.pop() if len(known) == 1 else None


def _others(log: KernelText, context: Context) -> Iterator[Finding]:
    groups: dict[tuple[str, Verdict, str | None, str], list[Other]] = {}
    for other in log.others:
        # A NIC's figures change when it is trained again.
        kind = "" if other.pci is not None else other.text
        groups.setdefault((other.code, other.verdict, other.pci, kind), []).append(other)
    for (code, verdict, pci, _), same in groups.items():
        first = same[-1]  # the newest
        times = f", {len(same)} times" if len(same) > 1 and first.port is None else ""
        expected = None if first.expected is None else Expected(first.expected, "Gb/s", "the NIC's driver")
        yield Finding(
            code,
            verdict,
            Target(node=context.node, pci=pci, port=first.port),
            first.text + times,
            first.measured,
            "Gb/s" if first.measured is not None else "",
            expected,
            why_unjudged=first.text if verdict == "UNJUDGED" else "",
            evidence=evidence(log.file, (o.line for o in same)),
        )


TOOLS: tuple[Tool[KernelText], ...] = (Tool("kernel log", matches, parse, judge, each=_LINE),)
