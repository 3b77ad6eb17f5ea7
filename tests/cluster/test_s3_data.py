"""Training data on an object store, by way of a real service: moto's server."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import ONE_NODE, Run, records
from moto_server import Disturbance, Line, MotoServer
from seatrial.base.batches import BatchSizes
from seatrial.base.errors import InputError
from seatrial.data.chunks import CHUNK_BYTES
from seatrial.data.loader import BatchLoader
from seatrial.data.prepare import prepare
from seatrial.data.store import TokenStore
from seatrial.data.stream import AHEAD, StreamedStore
from seatrial.data.tokenizer import ByteTokenizer
from seatrial.data.writer import StoreWriter
from seatrial.storage import StorageError, open_store

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

N, ROOMY = 3_000_000, 1 << 30


class WideTokenizer(ByteTokenizer):
    vocab_size = 1 << 22


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Token i is i, 12 MB of them in four shards of 13 chunks."""
    with StoreWriter(tmp_path_factory.mktemp("data") / "store", WideTokenizer(), shard_tokens=820_000) as w:
        w.append(np.arange(N), np.arange(0, N, 777))
        return w.finish({})


def copy_to(url: str, folder: Path) -> None:
    """What `aws s3 sync` does."""
    target = open_store(url)
    for path in folder.iterdir():
        target.write(path.name, path.read_bytes())


@pytest.fixture
def url(s3_url: str, local: TokenStore) -> str:
    copy_to(f"{s3_url}/corpus/v1", local.folder)
    return f"{s3_url}/corpus/v1"


def loader(store: TokenStore, **changes: object) -> BatchLoader:
    sizes = {"sequence_length": 1000, "batches": BatchSizes.of(32), "seed": 3, "vocab_size": 1 << 22}
    return BatchLoader(store, **(sizes | changes))  # type: ignore[arg-type]


