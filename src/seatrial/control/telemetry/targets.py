"""control/prometheus-targets.json: where this run's agents serve `/metrics`, for Prometheus' file_sd_configs."""

from __future__ import annotations

import json
from collections.abc import Mapping

from seatrial.base import atomic
from seatrial.base.complain import complain
from seatrial.job import Job
from seatrial.record.folder import RunFolder


def metrics_port(job: Job, node: int) -> int | None:
    """The port of one node's agent; None: it serves none."""
    port = job.file.watch.metrics_port
    if port is None:
        return None
    hosts = job.file.ssh.hosts if job.file.ssh is not None else []
    shared = job.cluster.launcher == "local" or len(set(hosts)) < len(hosts)
    return port + node if shared else port


def write_targets(folder: RunFolder, job: Job, addresses: Mapping[int, str]) -> None:
    """`addresses`: node -> address of its agent. A file that cannot be written is reported on stderr."""
    where = {address: f"[{address}]" if ":" in address else address for address in addresses.values()}
    targets = [f"{where[addresses[node]]}:{metrics_port(job, node)}" for node in sorted(addresses)]
    try:
        atomic.write_text(folder.prometheus_targets, json.dumps([{"targets": targets}]) + "\n", durable=False)
    except OSError as error:
        complain(f"could not write {folder.prometheus_targets}: {error}")
