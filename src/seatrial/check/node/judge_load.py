"""Verdicts on a node under load: GPU clocks and links, and rates with peers but without a floor. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seatrial.check.judging.compare import PEERS, median_of_others
from seatrial.check.judging.findings import Direction, Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import find_sku, shares
from seatrial.check.node.columns import gpus_of
from seatrial.check.node.judge_pairs import both_ways
from seatrial.check.outputs.gpu_state import HELD_DOWN, REASONS

Facts = Mapping[str, Any]

_OWN_SHARE = 0.8  # of the CPU time: with less, other work took part of what was measured


@dataclass(frozen=True)
class _Rate:
    """One rate that has peers and no floor. `suspect` and `broken` are shares of their median; 0 means never."""

    code: str
    what: str
    unit: str
    suspect: float
    broken: float
    algorithm: str
    direction: Direction = ""


_RATES = {
    "gemm_gflop_s": _Rate("NOD015", "fp32 GEMM on the CPU", "GFLOP/s", 0.8, 0.5, "fp32 GEMM, CPU"),
    "memory_gb_s": _Rate("NOD016", "copy in host memory", "GB/s", 0.5, 0.0, "read and write added"),
    "loopback_gb_s": _Rate("NOD017", "TCP on 127.0.0.1", "GB/s", 0.5, 0.0, "TCP", "one direction"),
    "write_gb_s": _Rate("NOD013", "writing to the checkpoint folder", "GB/s", 0.5, 0.0, "one file, synced"),
    "read_gb_s": _Rate("NOD013", "reading from the checkpoint folder", "GB/s", 0.5, 0.0, "one file"),
    "sustained_tflop_s": _Rate(
        "NOD024",
        "bf16 GEMMs on all GPUs at once",
        "TFLOP/s",
        shares().suspect,
        shares().broken,
        "bf16 GEMM",
    ),
    "d2h_gb_s": _Rate(
        *("NOD021", "copy from a GPU to the host", "GB/s", shares().suspect, shares().broken),
        *("device to host copy, pinned", "one direction"),
    ),
}
PAIRS = "pairs"  # key in Peers: not one value per GPU, so not in _RATES
_SHARES = {"memory_gb_s": "memory_share", "loopback_gb_s": "loopback_share"}


@dataclass
class Peers:
    """The readings of all nodes, sorted, by rate name. Empty by default: no peers."""

    values: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Iterable[Facts | None]) -> Peers:
        found = cls()
        for facts in nodes:
            for name, reading in _readings(facts or {}):
                if reading.why is None and reading.value is not None:
                    found.values.setdefault(name, []).append(reading.value)
            if pairs := both_ways(facts):
                found.values.setdefault(PAIRS, []).extend(pairs)
        for values in found.values.values():
            values.sort()
        return found


@dataclass(frozen=True)
class _Reading:
    value: float | None
    why: str | None  # why it is no evidence about the node; None: it is
    gpu: int | None = None
    pci: str | None = None


def judge_rates(facts: Facts, node: str, peers: Peers) -> Iterator[Finding]:
    """Judge each rate against the other nodes'. Without enough of them it is UNJUDGED, with the value in its text."""
    for name, reading in _readings(facts):
        rate = _RATES[name]
        target = Target(node=node, gpu=reading.gpu, pci=reading.pci)
        if reading.value is None or reading.why is not None:
            shown = "" if reading.value is None else f" (read: {reading.value:.4g} {rate.unit})"
            why = str(reading.why)
            text = f"{rate.what}: {why}{shown}"
            action = "" if reading.value is None else "measure again when the node is otherwise idle"
            yield Finding(rate.code, "UNJUDGED", target, text, why_unjudged=why, action=action)
            continue
        text = f"{rate.what}: {reading.value:.4g} {rate.unit}"
        values = peers.values.get(name, [])
        if len(values) <= PEERS:
            why = f"no floor is known, and fewer than {PEERS} other measurements exist"
            expected = Expected(None, rate.unit, "", rate.direction, rate.algorithm)
            yield Finding(
                *(rate.code, "UNJUDGED", target, text, reading.value, rate.unit, expected), why_unjudged=why
            )
            continue
        usual = median_of_others(values, reading.value)
        share = reading.value / usual if usual else 1.0
        verdict: Verdict = "FAIL" if share < rate.broken else "WARN" if share < rate.suspect else "PASS"
        source = f"median of {len(values) - 1} others; suspect below {rate.suspect:.0%}"
        expected = Expected(usual, rate.unit, source, rate.direction, rate.algorithm)
        if verdict != "PASS":
            text += f", {share:.0%} of the others' median"
        yield Finding(rate.code, verdict, target, text, reading.value, rate.unit, expected, usual)


