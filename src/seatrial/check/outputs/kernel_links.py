"""Network links that flap, as logged by the kernel and systemd-networkd."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from seatrial.check.judging.findings import Verdict

# Losses of a link per day that count as flapping: Azure/azurehpc-health-checks, customTests/azure_ib_link_flapping.nhc.
_FLAPS = 5
# Interfaces that can belong to the fabric: IPoIB, and drivers of RDMA adapters. Others (veth, docker) flap by design.
_NETWORKD = re.compile(
    r"systemd-networkd\[\d+\]: (?P<port>(?:ib|rdma)[\w.-]{1,30}): (?P<what>lost|gained) carrier",
    re.IGNORECASE,
)
_DRIVER = re.compile(
    r"\b(?:mlx5_core|mlx5_ib|bnxt_en|bnxt_re|ice|irdma|ionic|mlx4_en) [0-9a-f:.]{7,12}:? (?P<port>[\w.-]{1,30}): (?:NIC )?Link (?:is )?(?P<what>up|down)\b",
    re.IGNORECASE,
)
# An empty cage also reports "unplugged" when the driver loads, so that counts only after "plugged".
_MODULE = re.compile(
    r"\bmlx5_core (?P<port>[0-9a-f:.]{7,12}): Port module event: module \d+, Cable (?P<what>plugged|unplugged)"
)
# The day of a line as printed; dmesg prints seconds since boot.
_DAY = re.compile(
    r"^(?:<\d+>)?(?:kern *:\w+ *: )?(?:\[?(?:[A-Z][a-z]{2} )?(?P<day>\d{4}-\d\d-\d\d|[A-Z][a-z]{2} [ \d]\d)\b|\[ *(?P<seconds>\d{1,12})\.)"
)


@dataclass
class Link:
    """One interface: the lines in which it went down, by day, and whether it was up at the end.

    `dark` are lines that report the link as down when it was not up, as drivers do while they start.
    """

    port: str
    lost: dict[str, list[int]] = field(default_factory=dict)
    dark: list[int] = field(default_factory=list)
    up: bool = False
    quote: str = ""  # the last line that reports a loss
    more: int = 0  # losses whose lines were dropped by numbered_lines.py

    @property
    def lines(self) -> list[int]:
        return [n for day in self.lost.values() for n in day]

    def verdict(self) -> Verdict | None:
        """The verdict; None for a single loss that recovered, as when the other end is restarted."""
        if max((len(day) for day in self.lost.values()), default=0) >= _FLAPS:
            return "FAIL"
        if len(self.lines) > 1 or (self.lines and not self.up):
            return "WARN"
        return "UNJUDGED" if self.dark and not self.up else None

    def text(self) -> str:
        times = len(self.lines) + self.more
        if not times:
            return f"link {self.port} is down and was never up in this log: not cabled, or down since before the log began"
        return f"link {self.port} went down {times} time{'s' * (times > 1)}" + (
            "" if self.up else " and was down at the end"
        )


def link_event(line: str) -> re.Match[str] | None:
    """The link event in a line, with groups `port` and `what`; None if there is none."""
    if not any(word in line for word in ("arrier", "ink", "Cable")):
        return None
    return _NETWORKD.search(line) or _DRIVER.search(line) or _MODULE.search(line)


class LinkWatch:
    """The links of one log."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}

    def add_line(self, number: int, line: str, times: int = 1) -> None:
        """Record what a line says about a link, if anything; `times`: number of lines it represents."""
        found = link_event(line)
        if found is None or (found["what"] == "unplugged" and found["port"] not in self.links):
            return
        link = self.links.setdefault(found["port"], Link(found["port"]))
        what, was_up = found["what"].lower(), link.up
        link.up = what in ("gained", "up", "plugged")
        if not link.up and (was_up or what == "lost"):
            day = _DAY.match(line)
            text = "" if day is None else day["day"] or str(int(day["seconds"]) // 86400)
            link.lost.setdefault(text, []).append(number)
            link.quote, link.more = line, link.more + times - 1
        elif not link.up:
            link.dark.append(number)
