"""NVLink error counters before and after a load: what grew is wrong now, whatever the totals say."""

from __future__ import annotations

from seatrial.check.findings import Expected, Finding, Target
from seatrial.check.outputs.smi_gpu_list import GpuList
from seatrial.check.tool import Context
from seatrial.hardware.counters import Links, nvlink_findings


def judge_growth(before: GpuList, after: GpuList, seconds: float, context: Context) -> list[Finding]:
    """Findings from two outputs of `nvidia-smi nvlink -e` that were read `seconds` apart, by the limits of hardware.counters.

    A GPU that only one of them shows is UNJUDGED, as is a time that is not positive; quiet counters give one PASS.
    """
    node = Target(node=context.node)
    places = (before.file, after.file)
    if not seconds > 0:
        why = f"{seconds} s between the two readings"
        return [Finding("NVL003", "UNJUDGED", node, why, evidence=places)]
    indices = {g.uuid: g.index for g in after.gpus}
    found = []
    for uuid in sorted({g.uuid for g in before.gpus} ^ set(indices)):
        why = f"{uuid} is in only one of the two readings"
        found.append(Finding("NVL003", "UNJUDGED", node, why, evidence=places))
    for grown in nvlink_findings(_links(before), _links(after), seconds):
        deltas: dict[str, int] = grown.evidence["deltas"]
        found.append(
            Finding(
                "NVL003",
                "FAIL",
                Target(node=context.node, gpu=indices[grown.evidence["gpu"]], link=grown.evidence["link"]),
                grown.message,
                max(deltas.values()),
                f"errors in {seconds:.0f} s",
                Expected(0, "errors", "hardware/counters.py, NVLINK_LIMITS"),
                evidence=places,
            )
        )
    if not found:
        text = f"no error counter of {len(indices)} GPUs grew past its limit in {seconds:.0f} s"
        found.append(Finding("NVL003", "PASS", node, text, evidence=places))
    return found


def _links(output: GpuList) -> Links:
    links: Links = {}
    for gpu in output.gpus:
        for (link, counter), (value, _) in gpu.counters.items():
            links.setdefault((gpu.uuid, link), {})[counter] = value
    return links
