"""Real runs of `seatrial train` on a small job, and proof that nothing of them is left afterwards."""

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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

JOB = """
name = "small"

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

[parallel]
tensor = 2
pipeline = 2

[train]
steps = 12
sequence_length = 32
global_batch = 8
microbatch = 2
precision = "fp32"
sample_tokens = 8

[optimizer]
lr = 1e-2
warmup_steps = 2

[checkpoint]
every_steps = 4
keep = 2
"""

# The same ranks on one node, where a test is about something else: each node imports torch once.
ONE_NODE = JOB.replace("nodes = 2\ngpus_per_node = 2", "nodes = 1\ngpus_per_node = 4")

TIMEOUT_S = 60.0
# A launcher waits while its console takes nothing, and a test that waits for something else reads nothing.
CONSOLE_BYTES = 1 << 20
_MARK = "SEATRIAL_TEST_RUN"


class Run:
    """One start of `seatrial train` in a folder of its own."""

    def __init__(self, folder: Path, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "seatrial", "train", "job.toml", "--plain", *arguments],
            cwd=folder,
            env={**os.environ, _MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pipesize=CONSOLE_BYTES,
            text=True,
        )

    def wait_line(self, wanted: str) -> str:
        """Read stderr until a line starts with `wanted`; that line."""
        assert self.process.stderr is not None
        read = []
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            ready, _, _ = select.select([self.process.stderr], [], [], end - time.monotonic())
            if not ready:
                break
            line = self.process.stderr.readline()
            if not line:
                break
            read.append(line)
            if line.startswith(wanted):
                return line
        raise AssertionError(f"no line {wanted!r} in {''.join(read)}")

    def wait(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str, str]:
        """(exit code, stdout, the rest of stderr) once it has ended."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def processes(self) -> list[int]:
        """Everything alive that this start began, itself included."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self.mark.encode() in environment and state != "Z":
                found.append(int(entry.name))
        return found

    def ranks(self) -> dict[int, int]:
        """Rank -> process id of the ranks that run now, from the run's events."""
        started = [e for e in records(self.folder / "runs/small/events.jsonl") if e["kind"] == "rank_started"]
        return {e["rank"]: e["data"]["pid"] for e in started}

    def wait_gone(self, within_s: float) -> None:
        """Assert that nothing of this start is alive `within_s` from now."""
        end = time.monotonic() + within_s
        while left := self.processes():
            assert time.monotonic() < end, f"left behind: {left}"
            # Waits for the end of one of them, not for a time.
            try:
                handle = os.pidfd_open(left[0])
            except ProcessLookupError:
                continue
            try:
                select.select([handle], [], [], max(0.0, end - time.monotonic()))
            finally:
                os.close(handle)

    def kill_all(self) -> None:
        """kill -9 of everything at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def each_case(
    names: Iterable[str], *, long: Collection[str], ci: Collection[str] = ()
) -> pytest.MarkDecorator:
    """Parametrises `name`; those in `long` and in `ci` have these marks."""

    def mark(name: str) -> pytest.MarkDecorator | tuple[()]:
        return pytest.mark.long if name in long else pytest.mark.ci if name in ci else ()

    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in names])


def selected_cases(request: pytest.FixtureRequest) -> set[Any]:
    """The `name` of every test of this file that will run."""
    selected = [item for item in request.session.items if item.path == request.path]
    return {item.callspec.params.get("name") for item in selected if hasattr(item, "callspec")}


def run_cases(
    cases: list[dict[str, Any]], out: Path, timeout_s: float, script: str = "parity_ranks.py"
) -> subprocess.CompletedProcess[str]:
    """`script` over `cases`; what the ranks saw lies in `out` afterwards."""
    (out / "cases.json").write_text(json.dumps(cases))
    return subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), str(out / "cases.json"), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def seatrial(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of Seatrial in `folder`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "seatrial", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_corpus(folder: Path) -> None:
    """Text that a small model learns quickly, the same everywhere; and other text."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(4):
        lines = [f"def add_{n}(a, b):\n    return a + b + {n * i}\n" for n in range(200)]
        (corpus / f"part{i}.py").write_text("\n".join(lines))
    (folder / "other.py").write_text("\n".join(f"def sub_{n}(a):\n    return a - {n}\n" for n in range(800)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the small job and its corpus."""
    (tmp_path / "job.toml").write_text(JOB)
    write_corpus(tmp_path)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Run]]:
    """Start the job; at the end of the test nothing of any start may be alive."""
    runs: list[Run] = []

    def begin(*arguments: str, prefix: Sequence[str] = ()) -> Run:
        runs.append(Run(folder, *arguments, prefix=prefix))
        return runs[-1]

    yield begin
    left = {run.mark: run.processes() for run in runs}
    for run in runs:
        run.kill_all()
        run.process.wait()
        for stream in (run.process.stdout, run.process.stderr):
            if stream is not None:
                stream.close()
    assert not any(left.values()), f"left behind: {left}"
