"""The code of a node's probe processes: reads the network ports' counters, and queries NVIDIA's driver.

Both can hang: a port's counters are read from its firmware, NVML and nvidia-smi wait for the driver. So neither runs in
the agent. A probe sends `alive`, with what it is about to do, before each operation that may not return.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seatrial.base.lines import Channel
from seatrial.control.node.external import Body, Message
from seatrial.control.telemetry.gpus import GpuSeries
from seatrial.control.telemetry.ports import port_values
from seatrial.hardware.counters import (
    Links,
    PortFault,
    findings,
    first_findings,
    nvlink_findings,
    parse_nvlink_errors,
    read_ports,
)
from seatrial.hardware.nvml import CLOCK_SM, Ask, Library
from seatrial.hardware.xid import address
from seatrial.record.node_counters import GpuCounters, GpuUse, PortCounters, write_counters

SMI_TIMEOUT_S = 20.0
NVLINK_INTERVAL_S = 60.0  # nvidia-smi costs a good part of a second of CPU
_EVENT_WAIT_MS = 1000
_TENSOR_ACTIVE = 5  # NVML_GPM_METRIC_ANY_TENSOR_UTIL: percent of the time
_BUSY_PERCENT = 50  # of a sample's time with a kernel running; an idle GPU lowers its clock
# A persisting fault is reported again after this long: one that is tolerated at first then counts as repeated.
REMIND_S = 300.0


class _Reminder:
    """Passes a finding on when it begins, and again every REMIND_S while it persists."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str | None], tuple[float, float]] = {}  # began, last reported

    def new(self, found: list[PortFault], now: float) -> list[Message]:
        entries = []
        keys = {(f.signal, f.where) for f in found}
        self._since = {key: times for key, times in self._since.items() if key in keys}
        for finding in found:
            key = (finding.signal, finding.where)
            started_at, last = self._since.get(key, (now, now - REMIND_S))
            if now - last >= REMIND_S:
                self._since[key] = (started_at, now)
                evidence = finding.evidence | {"for_s": round(now - started_at, 1)}
                entries.append({"finding": asdict(finding) | {"evidence": evidence}})
        return entries


