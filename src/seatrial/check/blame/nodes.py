"""The measurements of all nodes by themselves, in columns, and the findings from them. Pure.

Rows are nodes, columns are GPU slots or rails. Slots are ordered by PCI address, so that a missing GPU leaves a hole
instead of shifting the others. Bandwidths are decimal GB/s in one direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seatrial.check.judging.findings import Direction, Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import Floor, What, find_sku, shares
from seatrial.check.ranges import listed
from seatrial.hardware.counters import Links, Port, findings, nvlink_findings
from seatrial.hardware.xid import address, catalogue, parse

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

BROKEN, SUSPECT = shares().broken, shares().suspect  # of what is expected
_ENOUGH_PEERS = 3  # values needed for a meaningful median

# The buckets of the catalogue that mean: not the hardware, or nothing to do now.
_HARMLESS = frozenset({"IGNORE", "RESTART_APP", "UPDATE_SWFW", "CHECK_UVM", None})
_HARDWARE = frozenset({"memory", "nvlink", "pcie", "gpu", "power"})


@dataclass(frozen=True)
class Quantity:
    """One rate that is measured on every GPU."""

    name: str
    code: str
    unit: str
    what: str
    algorithm: str
    direction: Direction = ""
    floor: What | None = None  # name in floors.toml


RATES = (
    Quantity("gemm", "MSR001", "TFLOP/s", "bf16 GEMM", "bf16 GEMM, dense", "", "gemm_bf16"),
    Quantity(
        "hbm", "MSR002", "GB/s", "copy within GPU memory", "device to device copy, read and write added"
    ),
    Quantity(
        *("h2d", "MSR003", "GB/s", "copy from the host"),
        *("host to device copy, pinned", "one direction", "host_to_device"),
    ),
    Quantity(
        *("p2p", "MSR004", "GB/s", "copy to and from the other GPUs"),
        *("peer to peer copy", "one direction", "nvlink_copy"),
    ),
)


@dataclass
class NodeStage:
    """The node stage of a whole cluster: N nodes, G slots, R rails. What was not measured is NaN.

    `rates` has (N, G) for "gemm" (TFLOP/s), "hbm", "h2d" (GB/s) and (N, G, G) for "p2p": row sends, column receives.
    The mappings are sparse: a missing key had nothing to report. `counters` holds a port's counters before and after a
    load of `load_s` seconds, `nvlink` the same of NVLinks, keyed by the GPU's PCI address. `kernel_log` is None for a
    node whose log cannot be read. `able`: the nodes that can take part in pairs and groups, None for all.
    """

    names: tuple[str, ...]
    answered: Bools  # (N,)
    slots: tuple[str, ...]  # PCI addresses
    present: Bools  # (N, G)
    rates: dict[str, Floats]
    links_down: Mapping[tuple[int, int], tuple[int, ...]]  # (node, slot) -> inactive links
    links: int  # NVLinks per GPU
    uncorrectable: Mapping[tuple[int, int], int]  # (node, slot) -> errors since the driver was loaded
    devices: tuple[str, ...]  # "mlx5_0/1", by rail
    port_up: Bools  # (N, R)
    counters: Mapping[tuple[int, int], tuple[Port, Port]]
    nvlink: Mapping[tuple[int, int], tuple[Links, Links]]
    kernel_log: Mapping[int, tuple[str, ...] | None]
    load_s: float = 10.0
    gpu: str | None = None  # catalogue or device name; None or an unknown one has no floors
    able: Bools | None = None  # (N,)

    def floor(self, quantity: Quantity) -> Floor | None:
        """What this kind of GPU reaches when healthy; None if unknown."""
        sku = find_sku(self.gpu)
        if sku is None or quantity.floor is None:
            return None
        return sku.floor(quantity.floor, direction=quantity.direction)

    def level(self, name: str) -> Floats:
        """A rate as one value per GPU, (N, G): for "p2p" the median over its peers, in the slower direction."""
        values = self.rates[name]
        if name != "p2p":
            return values
        own = np.eye(values.shape[1], dtype=bool)
        values = np.where(own, np.nan, values)
        return np.minimum(_median(values, 2), _median(values, 1))


def _median(values: Floats, axis: int) -> Floats:
    """np.nanmedian without its warning for slices without values; 0 counts as a value."""
    ordered = np.sort(values, axis=axis)  # NaN last
    count = np.sum(~np.isnan(values), axis=axis)
    middle = np.expand_dims(np.maximum(count - 1, 0) // 2, axis)
    upper = np.expand_dims(np.minimum(count // 2, values.shape[axis] - 1), axis)
    both = np.take_along_axis(ordered, middle, axis) + np.take_along_axis(ordered, upper, axis)
    return np.asarray(np.squeeze(both, axis) / 2)


def doubtful(stage: NodeStage) -> Ints:
    """Positions of the nodes that should measure again: no answer, or a rate below what is expected."""
    again = ~stage.answered
    for quantity in RATES:
        again |= _slow(stage, quantity)[0].any(axis=1)
    return np.flatnonzero(again)


def settle(first: NodeStage, later: Sequence[tuple[Ints, NodeStage]]) -> NodeStage:
    """`first` with the median over the repeated measurements, node by node; sparse entries are the last ones seen.

    `later` holds positions and the measurements of just these nodes.
    """
    stage = NodeStage(**{**vars(first), "rates": dict(first.rates), "answered": first.answered.copy()})
    stage.present, stage.port_up = first.present.copy(), first.port_up.copy()
    for name, values in first.rates.items():
        stage.rates[name] = values.copy()
        for node in {int(n) for rows, _ in later for n in rows}:
            repeats = [s.rates[name][list(rows).index(node)] for rows, s in later if node in rows]
            stage.rates[name][node] = _median(np.stack([values[node], *repeats]), 0)
    sparse = ("links_down", "uncorrectable", "counters", "nvlink", "kernel_log")
    tables = {name: dict(getattr(first, name)) for name in sparse}
    for rows, part in later:
        back = dict(enumerate(int(n) for n in rows))
        stage.answered[rows] |= part.answered
        heard = rows[part.answered]
        stage.present[heard], stage.port_up[heard] = part.present[part.answered], part.port_up[part.answered]
        for name in sparse:
            for key, value in getattr(part, name).items():
                moved = back[key] if name == "kernel_log" else (back[key[0]], key[1])
                tables[name][moved] = value
    for name in sparse:
        setattr(stage, name, tables[name])
    return stage


def _slow(stage: NodeStage, quantity: Quantity) -> tuple[Bools, Floats, float | None]:
    """The slow GPUs, their rate as a share of what is expected, and the peers' median.

    Slow means less than 92 % of the median of all GPUs, or less than the floor if one is known. If all are equally
    slow, only the floor reveals it.
    """
    level = stage.level(quantity.name)
    known = level[~np.isnan(level)]
    median = float(np.median(known)) if len(known) >= _ENOUGH_PEERS else None
    floor = stage.floor(quantity)
    share = np.full(level.shape, np.nan)
    if median:
        share = level / median
    slow = np.nan_to_num(share, nan=1.0) < SUSPECT
    if floor is not None:
        low = np.nan_to_num(level, nan=np.inf) < floor.suspect
        slow |= low
        share = np.where(low, np.fmin(share, level / floor.value), share)
    return slow, share, median


def judge_nodes(stage: NodeStage) -> list[Finding]:
    """All faults of nodes by themselves, and one PASS for each check that found nothing."""
    found: list[Finding] = []
    of_gpus = (_missing, _rates, _links, _memory) if stage.slots else ()
    for check in (_answers, *of_gpus, _messages, _ports):
        found += check(stage)
    return found


def _answers(stage: NodeStage) -> Iterator[Finding]:
    for node in np.flatnonzero(~stage.answered):
        name = stage.names[node]
        yield Finding("MSR011", "FAIL", Target(node=name), f"{name} does not respond, asked several times")
    if stage.answered.all():
        yield Finding(
            "MSR011",
            "PASS",
            Target(),
            f"all {len(stage.names)} nodes respond" if len(stage.names) > 1 else "the node responds",
        )


def _missing(stage: NodeStage) -> Iterator[Finding]:
    holes = np.argwhere(~stage.present & stage.answered[:, None])
    siblings = stage.present.sum(axis=0)
    for node, slot in holes:
        target = Target(node=stage.names[node], gpu=int(slot), pci=stage.slots[slot])
        text = f"no GPU at {stage.slots[slot]}, {siblings[slot]} other nodes have one"
        have = int(stage.present[node].sum())
        expected = Expected(len(stage.slots), "GPUs", "the other nodes")
        yield Finding("GPU001", "FAIL", target, text, have, "GPUs", expected, float(len(stage.slots)))
    if not len(holes):
        yield Finding("GPU001", "PASS", Target(), f"{len(stage.slots)} GPUs on every node that responds")


def _rates(stage: NodeStage) -> Iterator[Finding]:
    for quantity in RATES:
        slow, share, median = _slow(stage, quantity)
        level = stage.level(quantity.name)
        floor = stage.floor(quantity)
        if np.isnan(level).all():
            if quantity.name != "p2p" or len(stage.slots) > 1:
                why = "no GPU was measured"
                text = f"{quantity.what}: {why}"
                yield Finding(quantity.code, "UNJUDGED", Target(), text, why_unjudged=why)
            continue
        if median is None and floor is None:
            why = f"fewer than {_ENOUGH_PEERS} GPUs were measured, and no floor is known"
            yield Finding(
                quantity.code, "UNJUDGED", Target(), f"{quantity.what} has no peers", why_unjudged=why
            )
            continue
        source = "median of the cluster's GPUs; suspect below 92 % of it"
        expected = (
            floor.expected()
            if floor is not None
            else Expected(median, quantity.unit, source, quantity.direction, quantity.algorithm)
        )
        for node, slot in np.argwhere(slow):
            target = Target(node=stage.names[node], gpu=int(slot), pci=stage.slots[slot])
            part = float(share[node, slot])
            verdict: Verdict = "FAIL" if part < BROKEN else "WARN"
            text = (
                f"{quantity.what}: {level[node, slot]:.4g} {quantity.unit}, {part:.0%} of the expected rate"
            )
            measured = float(level[node, slot])
            yield Finding(quantity.code, verdict, target, text, measured, quantity.unit, expected, median)
        if not slow.any():
            middle = float(np.nanmedian(level))
            text = f"{quantity.what}: {middle:.4g} {quantity.unit} (median), no outlier"
            yield Finding(quantity.code, "PASS", Target(), text, middle, quantity.unit, expected, median)


def _links(stage: NodeStage) -> Iterator[Finding]:
    clean = True
    for (node, slot), links in stage.links_down.items():
        clean = False
        # If all are down, the driver's message names the link that failed first.
        link = links[0] if len(links) == 1 else None
        target = Target(node=stage.names[node], gpu=slot, pci=stage.slots[slot], link=link)
        text = f"{len(links)} of {stage.links} NVLinks are inactive: {listed(links)}"
        up = stage.links - len(links)
        expected = Expected(stage.links, "links", "the other GPUs")
        yield Finding("MSR005", "FAIL", target, text, up, "links", expected, float(stage.links))
    for (node, slot), (before, after) in stage.nvlink.items():
        for error in nvlink_findings(before, after, stage.load_s):
            clean = False
            target = Target(
                node=stage.names[node], gpu=slot, pci=stage.slots[slot], link=error.evidence["link"]
            )
            yield Finding("MSR006", "FAIL", target, error.message)
    if clean:
        yield Finding("MSR005", "PASS", Target(), "no NVLink is inactive or counts errors under load")


def _memory(stage: NodeStage) -> Iterator[Finding]:
    for (node, slot), count in stage.uncorrectable.items():
        target = Target(node=stage.names[node], gpu=slot, pci=stage.slots[slot])
        text = f"{count} uncorrectable memory errors since the driver was loaded"
        yield Finding("MSR007", "FAIL", target, text, count, "errors", Expected(0, "errors", "NVIDIA"))
    if not stage.uncorrectable:
        yield Finding("MSR007", "PASS", Target(), "no uncorrectable memory errors")


def _messages(stage: NodeStage) -> Iterator[Finding]:
    slots = {address(pci): slot for slot, pci in enumerate(stage.slots)}
    known, named = catalogue(), False
    for node, lines in stage.kernel_log.items():
        if lines is None:
            why = "no permission to read the kernel log, or it is not visible in the container"
            target = Target(node=stage.names[node])
            yield Finding("MSR008", "UNJUDGED", target, "the kernel log is not readable", why_unjudged=why)
            continue
        for line in lines:
            message = parse(line)
            code = known.get(message.code) if message is not None and message.kind == "xid" else None
            if message is None or code is None or code.cls not in _HARDWARE or code.bucket in _HARMLESS:
                continue
            named = True
            target = Target(stage.names[node], slots.get(message.pci), message.pci, message.link)
            text = f"Xid {message.code}, {code.meaning}: {message.message}"
            yield Finding("MSR008", "FAIL", target, text, message.code, evidence=(line,))
    if not named:
        yield Finding("MSR008", "PASS", Target(), "no driver message caused by the hardware")


def _ports(stage: NodeStage) -> Iterator[Finding]:
    down = ~stage.port_up & stage.answered[:, None]
    for node, rail in np.argwhere(down):
        target = Target(node=stage.names[node], port=stage.devices[rail])
        others = int(stage.port_up[:, rail].sum())
        text = f"{stage.devices[rail]} is down; the same port is up on {others} other nodes"
        yield Finding("MSR009", "FAIL", target, text, "DOWN", "", Expected("ACTIVE", "", "the other nodes"))
    if not down.any() and stage.devices:
        rdma = any("/" in device for device in stage.devices)  # "mlx5_0/1"; a network device has no port
        what = "ports of the fabric" if rdma else "devices of the network (TCP; there is no RDMA)"
        yield Finding("MSR009", "PASS", Target(), f"all {what} are up: {', '.join(stage.devices)}")
    rising = False
    for (node, rail), (before, after) in stage.counters.items():
        for error in findings({before.name: before}, {after.name: after}, stage.load_s):
            # Congestion and retransmissions are more often suffered by a port than caused by it.
            fault = error.signal in ("link_errors", "link_down")
            rising |= fault
            target = Target(node=stage.names[node], port=stage.devices[rail])
            yield Finding("MSR010", "FAIL" if fault else "WARN", target, error.message)
    if not rising:
        yield Finding("MSR010", "PASS", Target(), "no port counts errors under load")
