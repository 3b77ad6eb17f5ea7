"""`seatrial train` with what a launcher on real machines has and its command line has not: a plan for the nodes.

    python recovery_driver.py '{"set": [...], "returns": {"1": 0.5}, "coordinator": 2}'

`returns`: node -> seconds after which an agent that ended is started again. `coordinator`: all other agents are held
until this one has taken the lease. `late`: the ranks' device is tests/late_device.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from seatrial.control.net import lease
from seatrial.job import load_job
from seatrial.launch import LocalLauncher, attended, local, preflight
from seatrial.launch.agents import AgentHandle
from seatrial.launch.session import prepare_session
from seatrial.record.folder import RunFolder
from seatrial.ui.console import TrainConsole


class Held:
    """Agents that are stopped until another one coordinates."""

    def __init__(self, folder: RunFolder, first: int | None) -> None:
        self.folder, self.first = folder, first
        self.agents: list[AgentHandle] = []

    def tick(self) -> None:
        found = lease.Leases(self.folder.leases).newest()
        if self.agents and found is not None and found.node == self.first:
            for agent in self.agents:
                os.kill(agent.popen.pid, signal.SIGCONT)
            self.agents.clear()

    def start(self, start: Any) -> Any:
        def held(node: int) -> AgentHandle:
            agent: AgentHandle = start(node)
            if self.first not in (None, node) and lease.last_term(self.folder.leases) == 0:
                os.kill(agent.popen.pid, signal.SIGSTOP)  # long before its interpreter has come to our code
                self.agents.append(agent)
            return agent

        return held


def use_late_device() -> None:
    """Let ranks start on a device that this machine has not."""

    def choose(_: object) -> tuple[str, str]:
        return "cuda", "the test device"

    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    )
    os.environ["OMP_NUM_THREADS"] = "1"  # sums in another order would not be bit-equal
    local.choose_device = preflight.choose_device = choose  # type: ignore[assignment]
    local.visible_devices = lambda: [str(i) for i in range(64)]  # type: ignore[assignment]


def main() -> int:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    late = bool(plan.get("late"))
    if late:
        use_late_device()
    # The test device calls itself a GPU, for which there is no compiler here.
    job = load_job(Path("job.toml"), [*plan.get("set", []), *(["train.compile=false"] if late else [])])
    session = prepare_session(job, Path("runs"))
    held = Held(session.opened.folder, plan.get("coordinator"))

    class AttendedRun(attended.AttendedRun):
        def __init__(self, folder: RunFolder, generation: int, start: Any, **more: Any) -> None:
            super().__init__(folder, generation, held.start(start), **more)

    attended.AttendedRun = AttendedRun  # type: ignore[misc]
    launcher = LocalLauncher(returns={int(n): s for n, s in plan.get("returns", {}).items()})
    if late:
        launcher.worker_module = "late_rank"
    with (
        session.opened as opened,
        TrainConsole(
            session.opened.folder, total_steps=job.train.steps, generation=opened.generation, plain=True
        ) as console,
    ):

        def tick() -> None:
            held.tick()
            console.poll()

        return session.run(tick, launcher=launcher).exit_code


if __name__ == "__main__":
    sys.exit(main())
