"""Judge each GPU by the state that the driver reports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import find_sku, shares
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.gpu_state import GpuState, GpuStates
from seatrial.check.outputs.smi_query import BEGINS, matches, parse
from seatrial.check.outputs.smi_query_damage import damage
from seatrial.check.outputs.smi_state import states_of
from seatrial.check.outputs.smi_table import inforom_findings
from seatrial.check.outputs.tool import Context, Lines, Tool, evidence
from seatrial.hardware.catalogue import find_gpu

_RETIRED_LIMIT = 63  # DCGM, dcgm_gpu_hardware_limits.h
_RETIRED_DOUBLE_LIMIT = 15  # same file: soft limit
# `nvidia-smi -q -x` of driver 595 (influxdata/telegraf, plugins/inputs/nvidia_smi/testdata). A pending repair is done
# at the next reset, like a row remapping; unrepairable memory stays so.
_REPAIRS: dict[str, tuple[str, Verdict]] = {
    "unrepairable_memory": ("GPU004", "FAIL"),
    "channel_repair_pending": ("GPU005", "WARN"),
    "tpc_repair_pending": ("GPU005", "WARN"),
}
_ALIKE = ("kind", "VBIOS", "memory", "ECC mode", "MIG mode", "power limit")


class GpuJudge:
    """The findings about one GPU."""

    def __init__(self, states: GpuStates, context: Context, place: int) -> None:
        self.states, self.gpu = states, states.gpus[place]
        # The output is in the driver's order, but only some GPUs may have been requested.
        alone = states.attached not in (None, len(states.gpus)) or self.gpu.pci is None
        index = self.gpu.index if self.gpu.index is not None else None if alone else place
        self.target = Target(node=context.node, gpu=index, pci=self.gpu.pci)

    def places(self, *names: str) -> tuple[str, ...]:
        """The places of these fields, or keys of fields."""
        return _places(self.states, sorted(self.gpu.lines[name] for name in names if name in self.gpu.lines))

    def finding(
        self,
        code: str,
        verdict: Verdict,
        message: str,
        *names: str,
        measured: float | str | None = None,
        unit: str = "",
        expected: Expected | None = None,
        peers_median: float | None = None,
    ) -> Finding:
        places = self.places(*names)
        return Finding(
            code, verdict, self.target, message, measured, unit, expected, peers_median, evidence=places
        )

    def faults(self) -> Iterator[Finding]:
        """All but what is damaged in the output."""
        gpu = self.gpu
        if gpu.errors:
            name, text = next(iter(gpu.errors.items()))
            yield self.finding(
                "GPU002", "FAIL", f"{text} instead of a value: {name}", *gpu.errors, measured=text
            )
        if gpu.needs_reset:
            places = _places(self.states, sorted(gpu.needs_reset))
            yield Finding("GPU009", "FAIL", self.target, "the GPU requires a reset", evidence=places)
        for check in (
            self._ecc,
            self._remapping,
            self._retired,
            self._recovery,
            self._clocks,
            self._pcie,
            self._fabric,
        ):
            yield from check()

    def _ecc(self) -> Iterator[Finding]:
        gpu = self.gpu
        lost = {where: count for where, count in gpu.uncorrectable.items() if count is not None and count > 0}
        if lost:
            text = f"{sum(map(int, lost.values()))} uncorrectable memory errors since the driver was loaded"
            measured = next(iter(lost.values()))
            yield self.finding("GPU003", "FAIL", text, *lost, measured=measured, unit="errors")
        if gpu.sram_threshold_exceeded:
            text = "SRAM errors have exceeded NVIDIA's threshold"
            yield self.finding("GPU003", "FAIL", text, "sram_threshold_exceeded")
        for name, (code, verdict) in _REPAIRS.items():
            if name in gpu.repairs:
                text = f"{name.replace('_', ' ')}: Yes"
                yield self.finding(code, verdict, text, name, measured="Yes")
        if gpu.ecc is False and find_gpu(gpu.name or "") is not None:
            yield self.finding("GPU012", "WARN", "ECC is off", "ECC mode", measured="Disabled")

    def _remapping(self) -> Iterator[Finding]:
        gpu = self.gpu
        if gpu.remapping_failed:
            yield self.finding("GPU004", "FAIL", "a memory row could not be remapped", "remapping_failed")
        if gpu.banks_without_spare:
            text = f"{gpu.banks_without_spare:.0f} bank(s) of memory without a spare row"
            yield self.finding(
                *("GPU004", "WARN", text, "banks_without_spare"),
                measured=gpu.banks_without_spare,
                unit="banks",
            )
        if gpu.remapping_pending:
            # A row that failed since the driver was loaded may still be in use; an older one is kept from new work.
            known = [count for count in gpu.uncorrectable.values() if count is not None]
            fresh = any(known) if known else None
            text = "remapping of a memory row is pending until a reset"
            if gpu.remapped_uncorrectable is not None:
                text += f" ({gpu.remapped_uncorrectable:.0f} remapped for uncorrectable errors over the card's lifetime)"
            if fresh is False:
                text += "; the card remains usable until then"
            yield self._pending(text, "remapping_pending", fresh)

    def _pending(self, text: str, name: str, bad: bool | None) -> Finding:
        """`bad`: whether it is for an uncorrectable error; None if the output does not say."""
        code = "GPU005"
        if bad:
            return self.finding(code, "FAIL", text, name)
        if bad is None:
            text += "; whether for an uncorrectable error is not in the output"
            return self.finding(code, "UNJUDGED", text, name)
        action = "reset the GPU when it is idle"
        return Finding(code, "PASS", self.target, text, action=action, evidence=self.places(name))

    def _retired(self) -> Iterator[Finding]:
        gpu = self.gpu
        double_pages = gpu.retired_double or 0
        pages = (gpu.retired_single or 0) + double_pages
        if pages >= _RETIRED_LIMIT or double_pages > _RETIRED_DOUBLE_LIMIT:
            verdict: Verdict = "FAIL" if pages >= _RETIRED_LIMIT else "WARN"
            text = f"{pages:.0f} memory pages retired, {double_pages:.0f} of them for double-bit errors"
            expected = Expected(f"fewer than {_RETIRED_LIMIT}", "pages", "DCGM, dcgm_gpu_hardware_limits.h")
            yield self.finding(
                *("GPU006", verdict, text, "retired_single", "retired_double"),
                measured=pages,
                unit="pages",
                expected=expected,
            )
        if gpu.retirement_pending:
            text = f"retirement of a memory page is pending ({double_pages:.0f} double-bit pages so far)"
            bad = None if gpu.retired_double is None else double_pages > 0
            yield self._pending(text, "retirement_pending", bad)

    def _recovery(self) -> Iterator[Finding]:
        gpu = self.gpu
        if (action := gpu.recovery_action) not in (None, "None"):
            text = f"recovery action: {action}"
            yield self.finding("GPU009", "FAIL", text, "recovery_action", measured=action)
        if gpu.reset_required:
            text = "the driver requires a reset of the GPU"
            yield self.finding("GPU009", "FAIL", text, "reset_required")
        if gpu.drain_recommended:
            text = "the driver recommends to drain and reset the GPU"
            yield self.finding("GPU009", "FAIL", text, "drain_recommended")

    def _clocks(self) -> Iterator[Finding]:
        gpu = self.gpu
        if not gpu.held_down:
            return
        clock, most = gpu.sm_mhz, gpu.max_sm_mhz
        slow = clock is not None and most is not None and clock < shares().broken * most and not _idle(gpu)
        text = f"clocks throttled: {', '.join(sorted(gpu.held_down)).replace('_', ' ')}"
        expected = None
        if clock is not None and most is not None:
            text += f"; SM clock {clock:.0f} of {most:.0f} MHz"
            expected = Expected(most, "MHz", "the card's highest SM clock")
        yield self.finding(
            "GPU007",
            "FAIL" if slow else "WARN",
            text,
            *gpu.held_down,
            measured=clock,
            unit="MHz" if clock is not None else "",
            expected=expected,
            peers_median=self._median_clock(),
        )

    def _median_clock(self) -> float | None:
        known = [g.sm_mhz for g in self.states.gpus if g is not self.gpu and g.sm_mhz is not None]
        return median(known) if known else None

    def _pcie(self) -> Iterator[Finding]:
        gpu = self.gpu
        have, could = gpu.pcie_width, gpu.max_pcie_width
        if have is not None and could is not None and have < could:
            sku = find_sku(gpu.name)
            # Cards without NVLink also sit in x8 slots: public outputs of a healthy T4 and A10G show x8 of x16
            # (influxdata/telegraf, plugins/inputs/nvidia_smi/testdata).
            verdict: Verdict = "FAIL" if sku is not None and sku.name != "without NVLink" else "WARN"
            text = f"PCIe width x{have:.0f} of x{could:.0f}"
            expected = Expected(could, "lanes", "maximum of card and slot, from the driver")
            yield self.finding(
                *("GPU008", verdict, text, "pcie_width", "max_pcie_width"),
                measured=have,
                unit="lanes",
                expected=expected,
            )
        have, could = gpu.pcie_gen, gpu.max_pcie_gen
        if have is not None and could is not None and have < could and not _idle(gpu):
            text = f"PCIe generation {have:.0f} of {could:.0f} while the GPU works"
            expected = Expected(could, "generation", "maximum of card and slot, from the driver")
            yield self.finding(
                "GPU008", "WARN", text, "pcie_gen", "max_pcie_gen", measured=have, expected=expected
            )

    def _fabric(self) -> Iterator[Finding]:
        state, status = self.gpu.fabric_state, self.gpu.fabric_status
        if state not in (None, "Completed"):
            text = f"fabric state: {state}"
            expected = Expected("Completed", "", "docs.nvidia.com, NVML: nvmlGpuFabricInfo")
            yield self.finding("NVL005", "FAIL", text, "fabric_state", measured=state, expected=expected)
        if status not in (None, "Success"):
            yield self.finding("NVL005", "FAIL", f"fabric status: {status}", "fabric_status", measured=status)
        for name, value in self.gpu.fabric_health.items():
            if name == "partition_assigned":  # how the fabric is partitioned, not its health
                continue
            bad = {"bandwidth": "Degraded", "summary": "Unhealthy"}.get(name, "True")
            if value == bad or (name == "incorrect_configuration" and value not in ("N/A", "None", "False")):
                verdict: Verdict = "WARN" if name == "route_recovery_in_progress" else "FAIL"
                yield self.finding(
                    "NVL005", verdict, f"fabric health: {name.replace('_', ' ')}: {value}", name
                )
            elif name == "summary" and value not in ("Healthy", "N/A"):
                yield self.finding("NVL005", "WARN", f"fabric health: {value}", name)


def differences(states: GpuStates, context: Context) -> Iterator[Finding]:
    """Findings for properties that differ between the GPUs of this node."""
    for what in _ALIKE:
        entries = [
            (place, value)
            for place, gpu in enumerate(states.gpus)
            if (value := gpu.alike.get(what)) is not None
        ]
        kinds = Counter(value for _, value in entries)
        if len(kinds) < 2:
            continue
        usual, count = kinds.most_common(1)[0]
        for place, value in entries:
            # Without a majority, as with two and two, all are reported.
            if value != usual or count * 2 <= len(entries):
                others = usual if value != usual else "others differ"
                text = f"{what} is {value}, most of its peers have {others}"
                yield GpuJudge(states, context, place).finding("GPU010", "WARN", text, what, measured=value)


def _missing(states: GpuStates, context: Context) -> Iterator[Finding]:
    target = Target(node=context.node)
    gpus, attached = states.gpus, states.attached
    for line, text in states.lost:
        yield Finding("GPU002", "FAIL", target, text[:200], evidence=_places(states, [line]))
    yield from inforom_findings(states.corrupt, states.file, context)
    if attached is None and any(g.pci is not None for g in gpus):
        why = "the number of attached GPUs is missing: the beginning is truncated"
        yield Finding("GPU011", "UNJUDGED", target, why, evidence=(states.file,))
    if any(g.pci is None and len(g.sections) > 1 for g in gpus):
        why = "several sections without a GPU's heading: the beginning is truncated"
        yield Finding("GPU011", "UNJUDGED", target, why, evidence=(states.file,))
    shown = len(gpus) + len(states.lost)
    places = _places(states, [g.line for g in gpus])
    if attached is not None and shown < attached:
        why = f"{attached} GPUs attached, {shown} in the output: only these were selected, or it is truncated"
        yield Finding("GPU011", "UNJUDGED", target, why, evidence=places)
    elif gpus and all(g.pci is not None for g in gpus):
        names = {g.name for g in gpus}
        sku = find_sku(names.pop()) if len(names) == 1 else None
        yield from count_findings(range(len(gpus)), sku, context, places)


def judge(states: GpuStates, context: Context) -> list[Finding]:
    """Findings for every GPU of the output. A GPU without faults gives one PASS."""
    found = [*_missing(states, context), *differences(states, context)]
    for place, gpu in enumerate(states.gpus):
        work = GpuJudge(states, context, place)
        own = list(work.faults())
        for what, line in gpu.damage:
            own.append(Finding("GPU011", "UNJUDGED", work.target, what, evidence=_places(states, [line])))
        if all(f.verdict == "PASS" for f in own):
            sections = sorted(s.replace("_", " ") for s in gpu.sections)
            where = f"{len(sections)} sections" if len(sections) > 3 else ", ".join(sections)
            text = f"no faults in {where or 'what the driver reports'}"
            own.append(Finding("GPU011", "PASS", work.target, text, evidence=_places(states, [gpu.line])))
        found += own
    return found


def _places(states: GpuStates, lines: Iterable[int | None]) -> tuple[str, ...]:
    """The places of these lines; the whole file if it is not text."""
    return evidence(states.file, (n for n in lines if n is not None)) if states.printed else (states.file,)


def _idle(gpu: GpuState) -> bool:
    """Whether the card reports that it is idle, or does not report state P0."""
    # The slower states are idle states, even if a power cap is given as the reason.
    level = gpu.performance_state
    if level is not None and re.fullmatch(r"P(?:[5-9]|1[0-5])", level):
        return True
    return gpu.idle if gpu.idle is not None else level != "P0"


def inventory(states: GpuStates) -> dict[str, str | int | float]:
    """Properties compared between siblings: number and kind of GPUs, driver, VBIOS, memory."""
    found: dict[str, str | int | float] = {}
    if states.attached is not None:
        found["GPUs"] = states.attached
    if states.driver is not None:
        found["driver"] = states.driver
    for what in ("kind", "VBIOS", "memory"):
        texts = sorted({value for g in states.gpus if (value := g.alike.get(what)) is not None})
        if texts:
            found["GPU" if what == "kind" else what] = ", ".join(texts)
    return found


def _read(lines: Lines, file: str) -> GpuStates:
    query = parse(lines, file)
    return states_of(query, lambda gpu: damage(gpu, query.whole))


TOOLS: tuple[Tool[GpuStates], ...] = (
    Tool("nvidia-smi -q", matches, _read, judge, inventory, first_line=BEGINS),
)
