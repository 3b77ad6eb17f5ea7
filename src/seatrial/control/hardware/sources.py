"""Reports of a node's hardware: driver messages from the kernel log and NVML, counters of ports and NVLinks.

For the agent's event loop: no call blocks. On a machine without GPU driver and RDMA devices it does nothing.
"""

from __future__ import annotations

import contextlib
import re
import select
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.base.kernel_files import KMSG
from seatrial.control.hardware.kernel_log import KernelLog
from seatrial.control.hardware.probe import SMI_TIMEOUT_S, watch_gpus, watch_ports
from seatrial.control.hardware.xid_gate import GatedSignal, XidGate
from seatrial.control.node.external import Body, Child, Message
from seatrial.hardware.xid import XidMessage, address, catalogue, parse

INFINIBAND = Path("/sys/class/infiniband")
DRIVER = Path("/proc/driver/nvidia")

# The second and third line of each SXid; the first one contains the error.
_SXID_DETAIL = re.compile(r"Severity [0-9]|Data \{")

_GPUS = "GPUs"  # the probe that queries the driver
_NOT_YET = "NVML has not answered yet"
_FILE_INTERVAL_S = 0.25  # a plain file must be polled
_SILENT_S = 10.0  # a probe that is silent for this long beyond the time it may take counts as hung


@dataclass(frozen=True)
class Signal:
    """One report of the hardware. `gpu` is its PCI address ("0000:3b:00"), `port` "mlx5_0/1"."""

    signal: str  # a key of the policy
    gpu: str | None
    port: str | None
    message: str
    evidence: dict[str, Any]
    time: float  # on the clock of the time passed to `poll`