def _readings(facts: Facts) -> Iterator[tuple[str, _Reading]]:
    rates = facts.get("rates") or {}
    cpu: Facts = rates.get("cpu") or {}
    for name in ("gemm_gflop_s", "memory_gb_s", "loopback_gb_s") if cpu else ():
        share = cpu.get(_SHARES.get(name, ""))
        why = None
        if cpu[name] is None:
            why = str(cpu.get("loopback_problem") or "no rate was measured")
        elif share is not None and share < _OWN_SHARE:
            why = f"other work was running: the measurement got only {share:.0%} of the CPU time"
        yield name, _Reading(cpu[name], why)
    storage = facts.get("storage") or {}
    for name in ("write_gb_s", "read_gb_s"):
        if storage.get(name) is not None:
            yield name, _Reading(storage[name], None)
    gpus = gpus_of(facts) if rates else {}
    for pci, gpu in (rates.get("gpus") or {}).items():
        for name in ("sustained_tflop_s", "d2h_gb_s"):
            if gpu.get(name) is not None:
                yield name, _Reading(gpu[name], None, gpus.get(pci, gpu).get("index"), pci)


def judge_gpu_load(facts: Facts, node: str) -> Iterator[Finding]:
    """Clocks and PCIe link of each GPU under load. Running at the power limit is normal for these cards and passes."""
    rates = facts.get("rates") or {}
    gpus = gpus_of(facts)
    for pci, gpu in (rates.get("gpus") or {}).items():
        target = Target(node=node, gpu=gpus.get(pci, gpu).get("index"), pci=pci)
        if gpu.get("problem") and gpu.get("broken"):
            yield Finding("NOD022", "FAIL", target, gpu["problem"])
            continue
        if gpu.get("problem"):
            yield Finding("NOD019", "UNJUDGED", target, gpu["problem"], why_unjudged=gpu["problem"])
            continue
        load = gpu.get("load")
        if load is None or not load["samples"]:
            why = gpu.get("load_problem") or "no sample was taken under load"
            yield Finding("GPU007", "UNJUDGED", target, f"clocks under load: {why}", why_unjudged=why)
            continue
        yield _clocks(load, target)
        yield from _pcie(load, target, gpu.get("name"))


def _clocks(load: Facts, target: Target) -> Finding:
    clock, most = load["sm_mhz"], load["limits"].get("sm_mhz")
    expected = None if most is None else Expected(most, "MHz", "the card's highest SM clock")
    text = "clocks under load: " + ("not reported" if clock is None else f"SM {clock:.0f} MHz")
    if most is not None:
        text += f" of {most:.0f}"
    if load["reasons"] is None:
        why = "the driver does not report the clock throttle reasons"
        return Finding("GPU007", "UNJUDGED", target, text, clock, "MHz", expected, why_unjudged=why)
    held = [name for bit, name in REASONS.items() if load["reasons"] & HELD_DOWN & bit]
    if load["temperature_c"] is not None:
        text += f", {load['temperature_c']:.0f} °C"
    if load["power_w"] is not None:
        text += f", {load['power_w']:.0f} W"
    if not held:
        if load["reasons"] & 0x4:
            text += ", limited by its power cap, which is normal under this load"
        return Finding("GPU007", "PASS", target, text, clock, "MHz" if clock is not None else "", expected)
    text += f", throttled: {', '.join(held)}"
    slow = clock is not None and most is not None and clock < shares().broken * most
    return Finding("GPU007", "FAIL" if slow else "WARN", target, text, clock, "MHz", expected)


def _pcie(load: Facts, target: Target, name: str | None) -> Iterator[Finding]:
    limits, bad = load["limits"], False
    source = "maximum of card and slot, from the driver"
    for key, unit, what in (("pcie_width", "lanes", "width x"), ("pcie_gen", "generation", "generation ")):
        have, could = load[key], limits.get(key)
        if have is None or could is None or have >= could:
            continue
        bad = True
        verdict: Verdict = "FAIL" if key == "pcie_width" and find_sku(name) is not None else "WARN"
        text = f"PCIe {what}{have:.0f} of {could:.0f} under load"
        yield Finding("GPU008", verdict, target, text, have, unit, Expected(could, unit, source))
    if bad:
        return
    if load["pcie_gen"] is None or load["pcie_width"] is None:
        why = "the driver does not report generation and width"
        yield Finding("GPU008", "UNJUDGED", target, f"PCIe under load: {why}", why_unjudged=why)
        return
    text = f"PCIe generation {load['pcie_gen']:.0f}, x{load['pcie_width']:.0f} under load"
    yield Finding("GPU008", "PASS", target, text, load["pcie_gen"], "generation")


