"""What a check reads of GPUs by NVML, in probe_nvml.py and probe_rates.py: each value is queried separately."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from seatrial.check.outputs.gpu_state import HELD_DOWN, GpuState, reasons
from seatrial.hardware.nvml import CLOCK_SM, Library, clock_reasons
from seatrial.hardware.xid import address

# nvmlDeviceGpuRecoveryAction_t
_RECOVERY = {0: "None", 1: "Reset", 2: "Reboot", 3: "Drain P2P", 4: "Drain and Reset"}
_RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; older packages have no name for it
_FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}  # 0: not supported
_HEALTH = {
    "route_recovery_in_progress": 2,
    "route_unhealthy": 4,
    "access_timeout_recovery": 6,
}  # bit of the mask
_SINCE_LOADED = 0  # NVML_VOLATILE_ECC
_UNCORRECTED = 1
_DRAM, _SRAM = 2, 7  # NVML_MEMORY_LOCATION_*
_CLOCK_MEMORY = 2
_LINKS = 18  # NVML_NVLINK_MAX_LINKS


class _Fabric(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t: the package's layout has been wrong (NVIDIA/DCGM notes this, and defines its own)."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


class Nvml(Library):
    """What a check asks NVML."""

    def text(self, name: str, *arguments: Any) -> str | None:
        """ask() for a string: older packages return bytes."""
        value = self.ask(name, *arguments)
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def count(self) -> int:
        """GPUs that the driver shows."""
        return int(self.ask("nvmlDeviceGetCount") or 0)

    def handle(self, index: int) -> Any:
        """A GPU's handle. Raises OSError for one the driver cannot open, such as one that has fallen off the bus."""
        try:
            return self.module.nvmlDeviceGetHandleByIndex(index)
        except self.module.NVMLError as error:
            raise OSError(str(error)) from None

    def pci(self, handle: Any) -> str | None:
        """The PCI address, "00000000:18:00.0"."""
        info = self.ask("nvmlDeviceGetPciInfo", handle)
        bus_id = None if info is None else info.busId
        return bus_id.decode() if isinstance(bus_id, bytes) else bus_id

    def now(self, handle: Any) -> dict[str, Any]:
        """Current values. MHz, watts, degrees Celsius."""
        power = self.ask("nvmlDeviceGetPowerUsage", handle)
        return {
            "reasons": clock_reasons(self.ask, handle),
            "sm_mhz": self.ask("nvmlDeviceGetClockInfo", handle, CLOCK_SM),
            "memory_mhz": self.ask("nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY),
            "pcie_gen": self.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "pcie_width": self.ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "temperature_c": self.ask("nvmlDeviceGetTemperature", handle, 0),
            "power_w": None if power is None else power / 1000,
        }

    def limits(self, handle: Any) -> dict[str, Any]:
        """The limits of the current values."""
        power = self.ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        return {
            "sm_mhz": self.ask("nvmlDeviceGetMaxClockInfo", handle, CLOCK_SM),
            "memory_mhz": self.ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_MEMORY),
            "pcie_gen": self.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "pcie_width": self.ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            "power_w": None if power is None else power / 1000,
        }

    def links(self, handle: Any) -> dict[str, bool]:
        """NVLink -> whether it is active; links that the GPU does not have are omitted."""
        states = {n: self.ask("nvmlDeviceGetNvLinkState", handle, n) for n in range(_LINKS)}
        return {str(n): bool(state) for n, state in states.items() if state is not None}

    def processes(self, handle: Any) -> int | None:
        """Number of programs that compute on it; None if unknown."""
        running = self.ask("nvmlDeviceGetComputeRunningProcesses", handle)
        return None if running is None else len(running)

    def state(self, handle: Any, now: Mapping[str, Any], limits: Mapping[str, Any]) -> GpuState:
        """What is judged of an idle GPU; `now` and `limits` as read by the methods of these names."""
        name, memory = self.text("nvmlDeviceGetName", handle), self.ask("nvmlDeviceGetMemoryInfo", handle)
        ecc, mig = self.ask("nvmlDeviceGetEccMode", handle), self.ask("nvmlDeviceGetMigMode", handle)
        alike = {
            "kind": name,
            "VBIOS": self.text("nvmlDeviceGetVbiosVersion", handle),
            "memory": None if memory is None else f"{memory.total >> 20} MiB",
            "ECC mode": None if ecc is None else _enabled(ecc[0]),
            "MIG mode": None if mig is None else _enabled(mig[0]),
            "power limit": None if limits["power_w"] is None else f"{limits['power_w']} W",
        }
        performance = self.ask("nvmlDeviceGetPerformanceState", handle)
        pci = self.pci(handle)
        return GpuState(
            pci=None if pci is None else address(pci),
            name=name or None,
            alike={what: text for what, text in alike.items() if text},
            uncorrectable={
                "sram_uncorrectable": self._uncorrected(handle, _SRAM),
                "dram_uncorrectable": self._uncorrected(handle, _DRAM),
            },
            ecc=None if ecc is None else bool(ecc[0]),
            recovery_action=self._recovery(handle),
            performance_state=None if performance is None else f"P{performance}",
            idle=None if now["reasons"] is None else "idle" in reasons(now["reasons"]),
            held_down=reasons((now["reasons"] or 0) & HELD_DOWN),
            sm_mhz=_number(now["sm_mhz"]),
            max_sm_mhz=_number(limits["sm_mhz"]),
            pcie_width=_number(now["pcie_width"]),
            max_pcie_width=_number(limits["pcie_width"]),
            pcie_gen=_number(now["pcie_gen"]),
            max_pcie_gen=_number(limits["pcie_gen"]),
            damage=[("NVML does not report its PCI address", None)] if pci is None else (),
            **self._remapped(handle),
            **self._retired(handle),
            **self._fabric(handle),
        )

    def uncorrectable(self, handle: Any) -> int | None:
        """Uncorrectable memory errors since the driver was loaded; None if ECC is off or absent."""
        count = self.ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_LOADED)
        return None if count is None else int(count)

    def _uncorrected(self, handle: Any, where: int) -> float | None:
        return _number(
            self.ask("nvmlDeviceGetMemoryErrorCounter", handle, _UNCORRECTED, _SINCE_LOADED, where)
        )

    def _retired(self, handle: Any) -> dict[str, Any]:
        """Retired pages, before Ampere; later cards remap rows."""
        single, double = (self.ask("nvmlDeviceGetRetiredPages", handle, cause) for cause in (0, 1))
        if single is None or double is None:
            return {}
        pending = self.ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        return {
            "retired_single": float(len(single)),
            "retired_double": float(len(double)),
            "retirement_pending": None if pending is None else bool(pending),
        }

    def _remapped(self, handle: Any) -> dict[str, Any]:
        rows = self.ask("nvmlDeviceGetRemappedRows", handle)
        if rows is None:
            return {}
        banks = self.ask("nvmlDeviceGetRowRemapperHistogram", handle)
        return {
            "remapped_uncorrectable": float(rows[1]),
            "remapping_pending": bool(rows[2]),
            "remapping_failed": bool(rows[3]),
            "banks_without_spare": None if banks is None else float(banks.none),
        }

    def _recovery(self, handle: Any) -> str | None:
        values = self.ask("nvmlDeviceGetFieldValues", handle, [_RECOVERY_FIELD])
        if not values or values[0].nvmlReturn != 0:
            return None
        action = int(values[0].value.uiVal)
        return _RECOVERY.get(action, f"unknown ({action})")

    def _fabric(self, handle: Any) -> dict[str, Any]:
        info = _Fabric(version=ctypes.sizeof(_Fabric) | 2 << 24)
        # It returns the code as well as raising it; the made-up values of a failed call must not be read.
        if self.ask("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)) != 0:
            return {}
        if info.state not in _FABRIC_STATES:
            return {}  # GPU without a fabric: PCIe cards
        values = {"bandwidth": {1: "Degraded", 2: "Full"}.get(info.health & 3)}
        for name, bit in _HEALTH.items():
            values[name] = {1: "True", 2: "False"}.get(info.health >> bit & 3)
        status = "Success" if info.status == 0 else f"error {info.status}"
        return {
            "fabric_state": _FABRIC_STATES[info.state],
            "fabric_status": status if info.state == 3 else None,  # nvml.h: valid only once it has completed
            "fabric_health": {name: value for name, value in values.items() if value is not None},
        }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _enabled(value: Any) -> str:
    return "Enabled" if value else "Disabled"
