"""An agent started by a scheduler or by hand: its identity, its address and its device."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from seatrial.base import process
from seatrial.base.address import route
from seatrial.base.errors import InputError
from seatrial.control.agent.agent import Agent
from seatrial.control.node.spec import spec_of
from seatrial.hardware.devices import choose_device
from seatrial.launch import named
from seatrial.launch.base import Identity, Scheduled
from seatrial.launch.begin import current_launch, current_start
from seatrial.record.filesystem import check_token
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import frozen, job_of
from seatrial.record.launches import StartOutcome

_SEEN_S = 60.0  # a network file system may show a new file this much later


def run_agent(run: Path, node: int | None) -> int:
    """Run the agent of this host until the run is over; its exit status.

    `node`: the index, for an agent that is started by hand; otherwise the launcher's environment states it. Raises
    InputError if the run, the host or the environment cannot be used.
    """
    folder = RunFolder.open(run)
    launcher = named(current_launch(folder).launcher)
    if node is not None:
        identity = Identity(node, f"{socket.gethostname()}-{os.getpid()}")
    elif isinstance(launcher, Scheduled):
        identity = launcher.identity(os.environ)
    else:
        raise InputError(
            f"the agents of launcher {launcher.name!r} are started by `seatrial train`",
            hint="by hand: --node N",
        )
    start = current_start(folder, identity.attempt)
    if isinstance(start, StartOutcome):
        print(f"the run is over: {start.message or 'done'} (exit code {start.exit_code})", file=sys.stderr)
        return start.exit_code
    check_token(folder, start.generation, wait_s=_SEEN_S)
    job = job_of(folder, frozen(folder))
    device, _reason = choose_device(job.cluster)
    bind = job.cluster.bind
    way = route(identity.peers, bind or identity.address)
    reason = way.reason if bind or not identity.address else f"the address set by {launcher.name}"
    spec = spec_of(
        job,
        folder,
        start.generation,
        identity.node,
        device=device,
        address=way.address,
        interface=way.interface,
        route_reason=reason,
        incarnation=identity.incarnation,
        order=identity.order,
    )
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    os.environ[process.MARK] = f"{socket.gethostname()}-{os.getpid()}/node{spec.node}"
    process.allow_many_files()
    return Agent(spec, None).run()
