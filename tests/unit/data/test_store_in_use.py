"""A token store that a run trains on is not replaced, whoever wants to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.base.errors import RunFailed
from seatrial.data import in_use
from seatrial.data.manifest import MANIFEST
from seatrial.data.megatron import export_pair
from seatrial.data.megatron_import import import_pair
from seatrial.data.prepare import open_stores, prepare, resolve_stores
from seatrial.data.store import TokenStore


class Data:
    tokenizer, text_key, weights, cache_gb = "bytes", "text", None, 1.0

    def __init__(self, train: str) -> None:
        self.train = train


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("some text")
    return str(tmp_path / "a.txt")


@pytest.fixture
def out(tmp_path: Path, text: str) -> Path:
    return prepare([text], "bytes", tmp_path / "out").folder


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


HOLD = """
import sys
from pathlib import Path
from seatrial.data.prepare import open_stores
from seatrial.record import lock
from seatrial.record.folder import RunFolder
store, run = sys.argv[1:]
if run:
    RunFolder(Path(run)).control.mkdir(parents=True)
    fd = lock.acquire(RunFolder(Path(run)).lock)
stores = open_stores([store], Path("nowhere"), 1.0)
print("held", flush=True)
sys.stdin.read()
"""


class Holder:
    """Another process that trains on a store."""

    def __init__(self, store: Path, run: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(store), "" if run is None else str(run)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"held\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    found: list[Holder] = []
    yield found
    for holder in found:
        holder.kill()


@pytest.mark.cluster
def test_a_store_in_use_is_not_replaced_and_the_run_is_named(
    tmp_path: Path, text: str, out: Path, holders: list[Holder]
) -> None:
    before = content(out)
    holders += [
        Holder(out, tmp_path / "runs" / "first"),
        Holder(out, tmp_path / "runs" / "second"),
        Holder(out),
    ]
    (tmp_path / "a.txt").write_text("another text")
    with pytest.raises(RunFailed) as e:
        prepare([text], "bytes", out, force=True)
    for holder, name in zip(holders, ("first", "second"), strict=False):
        assert f"the run {tmp_path}/runs/{name} (process {holder.process.pid})" in e.value.message
    assert content(out) == before
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    # However they end: nothing is left that says it were in use.
    while holders:
        holders.pop(0).kill()
        if holders:
            with pytest.raises(RunFailed, match=f"process {holders[0].process.pid}"):
                prepare([text], "bytes", out, force=True)
    assert prepare([text], "bytes", out, force=True).n_tokens == 13


def test_import_is_refused_too(tmp_path: Path, out: Path) -> None:
    pair = export_pair(TokenStore.open(out), tmp_path / "pair").prefix
    import_pair(pair, "bytes", tmp_path / "imported")
    (held,) = open_stores([str(tmp_path / "imported")], tmp_path, 1.0)
    with pytest.raises(RunFailed, match=f"in use by process {os.getpid()}"):
        import_pair(pair, "bytes", tmp_path / "imported", force=True)
    del held
    import_pair(pair, "bytes", tmp_path / "imported", force=True)


def test_damaged_prepared_data_in_use_is_not_rebuilt(tmp_path: Path, text: str) -> None:
    cache = tmp_path / "runs" / ".data"
    (held,) = resolve_stores(Data(text), cache, tmp_path)
    shard = held.folder / "shard-00000.bin"
    os.truncate(shard, 2)
    with pytest.raises(RunFailed, match="is in use"):
        resolve_stores(Data(text), cache, tmp_path)
    assert shard.stat().st_size == 2
    del held
    assert resolve_stores(Data(text), cache, tmp_path)[0].n_tokens == 10


def test_store_opened_during_prepare_is_kept_and_work_is_reused(tmp_path: Path, text: str, out: Path) -> None:
    (tmp_path / "a.txt").write_text("another text")
    before, held, notes = content(out), [], []

    def progress(done: int, of: int, name: str) -> None:
        held[:] = held or open_stores([str(out)], tmp_path, 1.0)

    with pytest.raises(RunFailed, match="is in use"):
        prepare([text], "bytes", out, force=True, progress=progress, note=notes.append)
    assert content(out) == before
    assert "finished work is kept" in notes[-1]
    held.clear()
    prepare([text], "bytes", out, force=True, note=notes.append)
    assert notes[-1] == "resuming an earlier attempt: 1 of 1 parts are done"
    assert content(out) != before


def test_a_store_being_replaced_is_waited_for_or_refused(
    tmp_path: Path, text: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_use, "_PATIENCE_S", 0.0)
    with in_use.claimed(out), pytest.raises(RunFailed, match="is being replaced"):
        open_stores([str(out)], tmp_path, 1.0)
    store = TokenStore.open(out)
    (out / MANIFEST).rename(out / "moved")  # between the two renames
    with pytest.raises(RunFailed, match="is being replaced"):
        store.hold()
    (out / "moved").rename(out / MANIFEST)
    (tmp_path / "a.txt").write_text("another text")
    prepare([text], "bytes", out, force=True)
    with pytest.raises(RunFailed, match="has just been replaced"):
        store.hold()


def test_a_read_only_store_can_be_held(out: Path) -> None:
    for path in (*out.iterdir(), out):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (held,) = open_stores([str(out)], out, 1.0)
    with pytest.raises(RunFailed), in_use.claimed(out):
        pass
    del held
    with in_use.claimed(out):
        pass
    out.chmod(0o755)


def test_without_file_locks_a_warning_is_printed(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    notes: list[str] = []
    monkeypatch.setattr(in_use.fcntl, "flock", unsupported)
    (store,) = resolve_stores(Data(str(out)), tmp_path, tmp_path, note=notes.append)
    assert store.n_tokens == 10
    assert notes == [
        f"{out} cannot be locked (Operation not supported): it is not protected from being replaced"
    ]
    with pytest.raises(RunFailed, match="it is unknown whether a run uses"), in_use.claimed(out):
        pass
