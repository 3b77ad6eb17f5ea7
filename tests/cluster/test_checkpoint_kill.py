"""kill -9 at 200 random instants of saving and of retention: the newest complete checkpoint is there, whole and right."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from seatrial.base import process
from seatrial.base.box import Box
from seatrial.checkpoint.manifest import Manifest, Progress
from seatrial.checkpoint.place import Place, open_place
from seatrial.checkpoint.staging import AsyncWriter
from seatrial.checkpoint.write import Piece
from seatrial.record.folder import RunFolder
from seatrial.storage import is_remote

pytestmark = pytest.mark.cluster

WAIT_S = 60.0
RANKS, KEEP = 2, 2
VALUES = 100_000  # of each rank's tensor


def weights(step: int, rank: int) -> torch.Tensor:
    return torch.arange(VALUES, dtype=torch.float32) + step * 1000 + rank


def save_for_ever(run: RunFolder, url: str, told: int, first: int, generation: int) -> int:
    """A rank's life: stage, have it written, committed and what is old removed; it says what it is at."""
    torch.set_num_threads(1)
    writers = [AsyncWriter(rank=rank, world_size=RANKS, device=torch.device("cpu")) for rank in range(RANKS)]

    def tell(what: str, number: int) -> None:
        os.write(told, f"{what} {number}\n".encode())

    for step in range(first, first + 100_000):
        for rank, writer in enumerate(writers):
            box = Box((rank * VALUES,), (VALUES,))
            writer.stage([Piece("model/w", weights(step, rank), box, (RANKS * VALUES,))])
        tell("began", step)
        for writer in writers:
            assert writer.pid is not None
            tell("writer", writer.pid)
            writer.order_part(step, url, step, generation, read_back=step % 2 == 0)
        settled = [_settled(writer, step) for writer in writers]
        if not all(settled):
            continue
        manifest = Manifest(Progress(step, step, step, generation), 1.0, 1, {}, {}, "", "", False, [], {})
        writers[0].order_commit(step, url, manifest, run.path, KEEP, 0)
        outcomes = writers[0].wait_removed(WAIT_S)
        if any(o.what == "commit" and o.ok for o in outcomes):
            tell("saved", step)
    return 0


def _settled(writer: AsyncWriter, step: int) -> bool:
    while not (told := writer.poll()):
        writer.wait(WAIT_S)
    return all(o.ok for o in told if o.attempt == step)


