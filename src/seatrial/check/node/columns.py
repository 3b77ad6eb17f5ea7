"""The facts of all nodes in columns, as nodes.NodeStage takes them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high
from typing import Any

import numpy as np

from seatrial.check.blame.nodes import RATES, Floats, NodeStage
from seatrial.check.node.node_ports import is_up
from seatrial.check.node.node_stage import FACTS_VERSION
from seatrial.check.ranges import natural
from seatrial.hardware.counters import Links, Port, parse_nvlink_errors
from seatrial.hardware.xid import address, parse

Facts = Mapping[str, Any]

NETWORK = "network"  # the rail of nodes whose network devices have different names
_OF_GPU = {"gemm": "gemm_tflop_s", "hbm": "hbm_gb_s", "h2d": "h2d_gb_s"}


def columns(facts: Mapping[str, Facts | None], like: NodeStage | None = None) -> NodeStage:
    """The node stage of all of `facts`, in its order; None is a node that did not answer. What is missing is NaN.

    `like` gives slots, devices and NVLinks: what a few nodes measured again must fit what all nodes measured first.
    Slots go by PCI address if one set of addresses holds all nodes' GPUs, else by the order of the addresses; devices
    likewise by name. Without RDMA anywhere there is one rail: the network device that ranks use.
    """
    # Facts of another version are unusable here; judge_node.judge_stage() reports them.
    names, answers = (
        tuple(facts),
        [f if f is None or f["version"] == FACTS_VERSION else None for f in facts.values()],
    )
    gpus = [gpus_of(f) for f in answers]
    slots = like.slots if like is not None else _common([list(own) for own in gpus], "slot")
    places = [_places(list(own), slots) for own in gpus]
    ports = [_ports(f) for f in answers]
    rdma = any(own for own in ports)
    devices = like.devices if like is not None else _devices(ports, answers, rdma=rdma)
    rails = [_places(list(own), devices) for own in ports]
    up = np.zeros((len(names), len(devices)), dtype=bool)
    counters: dict[tuple[int, int], tuple[Port, Port]] = {}
    for node, shown in enumerate(ports):
        for name, (before, after) in shown.items():
            if (rail := rails[node].get(name)) is None:
                continue
            state = after or before
            up[node, rail] = state is not None and state.state in ("ACTIVE", None)
            if before is not None and after is not None:
                counters[node, rail] = (before, after)
    # Without RDMA ports a node is on the rail through its network device.
    if not rdma and len(devices) == 1:
        up[:, 0] = [f is not None and is_up(f["interface"]) for f in answers]
    present = np.zeros((len(names), len(slots)), dtype=bool)
    for node, own in enumerate(places):
        present[node, list(own.values())] = True
    links, down = _links(gpus, places, like)
    load = [float(f["load_s"]) for f in answers if f is not None]
    return NodeStage(
        names=names,
        answered=np.array([f is not None for f in answers], dtype=bool),
        slots=slots,
        present=present,
        rates=_rates(answers, places, len(slots)),
        links_down=down,
        links=links,
        uncorrectable={
            (node, slot): int(gpus[node][pci]["uncorrectable"])
            for node, own in enumerate(places)
            for pci, slot in own.items()
            if gpus[node][pci].get("uncorrectable")
        },
        devices=devices,
        port_up=up,
        counters=counters,
        nvlink={
            (node, slot): pair
            for node, own in enumerate(places)
            for slot, pair in _link_errors(answers[node], gpus[node], own).items()
        },
        kernel_log={node: driver_lines(f) for node, f in enumerate(answers) if f is not None},
        # Error rates use the shortest time in which they can have been counted.
        load_s=min(load, default=10.0) or 10.0,
        gpu=_kind(gpus) if like is None else like.gpu,
    )


def gpus_of(facts: Facts | None) -> dict[str, Facts]:
    """PCI address -> facts of each GPU that the driver shows, by NVML, else by CUDA; in order of the addresses."""
    if facts is None:
        return {}
    found: dict[str, Facts] = {}
    after = {g["pci"]: g for g in (facts["gpus_after"] or {}).get("gpus") or () if g.get("pci")}
    for gpu in (facts["gpus"] or {}).get("gpus") or ():
        if pci := gpu.get("pci"):
            # Errors that occurred during the load count as well.
            errors = [g.get("uncorrectable") for g in (gpu, after.get(pci, gpu))]
            most = max((e for e in errors if e is not None), default=None)
            found[pci] = {**gpu, "uncorrectable": most}
    for pci, rates in ((facts["rates"] or {}).get("gpus") or {}).items():
        found[pci] = {**rates, **found.get(pci, {})}
    return dict(sorted(found.items()))


def driver_lines(facts: Facts) -> tuple[str, ...] | None:
    """The driver's messages in the kernel log; None if the log cannot be read."""
    text = facts["kernel"]["text"]
    return None if text is None else tuple(line for line in text.splitlines() if parse(line) is not None)


def _order(name: str) -> tuple[bool, Any]:
    """Sort key: PCI addresses by their text, for they are hexadecimal; device names by their numbers."""
    pci = address(name) is not None
    return (not pci, name if pci else natural(name))


