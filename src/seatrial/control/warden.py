"""The hardware of one node: what it says, and what is done to it when the coordinator orders so.

Resetting a GPU and draining a node have effects outside the run: they are done only where the job allows it, and what
the command printed is told either way.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seatrial.base import process
from seatrial.control.external import External, ExternalResult
from seatrial.control.policy import drain_command, reset_command
from seatrial.control.sources import KMSG, Sources, gpu_addresses
from seatrial.control.spec import AgentSpec
from seatrial.hardware.devices import visible_devices
from seatrial.job.schema import ResilienceSection

KERNEL_LOG = "SEATRIAL_KERNEL_LOG"  # another file than /dev/kmsg; `{node}` in it stands for the node's number
_QUALIFY_S = 120.0

Watch = Callable[[Any, Callable[[], None]], None]


class Warden:
    """Listens to the node's hardware and carries out what concerns it."""

    def __init__(
        self,
        spec: AgentSpec,
        resilience: ResilienceSection,
        tell: Callable[[dict[str, Any]], None],
        watch: Watch,
        unwatch: Callable[[Any], None],
    ) -> None:
        self._spec, self._resilience = spec, resilience
        self._tell, self._watch, self._unwatch = tell, watch, unwatch
        stand_in = os.environ.get(KERNEL_LOG)
        log = None if stand_in is None else Path(stand_in.replace("{node}", str(spec.node)))
        if spec.device == "cuda":
            self._sources = Sources(log or KMSG, gpus=gpu_addresses(visible_devices()))
        else:
            # A GPU that this host may have is none of ours.
            self._sources = Sources(log, None, driver=None)
        self._watch(self._sources, self._listen)
        self._running: External | None = None
        self._then: Callable[[ExternalResult], None] | None = None
        self._queue: list[dict[str, Any]] = []

    @property
    def deadline(self) -> float | None:
        times = [self._sources.deadline(time.monotonic())]
        if self._running is not None:
            times.append(self._running.deadline)
        return min((t for t in times if t is not None), default=None)

    def tick(self) -> None:
        """What time demands."""
        at = self._sources.deadline(time.monotonic())
        if at is not None and time.monotonic() >= at:
            self._listen()
        if self._running is not None and time.monotonic() >= self._running.deadline:
            self._ended()

    def _listen(self) -> None:
        signals = [signal.to_message() for signal in self._sources.poll(time.monotonic())]
        if signals:
            self._tell({"signals": signals})

    def order(self, order: dict[str, Any]) -> None:
        """{"what": "reset_gpu" | "requalify" | "drain", ...}: one after the other."""
        self._queue.append(order)
        self._next()

    def _next(self) -> None:
        if self._running is not None or not self._queue:
            return
        order = self._queue.pop(0)
        match order["what"]:
            case "reset_gpu":
                self._reset(order)
            case "reset_one":
                self._reset_one(order)
            case "drain":
                self._drain(order)
            case "requalify":
                self._qualify()

    def _reset(self, order: dict[str, Any]) -> None:
        if self._spec.device != "cuda":
            self._told("gpu_reset", f"node {self._spec.node} has no GPU to reset", order, done=False)
            self._qualify()
            return
        # Nobody said which: all that this node uses, and never one that is another job's.
        gpus = gpu_addresses(visible_devices()) if order["gpu"] is None else [str(order["gpu"])]
        if not self._resilience.allow_gpu_reset:
            self._refuse_reset(
                order, "resilience.allow_gpu_reset is false; it stays out of this run until it was"
            )
        elif not gpus:
            self._refuse_reset(order, "which GPUs are this node's cannot be told")
        else:
            ones = [{**order, "what": "reset_one", "gpu": gpu} for gpu in sorted(gpus)]
            self._queue[:0] = [*ones, {"what": "requalify"}]
            self._next()

    def _refuse_reset(self, order: dict[str, Any], why: str) -> None:
        which = "no GPU" if order["gpu"] is None else f"GPU {order['gpu']}"
        self._told("gpu_reset", f"{which} of node {self._spec.node} not reset: {why}", order, done=False)
        self._tell({"requalified": {"ok": False, "checks": {}, "message": f"not reset: {why}"}})
        self._next()

    def _reset_one(self, order: dict[str, Any]) -> None:
        self._sources.release_gpus()  # an open handle would keep the driver from it
        command = reset_command(order["gpu"])
        shown = " ".join(command.argv)

        def was_reset(result: ExternalResult) -> None:
            self._sources.resume_gpus()
            message = f"`{shown}` on node {self._spec.node}: {result.output or 'no output'}"
            self._told("gpu_reset", message, order, done=result.done, output=result.output)

        self._start(list(command.argv), command.timeout_s, was_reset)

    def _drain(self, order: dict[str, Any]) -> None:
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        try:
            command = drain_command(name, order["cause"])
        except ValueError as error:  # no name that a scheduler could mean
            self._told("node_drained", f"not run: {error}", order, done=False)
            self._next()
            return
        shown = " ".join(command.argv)
        if not self._resilience.allow_node_drain:
            text = f"not run, resilience.allow_node_drain is false: {shown}"
            self._told("node_drained", text, order, done=False)
            self._next()
            return

        def drained(result: ExternalResult) -> None:
            message = f"`{shown}`: {result.output or 'no output'}"
            self._told("node_drained", message, order, done=result.done, output=result.output)

        self._start(list(command.argv), command.timeout_s, drained)

    def _qualify(self) -> None:
        argv = process.python("seatrial.train.qualify", "--device", self._spec.device)
        # As many as we use: one that is missing must fail the test too.
        argv += ["--count", str(self._spec.ranks_per_node), "--timeout", str(_QUALIFY_S - 10)]

        def tested(result: ExternalResult) -> None:
            values = {"ok": result.done, "checks": {}, "message": result.output}
            self._tell({"requalified": values})

        self._start(argv, _QUALIFY_S, tested)

    def _told(self, kind: str, message: str, order: dict[str, Any], *, done: bool, output: str = "") -> None:
        data = {"done": done, "output": output, "cause": order.get("cause")}
        self._tell({"external": {"kind": kind, "message": message, "data": data}})

    # -- the command under way

    def _start(self, argv: list[str], timeout_s: float, then: Callable[[ExternalResult], None]) -> None:
        try:
            self._running, self._then = External(argv, timeout_s), then
        except OSError as error:  # not even a process could be had for it
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
