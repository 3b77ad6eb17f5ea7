"""`rdma link` (iproute2): state of each RDMA port and its network device.

Format: iproute2, rdma/link.c. Older versions number the lines: "1/1: mlx5_0/1: subnet_prefix ...".
"""

from __future__ import annotations

import re

from seatrial.check.outputs.finding_collector import having
from seatrial.check.outputs.ibstat import judge
from seatrial.check.outputs.ports import PortFacts, PortsFacts, inventory
from seatrial.check.outputs.sysfs import STATES
from seatrial.check.outputs.tool import Lines, ParseError, Tool
from seatrial.hardware import counters

_LINK = re.compile(
    r"(?:link |\d+/\d+: )(?P<device>[\w.-]+)/(?P<port>\d{1,3}):? (?:(?P<ib>subnet_prefix \S+ lid \d+ sm_lid \d+ lmc \d+) )?"
    r"state (?P<state>[A-Z_]+) physical_state (?P<physical>[A-Z_]+)(?: netdev (?P<netdev>\S+))?(?: netdev_index \d+)?\s*(?:\[.*\])?\s*"
)
# Name in rdma -> name in ibstat and sysfs.
_PHYSICAL = {
    "NOP": "No state change",
    "SLEEP": "Sleep",
    "POLLING": "Polling",
    "DISABLED": "Disabled",
    "PORT_CONFIGURATION_TRAINING": "PortConfigurationTraining",
    "LINK_UP": "LinkUp",
    "LINK_ERROR_RECOVER": "LinkErrorRecovery",
    "PHY_TEST": "PhyTest",
}


def parse(lines: Lines, file: str) -> PortsFacts:
    """Parse all ports. Raises ParseError if there is none. A device without a driver does not appear in the output."""
    ports: list[PortFacts] = []
    for number, line in lines:
        found = _LINK.fullmatch(line)
        if found is None or found["state"] not in STATES or found["physical"] not in _PHYSICAL:
            continue
        lines.claim(number)
        layer = "InfiniBand" if found["ib"] else "Ethernet" if found["netdev"] else None
        port = counters.Port(found["device"], int(found["port"]), None, found["state"], layer, None)
        ports.append(PortFacts(port, _PHYSICAL[found["physical"]], None, None, number))
    if not ports:
        raise ParseError("no RDMA link in the output", file=file)
    return PortsFacts("rdma link", file, tuple(ports))


TOOLS = (
    Tool(
        "rdma link",
        having(r"^(?:link |\d+/\d+: )\S+/\d+:? .*\bstate [A-Z_]+ physical_state "),
        parse,
        judge,
        inventory,
        first_line=re.compile(r"link (?P<id>\S+/\d+?):? (?:subnet_prefix|state) "),
    ),
)