class Sources:
    """All sources of one node. `poll` returns what is new; the object is readable when there may be something.

    `kernel_log`, `infiniband` and `driver` are None to disable a source, as where ranks use neither GPU nor RDMA. A log
    other than /dev/kmsg is a substitute and is always followed; /dev/kmsg itself only if NVIDIA's driver is present.
    `gpus`: the PCI addresses of the GPUs that this node uses, None for all; other jobs' GPUs are ignored. `ports_file` and
    `gpus_file`: where their counters are kept (`record.node_counters`). `telemetry` gets the series that a probe has read.
    """

    def __init__(
        self,
        kernel_log: Path | None = KMSG,
        infiniband: Path | None = INFINIBAND,
        interval_s: float = 10.0,
        *,
        gpus: Collection[str] | None = None,
        driver: Path | None = DRIVER,
        ports_file: Path | None = None,
        gpus_file: Path | None = None,
        telemetry: Callable[[str, dict[str, float]], None] = lambda source, values: None,
    ) -> None:
        self._telemetry = telemetry
        self._interval_s = interval_s
        self._gpus = None if gpus is None else frozenset(gpus)
        self._gpus_file = gpus_file
        self._gate = XidGate()
        self._poller = select.epoll()
        self._nvml: str | None = "no GPU driver"  # why NVML gives no events; None while it does
        self._blind_reported = self._no_ports_reported = False
        self._probes: list[_Probe] = []
        self._driver = driver is not None and driver.is_dir()
        wanted = kernel_log is not None and (kernel_log != KMSG or self._driver)
        self._log = KernelLog(kernel_log) if wanted and kernel_log is not None else None
        self._log_fd: int | None = None
        self._lost = 0
        self._next_poll = 0.0
        self._watch_log()
        self._infiniband = infiniband
        self._ports = infiniband is not None and infiniband.is_dir() and any(infiniband.iterdir())
        if self._ports and infiniband is not None:
            self._start("ports", watch_ports(infiniband, interval_s, ports_file), interval_s)
        self.resume_gpus()

    def fileno(self) -> int:
        return self._poller.fileno()

    def deadline(self, now: float) -> float | None:
        """When to call `poll` even if nothing is readable; None for never."""
        times = [self._gate.deadline, *(p.silent_at(now) for p in self._probes)]
        if self._log is not None and self._log.silent:
            times.append(self._next_poll)
        return min((t for t in times if t is not None), default=None)

    def poll(self, now: float) -> list[Signal]:
        """The signals since the last call; never blocks."""
        signals = self._read_log(now)
        for probe in list(self._probes):
            for message in probe.receive(now):
                signals += self._on_message(message, now)
            if (problem := probe.problem(now)) is not None:
                self._drop(probe)
                evidence = {"probe": probe.name, "last": probe.doing}
                signals.append(Signal("probe_silent", None, None, problem, evidence, now))
        signals += [self._xid(gated, now) for gated in self._gate.due(now)]
        return self._once(now) + signals

    def release_gpus(self) -> None:
        """Close the GPUs: a GPU that a process has open, even only for NVML, cannot be reset."""
        for probe in [p for p in self._probes if p.name == _GPUS]:
            self._drop(probe)
            self._nvml = "the GPUs were released"

    def resume_gpus(self) -> None:
        """Start to watch the GPUs, at construction and after `release_gpus`."""
        if self._driver and not any(p.name == _GPUS for p in self._probes):
            self._nvml = _NOT_YET
            body = watch_gpus(self._interval_s, self._gpus_file, self._gpus)
            self._start(_GPUS, body, 3 * SMI_TIMEOUT_S)

    def close(self) -> None:
        """End the probes and close the log."""
        for probe in list(self._probes):
            self._drop(probe)
        if self._log is not None:
            self._log.close()
        self._poller.close()

    # -- the kernel log

    def _read_log(self, now: float) -> list[Signal]:
        if self._log is None or (self._log.silent and now < self._next_poll):
            return []
        self._next_poll = now + _FILE_INTERVAL_S
        for line in self._log.lines():
            message = parse(line)
            if message is not None and self._ours(message) and not _SXID_DETAIL.match(message.message):
                self._gate.add(message, "kernel log", now)
        self._watch_log()
        if self._log.lost == self._lost:
            return []
        self._lost = self._log.lost
        text = f"{self._log.path}: messages were overwritten before they were read"
        return [Signal("log_lost", None, None, text, {"times": self._lost}, now)]

    def _watch_log(self) -> None:
        """Register the log with the poller, if it is open and of a kind that can be polled."""
        fd = None if self._log is None else self._log.fileno()
        if fd != self._log_fd:
            # The poller has dropped a closed descriptor by itself.
            self._log_fd = fd
            if fd is not None:
                with contextlib.suppress(PermissionError):  # /dev/null: epoll does not support it
                    self._poller.register(fd, select.EPOLLIN)

    def _ours(self, message: XidMessage) -> bool:
        # A message whose GPU could not be identified is never dropped: it may be about one of ours.
        known = message.kind == "xid" and address(message.pci) is not None
        return not known or self._gpus is None or message.pci in self._gpus

    def _xid(self, gated: GatedSignal, now: float) -> Signal:
        message = gated.message
        name, where = ("Xid", "GPU") if message.kind == "xid" else ("SXid", "NVSwitch")
        known = catalogue().get(message.code) if message.kind == "xid" else None
        text = message.message or (known.meaning if known else "no description is known")
        evidence: dict[str, Any] = {
            "source": gated.source,
            "code": message.code,
            "name": known.name if known else None,
            "pci": message.pci,
            "logged": message.time,
            "pid": message.pid,
            "process": message.name,
            "unit": message.unit,
            "severity": message.severity,
            "link": message.link,
            "subcode": message.subcode,
            "with": list(gated.other_codes) or None,
            "swallowed": gated.swallowed or None,
        }
        return Signal(
            gated.signal,
            message.pci if message.kind == "xid" else None,
            None,
            f"{name} {message.code} from {where} {message.pci}: {text}",
            {key: value for key, value in evidence.items() if value is not None},
            now,
        )

    # -- the probes

    def _start(self, name: str, body: Body, longest_s: float) -> None:
        probe = _Probe(name, Child(body), longest_s)
        self._probes.append(probe)
        self._poller.register(probe.child.fileno(), select.EPOLLIN)

    def _drop(self, probe: _Probe) -> None:
        self._poller.unregister(probe.child.fileno())
        probe.child.close()
        self._probes.remove(probe)
        if probe.name == _GPUS:
            self._nvml = "the NVML probe does not answer"

    def _on_message(self, message: Message, now: float) -> list[Signal]:
        match message:
            case {"nvml": reason}:
                self._nvml = reason
            case {"source": str(source), "values": dict(values)}:
                self._telemetry(source, values)
            case {"xid": {"code": int(code), "pci": str(pci)}}:
                xid = XidMessage("xid", code, pci, "")
                if self._ours(xid):
                    self._gate.add(xid, "NVML", now, log_readable=self._log_readable)
            case {"finding": {"signal": signal, "where": where, "message": text, "evidence": evidence}}:
                gpu = message.get("gpu")
                if gpu is None or self._gpus is None or address(gpu) is None or gpu in self._gpus:
                    return [Signal(signal, gpu, None if gpu else where, text, evidence, now)]
        return []

    # -- what cannot be observed

    @property
    def _log_readable(self) -> bool:
        return self._log is not None and self._log.problem is None

    def _once(self, now: float) -> list[Signal]:
        """Report once what cannot be observed: there, the absence of signals does not mean health."""
        signals = []
        waiting = self._nvml == _NOT_YET
        blind = self._log is not None and not self._log_readable and self._nvml is not None and not waiting
        if blind and not self._blind_reported and self._log is not None:
            self._blind_reported = True
            text = f"driver messages (Xid) are not observable: {self._log.problem}; {self._nvml}"
            evidence = {"kernel_log": self._log.problem, "nvml": self._nvml}
            signals.append(Signal("not_observable", None, None, text, evidence, now))
        if self._driver and self._infiniband and not self._ports and not self._no_ports_reported:
            self._no_ports_reported = True
            text = f"network counters are not observable: no RDMA device in {self._infiniband}"
            signals.append(Signal("not_observable", None, None, text, {}, now))
        return signals