class Saver:
    """A process that saves until it is killed, and its writing processes."""

    def __init__(self, run: RunFolder, url: str, first: int, generation: int) -> None:
        read, write = os.pipe()
        run.generation_file.write_text(f"{generation}\n")
        self.pid = process.fork(lambda: save_for_ever(run, url, write, first, generation))
        os.close(write)
        self._read, self._rest = read, b""
        self.began = self.saved = first - 1
        self.writers: list[int] = []

    def hear(self, timeout_s: float) -> bool:
        """What it has said by then; False where it says nothing more."""
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        if not ready:
            return True
        data = os.read(self._read, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what, number = line.split()
            if what == b"began":
                self.began, self.writers = int(number), []
            elif what == b"saved":
                self.saved = int(number)
            else:
                self.writers.append(int(number))
        return bool(data)

    def wait_saved(self, step: int) -> None:
        until = time.monotonic() + WAIT_S
        while self.saved < step or len(self.writers) < RANKS:
            assert time.monotonic() < until, f"step {step} was not saved"
            assert self.hear(WAIT_S)

    def kill(self) -> None:
        """At once, and wait until it and its writing processes are gone: the kernel kills those."""
        gone = [os.pidfd_open(pid) for pid in process.descendants(self.pid)]
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for fd in gone:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(WAIT_S * 1000), "a writing process lives on"
            os.close(fd)
        while self.hear(0):  # what it had said before
            pass

    def close(self) -> None:
        os.close(self._read)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    run = RunFolder(tmp_path / "run")
    for path in (run.path, run.checkpoints, run.control):
        path.mkdir()
    before = process.descendants(os.getpid())
    yield run
    assert process.descendants(os.getpid()) == before


def check(place: Place, saver: Saver) -> None:
    """As the next start sees it."""
    place.remove_leftovers()
    steps = place.steps()
    # It may have become complete without anybody having heard of it.
    assert steps[0] in (range(saver.saved, saver.began + 1)), (steps, saver.saved, saver.began)
    assert len(steps) >= KEEP, "what was good is there until something newer is"
    for step in steps:
        opened = place.open(step)
        assert opened.step == step
        for rank in range(RANKS):
            found = opened.read("w", Box((rank * VALUES,), (VALUES,)), torch.float32)
            assert torch.equal(found, weights(step, rank)), f"step {step} is not what was saved"
        opened.close()
    assert place.remove_leftovers() == []


def phase(folder: Path, last: int) -> str:
    """What was going on when it was killed, from what it left."""
    names = sorted(p.name for p in folder.iterdir())
    if any("removed" in name for name in names):
        return "removing"
    for name in names:
        if ".tmp-" in name:
            files = [p.name for p in (folder / name).iterdir()]
            if "manifest.json" in files:
                return "before the rename"
            if ".manifest" in " ".join(files):
                return "writing the manifest"
            indices = sum(f.startswith("index") for f in files)
            return f"{indices} of {RANKS} parts written" if files else "nothing written"
    if ".latest" in " ".join(names):
        return "writing latest"
    return "between" if f"step-{last:08d}" not in names else "complete"


@pytest.mark.parametrize(
    ("seed", "times", "phases"),
    [(1, 25, 3), *(pytest.param(seed, 100, 5, marks=pytest.mark.long) for seed in (1, 2))],
)
def test_killed_at_any_instant_the_newest_complete_one_loads(
    run: RunFolder, seed: int, times: int, phases: int
) -> None:
    """Now the rank is killed, which takes its writers along, now one of these alone."""
    url = str(run.checkpoints)
    _kill_often(run, url, seed, times, lambda saver: phase(run.checkpoints, saver.began), least_phases=phases)


def _kill_often(run: RunFolder, url: str, seed: int, times: int, what: object, least_phases: int) -> None:
    place = open_place(url)
    generator = random.Random(seed)
    seen: Counter[str] = Counter()
    generation, first, kills = 1, 1, 0
    while kills < times:
        saver = Saver(run, url, first, generation)
        try:
            saver.wait_saved(first + KEEP - 1 if generation == 1 else first)
            cycle = _cycle_s(saver)
            while True:
                alone = generator.random() < 0.5
                _after(saver, generator.uniform(0, 2 * cycle))
                kills += 1
                if not alone or not saver.writers:  # a save has begun, and who writes it is not told yet
                    break
                # It goes on with a new one, and the checkpoint that this one was at is given up.
                os.kill(generator.choice(saver.writers), signal.SIGKILL)
                saver.wait_saved(saver.began + 1)
            saver.kill()
            if callable(what):
                seen[what(saver)] += 1
            check(place, saver)
        except BaseException:
            if process.living().get(saver.pid) == os.getpid():
                saver.kill()
            raise
        finally:
            saver.close()
        first, generation = place.steps()[0] + 1, generation + 1
    assert len(seen) >= least_phases, f"the instants were not spread over what happens: {seen}"


def _cycle_s(saver: Saver) -> float:
    """How long one save takes now."""
    begin = time.monotonic()
    saver.wait_saved(saver.saved + 2)
    return (time.monotonic() - begin) / 2


def _after(saver: Saver, seconds: float) -> None:
    """Listen for so long: an instant that has nothing to do with what the saver is at."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        assert saver.hear(left)


@pytest.mark.long  # a run that saves there is killed in test_s3_checkpoints
def test_the_same_in_an_object_store(run: RunFolder, s3_url: str) -> None:
    """Through a real service's protocol; what died in the midst of an upload leaves nothing that costs."""
    assert is_remote(s3_url)
    _kill_often(run, f"{s3_url}/run", 3, 12, None, least_phases=0)
