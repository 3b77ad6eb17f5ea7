"""Judge NVLinks by `nvidia-smi nvlink -s`, `-R`, `-e` and `info`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import median, median_low

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import Sku, find_sku, shares
from seatrial.check.outputs.finding_collector import FindingCollector
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.smi_gpu_list import Gpu, GpuList, Kind, Link, kind_of, parse
from seatrial.check.outputs.tool import Context, Tool, evidence
from seatrial.check.ranges import listed
from seatrial.hardware.counters import NVLINK_LIMITS

_ENDS = (255, 65535, (1 << 32) - 1)  # where counters of 8, 16 and 32 bits stop
_STANDS_OUT = 10  # times the median of the node's other links
_NAMES: dict[Kind, str] = {
    "status": "nvidia-smi nvlink -s",
    "errors": "nvidia-smi nvlink -e",
    "remote": "nvidia-smi nvlink -R",
    "info": "nvidia-smi nvlink info",
    "list": "nvidia-smi -L",
}


def judge(output: GpuList, context: Context) -> list[Finding]:
    """Faults of GPUs and links; one PASS if there are none."""
    add = FindingCollector(output.file, context, "NVL008")
    add.found += _count(output, context)
    for line, text in output.lost:
        add("FAIL", text[:200], line, code="GPU002")
    if output.kind in ("status", "remote"):
        _links(output, add)
    elif output.kind == "errors":
        _counters(output, add)
    elif output.kind == "info":
        _info(output, add)
    if all(f.verdict == "PASS" for f in add.found):
        add("PASS", _summary(output, output.tool or _NAMES[output.kind]), output.gpus[0].line)
    return add.found


def _target(gpu: Gpu, links: Sequence[int] = ()) -> Target:
    """The GPU, and its link if it is a single one."""
    return Target(gpu=gpu.index, link=links[0] if len(links) == 1 else None)


def _sku(context: Context, gpu: Gpu) -> Sku | None:
    return find_sku(gpu.name) or find_sku(context.gpu)


def _count(output: GpuList, context: Context) -> list[Finding]:
    skus = {s.name: s for g in output.gpus if (s := _sku(context, g)) is not None}
    alone = next(iter(skus.values())) if len(skus) == 1 else None
    places = evidence(output.file, (g.line for g in output.gpus))
    return count_findings([g.index for g in output.gpus], alone, context, places)


def _summary(output: GpuList, name: str) -> str:
    gpus = f"{len(output.gpus)} GPU{'s' * (len(output.gpus) > 1)}"
    if output.kind == "status":
        up = sorted({sum(link.gb_s is not None for link in g.links) for g in output.gpus})
        rates = sorted({link.gb_s for g in output.gpus for link in g.links if link.gb_s is not None})
        speed = f" at {listed(rates)} GB/s raw, one direction" if rates else ""
        return f"{gpus}, {listed(up)} NVLinks up{speed}"
    return f"{gpus}, no faults in {name}"


# -- -s and -R


def _links(output: GpuList, add: FindingCollector) -> None:
    up = {g.index: [x for x in g.links if x.gb_s is not None or x.device is not None] for g in output.gpus}
    rates = [link.gb_s for g in output.gpus for link in g.links if link.gb_s is not None]
    for gpu in output.gpus:
        sku = _sku(add.context, gpu)
        siblings = [g for g in output.gpus if g is not gpu and g.name == gpu.name]
        most = max((len(up[g.index]) for g in siblings), default=0)
        have = len(up[gpu.index])
        dark = [link for link in gpu.links if link.gb_s is None and link.device is None]
        lines, off = [x.line for x in dark] or [gpu.inactive or gpu.line], [x.link for x in dark]
        if have == 0:
            _all_off(gpu, sku, output, up, lines, add)
            continue
        # A mesh of eight uses all links; how many a smaller one leaves unused depends on the board.
        board = (
            "none" if sku is None else "switch" if sku.board == "mesh" and len(siblings) > 6 else sku.board
        )
        must = sku.links if sku is not None and board in ("switch", "bridge") else None
        must = max(must or 0, most) or None
        if must is not None and have < must:
            text = f"{have} of {must} NVLinks up" + (f": {listed(off)} inactive" if off else "")
            source = sku.source if sku is not None and sku.links == must else "the node's other GPUs"
            at, expected = _target(gpu, off), Expected(must, "links", source)
            median_ = float(most) if siblings else None
            add(
                "FAIL",
                text,
                *lines,
                code="NVL001",
                target=at,
                measured=have,
                expected=expected,
                median=median_,
            )
        elif (off and sku is None) or (board == "mesh" and sku is not None and have < (sku.links or 0)):
            what = f"NVLink {listed(off)} inactive" if off else f"{have} NVLinks up"
            why = f"{what}, and how many a {gpu.name} must have up here is unknown"
            add("UNJUDGED", why, *lines, target=_target(gpu))
        _rates(gpu, sku, median(rates) if rates else None, add)


def _all_off(
    gpu: Gpu,
    sku: Sku | None,
    output: GpuList,
    up: dict[int, list[Link]],
    lines: list[int],
    add: FindingCollector,
) -> None:
    """Findings for a GPU with no link up, which may be by design."""
    alike = [g for g in output.gpus if g.name == gpu.name]
    dark = [g for g in alike if not up[g.index]]
    verdict: Verdict = "UNJUDGED"
    code, measured, expected = "NVL008", None, None
    if gpu.unsupported is not None and (sku is None or sku.board in ("none", "bridge")):
        verdict, text = "PASS", "the driver reports that it has no NVLink"
    elif gpu.inactive is None and gpu.unsupported is None and not gpu.links:
        text = f"no links listed for GPU {gpu.index}"
    elif sku is None and len(dark) == len(alike):
        text = f"no NVLink is up, and whether a {gpu.name} must have some is unknown"
    elif sku is not None and (sku.board == "none" or (sku.board == "bridge" and _may_be_single(alike, dark))):
        verdict, text = "PASS", f"no NVLink up, normal for a {sku.name}"
    elif sku is not None and sku.board == "switch" and len(output.gpus) == 1 and gpu.index == 0:
        code = "NVL001"
        text = "no NVLink is up on the only GPU shown: normal in a virtual machine with one GPU, otherwise a fault"
    else:
        must = sku.links if sku is not None and sku.links else max(len(v) for v in up.values())
        verdict = "WARN" if sku is None or sku.board == "bridge" else "FAIL"
        source = sku.source if sku is not None else "the node's other GPUs"
        code, text = "NVL001", f"no NVLink up; {must} expected"
        measured, expected = 0, Expected(must, "links", source)
    add(verdict, text, *lines, code=code, target=_target(gpu), measured=measured, expected=expected)


def _may_be_single(alike: list[Gpu], dark: list[Gpu]) -> bool:
    """Whether dark cards may just be unbridged: a bridge joins two; all may lack one, and one of an odd number must."""
    return len(dark) == len(alike) or (len(dark) == 1 and len(alike) % 2 == 1)


def _rates(gpu: Gpu, sku: Sku | None, usual: float | None, add: FindingCollector) -> None:
    known = sku.link_gb_s if sku is not None else None
    for must, source in ((known, sku.source if sku is not None else ""), (usual, "the node's other links")):
        if must is None:
            continue
        slow = [(x, x.gb_s) for x in gpu.links if x.gb_s is not None]
        slow = [(x, gb_s) for x, gb_s in slow if gb_s < shares().suspect * must or not gb_s]
        if slow:
            least, links = min(gb_s for _, gb_s in slow), [x.link for x, _ in slow]
            expected = Expected(must, "GB/s", source, "one direction", "raw rate of one link")
            text, at = f"NVLink {listed(links)} at {least} GB/s instead of {must}", _target(gpu, links)
            verdict: Verdict = "FAIL" if least < shares().broken * must or not least else "WARN"
            lines = [x.line for x, _ in slow]
            add(
                verdict,
                text,
                *lines,
                code="NVL002",
                target=at,
                measured=least,
                expected=expected,
                median=usual,
            )
            return


# -- -e


def _counters(output: GpuList, add: FindingCollector) -> None:
    _lacking(output, add)
    for limit in NVLINK_LIMITS:
        seen = {
            (g.index, k[0]): v for g in output.gpus for k, v in g.counters.items() if k[1] == limit.counter
        }
        if not seen:
            continue
        usual = median_low(value for value, _ in seen.values())
        for gpu in output.gpus:
            own = {link: v for (index, link), v in seen.items() if index == gpu.index}
            ended = {k: v for k, v in own.items() if v[0] in _ENDS and limit.bits is not None}
            if ended:
                _counted("NVL004", gpu, limit.counter, ended, "saturated", add)
            high = {k: v for k, v in own.items() if v[0] >= limit.least and k not in ended}
            outside = {k: v for k, v in high.items() if v[0] >= _STANDS_OUT * usual}
            if outside:
                _counted("NVL003", gpu, limit.counter, outside, limit.reason, add, usual)
            elif high:
                why = f"{limit.counter} as on the node's other links: one reading does not show whether they increase"
                lines = (line for _, line in high.values())
                add("UNJUDGED", why, *lines, code="NVL003", target=_target(gpu))


def _lacking(output: GpuList, add: FindingCollector) -> None:
    """Links without a counter that the node's other links have: lines are missing."""
    known = {limit.counter for limit in NVLINK_LIMITS}
    names = {k[1] for g in output.gpus for k in g.counters} & known
    if not names and not all(g.inactive or g.unsupported for g in output.gpus):
        why = "none of the error counters that are judged is in the output"
        add("UNJUDGED", why, code="NVL003")
    for gpu in output.gpus:
        links = {k[0] for k in gpu.counters}
        lost = [(k, n) for k in sorted(links) for n in sorted(names) if (k, n) not in gpu.counters]
        # Links are numbered from 0 without gaps, inactive ones too.
        sku = _sku(add.context, gpu)
        top = sku.links - 1 if links and sku is not None and sku.links else max(links, default=-1)
        gaps = sorted(set(range(top + 1)) - links)
        if lost or gaps or (not links and gpu.inactive is None and gpu.unsupported is None):
            what = f"{lost[0][1]} of NVLink {lost[0][0]}" if lost else f"NVLink {listed(gaps) or 'counters'}"
            add("UNJUDGED", f"{what} is missing in the output", gpu.line, code="OUT002", target=_target(gpu))


