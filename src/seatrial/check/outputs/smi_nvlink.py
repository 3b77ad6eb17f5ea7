"""Judge NVLinks by `nvidia-smi nvlink -s`, `-R`, `-e` and `info`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from statistics import median, median_low

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import Sku, find_sku, shares
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
    name = output.tool or _NAMES[output.kind]
    found = _count(output, context)
    for line, text in output.lost:
        place = evidence(output.file, [line])
        found.append(Finding("GPU002", "FAIL", Target(node=context.node), text[:200], evidence=place))
    if output.kind in ("status", "remote"):
        found += _links(output, context)
    elif output.kind == "errors":
        found += _counters(output, context)
    elif output.kind == "info":
        found += _info(output, context)
    if all(f.verdict == "PASS" for f in found):
        place = evidence(output.file, [output.gpus[0].line])
        found.append(
            Finding("NVL008", "PASS", Target(node=context.node), _summary(output, name), evidence=place)
        )
    return found


def _target(context: Context, gpu: Gpu, link: int | None = None) -> Target:
    return Target(node=context.node, gpu=gpu.index, link=link)


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


def _links(output: GpuList, context: Context) -> Iterator[Finding]:
    up = {g.index: [x for x in g.links if x.gb_s is not None or x.device is not None] for g in output.gpus}
    rates = [link.gb_s for g in output.gpus for link in g.links if link.gb_s is not None]
    for gpu in output.gpus:
        sku = _sku(context, gpu)
        siblings = [g for g in output.gpus if g is not gpu and g.name == gpu.name]
        most = max((len(up[g.index]) for g in siblings), default=0)
        have = len(up[gpu.index])
        lines = [link.line for link in gpu.links if link.gb_s is None and link.device is None]
        where = evidence(output.file, lines or [gpu.inactive or gpu.line])
        off = [link.link for link in gpu.links if link.gb_s is None and link.device is None]
        if have == 0:
            yield from _all_off(gpu, sku, output, up, context, where)
            continue
        # A mesh of eight uses all links; how many a smaller one leaves unused depends on the board.
        board = (
            "none" if sku is None else "switch" if sku.board == "mesh" and len(siblings) > 6 else sku.board
        )
        must = sku.links if sku is not None and board in ("switch", "bridge") else None
        must = max(must or 0, most) or None
        if must is not None and have < must:
            which = f": {listed(off)} inactive" if off else ""
            source = sku.source if sku is not None and sku.links == must else "the node's other GPUs"
            yield Finding(
                "NVL001",
                "FAIL",
                _target(context, gpu, off[0] if len(off) == 1 else None),
                f"{have} of {must} NVLinks up{which}",
                have,
                "links",
                Expected(must, "links", source),
                float(most) if siblings else None,
                evidence=where,
            )
        elif (off and sku is None) or (board == "mesh" and sku is not None and have < (sku.links or 0)):
            dark = f"NVLink {listed(off)} inactive" if off else f"{have} NVLinks up"
            why = f"{dark}, and how many a {gpu.name} must have up here is unknown"
            yield Finding("NVL008", "UNJUDGED", _target(context, gpu), why, evidence=where)
        yield from _rates(gpu, sku, median(rates) if rates else None, output, context)


def _all_off(
    gpu: Gpu,
    sku: Sku | None,
    output: GpuList,
    up: dict[int, list[Link]],
    context: Context,
    where: tuple[str, ...],
) -> Iterator[Finding]:
    """Findings for a GPU with no link up, which may be by design."""
    target = _target(context, gpu)
    alike = [g for g in output.gpus if g.name == gpu.name]
    dark = [g for g in alike if not up[g.index]]
    if gpu.unsupported is not None and (sku is None or sku.board in ("none", "bridge")):
        yield Finding("NVL008", "PASS", target, "the driver reports that it has no NVLink", evidence=where)
    elif gpu.inactive is None and gpu.unsupported is None and not gpu.links:
        why = f"no links listed for GPU {gpu.index}"
        yield Finding("NVL008", "UNJUDGED", target, why, evidence=where)
    elif sku is None and len(dark) == len(alike):
        why = f"no NVLink is up, and whether a {gpu.name} must have some is unknown"
        yield Finding("NVL008", "UNJUDGED", target, why, evidence=where)
    elif sku is not None and (sku.board == "none" or (sku.board == "bridge" and _may_be_single(alike, dark))):
        yield Finding("NVL008", "PASS", target, f"no NVLink up, normal for a {sku.name}", evidence=where)
    elif sku is not None and sku.board == "switch" and len(output.gpus) == 1 and gpu.index == 0:
        why = "no NVLink is up on the only GPU shown: normal in a virtual machine with one GPU, otherwise a fault"
        yield Finding("NVL001", "UNJUDGED", target, why, evidence=where)
    else:
        must = sku.links if sku is not None and sku.links else max(len(v) for v in up.values())
        verdict: Verdict = "WARN" if sku is None or sku.board == "bridge" else "FAIL"
        source = sku.source if sku is not None else "the node's other GPUs"
        yield Finding(
            "NVL001",
            verdict,
            target,
            f"no NVLink up; {must} expected",
            0,
            "links",
            Expected(must, "links", source),
            evidence=where,
        )


def _may_be_single(alike: list[Gpu], dark: list[Gpu]) -> bool:
    """Whether dark cards may just be unbridged: a bridge joins two; all may lack one, and one of an odd number must."""
    return len(dark) == len(alike) or (len(dark) == 1 and len(alike) % 2 == 1)


def _rates(
    gpu: Gpu, sku: Sku | None, usual: float | None, output: GpuList, context: Context
) -> Iterator[Finding]:
    known = sku.link_gb_s if sku is not None else None
    for must, source in ((known, sku.source if sku is not None else ""), (usual, "the node's other links")):
        if must is None:
            continue
        slow = [
            x for x in gpu.links if x.gb_s is not None and (x.gb_s < shares().suspect * must or not x.gb_s)
        ]
        if slow:
            least = min(x.gb_s for x in slow if x.gb_s is not None)
            yield Finding(
                "NVL002",
                "FAIL" if least < shares().broken * must or not least else "WARN",
                _target(context, gpu, slow[0].link if len(slow) == 1 else None),
                f"NVLink {listed(x.link for x in slow)} at {least} GB/s instead of {must}",
                least,
                "GB/s",
                Expected(must, "GB/s", source, "one direction", "raw rate of one link"),
                usual,
                evidence=evidence(output.file, (x.line for x in slow)),
            )
            return


# -- -e


def _counters(output: GpuList, context: Context) -> Iterator[Finding]:
    yield from _lacking(output, context)
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
                yield _counted("NVL004", gpu, limit.counter, ended, "saturated", output, context)
            high = {k: v for k, v in own.items() if v[0] >= limit.least and k not in ended}
            outside = {k: v for k, v in high.items() if v[0] >= _STANDS_OUT * usual}
            if outside:
                yield _counted("NVL003", gpu, limit.counter, outside, limit.reason, output, context, usual)
            elif high:
                why = f"{limit.counter} as on the node's other links: one reading does not show whether they increase"
                place = evidence(output.file, (line for _, line in high.values()))
                target = _target(context, gpu)
                yield Finding("NVL003", "UNJUDGED", target, why, evidence=place)


def _lacking(output: GpuList, context: Context) -> Iterator[Finding]:
    """Links without a counter that the node's other links have: lines are missing."""
    known = {limit.counter for limit in NVLINK_LIMITS}
    names = {k[1] for g in output.gpus for k in g.counters} & known
    if not names and not all(g.inactive or g.unsupported for g in output.gpus):
        why = "none of the error counters that are judged is in the output"
        yield Finding("NVL003", "UNJUDGED", Target(node=context.node), why)
    for gpu in output.gpus:
        links = {k[0] for k in gpu.counters}
        lost = [(k, n) for k in sorted(links) for n in sorted(names) if (k, n) not in gpu.counters]
        # Links are numbered from 0 without gaps, inactive ones too.
        sku = _sku(context, gpu)
        top = sku.links - 1 if links and sku is not None and sku.links else max(links, default=-1)
        gaps = sorted(set(range(top + 1)) - links)
        if lost or gaps or (not links and gpu.inactive is None and gpu.unsupported is None):
            what = f"{lost[0][1]} of NVLink {lost[0][0]}" if lost else f"NVLink {listed(gaps) or 'counters'}"
            why = f"{what} is missing in the output"
            place = evidence(output.file, [gpu.line])
            yield Finding("OUT002", "UNJUDGED", _target(context, gpu), why, evidence=place)


