"""A run as one job step: its agents on some nodes of an allocation that exists already."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from seatrial.base import process
from seatrial.base.errors import EXIT_FAILED, EXIT_INTERRUPTED
from seatrial.control.agent.errors import tail_of
from seatrial.launch.base import Outcome
from seatrial.launch.slurm import agents_command, slurm_section
from seatrial.record.failure import Failure
from seatrial.record.folder import RunFolder
from seatrial.record.launches import read_outcome

if TYPE_CHECKING:
    from seatrial.job import Job
    from seatrial.launch.allocation import Allocation

_POLL_S = 0.1
_ENDING_S = 40.0  # srun itself waits 32 s for a step that it has killed


class SlurmStepLauncher:
    """Starts the agents by one srun in `allocation`, on the first of its nodes, and stays until that ends.

    The allocation is given as if it had only the nodes of this run. Measured with Slurm 22.05: SIGTERM to srun kills its
    tasks at once, and so does its own helper process if srun is killed.
    """

    name = "slurm"

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation

    def check(self, job: Job) -> None:
        """Nothing beyond what `allocation_for` has checked."""
        assert len(self.allocation.nodes) >= job.cluster.nodes

    def render(self, job: Job, folder: RunFolder, generation: int = 1) -> dict[str, str]:
        """The step, as a script."""
        count = job.cluster.nodes
        where = [
            f"--jobid={self.allocation.job}",
            f"--nodelist={','.join(self.allocation.nodes[:count])}",
            # Given here, since srun would otherwise take those of the allocation, or of the step that this runs in.
            *(f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpu-bind=none"),
            # The process that starts it may be in a step that holds all of its node.
            "--overlap",
        ]
        output = folder.path.absolute() / "logs" / "slurm-%j-node%t.log"
        command = shlex.join(agents_command(job, folder, output, *where))
        lines = ["#!/bin/bash", f"# generation {generation}", *slurm_section(job).setup, f"exec {command}"]
        return {"step.sh": "\n".join([*lines, ""])}

    def launch(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        *,
        tick: Callable[[], None] | None = None,
    ) -> Outcome:
        """Run the job to its end; SIGINT ends it. Call it from the main thread."""
        (text,) = self.render(job, folder, generation).values()
        parent, log_path = os.getpid(), folder.logs / "srun.log"
        folder.logs.mkdir(parents=True, exist_ok=True)
        with open(process.open_log(log_path), "ab") as log:
            srun = subprocess.Popen(
                ["bash", "-c", text],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=lambda: process.die_with_parent(parent, signal.SIGTERM),
            )
        try:
            while srun.poll() is None:
                if tick is not None:
                    tick()
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            return Outcome(EXIT_INTERRUPTED)
        finally:
            _end(srun)
        outcome = read_outcome(folder, generation)
        if outcome is not None:
            return Outcome(outcome.exit_code, outcome.failure)
        how = process.status_text(srun.returncode)
        failure = Failure(
            node=None,
            rank=None,
            message=f"no agent recorded how the run ended; srun {how}",
            cause=f"srun {how}",
            time=time.time(),
            log=str(log_path),
            tail=tail_of(log_path),
            hint=f"the whole log is {log_path}; the agents' logs are next to it",
        )
        return Outcome(EXIT_FAILED, failure)


def _end(srun: subprocess.Popen[bytes]) -> None:
    """End the step; its agents are killed, and their ranks with them."""
    if srun.poll() is not None:
        return
    srun.terminate()
    try:
        srun.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        srun.kill()
        srun.wait()
