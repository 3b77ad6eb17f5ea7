"""Outputs of nvidia-smi that are a list of GPUs with lines below each: `nvlink -s`, `-e`, `-R`, `info`, and `-L`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from seatrial.check.outputs.tool import Lines, ParseError, lines_of

Kind = Literal["status", "errors", "remote", "info", "list"]

_GPU = re.compile(
    r"^GPU (?P<index>[0-9]{1,3}): (?P<name>.{1,120}?) \(UUID: (?P<uuid>[^)\s]{1,80})\)(?: (?P<rest>\S.{0,120}?))?\s*$",
    re.ASCII,
)
_STATUS = re.compile(
    r"^\s*Link (?P<link>[0-9]{1,2}): (?:(?P<rate>[0-9]{1,6}(?:\.[0-9]{1,6})?) GB/s|(?P<off><inactive>))\s*$",
    re.I,
)
_ERRORS = re.compile(
    r"^\s*Link (?P<link>[0-9]{1,2}): (?P<name>[A-Za-z][^:]{1,80}): (?P<value>[0-9]{1,20}(?:e-?[0-9]{1,4})?|N/A)\s*$"
)
_REMOTE = re.compile(
    r"^\s*Link (?P<link>[0-9]{1,2}): Remote Device (?P<device>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]): Link (?P<far>[0-9]{1,3})\s*$"
)
_INFO = re.compile(
    r"^\s+(?P<name>(?:NVLE|Firmware Version|MSE|NETIR(?: [A-Z]{2,8})?)):(?: (?P<value>[A-Za-z0-9.:_-]{1,80}))?\s*$"
)
_INACTIVE = re.compile(
    r"^\s*NVML: Unable to retrieve NVLink information as all links are inActive\s*$", re.IGNORECASE
)
_UNSUPPORTED = re.compile(r"^\s*Device does not have or support NVLink\s*$", re.IGNORECASE)
_LOST = re.compile(
    r"^\s*Unable to determine the device handle for .{1,120}$|^.{0,80}GPU is lost.{0,120}$", re.IGNORECASE
)
_MIG = re.compile(r"^\s+MIG .{1,80}\(UUID: [^)]{1,100}\)\s*$")


@dataclass
class Link:
    """One line about a link. `gb_s` is its raw rate in one direction, None if it is inactive."""

    link: int
    line: int
    gb_s: float | None = None
    device: str | None = None  # PCI address of the other end


@dataclass
class Gpu:
    """One GPU and the lines below it."""

    index: int
    name: str
    uuid: str
    line: int
    links: list[Link] = field(default_factory=list)
    # (link, name in lower case) -> value, line.
    counters: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    info: dict[str, tuple[str, int]] = field(default_factory=dict)
    inactive: int | None = None  # line stating that all links are inactive
    unsupported: int | None = None  # line stating that the GPU has no NVLink


@dataclass
class GpuList:
    """The whole output."""

    file: str
    kind: Kind
    gpus: list[Gpu]
    lost: tuple[tuple[int, str], ...] = ()  # lines stating that a GPU does not answer
    tool: str = ""  # set if it is not nvidia-smi


def kind_of(text: str) -> Kind | None:
    """Which of the outputs it is; None if it is none of them."""
    lines = lines_of(text[:20_000])
    if not any(_GPU.match(line) for line in lines):
        return None
    entries = [m["rest"] or "" for line in lines if (m := _GPU.match(line))]
    for line in [*lines, *entries]:
        if _REMOTE.match(line):
            return "remote"
        if _STATUS.match(line) or _INACTIVE.match(line) or _UNSUPPORTED.match(line):
            return "status"
        if _ERRORS.match(line):
            return "errors"
        if re.match(r"^\s+(NVLE|Firmware Version):", line):
            return "info"
    # Nothing but GPUs: the list, or an output whose lines are all damaged.
    # A prompt may precede it.
    begin = next(n for n, line in enumerate(lines) if _GPU.match(line))
    lines = [x for n, x in enumerate(lines) if n > begin or "nvidia-smi" not in x]
    rest = [x for x in lines if x.strip() and not any(k.match(x) for k in (_GPU, _MIG, _LOST))]
    return "list" if not rest else None


def parse(lines: Lines, file: str) -> GpuList:
    """Parse all GPUs. Raises ParseError if there is no GPU, or a GPU appears twice."""
    kind = kind_of(lines.text)
    if kind is None:
        raise ParseError("not a GPU list of nvidia-smi", file=file)
    gpus: list[Gpu] = []
    lost: list[tuple[int, str]] = []
    for number, line in lines:
        if _LOST.match(line):
            lost.append((number, line.strip()))
        elif found := _GPU.match(line):
            if any(g.index == int(found["index"]) for g in gpus):
                raise ParseError(
                    f"GPU {found['index']} is listed twice", file=file, line=number, source_line=line
                )
            gpus.append(Gpu(int(found["index"]), found["name"], found["uuid"], number))
            # Some versions print the state on the same line.
            if found["rest"] and not _read_line(kind, gpus[-1], found["rest"], number):
                continue
        elif not gpus or not _read_line(kind, gpus[-1], line, number):
            continue
        lines.claim(number)
    return GpuList(file, kind, gpus, tuple(lost))


def _read_line(kind: Kind, gpu: Gpu, line: str, number: int) -> bool:
    """Add one line to its GPU; False if it does not belong to this output or repeats an earlier one."""
    if kind in ("status", "remote", "errors") and _INACTIVE.match(line):
        gpu.inactive = number
        return True
    if kind in ("status", "remote", "errors") and _UNSUPPORTED.match(line):
        gpu.unsupported = number
        return True
    if kind == "status" and (found := _STATUS.match(line)):
        return _add(gpu, Link(int(found["link"]), number, None if found["off"] else float(found["rate"])))
    if kind == "remote" and (found := _REMOTE.match(line)):
        return _add(gpu, Link(int(found["link"]), number, device=found["device"].lower()))
    if kind == "errors" and (found := _ERRORS.match(line)):
        key = (int(found["link"]), " ".join(found["name"].split()).lower())
        if found["value"].isdecimal():
            fresh = key not in gpu.counters
            gpu.counters[key] = (int(found["value"]), number)
            return fresh
        return True
    if kind == "info" and (found := _INFO.match(line)):
        if found["value"] is not None:
            gpu.info[found["name"]] = (found["value"], number)
        return True
    return kind == "list" and _MIG.match(line) is not None


def _add(gpu: Gpu, link: Link) -> bool:
    if any(other.link == link.link for other in gpu.links):
        return False
    gpu.links.append(link)
    return True
