"""The agent's telemetry child process, which samples, records and serves; its failure does not affect the agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seatrial.base.lines import Channel
from seatrial.checkpoint.place import checkpoint_urls
from seatrial.control.node.external import Child
from seatrial.control.node.spec import AgentSpec
from seatrial.control.telemetry.node_sampler import NodeSampler, SamplerSettings
from seatrial.control.telemetry.targets import metrics_port
from seatrial.job import Job
from seatrial.record import messages as msg


class Telemetry:
    """Starts the process, passes on what the probes read, and reports its failures as events."""

    def __init__(
        self,
        spec: AgentSpec,
        job: Job,
        send: Callable[[msg.Journalled], None],
        watch: Callable[[Any, Callable[[], None]], None],
        unwatch: Callable[[Any], None],
    ) -> None:
        self._node, self._send, self._unwatch = spec.node, send, unwatch
        self._coordinates = False
        settings = SamplerSettings(
            run=spec.run,
            node=spec.node,
            every_s=job.file.watch.telemetry_every_s,
            storages=_storages(job, spec),
            address=spec.address,
            port=metrics_port(job, spec.node),
        )
        self._child: Child | None = None
        try:
            self._child = Child(lambda channel: _sample(settings, channel))
        except OSError as error:  # no process could be forked
            self._fail("process", f"its process could not be started: {error}")
        else:
            watch(self._child, self._poll)

    def update(self, source: str, values: dict[str, float]) -> None:
        """Send the process the newest values of a probe."""
        if self._child is not None:
            self._child.post(msg.encode(msg.Readings(source, values)))

    def coordinates(self, coordinates: bool) -> None:
        """Whether this agent coordinates: its node then serves the series of the run too."""
        if self._child is not None and coordinates != self._coordinates:
            self._coordinates = coordinates
            self._child.post(msg.encode(msg.Coordinates(coordinates)))

    def _poll(self) -> None:
        """Report the process's messages. Once ended, it is not restarted: it would fail again."""
        assert self._child is not None
        for values in self._child.receive():
            failed: msg.TelemetryFailed = msg.decode(values, msg.FromTelemetry)
            self._fail(failed.what, failed.message)
        if self._child.ended:
            self.close()
            self._fail("process", "its process has ended")

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._unwatch(self._child)
            self._child.close()
            self._child = None

    def _fail(self, what: str, why: str) -> None:
        message = f"node {self._node}: telemetry: {why}; the run is not affected"
        self._send(msg.ExternalEvent("telemetry_failed", message, {"what": what}))


def _sample(settings: SamplerSettings, channel: Channel) -> None:
    NodeSampler(settings, channel).run()
    os._exit(0)  # threads that hang must not keep it


def _storages(job: Job, spec: AgentSpec) -> dict[str, Path]:
    """The file systems that the run writes to. An object store has no size."""
    urls = checkpoint_urls(job.checkpoint, job.name, spec.folder)
    named = {"run": str(spec.run), **dict(zip(("checkpoint", "fallback"), urls, strict=False))}
    return {name: Path(url) for name, url in named.items() if "://" not in url}
