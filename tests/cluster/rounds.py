"""Random rounds: a small run, two faults at any moment from its start on, and the result compared bit for bit.

`python tests/cluster/rounds.py --rounds 100 --seed 1`; exit 1 if a round failed. What each fault hits and when is drawn
from the seed; what the machine makes of it is not, so a round that failed may pass when it is played again. Folders of
failed rounds are kept.

A round passes if the run ends by itself with exit 0, with the weights of a run that never failed (bit-equal unless it
shrank), with every sample trained on once, and with no process left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.base import process
from seatrial.data.prepare import data_cache, resolve_stores
from seatrial.drill import weights
from seatrial.drill.drill_run import DrillRun, Overdue, processes_of
from seatrial.drill.expectation import OTHER_WORLD
from seatrial.drill.reference import Reference, run_reference
from seatrial.job import Job
from seatrial.job.changed import Copy
from seatrial.job.loading import job_from_text
from seatrial.record.events import read_events
from seatrial.record.ledger import ledger_gaps, read_ledger

STEPS = 24
LIMIT_S = 180.0  # of a round whose run takes some 10 s undisturbed; a lone node waits for half a minute
PAUSE_S = 6.0  # longer than `silence_s`: whoever stands still so long has lost its right to run ranks

JOB = """
name = "round"
[model]
vocab_size = 264
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 128
tie_word_embeddings = true
[data]
train = "corpus"
[cluster]
nodes = 2
gpus_per_node = 2
spares = 1
[parallel]
tensor = 2
shard = 2
[train]
steps = {steps}
sequence_length = 32
global_batch = 8
microbatch = 2
precision = "fp32"
sample_tokens = 0
[optimizer]
lr = 1e-2
warmup_steps = 2
decay = "constant"
[checkpoint]
every_steps = 6
[resilience]
snapshot_every_steps = 3
hang_min_s = 4.0
node_wait_s = 2.0
"""


@dataclass(frozen=True)
class Part:
    """A process of the run."""

    what: str
    pid: int


def parts(token: str) -> list[Part]:
    """All processes of the run by what they are."""
    parents = process.living()
    pids = sorted(processes_of(token))
    found = []
    for pid in pids:
        words = _command(pid)
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        above = _command(parents.get(pid, 0))
        child_of_same = module != "" and f"-m {module}" in " ".join(above)
        match module.rpartition(".")[2], child_of_same:
            case "run", False:
                what = "launcher"
            case "agent", False:
                what = "agent"
            case "agent", True:
                what = "agent's child"
            case "fork_server", False:
                what = "fork server"
            case "fork_server", True:
                what = "rank"
            case "writer", _:
                what = "writer"
            case _:
                what = "other"
        found.append(Part(what, pid))
    return found


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


# -- faults


class Faults:
    """What can be done to a run; `done` says what was."""

    def __init__(self, run: DrillRun, choose: random.Random) -> None:
        self._stage, self._choose = run, choose
        self.done: list[str] = []
        self._later: list[tuple[float, Callable[[], None]]] = []

    def strike(self, kind: str | None = None, how: str | None = None) -> bool:
        """One fault to whatever there is now; what is not given is drawn. False if there is nothing of that kind."""
        found = [p for p in parts(self._stage.token) if p.what != "other"]
        if not found or kind not in (None, "all", "node", *(p.what for p in found)):
            return False
        kind = kind or self._choose.choice([*sorted({p.what for p in found}), "all", "node"])
        if kind == "all":
            self._pause(found, "all processes")
            return True
        agents = [p for p in found if p.what == "agent"]
        if kind == "node":
            if not agents:
                return False
            agent = self._choose.choice(agents)
            self._note(f"SIGKILL to all processes of agent {agent.pid}")
            for pid in {agent.pid, *process.descendants(agent.pid)}:
                self._signal(pid, signal.SIGKILL)
            return True
        part = self._choose.choice([p for p in found if p.what == kind])
        how = how or self._choose.choice(("kill", "crash", "stop", "pause"))
        if how == "pause" or (how == "stop" and part.what == "launcher"):  # nobody could end it
            self._pause([part], f"{part.what} {part.pid}")
            return True
        number = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "stop": signal.SIGSTOP}[how]
        self._note(f"{number.name} to {part.what} {part.pid}")
        self._signal(part.pid, number)
        return True

    def tick(self) -> None:
        """End the pauses whose time is over."""
        now = time.monotonic()
        due, self._later = [x for x in self._later if x[0] <= now], [x for x in self._later if x[0] > now]
        for _, what in due:
            what()

    @property
    def launcher_deaths(self) -> int:
        """How often the run's own process was killed, rather than paused."""
        return sum("launcher" in done and "SIGSTOP" not in done for done in self.done)

    def _pause(self, whom: list[Part], what: str) -> None:
        self._note(f"SIGSTOP to {what} for {PAUSE_S:g} s")
        for part in whom:
            self._signal(part.pid, signal.SIGSTOP)

        def resume() -> None:
            for part in self._choose.sample(whom, len(whom)):
                self._signal(part.pid, signal.SIGCONT)

        self._later.append((time.monotonic() + PAUSE_S, resume))

    def _signal(self, pid: int, number: signal.Signals) -> None:
        if pid in processes_of(self._stage.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _note(self, what: str) -> None:
        self.done.append(f"at {time.monotonic() - self._stage.started_at:.1f} s {what}")


# -- a round


@dataclass(frozen=True)
class Strike:
    """A fault to come; what is None is drawn."""

    time: float  # seconds after the start
    kind: str | None = None
    how: str | None = None


def drawn(choose: random.Random, reference: Reference) -> list[Strike]:
    """Two faults at any moment of a run."""
    return [Strike(t) for t in sorted(choose.uniform(0.0, reference.seconds) for _ in range(2))]


def play(
    root: Path, number: int, seed: str, reference: Reference, strikes: Sequence[Strike] | None = None
) -> tuple[str, list[str], float]:
    """One round: what is wrong with it ("" for nothing), what was done, and how long it took."""
    choose = random.Random(seed)
    name, text = f"round-{number}", reference.copy.job.to_toml()
    job = job_from_text(text.replace('"reference"', f'"{name}"'), name=name, base_folder=root)
    coming = list(drawn(choose, reference) if strikes is None else strikes)
    run = DrillRun(root, job, limit_s=LIMIT_S)
    faults = Faults(run, choose)
    started_at = time.monotonic()
    try:
        run.start()
        problem = _follow(run, faults, coming)
        run.wait_gone()
    finally:
        run.close()
    seconds = time.monotonic() - started_at
    return problem or _compare(run, job, reference), faults.done, seconds


def _follow(run: DrillRun, faults: Faults, coming: list[Strike]) -> str:
    def look(_scene: object) -> bool:
        faults.tick()
        while coming and time.monotonic() - run.started_at >= coming[0].time:
            if not faults.strike(coming[0].kind, coming[0].how):
                break  # not yet
            coming.pop(0)
        return not run.running()

    try:
        run.wait_until(look)
        # Each time that the run's own process was killed, the same command goes on.
        while run.exits[-1] != 0 and len(run.exits) <= faults.launcher_deaths:
            run.wait_gone()
            if run.left:
                return f"left behind: {run.left}"
            run.rerun()
            run.wait_until(look)
    except Overdue:
        return "stalled"
    if run.exits[-1] != 0:
        return f"exit {run.exits[-1]}"
    return ""


def _compare(run: DrillRun, job: Job, reference: Reference) -> str:
    if run.left:
        return f"left behind: {run.left}"
    events, problems = read_events(run.folder)
    ledger, wrong = read_ledger(run.folder)
    gaps = [*map(str, problems), *map(str, wrong), *ledger_gaps(ledger, job.train.batches)]
    if gaps or max((r.step for r in ledger), default=0) != STEPS:
        return f"ledger: {gaps or 'it ends early'}"
    difference = weights.compare(run.folder.checkpoints / f"step-{STEPS:08d}", reference.checkpoint(STEPS))
    shrank = any(e.kind == "shrunk" for e in events) or any(
        e.kind == "recovered" and (e.data or {}).get("layout") for e in events
    )
    if difference.missing:
        return f"weights: {difference.missing[0]} is missing"
    if not difference.equal and (not shrank or difference.largest > OTHER_WORLD["weights"]):
        return f"weights differ by {difference.largest:.1e} ({difference.where}), {'after' if shrank else 'without'} a change of layout"
    return ""


def write_corpus(folder: Path) -> None:
    """Text that is the same everywhere."""
    (folder / "corpus").mkdir()
    for i in range(4):
        lines = [f"def add_{n}(a, b):\n    return a + b + {n * i}\n" for n in range(200)]
        (folder / "corpus" / f"part{i}.py").write_text("\n".join(lines))


def prepare(root: Path) -> Reference:
    """The run that nothing happens to, in `root`."""
    write_corpus(root)
    text = JOB.format(steps=STEPS)
    job = job_from_text(text, name="rounds", base_folder=root)
    store = resolve_stores(job.data, data_cache(root), root)[0].address
    text = text.replace('"corpus"', f'"{store}"').replace('"round"', '"reference"')
    copy = Copy(job_from_text(text, name="rounds", base_folder=root), ())
    return run_reference(root, copy, limit_s=LIMIT_S)


def play_all(root: Path, rounds: range, seed: int, tell: Callable[[str], None]) -> int:
    """How many of `rounds` failed."""
    reference = prepare(root)
    tell(f"the run that nothing happens to took {reference.seconds:.1f} s")
    results: Counter[str] = Counter()
    for number in rounds:
        problem, done, seconds = play(root, number, f"{seed} {number}", reference)
        tell(
            f"round {number}: {problem or 'ok'} in {seconds:.1f} s; {'; '.join(done) or 'it was over before'}"
        )
        results["failed" if problem else "ok"] += 1
        if not problem:
            for path in root.glob(f"round-{number}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    tell(f"{results['ok']} of {len(rounds)} rounds passed; seed {seed}")
    return results["failed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--first", type=int, default=1, help="number of the first one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root", type=Path, help="where failed rounds are kept; a new folder by default")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = arguments.root or Path(tempfile.mkdtemp(prefix="rounds-"))
    root.mkdir(parents=True, exist_ok=True)
    rounds = range(arguments.first, arguments.first + arguments.rounds)
    failed = play_all(root, rounds, arguments.seed, lambda text: print(text, flush=True))
    if not failed:
        shutil.rmtree(root)
    else:
        print(f"see {root}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