def _counted(
    code: str,
    gpu: Gpu,
    counter: str,
    values: dict[int, tuple[int, int]],
    reason: str,
    output: GpuList,
    context: Context,
    usual: float | None = None,
) -> Finding:
    links = sorted(values)
    text = f"{counter} on NVLink " + listed(f"{k} ({values[k][0]})" for k in links) + f": {reason}"
    return Finding(
        code,
        "FAIL" if code == "NVL004" else "WARN",
        _target(context, gpu, links[0] if len(links) == 1 else None),
        text,
        max(v for v, _ in values.values()),
        "errors",
        Expected(0, "errors", "docs.nvidia.com, NVML: NVLink error counters"),
        usual,
        evidence=evidence(output.file, (values[k][1] for k in links)),
    )


# -- info


def _info(output: GpuList, context: Context) -> Iterator[Finding]:
    for what in sorted({name for g in output.gpus for name in g.info}):
        entries = [(g, g.info[what]) for g in output.gpus if what in g.info]
        usual, count = Counter(v for _, (v, _) in entries).most_common(1)[0]
        for gpu, (value, line) in entries:
            if value != usual or (count * 2 <= len(entries) and len(entries) > 1):
                text = f"{what} is {value}, unlike its peers"
                place = evidence(output.file, [line])
                yield Finding("GPU010", "WARN", _target(context, gpu), text, value, evidence=place)


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
    return Tool(_NAMES[kind], lambda text: kind_of(text) == kind, parse, judge, inventory, begins=_BEGINS)


TOOLS: tuple[Tool[GpuList], ...] = tuple(_tool(kind) for kind in _NAMES)
