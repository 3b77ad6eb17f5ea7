"""Settings that an agent determines on its own host, where its launcher on another host leaves them open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from seatrial.base.address import Route, route
from seatrial.control.node.spec import AUTO, AgentSpec
from seatrial.hardware.devices import choose_device
from seatrial.job.schema import ClusterSection
from seatrial.record.inputs import frozen, job_of


def resolve_auto(spec: AgentSpec, environment: Mapping[str, str]) -> AgentSpec:
    """`spec` with the device, address and interface of this host in place of `AUTO`. Raises InputError."""
    if spec.address != AUTO:
        return spec
    cluster = job_of(spec.folder, frozen(spec.folder)).cluster
    found = ssh_route(cluster, environment)
    return dataclasses.replace(
        spec,
        device=choose_device(cluster)[0],
        address=found.address,
        interface=found.interface,
        route_reason=found.reason,
    )


def ssh_route(cluster: ClusterSection, environment: Mapping[str, str]) -> Route:
    """The route back to the ssh connection's host of origin. Raises InputError if `cluster.bind` matches nothing."""
    return route(environment.get("SSH_CONNECTION", "").split()[:1], cluster.bind)
