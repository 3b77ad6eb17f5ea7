"""A launcher: LSF, with one agent per host, started by blaunch. `launcher = "lsf"` in [cluster]."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from seatrial.base.errors import InputError, RunFailed
from seatrial.job import Job
from seatrial.launch.base import Identity, Status
from seatrial.record.folder import RunFolder


class LsfLauncher:
    name = "lsf"
    restarts = False

    def check(self, job: Job) -> None:
        pass

    def render(self, job: Job, folder: RunFolder, generation: int = 1) -> dict[str, str]:
        agent = shlex.join(["seatrial", "agent", "--run", str(folder.path.absolute())])
        return {"job.lsf": f'#BSUB -n {job.cluster.nodes}\nblaunch -z "$LSB_HOSTS" {agent}\n'}

    def identity(self, environment: Mapping[str, str]) -> Identity:
        if "LSF_PM_TASKID" not in environment:
            raise InputError("this is not a task of an LSF job", hint="blaunch starts the agents")
        job = environment["LSB_JOBID"]
        return Identity(int(environment["LSF_PM_TASKID"]) - 1, job, attempt=job)

    def submit(self, files: Mapping[str, Path]) -> str:
        answer = _run("bsub", text=files["job.lsf"].read_text())
        found = re.search(r"Job <([0-9]+)>", answer)
        if found is None:
            raise RunFailed(f"bsub printed no job number: {answer.strip()}")
        return found[1]

    def status(self, handle: str) -> Status:
        words = _run("bjobs", "-noheader", "-o", "stat", handle).strip()
        match words:
            case "PEND":
                return Status("queued", words)
            case "RUN":
                return Status("running", words)
            case "DONE" | "EXIT":
                return Status("gone", words)
        return Status("unknown", words)

    def signal(self, handle: str, how: Literal["preempt", "end"]) -> None:
        _run("bkill", *(("-s", "TERM") if how == "preempt" else ()), handle)

    def warnings(self, grace_s: float) -> Sequence[str]:
        return []

    def logs(self, handle: str) -> Sequence[str]:
        return [f"bpeek {handle}"]


def _run(*command: str, text: str = "") -> str:
    try:
        return subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout
    except OSError as error:
        raise RunFailed(f"{command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise RunFailed(f"{command[0]}: {error.stderr.strip()}") from None
