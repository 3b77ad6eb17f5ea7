"""`/metrics` of one agent, for Prometheus."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, start_http_server

from seatrial import __version__
from seatrial.record.exposition import Labelled, SeriesCollector
from seatrial.record.folder import RunFolder
from seatrial.record.run_series import RunSeries
from seatrial.record.series import series

_RUN_EVERY_S, _RUN_OLD_S = 5.0, 60.0


def serve(
    newest: Callable[[], dict[str, float]],
    coordinates: threading.Event,
    folder: RunFolder,
    node: int,
    address: str,
    port: int,
) -> None:
    """Serve scrapes in separate threads from the latest values: no scrape waits for a driver or a file system.

    The coordinator's node, where `coordinates` is set, serves the series of the run too. Raises OSError, for example if the port is taken.
    """
    host = socket.gethostname()
    info = series("run_info", run=folder.path.absolute().name, node=node, host=host, version=__version__)
    run: list[tuple[float, dict[str, float]]] = [(-_RUN_OLD_S, {})]  # when it was read, monotonic; what

    def read() -> Iterable[Labelled]:
        yield {"node": str(node)}, {info: 1.0, **newest()}
        at, values = run[0]
        if coordinates.is_set() and time.monotonic() - at < _RUN_OLD_S:
            yield {}, values

    registry = CollectorRegistry()
    registry.register(SeriesCollector(read))
    start_http_server(port, address, registry)

    def follow() -> None:
        reader = RunSeries(folder)
        while True:
            coordinates.wait()
            run[0] = time.monotonic(), reader.read(time.time())
            time.sleep(_RUN_EVERY_S)

    threading.Thread(target=follow, daemon=True).start()