class _Probe:
    """One probe process as the agent sees it. `longest_s`: how long one of its operations may take."""

    def __init__(self, name: str, child: Child, longest_s: float) -> None:
        self.name = name
        self.child = child
        self.doing = "starting"
        self._longest_s = longest_s
        self._heard_at: float | None = None

    def receive(self, now: float) -> list[Message]:
        messages = self.child.receive()
        if messages or self._heard_at is None:
            self._heard_at = now
        for message in messages:
            self.doing = message.get("alive", self.doing)
        return messages

    def silent_at(self, now: float) -> float:
        """When it has been silent for too long."""
        heard = now if self._heard_at is None else self._heard_at
        return heard + self._longest_s + _SILENT_S

    def problem(self, now: float) -> str | None:
        """Why it no longer works; None while it does."""
        if self.child.ended:
            return f"the probe of the {self.name} has exited; its last operation was: {self.doing}"
        if now >= self.silent_at(now):
            return f"the probe of the {self.name} hangs; its last operation was: {self.doing}"
        return None


def gpu_addresses(
    devices: Sequence[str], *, driver: Path = DRIVER, dev: Path = Path("/dev")
) -> frozenset[str] | None:
    """PCI addresses of CUDA devices that are named as in CUDA_VISIBLE_DEVICES; None if one cannot be determined.

    Numbers count the GPUs that have a file in `dev`, in the order of their addresses, as CUDA does among equal GPUs.
    """
    indexed, by_uuid = [], {}
    for folder in sorted((driver / "gpus").glob("*")):
        pci = address(folder.name)
        try:
            text = (folder / "information").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        fields = dict(re.findall(r"^(.+?):\s*(.*?)\s*$", text, re.MULTILINE))
        if pci is not None and (dev / f"nvidia{fields.get('Device Minor')}").exists():
            indexed.append(pci)
            by_uuid[fields.get("GPU UUID", "")] = pci
    found = set()
    for name in devices:
        if name.isdecimal():
            pci = indexed[int(name)] if int(name) < len(indexed) else None
        else:
            matches = [pci for uuid, pci in by_uuid.items() if uuid.startswith(name)]
            pci = matches[0] if len(matches) == 1 else None
        if pci is None:
            return None
        found.add(pci)
    return frozenset(found)
