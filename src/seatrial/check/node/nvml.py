"""NVIDIA's management library, through the package nvidia-ml-py: each value asked for by itself, and none is ever an error.

NVML hangs where the driver hangs, so this is only used in processes that may be killed (probe_nvml.py, probe_rates.py).
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from typing import Any

# nvml.h, nvmlClocksEventReason*, under the names of `nvidia-smi -q`.
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
# nvmlDeviceGpuRecoveryAction_t
_RECOVERY = {0: "None", 1: "Reset", 2: "Reboot", 3: "Drain P2P", 4: "Drain and Reset"}
_RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; older packages have no name for it
_FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}  # 0: not supported
_HEALTH = {
    "Route Recovery in progress": 2,
    "Route Unhealthy": 4,
    "Access Timeout Recovery": 6,
}  # bit of the mask
_ONCE, _LIFE = 0, 1  # NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC
_CORRECTED, _UNCORRECTED = 0, 1
_DRAM, _SRAM = 2, 7  # NVML_MEMORY_LOCATION_*
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_NO_VALUE = "N/A"


class _Fabric(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t: the package's own has had a wrong layout (NVIDIA/DCGM says so, and defines its own)."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


class Nvml:
    """The library, initialised. Raises OSError with the reason where it cannot be."""

    def __init__(self) -> None:
        try:
            self._lib: Any = importlib.import_module("pynvml")
        except ImportError:
            raise OSError("the package nvidia-ml-py is not installed") from None
        try:
            self._lib.nvmlInit()
        except self._lib.NVMLError as error:
            raise OSError(f"NVML: {error}") from None

    def ask(self, name: str, *arguments: Any) -> Any:
        """What a function of the library returns; None where it refuses or does not exist."""
        try:
            return getattr(self._lib, name)(*arguments)
        except (self._lib.NVMLError, AttributeError, TypeError):
            return None  # TypeError: a package of another age, whose function wants other arguments

    def text(self, name: str, *arguments: Any) -> str | None:
        """As ask(), of a name: older packages return bytes."""
        value = self.ask(name, *arguments)
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def count(self) -> int:
        """GPUs that the driver shows."""
        return int(self.ask("nvmlDeviceGetCount") or 0)

    def handle(self, index: int) -> Any:
        """A GPU's handle. Raises OSError for one that the driver cannot open, as one that has fallen off the bus."""
        try:
            return self._lib.nvmlDeviceGetHandleByIndex(index)
        except self._lib.NVMLError as error:
            raise OSError(str(error)) from None

    def pci(self, handle: Any) -> str | None:
        """ "00000000:18:00.0" """
        info = self.ask("nvmlDeviceGetPciInfo", handle)
        bus_id = None if info is None else info.busId
        return bus_id.decode() if isinstance(bus_id, bytes) else bus_id

    def reasons(self, handle: Any) -> int | None:
        """Why the clocks are what they are: bits of REASONS."""
        value = self.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if value is None:
            value = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return None if value is None else int(value)

    def now(self, handle: Any) -> dict[str, Any]:
        """What changes from moment to moment. MHz, watts, degrees Celsius."""
        power = self.ask("nvmlDeviceGetPowerUsage", handle)
        return {
            "reasons": self.reasons(handle),
            "sm_mhz": self.ask("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
            "memory_mhz": self.ask("nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY),
            "pcie_gen": self.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "pcie_width": self.ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "temperature_c": self.ask("nvmlDeviceGetTemperature", handle, 0),
            "power_w": None if power is None else power / 1000,
        }

    def limits(self, handle: Any) -> dict[str, Any]:
        """What the moment's values are measured by."""
        power = self.ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        return {
            "sm_mhz": self.ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM),
            "memory_mhz": self.ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_MEMORY),
            "pcie_gen": self.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "pcie_width": self.ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            "power_w": None if power is None else power / 1000,
        }

    def links(self, handle: Any) -> dict[str, bool]:
        """NVLink -> whether it is active; links that the GPU does not have are left out."""
        states = {n: self.ask("nvmlDeviceGetNvLinkState", handle, n) for n in range(_LINKS)}
        return {str(n): bool(state) for n, state in states.items() if state is not None}

    def processes(self, handle: Any) -> int | None:
        """How many programs compute on it; None where that is not told."""
        running = self.ask("nvmlDeviceGetComputeRunningProcesses", handle)
        return None if running is None else len(running)

    def query(self, handle: Any) -> dict[str, Any]:
        """What `nvidia-smi -q` shows of it, in its words and nested as there. What NVML does not tell is "N/A"."""
        now, top = self.now(handle), self.limits(handle)
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
        ecc = self.ask("nvmlDeviceGetEccMode", handle)
        mig = self.ask("nvmlDeviceGetMigMode", handle)
        state = self.ask("nvmlDeviceGetPerformanceState", handle)
        return {
            "Product Name": self.text("nvmlDeviceGetName", handle) or _NO_VALUE,
            "MIG Mode": _NO_VALUE
            if mig is None
            else {"Current": _enabled(mig[0]), "Pending": _enabled(mig[1])},
            "GPU UUID": self.text("nvmlDeviceGetUUID", handle) or _NO_VALUE,
            "VBIOS Version": self.text("nvmlDeviceGetVbiosVersion", handle) or _NO_VALUE,
            "GPU Recovery Action": self._recovery(handle),
            "PCI": {
                "Bus Id": self.pci(handle) or _NO_VALUE,
                "GPU Link Info": {
                    "PCIe Generation": {"Max": _or(top["pcie_gen"]), "Current": _or(now["pcie_gen"])},
                    "Link Width": {
                        "Max": _or(top["pcie_width"], "x"),
                        "Current": _or(now["pcie_width"], "x"),
                    },
                },
            },
            "Performance State": _NO_VALUE if state is None else f"P{state}",
            "Clocks Event Reasons": _reasons(now["reasons"]),
            "FB Memory Usage": {"Total": _NO_VALUE if memory is None else f"{memory.total >> 20} MiB"},
            "ECC Mode": _NO_VALUE
            if ecc is None
            else {"Current": _enabled(ecc[0]), "Pending": _enabled(ecc[1])},
            "ECC Errors": {"Volatile": self._ecc(handle, _ONCE), "Aggregate": self._ecc(handle, _LIFE)},
            "Retired Pages": self._retired(handle),
            "Remapped Rows": self._remapped(handle),
            "GPU Power Readings": {"Current Power Limit": _or(top["power_w"], " W")},
            "Clocks": {"SM": _or(now["sm_mhz"], " MHz"), "Memory": _or(now["memory_mhz"], " MHz")},
            "Max Clocks": {"SM": _or(top["sm_mhz"], " MHz"), "Memory": _or(top["memory_mhz"], " MHz")},
            "Fabric": self._fabric(handle),
            "Processes": "None",
        }

    def uncorrectable(self, handle: Any) -> int | None:
        """Uncorrectable memory errors since the driver was loaded; None where ECC is off or absent."""
        count = self.ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _ONCE)
        return None if count is None else int(count)

    def _ecc(self, handle: Any, counter: int) -> str | Mapping[str, str]:
        def count(kind: int, where: int) -> str:
            return _or(self.ask("nvmlDeviceGetMemoryErrorCounter", handle, kind, counter, where))

        return {
            "SRAM Correctable": count(_CORRECTED, _SRAM),
            "SRAM Uncorrectable": count(_UNCORRECTED, _SRAM),
            "DRAM Correctable": count(_CORRECTED, _DRAM),
            "DRAM Uncorrectable": count(_UNCORRECTED, _DRAM),
        }

    def _retired(self, handle: Any) -> str | Mapping[str, str]:
        """Before Ampere; later cards remap rows."""
        causes = [self.ask("nvmlDeviceGetRetiredPages", handle, cause) for cause in (0, 1)]
        if any(c is None for c in causes):
            return _NO_VALUE
        pending = self.ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        return {
            "Single Bit ECC": str(len(causes[0])),
            "Double Bit ECC": str(len(causes[1])),
            "Pending Page Blacklist": _NO_VALUE if pending is None else _yes(pending),
        }

    def _remapped(self, handle: Any) -> str | Mapping[str, Any]:
        rows = self.ask("nvmlDeviceGetRemappedRows", handle)
        if rows is None:
            return _NO_VALUE
        bank = self.ask("nvmlDeviceGetRowRemapperHistogram", handle)
        names = {"Max": "max", "High": "high", "Partial": "partial", "Low": "low", "None": "none"}
        counts = _NO_VALUE if bank is None else {k: f"{getattr(bank, v)} bank(s)" for k, v in names.items()}
        return {
            "Correctable Error": str(rows[0]),
            "Uncorrectable Error": str(rows[1]),
            "Pending": _yes(rows[2]),
            "Remapping Failure Occurred": _yes(rows[3]),
            "Bank Remap Availability Histogram": counts,
        }

    def _recovery(self, handle: Any) -> str:
        values = self.ask("nvmlDeviceGetFieldValues", handle, [_RECOVERY_FIELD])
        if not values or values[0].nvmlReturn != 0:
            return _NO_VALUE
        action = int(values[0].value.uiVal)
        return _RECOVERY.get(action, f"unknown ({action})")

    def _fabric(self, handle: Any) -> str | Mapping[str, Any]:
        info = _Fabric(version=ctypes.sizeof(_Fabric) | 2 << 24)
        # It returns the code as well as raising it; the fake values of a call that failed must not be read.
        if self.ask("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)) != 0:
            return _NO_VALUE
        if info.state not in _FABRIC_STATES:
            return _NO_VALUE  # no GPU of a fabric: PCIe cards
        health: dict[str, str] = {"Bandwidth": {1: "Degraded", 2: "Full"}.get(info.health & 3, _NO_VALUE)}
        for name, bit in _HEALTH.items():
            health[name] = {1: "True", 2: "False"}.get(info.health >> bit & 3, _NO_VALUE)
        status = "Success" if info.status == 0 else f"error {info.status}"
        done = info.state == 3
        return {
            "State": _FABRIC_STATES[info.state],
            "Status": status if done else _NO_VALUE,  # nvml.h: to be read only once it has completed
            "Health": health,
        }


def _reasons(bits: int | None) -> str | dict[str, str]:
    if bits is None:
        return _NO_VALUE
    return {name: "Active" if bits & bit else "Not Active" for bit, name in REASONS.items()}


def _or(value: Any, unit: str = "") -> str:
    return _NO_VALUE if value is None else f"{value}{unit}"


def _yes(value: Any) -> str:
    return "Yes" if value else "No"


def _enabled(value: Any) -> str:
    return "Enabled" if value else "Disabled"
