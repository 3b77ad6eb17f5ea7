"""The hardware of one node: its signals, and the resets, drains and tests that the coordinator orders.

Resetting a GPU and draining a node have effects outside the run: they are done only if the job allows it, and the
outcome, with the output of a command that ran, is reported either way.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.base import process
from seatrial.base.kernel_files import KMSG
from seatrial.control.hardware.sources import Sources, gpu_addresses
from seatrial.control.machine.policy import drain_command, reset_command
from seatrial.control.node.external import External, ExternalResult
from seatrial.control.node.spec import AgentSpec
from seatrial.hardware.devices import visible_devices
from seatrial.job.schema import ResilienceSection
from seatrial.record import messages as msg

KERNEL_LOG = "SEATRIAL_KERNEL_LOG"  # replaces /dev/kmsg; `{node}` in it stands for the node's number
_QUALIFY_S = 120.0

Watch = Callable[[Any, Callable[[], None]], None]
Order = msg.ResetGpu | msg.Requalify | msg.Drain


@dataclass(frozen=True)
class _ResetOne:
    """One of the resets that a `ResetGpu` for all GPUs leads to."""

    gpu: str  # PCI address
    cause: str


class HardwareMonitor:
    """Monitors the node's hardware and carries out the orders for it."""

    def __init__(
        self,
        spec: AgentSpec,
        resilience: ResilienceSection,
        send: Callable[[msg.Journalled], None],
        watch: Watch,
        unwatch: Callable[[Any], None],
        telemetry: Callable[[str, dict[str, float]], None],
    ) -> None:
        """`telemetry` gets the series that a probe has read, with the probe's name."""
        self._spec, self._resilience = spec, resilience
        self._send, self._watch, self._unwatch = send, watch, unwatch
        stand_in = os.environ.get(KERNEL_LOG)
        log = None if stand_in is None else Path(stand_in.replace("{node}", str(spec.node)))
        if spec.device == "cuda":
            self._sources = Sources(
                log or KMSG,
                gpus=gpu_addresses(visible_devices()),
                ports_file=spec.folder.port_counters(spec.node),
                gpus_file=spec.folder.gpu_counters(spec.node),
                telemetry=telemetry,
            )
        else:
            # This host may have GPUs, but the run does not use them.
            self._sources = Sources(log, None, driver=None)
        self._watch(self._sources, self._listen)
        self._running: External | None = None
        self._then: Callable[[ExternalResult], None] | None = None
        self._queue: list[Order | _ResetOne] = []

    @property
    def deadline(self) -> float | None:
        times = [self._sources.deadline(time.monotonic())]
        if self._running is not None:
            times.append(self._running.deadline)
        return min((t for t in times if t is not None), default=None)

    def tick(self) -> None:
        """Handle everything that is due."""
        at = self._sources.deadline(time.monotonic())
        if at is not None and time.monotonic() >= at:
            self._listen()
        if self._running is not None and time.monotonic() >= self._running.deadline:
            self._ended()

    def _listen(self) -> None:
        for signal in self._sources.poll(time.monotonic()):
            self._send(msg.HardwareSignal(**vars(signal)))

    def order(self, order: Order) -> None:
        """Queue an order; they run one after the other."""
        self._queue.append(order)
        self._next()

    def _next(self) -> None:
        if self._running is not None or not self._queue:
            return
        order = self._queue.pop(0)
        match order:
            case msg.ResetGpu():
                self._reset(order)
            case _ResetOne():
                self._reset_one(order.gpu, order.cause)
            case msg.Drain():
                self._drain(order.cause)
            case msg.Requalify():
                self._qualify()

    def _reset(self, order: msg.ResetGpu) -> None:
        if self._spec.device != "cuda":
            self._external_event(
                "gpu_reset", f"node {self._spec.node} has no GPU to reset", order.cause, done=False
            )
            self._qualify()
            return
        # If no GPU is named: all that this node uses, and never one of another job.
        gpus = gpu_addresses(visible_devices()) if order.gpu is None else [order.gpu]
        if not self._resilience.allow_gpu_reset:
            self._refuse_reset(
                order,
                "resilience.allow_gpu_reset is false; the node stays excluded until its GPU has been reset",
            )
        elif not gpus:
            self._refuse_reset(order, "the GPUs of this node cannot be determined")
        else:
            self._queue[:0] = [*(_ResetOne(gpu, order.cause) for gpu in sorted(gpus)), msg.Requalify()]
            self._next()

    def _refuse_reset(self, order: msg.ResetGpu, why: str) -> None:
        which = "no GPU" if order.gpu is None else f"GPU {order.gpu}"
        message = f"{which} of node {self._spec.node} not reset: {why}"
        self._external_event("gpu_reset", message, order.cause, done=False)
        self._send(msg.Requalified(ok=False, checks={}, message=f"not reset: {why}"))
        self._next()

    def _reset_one(self, gpu: str, cause: str) -> None:
        self._sources.release_gpus()  # an open handle would prevent the driver from resetting it
        command = reset_command(gpu)
        shown = " ".join(command.argv)

        def was_reset(result: ExternalResult) -> None:
            self._sources.resume_gpus()
            message = f"`{shown}` on node {self._spec.node}: {result.output or 'no output'}"
            self._external_event("gpu_reset", message, cause, done=result.done, output=result.output)

        self._start(list(command.argv), command.timeout_s, was_reset)

    def _drain(self, cause: str) -> None:
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        try:
            command = drain_command(name, cause)
        except ValueError as error:  # not a valid name for a scheduler
            self._external_event("node_drained", f"not run: {error}", cause, done=False)
            self._next()
            return
        shown = " ".join(command.argv)
        if not self._resilience.allow_node_drain:
            text = f"not run, resilience.allow_node_drain is false: {shown}"
            self._external_event("node_drained", text, cause, done=False)
            self._next()
            return

        def drained(result: ExternalResult) -> None:
            message = f"`{shown}`: {result.output or 'no output'}"
            self._external_event("node_drained", message, cause, done=result.done, output=result.output)

        self._start(list(command.argv), command.timeout_s, drained)

    def _qualify(self) -> None:
        argv = process.python("seatrial.train.health.qualify", "--device", self._spec.device)
        # As many as we use, so that a missing GPU fails the test too.
        argv += ["--count", str(self._spec.ranks_per_node), "--timeout", str(_QUALIFY_S - 10)]

        def tested(result: ExternalResult) -> None:
            self._send(msg.Requalified(ok=result.done, checks={}, message=result.output))

        self._start(argv, _QUALIFY_S, tested)

    def _external_event(self, kind: str, message: str, cause: str, *, done: bool, output: str = "") -> None:
        data = {"done": done, "output": output, "cause": cause}
        self._send(msg.ExternalEvent(kind, message, data))

    # -- the running command

    def _start(self, argv: list[str], timeout_s: float, then: Callable[[ExternalResult], None]) -> None:
        try:
            self._running, self._then = External(argv, timeout_s), then
        except OSError as error:  # no process could be forked for it
            then(ExternalResult(False, None, f"{argv[0]}: {error}"))
            self._next()
            return
        self._watch(self._running, self._ended)

    def _ended(self) -> None:
        running, then = self._running, self._then
        if running is None or then is None:
            return
        self._unwatch(running)
        result = running.result()
        if result is None:
            self._watch(running, self._ended)
            return
        self._running = self._then = None
        then(result)
        self._next()

    def close(self) -> None:
        """End the probes."""
        self._sources.close()
