"""kill -9 of `seatrial data prepare` at random instants: the next attempt goes on, and the store is the same."""

from __future__ import annotations

import gzip
import lzma
import os
import random
import select
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.base.process import descendants
from seatrial.data import parts, readers
from seatrial.data.prepare import prepare
from seatrial.data.store import TokenStore

pytestmark = pytest.mark.cluster

DRIVER = Path(__file__).with_name("prepare_driver.py")


def write_corpus(folder: Path) -> Path:
    rng = random.Random(5)
    folder.mkdir()
    for i in range(30):
        text = " ".join(rng.choice(["def", "return", "漢字", "\n"]) for _ in range(rng.randrange(900)))
        (folder / f"{i:02}.txt").write_text(text, encoding="utf-8")
    rows = [f'{{"text": "row {i} {"x" * rng.randrange(90)}"}}' for i in range(600)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (folder / "text.txt.xz").write_bytes(lzma.compress("\n".join(rows).encode()))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def attempt(corpus: Path, out: Path, workers: int, rng: random.Random, within: int) -> bool:
    """Whether it ended by itself; else it was killed after less than `within` bytes of progress."""
    command = [sys.executable, str(DRIVER), str(corpus), str(out), str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told, wanted = 0, rng.randrange(1, within)
        while told < wanted:
            data = os.read(process.stdout.fileno(), wanted - told)
            if not data:
                assert process.wait() == 0
                return True
            told += len(data)
        for _ in range(rng.randrange(100_000)):  # not only between two parts
            pass
        pidfds = []
        for pid in descendants(process.pid):
            try:
                pidfds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                continue
        process.kill()
        process.wait()
        for fd in pidfds:
            # Its workers end with it: nobody is left who writes where the next attempt works.
            assert select.select([fd], [], [], 30)[0]
            os.close(fd)
    return False


@pytest.mark.ci
@pytest.mark.parametrize("kills", [12, pytest.param(40, marks=pytest.mark.long)])
def test_killed_at_random_instants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    monkeypatch.setattr(parts, "_FEWEST_BYTES", 2048)
    monkeypatch.setattr(parts, "_MOST_BYTES", 2048)
    monkeypatch.setattr(readers, "PIECE_BYTES", 256)
    prepare([str(corpus)], "bytes", tmp_path / "wanted", shard_tokens=9000)
    wanted = content(tmp_path / "wanted")
    rng = random.Random(11)
    killed, stores = 0, 0
    while killed < kills or stores < 3:
        assert (
            killed < 4 * kills
        )  # no attempt gets far enough to make a store alone: each must go on from the last
        out = tmp_path / f"out-{stores}"
        workers = rng.randrange(1, 4)
        if not attempt(corpus, out, workers, rng, 60):
            killed += 1
            if not out.exists():
                continue  # the next attempt is for the same store
        # Killed behind the rename, the store is complete all the same; only its lock may be left.
        found = content(out)
        found.pop(".lock", None)
        assert found == wanted
        assert TokenStore.open(out).verify() == []
        stores += 1
