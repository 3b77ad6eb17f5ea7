"""Real runs of the small job under a test's hands: waited for by what they write, hit where it hurts, and compared."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from conftest import _MARK, CONSOLE_BYTES, JOB, TIMEOUT_S, Run, write_corpus
from seatrial.record.jsonl import Tail

HERE = Path(__file__).parent
STEPS = 16
SETTINGS = (
    f"train.steps={STEPS}",
    "train.sample_tokens=0",
    "optimizer.decay=constant",  # so that runs of different length are equal up to the shorter one's end
    "checkpoint.every_steps=100",  # the last one only: what is lost must come from processes or memory
    "resilience.snapshot_every_steps=5",
)
REPLICAS = ("parallel.pipeline=1", "parallel.replicate=2")
# Replicas are compared after steps 8 and 16 only. A rank killed while they are is recovered from memory: between these
# steps a killed rank surely gets its state from its replica.
RARELY_VERIFIED = ("resilience.snapshot_every_steps=8", "resilience.verify_every_steps=8")

Event = dict[str, Any]


def one_node(ranks: int) -> tuple[str, str]:
    """All ranks on one node: which ranks share one changes no bit, and each node imports torch once."""
    return "cluster.nodes=1", f"cluster.gpus_per_node={ranks}"


class Trial(Run):
    """One start of the small job with `SETTINGS` and more. With a plan, see recovery_driver.py."""

    def __init__(self, folder: Path, *settings: str, prefix: Sequence[str] = (), **plan: Any) -> None:
        wanted = [*SETTINGS, *settings]
        if plan:
            command = [str(HERE / "recovery_driver.py"), json.dumps({**plan, "set": wanted})]
        else:
            command = ["-m", "seatrial", "train", "job.toml", "--plain"]
            command += [word for entry in wanted for word in ("--set", entry)]
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.process = subprocess.Popen(
            [*prefix, sys.executable, *command],
            cwd=folder,
            env={**os.environ, _MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pipesize=CONSOLE_BYTES,
            text=True,
        )

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "small"

    def events(self, *kinds: str) -> list[Event]:
        """What has been told so far, of these kinds or of all."""
        return [e for e in lines(self.run / "events.jsonl") if not kinds or e["kind"] in kinds]

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition` gives something true, and give that. The run must not end before."""
        end = time.monotonic() + TIMEOUT_S
        pidfd = os.pidfd_open(self.process.pid)
        try:
            while not (found := condition()):
                ended, _, _ = select.select([pidfd], [], [], 0.01)
                assert not ended or condition(), f"it ended:\n{self.process.communicate()[1]}"
                assert time.monotonic() < end, f"it did not come to that: {self.kinds()}"
        finally:
            os.close(pidfd)
        return found

    def until_event(self, kind: str, count: int = 1, **wanted: Any) -> Event:
        """The `count`th event of that kind that has these values."""

        def found() -> Event | None:
            fitting = [e for e in self.events(kind) if wanted.items() <= e.items()]
            return fitting[count - 1] if len(fitting) >= count else None

        event: Event = self.until(found)
        return event

    def until_step(self, step: int) -> None:
        self.until(lambda: any(m["step"] >= step for m in lines(self.run / "metrics.jsonl")))

    def kinds(self) -> list[str]:
        return [e["kind"] for e in self.events()]

    def pids(self) -> dict[int, int]:
        """Rank -> its process."""
        return {e["rank"]: e["data"]["pid"] for e in self.events("rank_started")}

    def agents(self) -> dict[int, int]:
        """Node -> its agent's process."""
        return {e["node"]: e["data"]["pid"] for e in self.events("agent_started")}

    def coordinator(self) -> int:
        """The node that coordinates."""
        return int(self.events("coordinator_elected")[-1]["node"])

    def kill_rank(self, rank: int, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pids()[rank], signum)

    def kill_agent(self, node: int) -> None:
        os.kill(self.agents()[node], signal.SIGKILL)

    def end(self) -> tuple[int, str]:
        """(exit code, the rest of stderr); nothing of it may be alive then."""
        code, _, err = self.wait()
        self.wait_gone(2.0)
        return code, err

    # -- what came of it

    def steps(self) -> dict[int, tuple[float, float]]:
        """Step -> (loss, gradient norm), the last record of each."""
        return {m["step"]: (m["loss"], m["grad_norm"]) for m in lines(self.run / "metrics.jsonl")}

    def samples(self) -> list[tuple[int, int]]:
        """What each step trained on in its last generation, in order."""
        last = {r["step"]: (r["first_sample"], r["end_sample"]) for r in lines(self.run / "ledger.jsonl")}
        return [last[step] for step in sorted(last)]

    def state(self, step: int = STEPS) -> dict[str, torch.Tensor]:
        """Every tensor of a checkpoint's files, optimizer and random state included."""
        found: dict[str, torch.Tensor] = {}
        for file in sorted((self.run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")):
            for name, values in safetensors.torch.load_file(file).items():
                found[f"{file.name}:{name}"] = values
        assert len(found) > 50
        return found


_READ: dict[Path, tuple[Tail, list[dict[str, Any]]]] = {}


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines that are there by now. Each is parsed once: tests that wait for one ask a hundred times a second."""
    tail, found = _READ.setdefault(path, (Tail(path), []))
    opened = tail.opened
    new = tail.poll()
    if tail.opened > opened > 0:  # another file
        found.clear()
    found += new
    assert not tail.problems, tail.problems
    return list(found)


def make_folder(path: Path) -> Path:
    """A folder with the small job and its corpus."""
    path.mkdir(exist_ok=True)
    (path / "job.toml").write_text(JOB)
    write_corpus(path)
    return path


def assert_same(trial: Trial, reference: Trial) -> None:
    """Bit for bit what a run gives that never failed."""
    assert trial.steps() == reference.steps()
    assert trial.samples() == reference.samples()
    last = max(reference.steps())
    ours, theirs = trial.state(last), reference.state(last)
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert torch.equal(values, theirs[name]), name


Begin = Callable[..., Trial]


@contextlib.contextmanager
def beginning(folder: Path) -> Iterator[Begin]:
    """A function that starts the small job in `folder`; at the end nothing of any start may be alive."""
    make_folder(folder)
    trials: list[Trial] = []

    def start(*settings: str, **plan: Any) -> Trial:
        trials.append(Trial(folder, *settings, **plan))
        return trials[-1]

    yield start
    left = {trial.mark: trial.processes() for trial in trials}
    for trial in trials:
        trial.kill_all()
        trial.process.wait()
        for stream in (trial.process.stdout, trial.process.stderr):
            assert stream is not None
            stream.close()
    assert not any(left.values()), f"left behind: {left}"
