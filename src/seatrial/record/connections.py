"""ranks/GENERATION/rankN.tcp.json: what the kernel measured on a rank's TCP connections until its generation ended.

Absent where a rank was killed, or has no connection that leaves its host.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import asdict

from seatrial.base.atomic import write_text
from seatrial.base.files import read_json
from seatrial.hardware.tcp import Connection
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Problem
from seatrial.record.typed import decode


def write_connections(folder: RunFolder, generation: int, rank: int, found: list[Connection]) -> None:
    """Write those of `found` that leave the host and sent something. Raises OSError."""
    leaving = [
        asdict(each)
        for each in found
        if each.sent_bytes and each.there != each.here and not ipaddress.ip_address(each.there).is_loopback
    ]
    if leaving:
        write_text(folder.connections(generation, rank), json.dumps(leaving), durable=False)


def read_connections(folder: RunFolder, generation: int) -> tuple[dict[int, list[Connection]], list[Problem]]:
    """Rank -> its connections, and the files that cannot be used."""
    found: dict[int, list[Connection]] = {}
    problems: list[Problem] = []
    for rank in folder.ranks_with(generation, ".tcp.json"):
        path = folder.connections(generation, rank)
        try:
            found[rank] = [decode(Connection, each) for each in read_json(path)]
        except (OSError, ValueError, TypeError) as error:
            problems.append(Problem(str(path.relative_to(folder.path)), 1, f"not used: {error}"))
    return found, problems
