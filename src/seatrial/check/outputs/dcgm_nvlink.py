"""`dcgmi nvlink -s`: which NVLinks of GPUs and NVSwitches are up. Judged like `nvidia-smi nvlink -s`.

Format: NVIDIA/DCGM, dcgmi/Nvlink.cpp, DisplayNvLinkLinkStatus.
"""

from __future__ import annotations

import re
from dataclasses import replace

from seatrial.check.judging.findings import Finding
from seatrial.check.outputs.finding_collector import having
from seatrial.check.outputs.smi_gpu_list import Gpu, GpuList, Link
from seatrial.check.outputs.smi_nvlink import judge as judge_links
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool

_WHO = re.compile(r"\s+(?P<kind>gpuId|physicalId) (?P<id>\d{1,3}):\s*")
_STATES = re.compile(r"\s+(?P<states>[UDX_](?: [UDX_])*)\s*")
_BESIDE = re.compile(
    r"\|?\s*NvLink Link Status\s*\|?|GPUs:|NvSwitches:|\s+No (?:GPUs|NvSwitches) found\.|Key: Up=U, Down=D, Disabled=X, Not Supported=_|\s+Link Entities:.*|\s+(?:\d+:\d+ ?)+"
)
_END = "Key: Up=U"


def parse(lines: Lines, file: str) -> GpuList:
    """Parse the list; ParseError without a GPU or if cut off. Skips switch ports: many boards leave some unused."""
    gpus: list[Gpu] = []
    open_gpu: Gpu | None = None
    for number, line in lines:
        if who := _WHO.fullmatch(line):
            open_gpu = None
            if who["kind"] == "gpuId":
                open_gpu = Gpu(int(who["id"]), "", f"gpuId {who['id']}", number)
                gpus.append(open_gpu)
        elif states := _STATES.fullmatch(line):
            if open_gpu is not None:
                if open_gpu.links:
                    continue
                for link, state in enumerate(states["states"].split()):
                    if state != "_":
                        open_gpu.links.append(Link(link, number, device="up" if state == "U" else None))
        elif not _BESIDE.fullmatch(line.rstrip()):
            continue
        lines.claim(number)
    if not gpus:
        raise ParseError("no GPU in the output", file=file)
    if _END not in lines.text:
        raise ParseError("the legend at its end is missing: truncated", file=file, line=gpus[-1].line)
    for gpu in gpus:
        gpu.unsupported = gpu.line if not gpu.links else None
    return GpuList(file, "remote", gpus, tool="dcgmi nvlink -s")


def judge(output: GpuList, context: Context) -> list[Finding]:
    """Judge like `nvidia-smi nvlink -s`; the GPU model is known only from other outputs."""
    named = [replace(gpu, name=context.gpu or "GPU") for gpu in output.gpus]
    return judge_links(replace(output, gpus=named), context)


TOOLS: tuple[Tool[GpuList], ...] = (
    Tool(
        "dcgmi nvlink -s",
        having(r"^\|\s*NvLink Link Status\s*\|"),
        parse,
        judge,
        first_line=re.compile(r"\|\s*NvLink Link Status\s*\|"),
    ),
)
