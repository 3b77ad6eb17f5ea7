"""The tools whose outputs are known, and recognition of a text by its content, never by a file's name."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from seatrial.check.outputs.tool import Tool

# Modules with a `TOOLS: tuple[Tool[...], ...]`. By name, so that they are imported when something must be recognised
# and not by `seatrial --help`. If several tools match, the first is the most certain: specific before general.
MODULES: tuple[str, ...] = (
    "seatrial.check.outputs.perftest",
    "seatrial.check.outputs.ibstat",
    "seatrial.check.outputs.ibstatus",
    "seatrial.check.outputs.ibv_devinfo",
    "seatrial.check.outputs.ibnetdiscover",
    "seatrial.check.outputs.sysfs",
    "seatrial.check.outputs.mlxlink",
    "seatrial.check.outputs.ncclscout",
    "seatrial.check.outputs.perfquery",
    "seatrial.check.outputs.fabric_links",
    "seatrial.check.outputs.rdma_link",
    "seatrial.check.outputs.gpu_burn",
    "seatrial.check.outputs.nvbandwidth",
    "seatrial.check.outputs.nccl_json",
    "seatrial.check.outputs.nccl_judge",
    "seatrial.check.outputs.dcgm_diag",
    "seatrial.check.outputs.dcgm_text",
    "seatrial.check.outputs.dcgm_health",
    "seatrial.check.outputs.dcgm_nvlink",
    "seatrial.check.outputs.smi_query_judge",
    "seatrial.check.outputs.smi_nvlink",
    "seatrial.check.outputs.smi_topo",
    "seatrial.check.outputs.smi_p2p",
    "seatrial.check.outputs.smi_csv",
    "seatrial.check.outputs.amd_smi",
    "seatrial.check.outputs.lspci",
    "seatrial.check.outputs.ipmi_sel",
    "seatrial.check.outputs.slurm_node",
    "seatrial.check.outputs.smi_table",
    "seatrial.check.outputs.fabric_log",
    "seatrial.check.outputs.kernel_text",
    "seatrial.check.outputs.shell",
)


@cache
def tools() -> tuple[Tool[Any], ...]:
    """All tools, in the order of `MODULES`. AttributeError if a module has no TOOLS: a programming error."""
    return tuple(tool for module in MODULES for tool in importlib.import_module(module).TOOLS)


def recognise(text: str) -> list[Tool[Any]]:
    """The tools whose output is in the text, most certain first: none if it is unknown, several if it is mixed."""
    return [tool for tool in tools() if tool.matches(text)]
