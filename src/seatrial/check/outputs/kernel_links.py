"""Network links that come and go, by what the kernel and systemd-networkd log of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from seatrial.check.findings import Verdict

# From this many losses of one link in a day on it flaps: the limit of Azure/azurehpc-health-checks, customTests/azure_ib_link_flapping.nhc.
_FLAPS = 5
# Interfaces of adapters that can be the fabric's: IPoIB, and the drivers of RDMA adapters. Others (veth, docker) come and go by design.
_NETWORKD = re.compile(
    r"systemd-networkd\[\d+\]: (?P<port>(?:ib|rdma)[\w.-]{1,30}): (?P<what>lost|gained) carrier",
    re.IGNORECASE,
)
_DRIVER = re.compile(
    r"\b(?:mlx5_core|mlx5_ib|bnxt_en|bnxt_re|ice|irdma|ionic|mlx4_en) [0-9a-f:.]{7,12}:? (?P<port>[\w.-]{1,30}): (?:NIC )?Link (?:is )?(?P<what>up|down)\b",
    re.IGNORECASE,
)
# A cage that was empty when the driver came up says "unplugged" too: that counts only after "plugged".
_MODULE = re.compile(
    r"\bmlx5_core (?P<port>[0-9a-f:.]{7,12}): Port module event: module \d+, Cable (?P<what>plugged|unplugged)"
)
# The day that a line is of, as it is written there; dmesg counts seconds.
_DAY = re.compile(
    r"^(?:<\d+>)?(?:kern *:\w+ *: )?(?:\[?(?:[A-Z][a-z]{2} )?(?P<day>\d{4}-\d\d-\d\d|[A-Z][a-z]{2} [ \d]\d)\b|\[ *(?P<seconds>\d{1,12})\.)"
)


@dataclass
class Link:
    """One interface: the lines in which it went down, by day, and whether it was up at the end.

    `dark` are lines that report a link as down that was never seen up, as drivers do while they start.
    """

    port: str
    lost: dict[str, list[int]] = field(default_factory=dict)
    dark: list[int] = field(default_factory=list)
    up: bool = False
    quote: str = ""  # the last line that reports a loss
    more: int = 0  # losses whose lines were dropped by intake.py

    @property
    def lines(self) -> list[int]:
        return [n for day in self.lost.values() for n in day]

    def verdict(self) -> Verdict | None:
        """None for a link that went down once and came back, as one does when its other end is restarted."""
        if max((len(day) for day in self.lost.values()), default=0) >= _FLAPS:
            return "FAIL"
        if len(self.lines) > 1 or (self.lines and not self.up):
            return "WARN"
        return "UNJUDGED" if self.dark and not self.up else None

    def text(self) -> str:
        times = len(self.lines) + self.more
        if not times:
            return f"link {self.port} is down, and was never up in this log: not cabled, or down since before"
        return f"link {self.port} went down {times} time{'s' * (times > 1)}" + (
            "" if self.up else " and was down at the end"
        )


def told(line: str) -> re.Match[str] | None:
    """What the line says of a link, as `port` and `what`; None if it says nothing of one."""
    if not any(word in line for word in ("arrier", "ink", "Cable")):
        return None
    return _NETWORKD.search(line) or _DRIVER.search(line) or _MODULE.search(line)


class Watch:
    """The links of one log."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}

    def take(self, number: int, line: str, times: int = 1) -> None:
        """Record what a line says about a link, if anything; `times`: number of lines it represents."""
        found = told(line)
        if found is None or (found["what"] == "unplugged" and found["port"] not in self.links):
            return
        link = self.links.setdefault(found["port"], Link(found["port"]))
        what, was_up = found["what"].lower(), link.up
        link.up = what in ("gained", "up", "plugged")
        if not link.up and (was_up or what == "lost"):
            day = _DAY.match(line)
            said = "" if day is None else day["day"] or str(int(day["seconds"]) // 86400)
            link.lost.setdefault(said, []).append(number)
            link.quote, link.more = line, link.more + times - 1
        elif not link.up:
            link.dark.append(number)
