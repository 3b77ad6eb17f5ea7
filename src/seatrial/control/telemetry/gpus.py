"""Series of the GPUs, by NVML. Used in the probe that watches the driver, which may hang."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from seatrial.hardware.counters import NVLINK_LIMITS, Links
from seatrial.hardware.nvml import CLOCK_SM, Ask, clock_reasons
from seatrial.record.series import MOST_GPUS, THROTTLE_REASONS, series

# nvml.h
_CORE = 0  # NVML_TEMPERATURE_GPU
_ERRORS, _SINCE_LOADED = {"corrected": 0, "uncorrected": 1}, 0  # NVML_MEMORY_ERROR_TYPE_*, NVML_VOLATILE_ECC
_REASONS = dict(zip(THROTTLE_REASONS, (0x04, 0x08, 0x40, 0x80, 0x20), strict=True))  # nvmlClocksEventReason*
_ALL_LINKS = 0xFFFFFFFF
_NVLINK_KIB = {
    "gpu_nvlink_sent_bytes_total": 138,
    "gpu_nvlink_received_bytes_total": 139,
}  # NVML_FI_DEV_NVLINK_*
_LINK_ERRORS = frozenset(limit.counter for limit in NVLINK_LIMITS)


class GpuSeries:
    """Reads the GPUs: `sample` about every second what changes quickly, `values` the rest and the means since."""

    def __init__(self, ask: Ask, handles: Mapping[str, Any], only: Collection[str] | None) -> None:
        """`handles`: by PCI address, in NVML's order. `only`: the addresses that this node uses; None for all."""
        self._ask = ask
        used = [(str(i), pci) for i, pci in enumerate(handles) if only is None or pci in only][:MOST_GPUS]
        self._gpus = {number: (pci, handles[pci]) for number, pci in used}
        self._means: dict[str, tuple[float, int]] = {}  # series -> sum, readings
        self._link_errors: dict[str, float] = {}  # PCI address -> errors

    def sample(self, tensor_active: Mapping[str, float | None]) -> None:
        """Read the averaged values. `tensor_active`: PCI address -> share of the time since the last call."""
        for gpu, (pci, handle) in self._gpus.items():
            used = self._ask("nvmlDeviceGetUtilizationRates", handle)
            mhz = self._ask("nvmlDeviceGetClockInfo", handle, CLOCK_SM)
            self._add("gpu_busy_ratio", None if used is None else used.gpu / 100, gpu=gpu)
            self._add("gpu_sm_clock_hertz", None if mhz is None else mhz * 1e6, gpu=gpu)
            self._add("gpu_tensor_active_ratio", tensor_active.get(pci), gpu=gpu)
            bits = clock_reasons(self._ask, handle)
            if bits is not None:
                for reason, bit in _REASONS.items():
                    self._add("gpu_throttle_ratio", float(bits & bit != 0), gpu=gpu, reason=reason)

    def links(self, links: Links, addresses: Mapping[str, str]) -> None:
        """The NVLinks' counters now; `addresses`: GPU's UUID -> PCI address."""
        self._link_errors = {}
        for (uuid, _), counters in links.items():
            pci = addresses.get(uuid, uuid)
            errors = sum(count for name, count in counters.items() if name in _LINK_ERRORS)
            self._link_errors[pci] = self._link_errors.get(pci, 0) + errors

    def values(self) -> dict[str, float]:
        """Series -> value: now, or the mean since the last call."""
        found = {name: total / count for name, (total, count) in self._means.items()}
        self._means = {}
        for gpu, (pci, handle) in self._gpus.items():
            for name, value in self._now(pci, handle).items():
                found[series(name, gpu=gpu)] = value
            for severity, kind in _ERRORS.items():
                errors = self._ask("nvmlDeviceGetTotalEccErrors", handle, kind, _SINCE_LOADED)
                if errors is not None:
                    found[series("gpu_ecc_errors_total", gpu=gpu, severity=severity)] = float(errors)
            name = self._ask("nvmlDeviceGetName", handle)
            text = name.decode(errors="replace") if isinstance(name, bytes) else name or "unknown"
            found[series("gpu_info", gpu=gpu, pci=pci, name=text)] = 1.0
        return found

    def _now(self, pci: str, handle: Any) -> dict[str, float]:
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        known = {
            "gpu_power_watts": None if milliwatts is None else milliwatts / 1000,
            "gpu_temperature_celsius": self._ask("nvmlDeviceGetTemperature", handle, _CORE),
            "gpu_memory_used_bytes": None if memory is None else memory.used,
            "gpu_memory_total_bytes": None if memory is None else memory.total,
            "gpu_pcie_replays_total": self._ask("nvmlDeviceGetPcieReplayCounter", handle),
            "gpu_nvlink_errors_total": self._link_errors.get(pci),
        }
        for name, field in _NVLINK_KIB.items():
            answers = self._ask("nvmlDeviceGetFieldValues", handle, [(field, _ALL_LINKS)])
            if answers and answers[0].nvmlReturn == 0:
                known[name] = int(answers[0].value.ullVal) * 1024
        return {name: float(value) for name, value in known.items() if value is not None}

    def _add(self, name: str, value: float | None, **labels: str) -> None:
        if value is not None:
            total, count = self._means.get(key := series(name, **labels), (0.0, 0))
            self._means[key] = total + value, count + 1
