"""Convert nvidia-smi's output to GpuState: where each value is in the text, in the XML, and by version."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from seatrial.check.outputs.gpu_state import HELD_DOWN, GpuState, GpuStates, reasons
from seatrial.check.outputs.smi_query import Gpu, Query, Value, number
from seatrial.check.outputs.smi_query_damage import ERRORS, NEEDS_RESET, REASONS

# Errors here say nothing about the card; public outputs of healthy ones have them: GeForce (driver 535.154.05), and all
# V100s of a machine whose host bridge cannot be queried (driver 550).
_QUIRKS = ("addressing_mode", "pci.gpu_link_info.pcie_generation.host_max")
_ALIKE = {
    "kind": ("product_name",),
    "VBIOS": ("vbios_version",),
    "memory": ("fb_memory_usage.total",),
    "ECC mode": ("ecc_mode.current", "ecc_mode.current_ecc"),
    "MIG mode": ("mig_mode.current", "mig_mode.current_mig"),
    "power limit": ("gpu_power_readings.current_power_limit", "power_readings.enforced_power_limit"),
}
_TEXT_LINK, _XML_LINK = "pci.gpu_link_info", "pci.pci_gpu_link_info"


def states_of(query: Query, damage: Callable[[Gpu], Iterable[tuple[str, Value | None]]]) -> GpuStates:
    """All GPUs of an output; `damage`: what is malformed or missing in a GPU's values."""
    driver = query.head.get("driver_version")
    return GpuStates(
        query.file,
        [
            _state(gpu, [(what, None if v is None else v.line) for what, v in damage(gpu)])
            for gpu in query.gpus
        ],
        query.lost,
        query.attached,
        None if driver is None else driver.text,
        query.whole,
        corrupt=query.corrupt,
    )


def _state(gpu: Gpu, damage: Sequence[tuple[str, int | None]]) -> GpuState:
    lines: dict[str, int] = {}

    def value_of(name: str, *paths: str) -> Value | None:
        value = gpu.get(*paths)
        if value is not None:
            lines[name] = value.line
        return value

    def text(name: str, *paths: str) -> str | None:
        return None if (value := value_of(name, *paths)) is None else value.text

    def count(name: str, *paths: str) -> float | None:
        return number(value_of(name, *paths))

    def yes(name: str, *paths: str) -> bool | None:
        return None if (value := value_of(name, *paths)) is None else value.text == "Yes"

    alike = {what: value for what, paths in _ALIKE.items() if (value := text(what, *paths)) is not None}
    uncorrectable = {k: v for k, v in gpu.below("ecc_errors.volatile") if _is_uncorrectable(k)}
    repairs = {
        key.partition(".")[2]: v for key, v in gpu.below("ecc_errors") if "repair" in key and v.text == "Yes"
    }
    why = [(_reason(key), value) for section in REASONS for key, value in gpu.below(section)]
    held_down = {name: v for name, v in why if name in reasons(HELD_DOWN) and v.text == "Active"}
    health = {key.rpartition(".")[2]: v for key, v in gpu.below("fabric.health")}
    errors = {k: v for k, v in gpu.values.items() if v.text in ERRORS and k not in _QUIRKS}
    lines |= {
        k: v.line for values in (uncorrectable, repairs, held_down, health, errors) for k, v in values.items()
    }
    return GpuState(
        pci=gpu.pci,
        index=gpu.index,
        name=gpu.name,
        alike=alike,
        uncorrectable={k: number(v) for k, v in uncorrectable.items()},
        sram_threshold_exceeded=yes(
            "sram_threshold_exceeded", "ecc_errors.aggregate.sram_threshold_exceeded"
        ),
        repairs=tuple(repairs),
        ecc=None if (mode := alike.get("ECC mode")) is None else mode != "Disabled",
        remapping_failed=yes(
            "remapping_failed",
            "remapped_rows.remapping_failure_occurred",
            "remapped_rows.remapped_row_failure",
        ),
        remapping_pending=yes(
            "remapping_pending", "remapped_rows.pending", "remapped_rows.remapped_row_pending"
        ),
        remapped_uncorrectable=count(
            "remapped_uncorrectable", "remapped_rows.uncorrectable_error", "remapped_rows.remapped_row_unc"
        ),
        banks_without_spare=count(
            "banks_without_spare",
            "remapped_rows.bank_remap_availability_histogram.none",
            "remapped_rows.row_remapper_histogram.row_remapper_histogram_none",
        ),
        retired_single=count(
            "retired_single",
            "retired_pages.single_bit_ecc",
            "retired_pages.multiple_single_bit_retirement.retired_count",
        ),
        retired_double=count(
            "retired_double",
            "retired_pages.double_bit_ecc",
            "retired_pages.double_bit_retirement.retired_count",
        ),
        retirement_pending=yes(
            "retirement_pending",
            "retired_pages.pending_page_blacklist",
            "retired_pages.pending_blacklist",
            "retired_pages.pending_retirement",
        ),
        recovery_action=text("recovery_action", "gpu_recovery_action"),
        reset_required=yes("reset_required", "gpu_reset_status.reset_required"),
        drain_recommended=yes("drain_recommended", "gpu_reset_status.drain_and_reset_recommended"),
        performance_state=text("performance_state", "performance_state"),
        idle=next((v.text == "Active" for name, v in why if name in ("idle", "gpu_idle")), None),
        held_down=tuple(held_down),
        sm_mhz=count("sm_mhz", "clocks.sm", "clocks.sm_clock"),
        max_sm_mhz=count("max_sm_mhz", "max_clocks.sm", "max_clocks.sm_clock"),
        pcie_width=count(
            "pcie_width", f"{_TEXT_LINK}.link_width.current", f"{_XML_LINK}.link_widths.current_link_width"
        ),
        max_pcie_width=count(
            "max_pcie_width", f"{_TEXT_LINK}.link_width.max", f"{_XML_LINK}.link_widths.max_link_width"
        ),
        pcie_gen=count(
            "pcie_gen", f"{_TEXT_LINK}.pcie_generation.current", f"{_XML_LINK}.pcie_gen.current_link_gen"
        ),
        max_pcie_gen=count(
            "max_pcie_gen", f"{_TEXT_LINK}.pcie_generation.max", f"{_XML_LINK}.pcie_gen.max_link_gen"
        ),
        fabric_state=text("fabric_state", "fabric.state"),
        fabric_status=text("fabric_status", "fabric.status"),
        fabric_health={name: v.text for name, v in health.items()},
        line=gpu.line,
        lines=lines,
        sections=gpu.sections,
        errors={k: v.text for k, v in errors.items()},
        needs_reset=[v.line for v in gpu.values.values() if v.text in NEEDS_RESET],
        damage=damage,
    )


def _is_uncorrectable(key: str) -> bool:
    # "double_bit.total" is the sum of its parts; the parts are left out.
    return "uncorrectable" in key or key.endswith("double_bit.total")


def _reason(key: str) -> str:
    return re.sub(r"^clocks_(?:event|throttle)_reason_", "", key.rpartition(".")[2])
