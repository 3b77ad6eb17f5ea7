"""nccl-tests as JSON (-J, since 2.17, and rccl-tests synchronised with it). Judged like the table.

Format: NVIDIA/nccl-tests, src/util.cu.
"""

from __future__ import annotations

import re
from typing import Any

from seatrial.check.outputs.nccl_judge import judge
from seatrial.check.outputs.nccl_log import NcclLog, Rank, Row
from seatrial.check.outputs.tool import Lines, ParseError, Tool, read_json

_MOST = 1024  # more GPUs than any machine has


def matches(text: str) -> bool:
    """Whether the text has keys that are specific to this JSON."""
    return '"average_bus_bandwidth"' in text or ('"bus_bw"' in text and '"alg_bw"' in text)


def parse(lines: Lines, file: str) -> NcclLog:
    """Parse the JSON. Raises ParseError if it is incomplete."""
    table = read_json(lines, file)
    log = NcclLog(file, table=True)
    try:
        config, average, bounds = table["config"], table["average_bus_bandwidth"], table["out_of_bounds"]
        log.test = re.split(r"[/\\]", str(table["args"][0]))[-1]
        log.most_bytes = int(config["maximum_bytes"])
        log.ranks_per_process = int(config["nthreads"]) * int(config["ngpus"])
        if not 0 < log.ranks_per_process <= _MOST:
            raise ValueError(f"{log.ranks_per_process} GPUs of one process")
        factor = config.get("step_factor")
        log.step = (int(config["step_bytes"]), "bytes") if factor is None else (int(factor), "factor")
        log.rows = [_row(entry) for entry in table["results"]]
        log.out_of_bounds = (1, int(bounds["count"]), bounds["okay"] == "true")
        log.average = (1, str(average["bandwidth"]), average["okay"] == "false")
        log.failures = [(1, f"error: {e}"[:200]) for e in table.get("errors") or () if e]
        for device in config["devices"]:
            first, host, number, name = (device[k] for k in ("rank", "hostname", "device", "device_info"))
            # Only the first GPU of each process is listed.
            log.ranks += [
                Rank(int(first) + n, str(host), int(number) + n, str(name))
                for n in range(log.ranks_per_process)
            ]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ParseError(
            f"not the JSON of nccl-tests: {type(error).__name__} {error}"[:120], file=file
        ) from None
    return log


def _row(entry: dict[str, Any]) -> Row:
    """One message size; "nan" and null mean that side was not run."""
    sides = [side for key in ("out_of_place", "in_place") if (side := entry[key]) is not None]
    bus, alg = max((float(s["bus_bw"]), float(s["alg_bw"])) for s in sides)
    wrong = [float(s["nwrong"]) for s in sides if s["nwrong"] is not None]
    return Row(1, int(entry["size"]), alg, bus, sum(wrong) if wrong else None)


TOOLS: tuple[Tool[NcclLog], ...] = (Tool("nccl-tests -J", matches, parse, judge),)
