"""Series as Prometheus reads them: names with the prefix `seatrial_`, HELP, TYPE and units from the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from seatrial.record.series import NODE_SERIES, PREFIX, RUN_SERIES, SERVED_SERIES, parse_series

_ALL = {**NODE_SERIES, **RUN_SERIES, **SERVED_SERIES}

Labelled = tuple[Mapping[str, str], Mapping[str, float]]  # labels that all of it gets; series -> value


class SeriesCollector(Collector):
    """Passes what `read` returns to prometheus_client at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Labelled]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Each family once, in the order of the table. A series that is not in the table is left out."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for labels, values in self._read():
            for key, value in values.items():
                name, own = parse_series(key)
                found.setdefault(name, []).append(({**labels, **own}, value))
        for name, entry in _ALL.items():
            if name not in found:
                continue
            kind = CounterMetricFamily if entry.kind == "counter" else GaugeMetricFamily
            names = list(found[name][0][0])
            # A metric's name must end with its unit: "bytes_per_second" does, "ratio" too.
            family = kind(PREFIX + name, entry.help, labels=names, unit=entry.unit)
            for labels, value in found[name]:
                family.add_metric([labels.get(each, "") for each in names], value)
            yield family


def exposition(parts: Iterable[Labelled]) -> bytes:
    """The text of `/metrics`, in `CONTENT_TYPE_LATEST` of prometheus_client."""
    registry = CollectorRegistry()
    registry.register(SeriesCollector(lambda: list(parts)))
    return generate_latest(registry)