def judge_gpu_presence(facts: Facts, node: str, *, wanted: bool) -> Iterator[Finding]:
    """GPUs that the bus or /dev shows and the driver does not, and GPUs in use. `wanted`: the node must have some."""
    planned: int | None = facts["options"]["gpus"]
    target, inventory = Target(node=node), facts["inventory"]
    nvidia = [g for g in inventory["pci_gpus"] if g["vendor"] == "NVIDIA"]
    shown: Sequence[Facts] = (facts["gpus"] or {}).get("gpus") or ()
    problem = (facts["gpus"] or {}).get("problem")
    others = sorted({g["vendor"] for g in inventory["pci_gpus"]} - {"NVIDIA"})
    if others:
        why = f"{', '.join(others)} GPUs are on the bus, but there is no tool to query them"
        yield Finding("NOD018", "UNJUDGED", target, why, why_unjudged=why)
    asked = facts["gpus"] is not None and problem is None
    # A container shows the host's whole bus, and a scheduler's job device files of others' GPUs, which it cannot open.
    files = (facts["gpus"] or {}).get("files") or {}
    ours = [name for name, result in files.items() if result not in ("EPERM", "EACCES")]
    if asked and len(shown) < len(ours):
        bad = ", ".join(
            f"{name}: {result}" for name, result in files.items() if name in ours and result != "ok"
        )
        text = f"/dev has {len(ours)} GPUs, the driver shows {len(shown)}" + (f" ({bad})" if bad else "")
        expected = Expected(len(ours), "GPUs", "/dev/nvidia*")
        yield Finding("NOD018", "FAIL", target, text, len(shown), "GPUs", expected)
    elif nvidia and inventory["nvidia_driver"] is None and not inventory["gpu_files"]:
        text = f"{len(nvidia)} NVIDIA GPUs on the bus, and no driver is loaded"
        yield Finding(
            "NOD018", "FAIL" if wanted else "WARN", target, text, 0, "GPUs", Expected(len(nvidia), "GPUs")
        )
    elif wanted and not asked and not inventory["gpu_files"]:
        yield Finding(
            "GPU001",
            "FAIL",
            target,
            "no GPU, but the other nodes have some or the job requires them",
            0,
            "GPUs",
        )
    elif planned and not asked and not inventory["gpu_files"]:
        text = f"no GPU, the job requires {planned} a node: its ranks would run on CPUs"
        yield Finding("GPU001", "WARN", target, text, 0, "GPUs", Expected(planned, "GPUs", "the job file"))
    rates: Facts = facts["rates"] or {}
    usable = len(rates.get("gpus") or ())
    tried = rates.get("device") == "cuda" and rates.get("whole") and not rates["failed"]
    if asked and shown and rates.get("device") == "cpu":
        why = (
            f"the driver shows {len(shown)} GPUs, but this process can use none (CUDA_VISIBLE_DEVICES, /dev)"
        )
        yield Finding("NOD022", "UNJUDGED", target, why, 0, "GPUs", why_unjudged=why)
    elif asked and tried and usable < len(shown):
        # The environment may have selected fewer, or fewer may work: one is as likely as the other.
        why = f"CUDA shows {usable} of {len(shown)} GPUs: CUDA_VISIBLE_DEVICES, MIG, or unusable cards"
        yield Finding("NOD022", "UNJUDGED", target, why, usable, "GPUs", why_unjudged=why)
    after = facts["gpus_after"]
    if asked and after is not None and after["problem"] is None:
        still = {g.get("pci") for g in after["gpus"]}
        for gpu in (g for g in shown if g.get("pci") and g["pci"] not in still):
            here = Target(node=node, gpu=gpu["index"], pci=gpu["pci"])
            yield Finding("GPU002", "FAIL", here, "the driver no longer shows it after the load")
    elif asked and after is not None:
        hangs = after["ended"] in ("hung", "stuck")
        text = f"after the load: {after['problem']}"
        if hangs:
            yield Finding("NOD002", "FAIL", target, text)
        else:
            yield Finding("NOD001", "UNJUDGED", target, text, why_unjudged=text)
    for gpu in shown:
        if gpu.get("processes"):
            here = Target(node=node, gpu=gpu["index"], pci=gpu["pci"])
            text = f"{gpu['processes']} other program{'s' * (gpu['processes'] > 1)} on it"
            yield Finding("NOD019", "WARN", here, text, gpu["processes"], "programs", Expected(0, "programs"))
