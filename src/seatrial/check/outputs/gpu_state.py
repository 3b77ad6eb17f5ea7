"""The GPU state of a node as the driver reports it, through nvidia-smi (text, XML, CSV) or NVML."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

# nvml.h, nvmlClocksEventReason*, with the names of `nvidia-smi -q`.
REASONS = {
    0x1: "Idle",
    0x2: "Applications Clocks Setting",
    0x4: "SW Power Cap",
    0x8: "HW Slowdown",
    0x10: "Sync Boost",
    0x20: "SW Thermal Slowdown",
    0x40: "HW Thermal Slowdown",
    0x80: "HW Power Brake Slowdown",
    0x100: "Display Clock Setting",
}
HELD_DOWN = 0x8 | 0x20 | 0x40 | 0x80  # reasons that throttle a busy card


def reasons(bits: int) -> list[str]:
    """The reasons of these bits, as in paths: "hw_slowdown"."""
    return [name.lower().replace(" ", "_") for bit, name in REASONS.items() if bits & bit]


@dataclass(frozen=True)
class GpuState:
    """One GPU. None and absent keys: not reported. Names of errors, reasons and health are nvidia-smi's."""

    pci: str | None = None
    index: int | None = None  # as the driver reports it; None: by position
    name: str | None = None  # "NVIDIA H100 80GB HBM3"
    # What must be equal on all GPUs of a node, as it is shown: "kind", "VBIOS", "memory", "ECC mode", ...
    alike: Mapping[str, str] = field(default_factory=dict)
    uncorrectable: Mapping[str, float | None] = field(default_factory=dict)  # since the driver was loaded
    sram_threshold_exceeded: bool | None = None
    repairs: Collection[str] = ()  # of memory: pending, or impossible
    ecc: bool | None = None
    remapping_failed: bool | None = None
    remapping_pending: bool | None = None
    remapped_uncorrectable: float | None = None  # rows, in the card's life
    banks_without_spare: float | None = None
    retired_single: float | None = None  # pages
    retired_double: float | None = None
    retirement_pending: bool | None = None
    recovery_action: str | None = None
    reset_required: bool | None = None
    drain_recommended: bool | None = None
    performance_state: str | None = None  # "P0"
    idle: bool | None = None  # by the reasons for its clocks
    held_down: Collection[str] = ()  # reasons(), of HELD_DOWN
    sm_mhz: float | None = None
    max_sm_mhz: float | None = None
    pcie_width: float | None = None
    max_pcie_width: float | None = None
    pcie_gen: float | None = None
    max_pcie_gen: float | None = None
    fabric_state: str | None = None
    fabric_status: str | None = None
    fabric_health: Mapping[str, str] = field(default_factory=dict)
    # Of a text only.
    line: int | None = None
    lines: Mapping[str, int] = field(default_factory=dict)  # field, or key of a field -> its line
    sections: Collection[str] = ()
    errors: Mapping[str, str] = field(default_factory=dict)  # path -> the error in place of a value
    needs_reset: Sequence[int] = ()  # lines that report a required reset instead of a value
    damage: Sequence[tuple[str, int | None]] = ()  # what is malformed or missing, and its line


@dataclass(frozen=True)
class GpuStates:
    """All GPUs of one node. `attached` is the number of GPUs that the driver has; `lost` are those it cannot open."""

    file: str  # its name, for the evidence
    gpus: Sequence[GpuState]
    lost: Sequence[tuple[int | None, str]] = ()  # line, message
    attached: int | None = None
    driver: str | None = None
    whole: bool = True  # everything the tool reports, not a selection
    printed: bool = True  # a text, with lines
    corrupt: Sequence[tuple[int, str | None]] = ()  # corrupt infoROMs: line, address
