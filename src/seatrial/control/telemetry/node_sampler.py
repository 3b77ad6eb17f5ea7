"""The process that records a node's telemetry: a child of its agent, which gives it what the probes read.

Everything that may hang has its own thread: reading the host, statvfs of each file system, writing to the run
folder, answering Prometheus, reading the run for it. What a thread read last counts for three intervals, then it is
absent. Nothing here holds up the agent, or is needed by the run.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from seatrial.base.lines import Channel
from seatrial.control.telemetry.host import HostLoad
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder
from seatrial.record.series import series
from seatrial.record.telemetry_writer import TelemetryWriter

Values = dict[str, float]

FRESH = 3.0  # intervals for which a value counts
_PROBES_S = 10.0  # between two messages of the agent's probes
_TIDY_S = 3600.0
_FIRST_S = 1.0  # until the first sample, in which the others read something
_NICENESS = 10  # ranks come first where processors are scarce


@dataclass(frozen=True)
class SamplerSettings:
    """What the process is to do."""

    run: Path
    node: int
    every_s: float
    storages: Mapping[str, Path]  # name -> a path of its file system
    address: str
    port: int | None  # of /metrics; None: not served


class NodeSampler:
    """Runs until its agent has closed the channel."""

    def __init__(self, settings: SamplerSettings, channel: Channel) -> None:
        self._settings, self._channel = settings, channel
        self._folder = RunFolder(settings.run)
        self._writer = TelemetryWriter(self._folder, settings.node, settings.every_s)
        self._read: dict[str, tuple[float, Values]] = {}  # source -> when, monotonic; what
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        self._load = HostLoad()
        self.coordinates = threading.Event()

    def run(self) -> None:
        """Start the threads, and receive the probes' readings from the agent."""
        settings = self._settings
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)
        self._every(self._host)
        for name, path in settings.storages.items():
            self._every(partial(self._storage, name, path))
        self._every(self._record, wait_first=True)
        self._every(self._tidy, every_s=_TIDY_S)
        if settings.port is not None:
            self._serve(settings.port)
        while not self._channel.closed:
            self._channel.readable(None)
            for message in self._channel.receive():
                match msg.decode(message, msg.ToTelemetry):
                    case msg.Readings(source, values):
                        self.update(source, values)
                    case msg.Coordinates(coordinates):
                        (self.coordinates.set if coordinates else self.coordinates.clear)()

    def update(self, source: str, values: Values) -> None:
        """Replace the values of `source` by its newest ones."""
        with self._lock:
            self._read[source] = time.monotonic(), values

    def newest(self) -> Values:
        """All values that are not too old."""
        since = time.monotonic() - FRESH * max(self._settings.every_s, _PROBES_S)
        with self._lock:
            return {k: v for at, values in self._read.values() if at >= since for k, v in values.items()}

    def report(self, what: str, message: str) -> None:
        """Have the agent record a warning, once for each `what`."""
        if what not in self._reported:
            self._reported.add(what)
            self._channel.send(msg.encode(msg.TelemetryFailed(what, message)))

    def _every(
        self, do: Callable[[], None], *, every_s: float | None = None, wait_first: bool = False
    ) -> None:
        """Call `do` now and then every interval, in its own thread."""
        period = self._settings.every_s if every_s is None else every_s

        def loop() -> None:
            if wait_first:
                time.sleep(_FIRST_S)
            while True:
                started_at = time.monotonic()
                do()
                time.sleep(max(0.0, period - (time.monotonic() - started_at)))

        threading.Thread(target=loop, daemon=True).start()

    def _host(self) -> None:
        self.update("host", self._load.read())

    def _storage(self, name: str, path: Path) -> None:
        self.update(f"storage {name}", storage_values(name, path))

    def _record(self) -> None:
        try:
            self._writer.add(time.time(), self.newest())
        except OSError as error:
            self._cannot_write(error)

    def _tidy(self) -> None:
        try:
            self._writer.tidy(time.time())
        except OSError as error:
            self._cannot_write(error)

    def _cannot_write(self, error: OSError) -> None:
        where = self._folder.telemetry_of(self._settings.node)
        self.report("record", f"telemetry cannot be written to {where}: {error.strerror or error}")

    def _serve(self, port: int) -> None:
        # Imported here: only a node that serves /metrics needs the library.
        from seatrial.control.telemetry.serve import serve

        try:
            own = self._folder, self._settings.node
            serve(self.newest, self.coordinates, *own, self._settings.address, port)
        except OSError as error:
            where = f"{self._settings.address}:{port}"
            self.report("serve", f"/metrics is not served at {where}: {error.strerror or error}")


def storage_values(name: str, path: Path) -> Values:
    """Free and total bytes of the file system of `path`, or of its nearest folder that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path)
    except OSError:
        return {}
    return {
        series("storage_free_bytes", storage=name): float(found.f_bavail * found.f_frsize),
        series("storage_total_bytes", storage=name): float(found.f_blocks * found.f_frsize),
    }