def _common(each: Sequence[list[str]], word: str) -> tuple[str, ...]:
    """Column names: the most frequent of the largest sets if it holds all others, else "slot 0", "slot 1", ..."""
    most = max((len(own) for own in each), default=0)
    sets = Counter(tuple(sorted(own, key=_order)) for own in each if len(own) == most and own)
    if not sets:
        return ()
    usual = sets.most_common(1)[0][0]
    if all(set(own) <= set(usual) for own in each):
        return usual
    # Machines of one kind may number their buses differently. One machine's name would be wrong for another.
    return tuple(f"{word} {n}" for n in range(most))


def _places(own: Sequence[str], columns_: Sequence[str]) -> dict[str, int]:
    """Name -> column: by name if all are columns' names, else in order."""
    at = {name: n for n, name in enumerate(columns_)}
    if all(name in at for name in own):
        return {name: at[name] for name in own}
    return dict(zip(sorted(own, key=_order), range(len(columns_)), strict=False))


def _ports(facts: Facts | None) -> dict[str, tuple[Port | None, Port | None]]:
    if facts is None:
        return {}
    before, after = facts["ports"]["before"], facts["ports"]["after"]
    return {
        name: (
            Port(**before[name]) if name in before else None,
            Port(**after[name]) if name in after else None,
        )
        for name in [*before, *(n for n in after if n not in before)]
    }


def _devices(
    ports: Sequence[Mapping[str, Any]], answers: Sequence[Facts | None], *, rdma: bool
) -> tuple[str, ...]:
    if rdma:
        return _common([list(own) for own in ports], "port")
    names = {f["interface"]["name"] for f in answers if f is not None and f["interface"]["name"]}
    return (names.pop(),) if len(names) == 1 else (NETWORK,)


def _rates(
    answers: Sequence[Facts | None], places: Sequence[Mapping[str, int]], slots: int
) -> dict[str, Floats]:
    found = {
        q.name: np.full((len(answers), slots, slots) if q.name == "p2p" else (len(answers), slots), np.nan)
        for q in RATES
    }
    for node, (facts, own) in enumerate(zip(answers, places, strict=True)):
        rates = (facts or {}).get("rates") or {}
        for pci, gpu in (rates.get("gpus") or {}).items():
            for name, key in _OF_GPU.items():
                if pci in own and gpu.get(key) is not None:
                    found[name][node, own[pci]] = gpu[key]
        for pair in rates.get("pairs") or ():
            if pair["from"] in own and pair["to"] in own:
                one, other = own[pair["from"]], own[pair["to"]]
                found["p2p"][node, one, other] = pair["gb_s"]
                found["p2p"][node, other, one] = pair["back_gb_s"]
    return found


def _links(
    gpus: Sequence[Mapping[str, Facts]], places: Sequence[Mapping[str, int]], like: NodeStage | None
) -> tuple[int, dict[tuple[int, int], tuple[int, ...]]]:
    """The usual number of active NVLinks per GPU, and the inactive ones by (node, slot)."""
    states = {
        (node, own[pci]): gpu["links"]
        for node, own in enumerate(places)
        for pci, gpu in gpus[node].items()
        if pci in own and gpu.get("links")
    }
    if like is not None:
        usual = like.links
    else:
        usual = median_high(_up(links) for links in states.values()) if states else 0
    # PCIe cards have unconnected links (12 of 18 are up by design): a link is down if most other GPUs have it up.
    down = {}
    for key, links in states.items():
        if _up(links) >= usual:
            continue
        off = [int(n) for n, state in links.items() if not state]
        mostly = [n for n in off if _mostly_up(n, states.values())]
        if chosen := mostly or off[: usual - _up(links)]:
            down[key] = tuple(chosen)
    return usual, down


def _up(links: Mapping[str, bool]) -> int:
    return sum(links.values())


def _mostly_up(link: int, states: Iterable[Mapping[str, bool]]) -> bool:
    known = [s[str(link)] for s in states if str(link) in s]
    return sum(known) * 2 > len(known)


def _link_errors(
    facts: Facts | None, gpus: Mapping[str, Facts], own: Mapping[str, int]
) -> dict[int, tuple[Links, Links]]:
    """Slot -> NVLink counters before and after the load, keyed by the GPU's PCI address."""
    texts = (facts or {}).get("link_errors") or [None, None]
    if texts[0] is None or texts[1] is None:
        return {}
    uuids = {gpu["uuid"]: pci for pci, gpu in gpus.items() if gpu.get("uuid")}
    found: dict[int, tuple[Links, Links]] = {}
    for which, text in enumerate(texts):
        for (uuid, link), counted in parse_nvlink_errors(text).items():
            pci = uuids.get(uuid)
            if pci in own and pci is not None:
                found.setdefault(own[pci], ({}, {}))[which][pci, link] = counted
    return found


def _kind(gpus: Sequence[Mapping[str, Facts]]) -> str | None:
    """The GPUs' name if all have the same; a floor of one kind does not apply to another."""
    kinds = {gpu["name"] for own in gpus for gpu in own.values() if gpu.get("name")}
    return kinds.pop() if len(kinds) == 1 else None
