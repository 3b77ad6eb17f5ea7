"""What is wrong with each GPU, by what `nvidia-smi -q` says of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from statistics import median

from seatrial.check.findings import Expected, Finding, Target, Verdict
from seatrial.check.floors import find_sku, shares
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.smi_query import BEGINS, Gpu, Query, Value, matches, number, parse
from seatrial.check.outputs.smi_query_damage import ERRORS, NEEDS_RESET, REASONS, damage
from seatrial.check.outputs.smi_table import inforom_findings
from seatrial.check.tool import Context, Tool, evidence
from seatrial.hardware.catalogue import find_gpu

_RETIRED_LIMIT = 63  # DCGM, dcgm_gpu_hardware_limits.h
_RETIRED_DOUBLE_LIMIT = 15  # the same: soft limit
# `nvidia-smi -q -x` of driver 595 (influxdata/telegraf, plugins/inputs/nvidia_smi/testdata). A repair that waits is made at
# the next reset, as a row's; what cannot be repaired stays so.
_REPAIRS: dict[str, tuple[str, Verdict]] = {
    "unrepairable_memory": ("GPU004", "FAIL"),
    "channel_repair_pending": ("GPU005", "WARN"),
    "tpc_repair_pending": ("GPU005", "WARN"),
}
_HELD_DOWN = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
# Public outputs of healthy cards have an error here, which says nothing of the card: GeForce (driver 535.154.05), and all
# V100s of a machine whose host bridge cannot be asked (driver 550).
_QUIRKS = ("addressing_mode", "pci.gpu_link_info.pcie_generation.host_max")
# What must be equal on all GPUs of a node: what it is called, and where it stands in text and XML.
_ALIKE = {
    "kind": ("product_name",),
    "VBIOS": ("vbios_version",),
    "memory": ("fb_memory_usage.total",),
    "ECC mode": ("ecc_mode.current", "ecc_mode.current_ecc"),
    "MIG mode": ("mig_mode.current", "mig_mode.current_mig"),
    "power limit": ("gpu_power_readings.current_power_limit", "power_readings.enforced_power_limit"),
}


class Judge:
    """Findings about each GPU of one output, about all of them, and about missing ones."""

    def __init__(self, query: Query, context: Context) -> None:
        self.query, self.context = query, context

    def target(self, place: int, gpu: Gpu) -> Target:
        # The order of the output is the driver's, but a single GPU may have been asked for.
        alone = self.query.attached not in (None, len(self.query.gpus)) or gpu.pci is None
        index = gpu.index if gpu.index is not None else None if alone else place
        return Target(node=self.context.node, gpu=index, pci=gpu.pci)

    def finding(
        self,
        code: str,
        verdict: Verdict,
        target: Target,
        message: str,
        *values: Value | None,
        measured: float | str | None = None,
        unit: str = "",
        expected: Expected | None = None,
        peers_median: float | None = None,
    ) -> Finding:
        lines = sorted(v.line for v in values if v is not None)
        return Finding(
            code,
            verdict,
            target,
            message,
            measured,
            unit,
            expected,
            peers_median,
            evidence=evidence(self.query.file, lines),
        )

    def of_gpu(self, index: int, gpu: Gpu) -> Iterator[Finding]:
        target = self.target(index, gpu)
        broken = {k: v for k, v in gpu.values.items() if v.text in ERRORS and k not in _QUIRKS}
        if broken:
            name, value = next(iter(broken.items()))
            text = f"{value.text} instead of a value: {name}"
            yield self.finding("GPU002", "FAIL", target, text, *broken.values(), measured=value.text)
        needs = [v for v in gpu.values.values() if v.text in NEEDS_RESET]
        if needs:
            yield self.finding("GPU009", "FAIL", target, "the GPU requires a reset", *needs)
        for check in (
            self._ecc,
            self._remapping,
            self._retired,
            self._recovery,
            self._clocks,
            self._pcie,
            self._fabric,
        ):
            yield from check(target, gpu)

    def _ecc(self, target: Target, gpu: Gpu) -> Iterator[Finding]:
        lost = [
            v for k, v in gpu.below("ecc_errors.volatile") if _is_uncorrectable(k) and (number(v) or 0) > 0
        ]
        if lost:
            text = f"{sum(int(number(v) or 0) for v in lost)} uncorrectable memory errors since the driver was loaded"
            yield self.finding("GPU003", "FAIL", target, text, *lost, measured=number(lost[0]), unit="errors")
        past = gpu.get("ecc_errors.aggregate.sram_threshold_exceeded")
        if past is not None and past.text == "Yes":
            yield self.finding(
                "GPU003", "FAIL", target, "static memory has passed NVIDIA's threshold of errors", past
            )
        for name, (code, verdict) in _REPAIRS.items():
            value = gpu.get(f"ecc_errors.{name}")
            if value is not None and value.text == "Yes":
                text = f"{name.replace('_', ' ')}: Yes"
                yield self.finding(code, verdict, target, text, value, measured="Yes")
        mode = gpu.get("ecc_mode.current", "ecc_mode.current_ecc")
        if mode is not None and mode.text == "Disabled" and find_gpu(gpu.name or "") is not None:
            yield self.finding("GPU012", "WARN", target, "ECC is off", mode, measured="Disabled")

    def _remapping(self, target: Target, gpu: Gpu) -> Iterator[Finding]:
        failed = gpu.get("remapped_rows.remapping_failure_occurred", "remapped_rows.remapped_row_failure")
        if failed is not None and failed.text == "Yes":
            yield self.finding("GPU004", "FAIL", target, "a memory row could not be remapped", failed)
        none = gpu.get(
            "remapped_rows.bank_remap_availability_histogram.none",
            "remapped_rows.row_remapper_histogram.row_remapper_histogram_none",
        )
        if none is not None and (number(none) or 0) > 0:
            text = f"{none.text} of memory without a spare row"
            yield self.finding("GPU004", "WARN", target, text, none, measured=number(none), unit="banks")
        pending = gpu.get("remapped_rows.pending", "remapped_rows.remapped_row_pending")
        if pending is not None and pending.text == "Yes":
            # A fault of this very boot may still be in use; an older one is kept away from new work.
            counts = [number(v) for k, v in gpu.below("ecc_errors.volatile") if _is_uncorrectable(k)]
            known = [n for n in counts if n is not None]
            fresh = any(known) if known else None
            rows = gpu.get("remapped_rows.uncorrectable_error", "remapped_rows.remapped_row_unc")
            text = "a memory row waits for a reset to be remapped"
            if rows is not None:
                text += f" ({rows.text} remapped for uncorrectable errors in the card's life)"
            if fresh is False:
                text += "; the card can work until then"
            yield self._pending(target, text, pending, fresh)

    def _pending(self, target: Target, text: str, value: Value, bad: bool | None) -> Finding:
        """`bad`: whether it is for an uncorrectable error; None if the output does not say."""
        code = "GPU005"
        if bad:
            return self.finding(code, "FAIL", target, text, value)
        if bad is None:
            text += "; whether for an uncorrectable error is not in the output"
            return self._unjudged(target, text, value, code=code)
        place = evidence(self.query.file, [value.line])
        action = "reset the GPU when it is idle"
        return Finding(code, "PASS", target, text, action=action, evidence=place)

    def _retired(self, target: Target, gpu: Gpu) -> Iterator[Finding]:
        single = gpu.get(
            "retired_pages.single_bit_ecc", "retired_pages.multiple_single_bit_retirement.retired_count"
        )
        double = gpu.get("retired_pages.double_bit_ecc", "retired_pages.double_bit_retirement.retired_count")
        pages, double_pages = (number(single) or 0) + (number(double) or 0), number(double) or 0
        expected = Expected(f"fewer than {_RETIRED_LIMIT}", "pages", "DCGM, dcgm_gpu_hardware_limits.h")
        if pages >= _RETIRED_LIMIT or double_pages > _RETIRED_DOUBLE_LIMIT:
            verdict: Verdict = "FAIL" if pages >= _RETIRED_LIMIT else "WARN"
            text = f"{pages:.0f} memory pages retired, {double_pages:.0f} of them for double-bit errors"
            yield self.finding(
                "GPU006",
                verdict,
                target,
                text,
                single,
                double,
                measured=pages,
                unit="pages",
                expected=expected,
            )
        pending = gpu.get(
            "retired_pages.pending_page_blacklist",
            "retired_pages.pending_blacklist",
            "retired_pages.pending_retirement",
        )
        if pending is not None and pending.text == "Yes":
            text = f"a memory page waits to be retired ({double_pages:.0f} double-bit pages so far)"
            yield self._pending(target, text, pending, None if number(double) is None else double_pages > 0)

    def _recovery(self, target: Target, gpu: Gpu) -> Iterator[Finding]:
        action = gpu.get("gpu_recovery_action")
        if action is not None and action.text != "None":
            text = f"recovery action: {action.text}"
            yield self.finding("GPU009", "FAIL", target, text, action, measured=action.text)
        required = gpu.get("gpu_reset_status.reset_required")
        if required is not None and required.text == "Yes":
            yield self.finding("GPU009", "FAIL", target, "the driver requires a reset of the GPU", required)
        drain = gpu.get("gpu_reset_status.drain_and_reset_recommended")
        if drain is not None and drain.text == "Yes":
            yield self.finding(
                "GPU009", "FAIL", target, "the driver recommends to drain and reset the GPU", drain
            )

    def _clocks(self, target: Target, gpu: Gpu) -> Iterator[Finding]:
        active = {
            name: value
            for section in REASONS
            for key, value in gpu.below(section)
            if value.text == "Active" and (name := _reason(key)) in _HELD_DOWN
        }
        if not active:
            return
        now, top = gpu.get("clocks.sm", "clocks.sm_clock"), gpu.get("max_clocks.sm", "max_clocks.sm_clock")
        clock, most = number(now), number(top)
        slow = clock is not None and most is not None and clock < shares().broken * most and not _idle(gpu)
        text = f"clocks held down: {', '.join(sorted(active)).replace('_', ' ')}"
        expected = None
        if clock is not None and most is not None:
            text += f"; SM clock {clock:.0f} of {most:.0f} MHz"
            expected = Expected(most, "MHz", "the card's highest SM clock")
        yield self.finding(
            "GPU007",
            "FAIL" if slow else "WARN",
            target,
            text,
            *active.values(),
            measured=clock,
            unit="MHz" if clock is not None else "",
            expected=expected,
            peers_median=self._median_clock(gpu),
        )

    def _median_clock(self, gpu: Gpu) -> float | None:
        others = [number(g.get("clocks.sm", "clocks.sm_clock")) for g in self.query.gpus if g is not gpu]
        known = [c for c in others if c is not None]
        return median(known) if known else None

    def _pcie(self, target: Target, gpu: Gpu) -> Iterator[Finding]:
        text_path, xml_path = "pci.gpu_link_info", "pci.pci_gpu_link_info"
        width = gpu.get(f"{text_path}.link_width.current", f"{xml_path}.link_widths.current_link_width")
        widest = gpu.get(f"{text_path}.link_width.max", f"{xml_path}.link_widths.max_link_width")
        have, could = number(width), number(widest)
        if have is not None and could is not None and have < could:
            sku = find_sku(gpu.name)
            # Cards without NVLink stand in slots of eight lanes too: public outputs of a healthy T4 and A10G read x8 of x16
            # (influxdata/telegraf, plugins/inputs/nvidia_smi/testdata).
            verdict: Verdict = "FAIL" if sku is not None and sku.name != "without NVLink" else "WARN"
            text = f"PCIe width x{have:.0f} of x{could:.0f}"
            expected = Expected(could, "lanes", "what card and slot can do, by the driver")
            yield self.finding(
                "GPU008", verdict, target, text, width, widest, measured=have, unit="lanes", expected=expected
            )
        speed = gpu.get(f"{text_path}.pcie_generation.current", f"{xml_path}.pcie_gen.current_link_gen")
        fastest = gpu.get(f"{text_path}.pcie_generation.max", f"{xml_path}.pcie_gen.max_link_gen")
        have, could = number(speed), number(fastest)
        if have is not None and could is not None and have < could and not _idle(gpu):
            text = f"PCIe generation {have:.0f} of {could:.0f} while the GPU works"
            expected = Expected(could, "generation", "what card and slot can do, by the driver")
            yield self.finding(
                "GPU008", "WARN", target, text, speed, fastest, measured=have, expected=expected
            )

    def _fabric(self, target: Target, gpu: Gpu) -> Iterator[Finding]:
        state, status = gpu.get("fabric.state"), gpu.get("fabric.status")
        if state is not None and state.text != "Completed":
            text = f"fabric state: {state.text}"
            expected = Expected("Completed", "", "docs.nvidia.com, NVML: nvmlGpuFabricInfo")
            yield self.finding("NVL005", "FAIL", target, text, state, measured=state.text, expected=expected)
        if status is not None and status.text != "Success":
            yield self.finding(
                "NVL005", "FAIL", target, f"fabric status: {status.text}", status, measured=status.text
            )
        for key, value in gpu.below("fabric.health"):
            name = key.rpartition(".")[2]
            if name == "partition_assigned":  # how the fabric is shared out, not how it is
                continue
            bad = {"bandwidth": "Degraded", "summary": "Unhealthy"}.get(name, "True")
            if value.text == bad or (
                name == "incorrect_configuration" and value.text not in ("N/A", "None", "False")
            ):
                verdict: Verdict = "WARN" if name == "route_recovery_in_progress" else "FAIL"
                yield self.finding(
                    "NVL005", verdict, target, f"fabric health: {name.replace('_', ' ')}: {value.text}", value
                )
            elif name == "summary" and value.text not in ("Healthy", "N/A"):
                yield self.finding("NVL005", "WARN", target, f"fabric health: {value.text}", value)

    def damage(self, target: Target, gpu: Gpu) -> Iterator[Finding]:
        for what, value in damage(gpu, self.query.whole):
            yield self._unjudged(target, what, value)

    def _unjudged(self, target: Target, why: str, *values: Value | None, code: str = "GPU011") -> Finding:
        places = evidence(self.query.file, sorted(v.line for v in values if v is not None))
        return Finding(code, "UNJUDGED", target, why, evidence=places)

    def alike(self) -> Iterator[Finding]:
        """What differs between the GPUs of this node."""
        for what, paths in _ALIKE.items():
            said = [(i, g, v) for i, g in enumerate(self.query.gpus) if (v := g.get(*paths)) is not None]
            kinds = Counter(v.text for _, _, v in said)
            if len(kinds) < 2:
                continue
            usual, count = kinds.most_common(1)[0]
            for index, gpu, value in said:
                # Of two and two nobody is the odd one: all are named.
                if value.text != usual or count * 2 <= len(said):
                    others = usual if value.text != usual else "others differ"
                    text = f"{what} is {value.text}, of most of its siblings {others}"
                    yield self.finding(
                        "GPU010", "WARN", self.target(index, gpu), text, value, measured=value.text
                    )

    def missing(self) -> Iterator[Finding]:
        target = Target(node=self.context.node)
        for line, text in self.query.lost:
            yield Finding("GPU002", "FAIL", target, text[:200], evidence=evidence(self.query.file, [line]))
        yield from inforom_findings(self.query.corrupt, self.query.file, self.context)
        if self.query.attached is None and any(g.pci is not None for g in self.query.gpus):
            why = "the number of attached GPUs is missing: the beginning is cut off"
            yield Finding("GPU011", "UNJUDGED", target, why, evidence=(self.query.file,))
        if any(g.pci is None and len(g.sections) > 1 for g in self.query.gpus):
            why = "several sections without a GPU's heading: the beginning is cut off"
            yield Finding("GPU011", "UNJUDGED", target, why, evidence=(self.query.file,))
        shown, attached = len(self.query.gpus) + len(self.query.lost), self.query.attached
        places = evidence(self.query.file, (g.line for g in self.query.gpus))
        if attached is not None and shown < attached:
            why = f"{attached} GPUs attached, {shown} in the output: asked for only these, or cut off"
            yield Finding("GPU011", "UNJUDGED", target, why, evidence=places)
        elif self.query.gpus and all(g.pci is not None for g in self.query.gpus):
            names = {g.name for g in self.query.gpus}
            sku = find_sku(names.pop()) if len(names) == 1 else None
            yield from count_findings(range(len(self.query.gpus)), sku, self.context, places)


def judge(query: Query, context: Context) -> list[Finding]:
    """Findings for every GPU of the output. A GPU of which nothing is wrong gives one PASS."""
    work = Judge(query, context)
    found = [*work.missing(), *work.alike()]
    for index, gpu in enumerate(query.gpus):
        target = work.target(index, gpu)
        own = [*work.of_gpu(index, gpu), *work.damage(target, gpu)]
        if all(f.verdict == "PASS" for f in own):
            sections = sorted(s.replace("_", " ") for s in gpu.sections)
            text = "nothing wrong in " + (
                f"{len(sections)} sections" if len(sections) > 3 else ", ".join(sections)
            )
            own.append(Finding("GPU011", "PASS", target, text, evidence=evidence(query.file, [gpu.line])))
        found += own
    return found


def _is_uncorrectable(key: str) -> bool:
    # "double_bit.total" is the sum of its parts; the parts are left out.
    return "uncorrectable" in key or key.endswith("double_bit.total")


def _reason(key: str) -> str:
    name = key.rpartition(".")[2]
    for prefix in ("clocks_event_reason_", "clocks_throttle_reason_"):
        name = name.removeprefix(prefix)
    return name


def _idle(gpu: Gpu) -> bool:
    """Whether the card says that it is idle, or does not say that it works at full state."""
    # The slower states are idle ones, also where a cap of the power is given as the reason.
    level = gpu.get("performance_state")
    if level is not None and re.fullmatch(r"P(?:[5-9]|1[0-5])", level.text):
        return True
    for section in REASONS:
        for key, value in gpu.below(section):
            if _reason(key) in ("idle", "gpu_idle"):
                return value.text == "Active"
    return level is None or level.text != "P0"


def inventory(query: Query) -> dict[str, str | int | float]:
    """What siblings are compared by: number and kind of GPUs, driver, VBIOS, memory."""
    found: dict[str, str | int | float] = {}
    if query.attached is not None:
        found["GPUs"] = query.attached
    driver = query.head.get("driver_version")
    if driver is not None:
        found["driver"] = driver.text
    for what in ("kind", "VBIOS", "memory"):
        texts = sorted({v.text for g in query.gpus if (v := g.get(*_ALIKE[what])) is not None})
        if texts:
            found["GPU" if what == "kind" else what] = ", ".join(texts)
    return found


TOOLS: tuple[Tool[Query], ...] = (Tool("nvidia-smi -q", matches, parse, judge, inventory, begins=BEGINS),)
