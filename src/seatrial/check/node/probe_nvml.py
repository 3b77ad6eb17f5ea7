"""Query NVML for every GPU of this node: `python -m seatrial.check.node.probe_nvml`. One JSON document on stdout."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seatrial.check.node.nvml import Nvml
from seatrial.hardware.xid import address


def read() -> dict[str, Any]:
    """{"driver", "gpus": [{"index", "pci", "name", "state", "now", "limits", "links", ...} or {"index", "lost"}]}.

    {"problem"} if NVML cannot be used at all.
    """
    try:
        nvml = Nvml()
    except OSError as error:
        return {"problem": str(error)}
    gpus: list[dict[str, Any]] = []
    for index in range(nvml.count()):
        try:
            handle = nvml.handle(index)
        except OSError as error:
            gpus.append({"index": index, "lost": str(error)})
            continue
        pci, now, limits = nvml.pci(handle), nvml.now(handle), nvml.limits(handle)
        gpus.append(
            {
                "index": index,
                "pci": None if pci is None else address(pci),
                "bus_id": pci,
                "name": nvml.text("nvmlDeviceGetName", handle),
                "uuid": nvml.text("nvmlDeviceGetUUID", handle),
                "state": asdict(nvml.state(handle, now, limits)),
                "now": now,
                "limits": limits,
                "links": nvml.links(handle),
                "uncorrectable": nvml.uncorrectable(handle),
                "processes": nvml.processes(handle),
            }
        )
    return {
        "problem": None,
        "time": time.time(),
        "driver": nvml.text("nvmlSystemGetDriverVersion"),
        "gpus": gpus,
        "files": device_files(),
    }


def device_files(dev: Path = Path("/dev")) -> dict[str, str]:
    """Device file -> result of opening it: "nvidia0" -> "ok", or the name of the error.

    EPERM if a scheduler has given the GPU to another job: its file exists all the same.
    """
    found = {}
    for path in sorted(p for p in dev.glob("nvidia[0-9]*") if p.name[6:].isdigit()):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            found[path.name] = errno.errorcode.get(error.errno or 0, str(error.errno))
        else:
            found[path.name] = "ok"
    return found


if __name__ == "__main__":
    print(json.dumps(read()), flush=True)
    sys.exit(0)