class _FileWriter:
    """Writes a file in a second thread: a run folder that hangs must not block the probe. A failed write is skipped."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._thread: threading.Thread | None = None

    def write(self, found: PortCounters | GpuCounters) -> None:
        """Replace the file, unless the previous write is still in progress."""
        if self._file is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._write, args=(self._file, found), daemon=True)
        self._thread.start()

    def _write(self, file: Path, found: PortCounters | GpuCounters) -> None:
        with contextlib.suppress(OSError):
            write_counters(file, found)


def watch_ports(root: Path, interval_s: float, file: Path | None) -> Body:
    """A probe that reads the ports below `root` every `interval_s`, and sends their series and the faults it finds.

    The first and the newest reading are in `file`.
    """

    def body(channel: Channel) -> None:
        send = channel.send
        reminder = _Reminder()
        send({"alive": "the first reading of the ports' counters"})
        before, then = read_ports(root), time.monotonic()
        first, started_at, start, writer = before, time.time(), then, _FileWriter(file)
        for finding in first_findings(before):
            send({"finding": asdict(finding)})
        while send({"alive": "reading the ports' counters"}):
            time.sleep(interval_s)
            after, now = read_ports(root), time.monotonic()
            for message in reminder.new(findings(before, after, now - then), now):
                send(message)
            send({"source": "ports", "values": port_values(before, after, now - then)})
            before, then = after, now
            writer.write(PortCounters(started_at, now - start, first, after))

    return body


def watch_gpus(interval_s: float, file: Path | None, only: Collection[str] | None = None) -> Body:
    """A probe that sends Xid events from NVML and, every minute or `interval_s`, the faults of the NVLinks.

    The clocks and error counters of the GPUs are kept in `file`. Every `interval_s` it sends the series of those in
    `only` (PCI addresses), or of all.
    """

    def body(channel: Channel) -> None:
        send = channel.send
        send({"alive": "starting NVML"})
        events: _XidEvents | str
        try:
            events = _XidEvents()
        except OSError as error:
            events = str(error)
        send({"nvml": events if isinstance(events, str) else None})
        send({"alive": "nvidia-smi, the GPUs' addresses"})
        addresses = _addresses()
        reminder, before, then, next_reading = _Reminder(), None, 0.0, 0.0
        usage = None if isinstance(events, str) else _GpuUsage(events)
        gpus = None if isinstance(events, str) else GpuSeries(events.ask, events.handles, only)
        writer, next_writing = _FileWriter(file), time.monotonic() + interval_s
        while send({"alive": "waiting for NVML events"}):
            if isinstance(events, str):
                time.sleep(_EVENT_WAIT_MS / 1000)
            else:
                found = events.wait()
                if isinstance(found, str):
                    events = found
                    send({"nvml": events})
                elif found is not None:
                    send({"xid": {"code": found[0], "pci": found[1]}})
            if usage is not None and gpus is not None:
                gpus.sample(usage.sample())
                if time.monotonic() >= next_writing:
                    next_writing = time.monotonic() + interval_s
                    writer.write(usage.counters())
                    send({"source": "gpus", "values": gpus.values()})
            if time.monotonic() < next_reading:
                continue
            next_reading = time.monotonic() + max(interval_s, NVLINK_INTERVAL_S)
            send({"alive": "nvidia-smi nvlink -e"})
            text = _smi("nvlink", "-e")
            if text is None:
                continue
            after, now = parse_nvlink_errors(text), time.monotonic()
            if usage is not None and gpus is not None:
                usage.links(after, addresses)
                gpus.links(after, addresses)
            for message in reminder.new(
                [] if before is None else nvlink_findings(before, after, now - then), now
            ):
                gpu = message["finding"]["where"]
                send(message | {"gpu": addresses.get(gpu, gpu)})
            before, then = after, now

    return body


class _XidEvents(Library):
    """NVML's Xid events of all GPUs."""

    def __init__(self) -> None:
        """Raises OSError, as `Library`, and if the events cannot be registered."""
        super().__init__()
        self._pci: dict[int | None, str] = {}
        self.handles: dict[str, Any] = {}  # by PCI address
        try:
            self._register(self.module)
        except self.module.NVMLError as error:
            raise OSError(f"NVML: {error}") from None

    def _register(self, nvml: Any) -> None:
        self._set = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
            bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
            text = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
            # Queried now: a GPU that has fallen off the bus no longer reports its address.
            self._pci[_pointer(handle)] = address(text) or text
            self.handles[address(text) or text] = handle

    def wait(self) -> tuple[int, str] | str | None:
        """The next event's code and PCI address; None if none came for a second; an error text if NVML failed."""
        try:
            data = self.module.nvmlEventSetWait_v2(self._set, _EVENT_WAIT_MS)
        except self.module.NVMLError as error:
            return None if error.value == self.module.NVML_ERROR_TIMEOUT else f"NVML: {error}"
        return int(data.eventData), self._pci.get(_pointer(data.device), "unknown")


class _TensorActive:
    """How much of the time a GPU's tensor cores are busy: the driver's GPM counters, of Hopper and later."""

    def __init__(self, ask: Ask, handle: Any) -> None:
        self._ask, self._handle = ask, handle
        support = ask("nvmlGpmQueryDeviceSupport", handle)
        samples = [ask("nvmlGpmSampleAlloc"), ask("nvmlGpmSampleAlloc")]
        known = support is not None and support.isSupportedDevice and None not in samples
        self._samples = samples if known and self._read(samples[0]) else None
        # From the first busy sample to the last one: an idle GPU at the ends of a run says nothing about its steps.
        self._sums, self._since = [0.0, 0], [0.0, 0]

    def sample(self, *, busy: bool) -> float | None:
        """Count the time since the last call; the share of it, 0..1, or None."""
        if self._samples is None:
            return None
        before, now = self._samples
        request = self._ask("c_nvmlGpmMetricsGet_t")
        if request is None or not self._read(now):
            return None
        self._samples = [now, before]
        request.version, request.numMetrics, request.sample1, request.sample2 = 1, 1, before, now
        request.metrics[0].metricId = _TENSOR_ACTIVE
        if self._ask("nvmlGpmMetricsGet", request) is None or request.metrics[0].nvmlReturn:
            return None
        share = float(request.metrics[0].value) / 100
        if busy or self._sums[1]:
            self._since = [self._since[0] + share, self._since[1] + 1]
        if busy:
            self._sums = [a + b for a, b in zip(self._sums, self._since, strict=True)]
            self._since = [0.0, 0]
        return share

    @property
    def mean(self) -> float | None:
        """0..1; None if unknown."""
        return self._sums[0] / self._sums[1] if self._sums[1] else None

    def _read(self, sample: Any) -> bool:
        return self._ask("nvmlGpmSampleGet", self._handle, sample) is not None