def _counted(
    code: str,
    gpu: Gpu,
    counter: str,
    values: dict[int, tuple[int, int]],
    reason: str,
    add: FindingCollector,
    usual: float | None = None,
) -> None:
    links, most = sorted(values), max(v for v, _ in values.values())
    text = f"{counter} on NVLink " + listed(f"{k} ({values[k][0]})" for k in links) + f": {reason}"
    verdict: Verdict = "FAIL" if code == "NVL004" else "WARN"
    expected = Expected(0, "errors", "docs.nvidia.com, NVML: NVLink error counters")
    lines = [values[k][1] for k in links]
    add(
        verdict,
        text,
        *lines,
        code=code,
        target=_target(gpu, links),
        measured=most,
        expected=expected,
        median=usual,
    )


# -- info


def _info(output: GpuList, add: FindingCollector) -> None:
    for what in sorted({name for g in output.gpus for name in g.info}):
        entries = [(g, g.info[what]) for g in output.gpus if what in g.info]
        usual, count = Counter(v for _, (v, _) in entries).most_common(1)[0]
        for gpu, (value, line) in entries:
            if value != usual or (count * 2 <= len(entries) and len(entries) > 1):
                text = f"{what} is {value}, unlike its peers"
                add("WARN", text, line, code="GPU010", target=_target(gpu), measured=value)


