"""The network of this node: its RDMA ports with their counters, and the network device that TCP uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.base.kernel_files import number_of, text_of
from seatrial.base.process import python
from seatrial.check.node.probe_ports import ROOT
from seatrial.check.node.run_tool import Order, Result, run_tool
from seatrial.check.outputs import sysfs
from seatrial.check.outputs.ports import fabric_ports
from seatrial.check.outputs.tool import Lines, ParseError
from seatrial.hardware.counters import Port

_PORTS_S = 10.0
_TOOL_S = 5.0
_NET = Path("/sys/class/net")
_COUNTERS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")


def read_ports(root: str = ROOT) -> Result | None:
    """The tree of RDMA devices as text for the reader "sysfs"; None if there is none."""
    if not os.path.isdir(root):
        return None
    found = run_tool(Order("sysfs", python("seatrial.check.node.probe_ports", root), _PORTS_S))
    return None if found.ok and not found.out else found


def mlxlink_orders(text: str) -> list[Order]:
    """`mlxlink` for each device with inactive fabric ports: only its firmware knows why a link is down."""
    down = [p for p in fabric_of(text).values() if p.state != "ACTIVE"]
    return [
        Order(f"mlxlink {p.device}", ("mlxlink", "-d", p.device, "-p", str(p.number)), _TOOL_S) for p in down
    ]


def fabric_of(text: str) -> dict[str, Port]:
    """Parse a tree's text into the training fabric's ports: "mlx5_0/1" -> port; empty if it is not such a text."""
    try:
        facts = sysfs.parse(Lines.of(text), "sysfs")
    except ParseError:
        return {}
    return {each.name: each.port for each in fabric_ports(facts.ports)}


def read_interface(
    name: str | None, *, net: Path = _NET, route: Path = Path("/proc/net/route")
) -> dict[str, Any]:
    """The network device that ranks use: `name`, else that of the default route. Mb/s as the driver reports it."""
    chosen = name or default_interface(route)
    if chosen is None:
        return {"name": None, "problem": "no default route and no interface given"}
    folder = net / chosen
    if not folder.is_dir():
        return {"name": chosen, "problem": f"no network device {chosen}"}
    speed = text_of(folder / "speed") or ""  # -1 if the device has none, such as a virtual one
    return {
        "name": chosen,
        "problem": None,
        "state": text_of(folder / "operstate"),
        "mbit_s": int(speed) if speed.isdecimal() and int(speed) > 0 else None,
        "mtu": number_of(folder / "mtu"),
        "carrier_changes": number_of(folder / "carrier_changes"),
        "counters": {c: v for c in _COUNTERS if (v := number_of(folder / "statistics" / c)) is not None},
    }


def default_interface(route: Path = Path("/proc/net/route")) -> str | None:
    """The device of the default route with the lowest metric; None without one."""
    found = []
    for line in (text_of(route) or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            found.append((int(fields[6]), fields[0]))
    return min(found)[1] if found else None


def is_up(interface: Mapping[str, Any]) -> bool:
    """Whether a device carries traffic; virtual ones report "unknown"."""
    return interface.get("problem") is None and interface.get("state") in ("up", "unknown")