class _GpuUsage:
    """Usage of the GPUs: clocks and tensor cores while they are busy, PCIe replays, NVLink errors."""

    def __init__(self, nvml: _XidEvents) -> None:
        self._ask, self._handles = nvml.ask, nvml.handles
        self._began, self._start = time.time(), time.monotonic()
        self._mhz: dict[str, list[int]] = {gpu: [0, 0] for gpu in self._handles}  # sum, samples
        self._tensor = {gpu: _TensorActive(self._ask, handle) for gpu, handle in self._handles.items()}
        self._replays = {gpu: self._pcie(handle) for gpu, handle in self._handles.items()}
        self._links: list[dict[tuple[str, int, str], int]] = []  # the first reading and the newest

    def sample(self) -> dict[str, float | None]:
        """Read the clocks of those that are busy, and how busy their tensor cores are: PCI address -> share or None."""
        active = {}
        for gpu, handle in self._handles.items():
            used = self._ask("nvmlDeviceGetUtilizationRates", handle)
            mhz = self._ask("nvmlDeviceGetClockInfo", handle, CLOCK_SM)
            busy = used is not None and used.gpu >= _BUSY_PERCENT
            active[gpu] = self._tensor[gpu].sample(busy=busy)
            if busy and mhz is not None:
                self._mhz[gpu][0] += mhz
                self._mhz[gpu][1] += 1
        return active

    def links(self, links: Links, addresses: Mapping[str, str]) -> None:
        """The NVLinks' counters now; `addresses`: GPU's UUID -> PCI address."""
        now = {
            (addresses.get(gpu, gpu), link, counter): value
            for (gpu, link), every in links.items()
            for counter, value in every.items()
        }
        self._links = [*self._links[:1], now]

    def counters(self) -> GpuCounters:
        """Since the start."""
        usage = {}
        for gpu, handle in self._handles.items():
            (total, samples), before, now = self._mhz[gpu], self._replays[gpu], self._pcie(handle)
            replays = None if before is None or now is None or now < before else now - before
            clock = total / samples if samples else None
            usage[gpu] = GpuUse(clock, samples, replays, self._grown(gpu), self._tensor[gpu].mean)
        return GpuCounters(self._began, time.monotonic() - self._start, usage)

    def _grown(self, gpu: str) -> dict[str, int] | None:
        if len(self._links) < 2 or not any(key[0] == gpu for key in self._links[1]):
            return None
        first, last = self._links
        return {
            f"{link} {counter}": value - first[which, link, counter]
            for (which, link, counter), value in last.items()
            if which == gpu and value > first.get((which, link, counter), value)
        }

    def _pcie(self, handle: Any) -> int | None:
        value = self._ask("nvmlDeviceGetPcieReplayCounter", handle)
        return None if value is None else int(value)


def _pointer(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _addresses() -> dict[str, str]:
    """GPU's UUID -> PCI address."""
    table = {}
    for line in (_smi("--query-gpu=uuid,pci.bus_id", "--format=csv,noheader") or "").splitlines():
        uuid, _, bus_id = line.partition(",")
        if found := address(bus_id):
            table[uuid.strip()] = found
    return table


def _smi(*arguments: str) -> str | None:
    """The output of nvidia-smi; None if it is not installed, fails, or takes too long."""
    try:
        ended = subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.decode(errors="replace")