@pytest.fixture
def line(s3_server: MotoServer, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    made = Line(s3_server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    yield made
    made.close()


@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize("cache_bytes", [ROOMY, 17 * CHUNK_BYTES])
def test_the_same_batches_as_from_a_folder(
    url: str, local: TokenStore, tmp_path: Path, across: bool, cache_bytes: int
) -> None:
    store = StreamedStore.stream(url, tmp_path / "cache", cache_bytes)
    ours = loader(store, attend_across_documents=across, ahead=AHEAD)
    theirs = loader(local, attend_across_documents=across, ahead=0)
    for step in (1, 2, 3, 4, 500, 501):
        for a, b in zip(ours.batch(step, 8, 16), theirs.batch(step, 8, 16), strict=True):
            assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
    ours.close()
    store.close()


def test_broken_reads_are_retried_and_damaged_chunks_not_cached(
    url: str, local: TokenStore, tmp_path: Path, line: Line
) -> None:
    """A bit that flips on the way, past every checksum of the network, is found by the chunk's hash."""
    key = url.removeprefix("s3://").encode()
    request = b"GET /" + key + b"/shard-00001.bin"
    store = StreamedStore.stream(url, tmp_path / "cache", ROOMY)
    store.read(820_000, 1)  # its hashes are here
    line.disturb(Disturbance(request, 100_000))
    assert store.read(1_000_000, 5).tolist() == list(range(1_000_000, 1_000_005))
    line.disturb(Disturbance(request, 100_000, cut=False))
    with pytest.raises(InputError, match=r"damaged: bytes \d+ to \d+ have the XXH3-128") as e:
        store.read(1_300_000, 5)
    assert f"{url}/shard-00001.bin" in e.value.render()
    assert line.happened == 2
    # It was not kept: the next one who asks gets it as it is.
    assert store.read(1_300_000, 5).tolist() == list(range(1_300_000, 1_300_005))
    store.close()


def test_a_damaged_object_is_named(url: str, local: TokenStore, tmp_path: Path) -> None:
    data = bytearray((local.folder / "shard-00002.bin").read_bytes())
    data[3 * CHUNK_BYTES + 5] ^= 1
    open_store(url).write("shard-00002.bin", bytes(data))
    store = StreamedStore.stream(url, tmp_path / "cache", ROOMY)
    first = 2 * 820_000 + 3 * CHUNK_BYTES // 4
    assert store.read(first - 10, 10).tolist() == list(range(first - 10, first))
    with pytest.raises(InputError, match=f"damaged: bytes {3 * CHUNK_BYTES} to {4 * CHUNK_BYTES - 1}") as e:
        store.rows([0, first, 10], 10)
    assert f"{url}/shard-00002.bin" in e.value.render()
    ((place, _),) = store.verify()
    assert place == f"{url}/shard-00002.bin"
    store.close()


def test_what_is_not_there(s3_url: str, url: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a token store: it has no manifest\.json"):
        StreamedStore.stream(f"{s3_url}/elsewhere", tmp_path / "cache", ROOMY)
    open_store(url).remove(["shard-00003.bin"])
    with pytest.raises(InputError) as e:
        StreamedStore.stream(url, tmp_path / "cache", ROOMY)
    assert f"{url}/shard-00003.bin: error: missing" in e.value.render()
    store = StreamedStore.stream(url, tmp_path / "cache", ROOMY, check_sizes=False)
    with pytest.raises(StorageError, match=r"shard-00003\.bin"):
        store.read(N - 1, 1)
    store.close()


@pytest.mark.long  # the cache: tests/unit/data
def test_the_ranks_of_a_node_fetch_a_chunk_once(
    url: str, local: TokenStore, tmp_path: Path, line: Line
) -> None:
    script = Path(__file__).with_name("stream_reader.py")
    command = [sys.executable, str(script), url, str(tmp_path / "cache")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    sums = [json.loads(rank.communicate(timeout=60)[0] or "null") for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    plain = loader(local, ahead=0)
    assert sums == [[int(plain.batch(step, 0, 32).ids_BT.sum()) for step in range(1, 6)]] * 3
    kept = [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.name != ".used"]
    assert len([p for p in kept if re.fullmatch(r"\d{6}", p.name)]) > 30
    # What was fetched twice would have been counted twice.
    fetched = int.from_bytes((tmp_path / "cache/.used").read_bytes(), "little")
    assert fetched == sum(p.stat().st_size for p in kept)


@pytest.fixture
def streaming(
    s3_url: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Writes a job whose data is on the object store."""
    store = prepare([str(folder / "corpus")], "bytes", tmp_path / "prepared", shard_tokens=20_000)
    copy_to(f"{s3_url}/corpus", store.folder)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))

    def write(changes: str = "") -> None:
        text = ONE_NODE.replace('train = "corpus"', f'train = "{s3_url}/corpus"\n{changes}')
        (folder / "job.toml").write_text(text)

    return write


def _losses(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in records(folder / "runs/small/metrics.jsonl")]


def test_a_run_trains_on_it_as_on_a_folder(
    folder: Path, tmp_path: Path, streaming: Callable[[str], None], start: Callable[..., Run]
) -> None:
    streaming()
    code, _, err = start().wait()
    assert code == 0, err
    streamed = _losses(folder)
    text = ONE_NODE.replace('train = "corpus"', f'train = "{tmp_path / "prepared"}"')
    (folder / "job.toml").write_text(text)
    code, _, err = start("--fresh").wait()
    assert code == 0, err
    assert streamed == _losses(folder)
    assert len(streamed) == 12
    assert list((tmp_path / "scratch").rglob("000000"))


def test_a_run_on_damaged_data_names_it(
    folder: Path,
    tmp_path: Path,
    streaming: Callable[[str], None],
    start: Callable[..., Run],
    s3_url: str,
) -> None:
    streaming()
    objects = open_store(f"{s3_url}/corpus")
    names = [e.name for e in objects.names() if e.name.endswith(".bin")]
    for name in names:
        data = bytearray(objects.read(name))
        data[100] ^= 1
        objects.write(name, data)
    code, _, err = start().wait()
    assert code != 0
    assert re.search(rf"{re.escape(s3_url)}/corpus/shard-0000\d\.bin", err), err
    assert "damaged: bytes 0 to" in err
    with contextlib.suppress(FileNotFoundError):
        assert _losses(folder) == []
