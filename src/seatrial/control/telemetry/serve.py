"""`/metrics` of one agent, for Prometheus."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server

from seatrial import __version__
from seatrial.record.exposition import Labelled, SeriesCollector
from seatrial.record.folder import RunFolder
from seatrial.record.run_series import RunSeries
from seatrial.record.series import series

if TYPE_CHECKING:
    from seatrial.control.telemetry.node_sampler import NodeSampler

_RUN_EVERY_S = 5.0


def serve(sampler: NodeSampler, folder: RunFolder, node: int, address: str, port: int) -> None:
    """Answer in threads of their own, with what was read last: no scrape waits for a driver or a file system.

    The coordinator's node serves the series of the run too. Raises OSError, as where the port is taken.
    """
    run: dict[str, float] = {}
    info = series("run_info", run=folder.path.name, node=node, host=socket.gethostname(), version=__version__)

    def read() -> Iterable[Labelled]:
        values = {info: 1.0, series("run_info_ignored"): 1.0, **sampler.newest()}
        yield {"node": str(node)}, values
        if sampler.coordinates.is_set():
            yield {}, dict(run)

    registry = CollectorRegistry()
    registry.register(SeriesCollector(read))
    start_http_server(port, address, registry)

    def follow() -> None:
        reader = RunSeries(folder)
        while True:
            sampler.coordinates.wait()
            run.update(reader.read(time.time()))
            time.sleep(_RUN_EVERY_S)

    threading.Thread(target=follow, daemon=True).start()