def inventory(output: GpuList) -> dict[str, str | int | float]:
    """Number and kind of GPUs, NVLinks up, firmware of the links."""
    found: dict[str, str | int | float] = {}
    indices = [g.index for g in output.gpus]
    if indices == list(range(len(indices))):
        found["GPUs"] = len(indices)
    found["GPU"] = ", ".join(sorted({g.name for g in output.gpus}))
    if output.kind == "status":
        found["NVLinks up"] = sum(link.gb_s is not None for g in output.gpus for link in g.links)
    for name in sorted({n for g in output.gpus for n in g.info}):
        found[f"NVLink {name}"] = ", ".join(sorted({g.info[name][0] for g in output.gpus if name in g.info}))
    return found


# The same GPU with the same UUID starts another list of this node; with another UUID or none, that of another node.
_BEGINS = re.compile(r"(?P<id>GPU (?P<device>[0-9]{1,3}): .{1,120} \(UUID: [^)\s]{1,80}\))")


def _tool(kind: Kind) -> Tool[GpuList]:
    return Tool(_NAMES[kind], lambda text: kind_of(text) == kind, parse, judge, inventory, first_line=_BEGINS)


TOOLS: tuple[Tool[GpuList], ...] = tuple(_tool(kind) for kind in _NAMES)
