"""The bounded cache of a node: by threads, by processes, and by processes that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seatrial.base.errors import InputError
from seatrial.data.cache import DiskCache

SIZE = 1000


def content(name: str) -> bytes:
    return random.Random(name).randbytes(SIZE)


def wrong(name: str, data: bytes) -> str | None:
    return None if data == content(name) else "damaged"


class Source:
    """What is fetched, and how often."""

    def __init__(self, cache: DiskCache) -> None:
        self.cache = cache
        self.fetched: Counter[str] = Counter()

    def get(self, name: str) -> bytes:
        def fetch() -> bytes:
            self.fetched[name] += 1
            return content(name)

        data = self.cache.get(name, fetch, lambda found: wrong(name, found))
        assert data == content(name)
        return data


def kept(folder: Path) -> dict[str, int]:
    return {
        str(p.relative_to(folder)): p.stat().st_size
        for p in folder.rglob("*")
        if p.is_file() and p.name != ".used"
    }


def test_what_was_fetched_is_kept(tmp_path: Path) -> None:
    source = Source(DiskCache(tmp_path, 10 * SIZE))
    for _ in range(3):
        source.get("a/1")
        source.get("a/2")
    assert source.fetched == {"a/1": 1, "a/2": 1}
    assert kept(tmp_path) == {"a/1": SIZE, "a/2": SIZE}
    assert Source(DiskCache(tmp_path, 10 * SIZE)).get("a/1")  # also by another process, at another time


def test_cache_stays_within_its_limit_and_evicts_lru_entries(tmp_path: Path) -> None:
    source = Source(DiskCache(tmp_path, 10 * SIZE))
    draw = random.Random(5)
    for i in range(300):
        source.get("often")
        source.get(f"x/{draw.randrange(40)}")
        assert sum(kept(tmp_path).values()) <= 10 * SIZE, i
    assert source.fetched["often"] == 1
    assert len(kept(tmp_path)) >= 8


def test_more_than_the_limit_at_once_is_not_kept(tmp_path: Path) -> None:
    source = Source(DiskCache(tmp_path, SIZE - 1))
    source.get("a")
    source.get("a")
    assert source.fetched == {"a": 2}
    assert kept(tmp_path) == {}


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "folder"])
def test_damaged_cached_data_is_fetched_again(tmp_path: Path, damage: str) -> None:
    source = Source(DiskCache(tmp_path, 10 * SIZE))
    source.get("a")
    path = tmp_path / "a"
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[500] ^= 1
        path.write_bytes(data)
    elif damage == "folder":
        path.unlink()
    else:
        os.truncate(path, 0 if damage == "empty" else 999)
    source.get("a")
    source.get("a")
    assert source.fetched == {"a": 2}


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10 * SIZE)

    def fails() -> bytes:
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        cache.get("a/b", fails, lambda data: None)
    assert kept(tmp_path) == {}
    Source(cache).get("a/b")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot keep streamed data in"):
        Source(DiskCache(tmp_path / "file" / "x", 10 * SIZE)).get("a")


def test_many_threads_fetch_each_file_once(tmp_path: Path) -> None:
    source = Source(DiskCache(tmp_path, 100 * SIZE))
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        barrier.wait()
        names = [f"{n % 3}/{n}" for n in range(30)]
        random.Random(seed).shuffle(names)
        for name in names:
            source.get(name)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert set(source.fetched.values()) == {1}
    assert len(kept(tmp_path)) == 30


def test_threads_that_remove_each_others_files(tmp_path: Path) -> None:
    source = Source(DiskCache(tmp_path, 4 * SIZE))

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(150):
            source.get(f"{draw.randrange(12)}")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert sum(kept(tmp_path).values()) <= 4 * SIZE


_CHILD = """
import random, sys
from pathlib import Path
from seatrial.data.cache import DiskCache
folder, limit, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
cache, draw = DiskCache(folder, limit), random.Random(seed)
content = lambda name: random.Random(name).randbytes(1000)
print("ready", flush=True)
while True:
    name = str(draw.randrange(30))
    data = cache.get(name, lambda: content(name), lambda d: None if d == content(name) else "damaged")
    assert data == content(name)
"""


@pytest.mark.cluster  # slow
def test_processes_that_are_killed_leave_a_cache_that_works(tmp_path: Path) -> None:
    limit = 8 * SIZE
    draw = random.Random(3)
    for turn in range(6):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(tmp_path), str(limit), str(10 * turn + i)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        survivor = Source(DiskCache(tmp_path, limit))
        for i in range(draw.randrange(20, 120)):
            survivor.get(str(draw.randrange(30)))
            if i == 10:
                children[0].send_signal(signal.SIGKILL)
        for child in children:
            child.kill()
            child.wait()
            assert child.returncode == -signal.SIGKILL  # and not because of what it read
            child.stdout.close()  # type: ignore[union-attr]
    survivor = Source(DiskCache(tmp_path, limit))
    for name in range(60):
        survivor.get(str(name))
    left = kept(tmp_path)
    assert not [name for name in left if name.endswith(".part")]
    assert sum(left.values()) <= limit
