import itertools
import json
import os
import resource
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.data import store as store_module
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import ByteTokenizer
from seatrial.data.writer import StoreWriter


class WideTokenizer(ByteTokenizer):
    name = "wide"
    vocab_size = 70_000
    digest = "w" * 64


def write(
    folder: Path, tokens: list[int], *, shard_tokens: int = 10, wide: bool = False, replace: bool = False
):
    tokenizer = WideTokenizer() if wide else ByteTokenizer()
    with StoreWriter(folder, tokenizer, shard_tokens=shard_tokens, replace=replace) as w:
        w.append(np.array(tokens), np.array([0]))
        return w.finish({"sources": ["test"]})


def test_files_and_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with StoreWriter(folder, ByteTokenizer(), shard_tokens=4) as w:
        w.append(np.array([1, 2, 256]), np.array([0]))
        w.append(np.array([3, 256, 4, 5, 6, 256]), np.array([0, 2]))
        assert w.n_tokens == 9
        store = w.finish({"sources": ["a"]})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["manifest.json", *(f"shard-0000{i}.{x}" for i in range(3) for x in ("bin", "idx", "xxh3"))]
    )
    assert (folder / "shard-00000.bin").read_bytes() == bytes([1, 0, 2, 0, 0, 1, 3, 0])
    # Documents begin at 0 and 3 in the first shard, and at 5 (1 in the second); none in the third.
    assert np.fromfile(folder / "shard-00000.idx", "<u8").tolist() == [0, 3]
    assert np.fromfile(folder / "shard-00001.idx", "<u8").tolist() == [1]
    assert (folder / "shard-00002.idx").read_bytes() == b""
    assert store.document_starts().tolist() == [0, 3, 5]
    m = json.loads((folder / "manifest.json").read_text())
    assert m["schema_version"] == 1
    assert (m["n_tokens"], m["n_documents"], m["max_token"], m["dtype"]) == (9, 3, 256, "uint16")
    assert [s["n_tokens"] for s in m["shards"]] == [4, 4, 1]
    assert [s["bytes"] for s in m["shards"]] == [8, 8, 2]
    assert m["tokenizer"]["end_of_document"] == 256
    assert m["source"] == {"sources": ["a"]}


@pytest.mark.cluster  # for its time only
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60),
    shard_tokens=st.integers(1, 70),
    wide=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, n: int, shard_tokens: int, wide: bool, cuts: list[int]
) -> None:
    tokens = (np.arange(n) * 7919) % (70_000 if wide else 257)
    bounds = sorted({0, n, *(c for c in cuts if c < n)})
    folder = tmp_path_factory.mktemp("s") / "store"
    with StoreWriter(folder, WideTokenizer() if wide else ByteTokenizer(), shard_tokens=shard_tokens) as w:
        for a, b in itertools.pairwise(bounds):
            w.append(tokens[a:b], np.array([0]))
        store = w.finish({})
    assert store.dtype.itemsize == (4 if wide else 2)
    assert store.verify() == []
    assert store.document_starts().tolist() == bounds[:-1]
    for start in range(0, n, 3):
        for length in range(0, n - start + 1, 2):
            got = store.read(start, length)
            assert got.dtype == np.int64
            assert got.tolist() == tokens[start : start + length].tolist()
    whole = store.rows([n - 1, 0, n // 2], 1)
    assert whole.dtype == store.dtype
    assert whole.ravel().tolist() == [tokens[n - 1], tokens[0], tokens[n // 2]]
    for i in range(n):
        file, position = store.locate(i)
        assert np.fromfile(file, store.dtype)[position] == tokens[i]


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 31), (30, 1)])
def test_reading_outside(tmp_path: Path, start: int, length: int) -> None:
    with pytest.raises(ValueError, match="outside a store of 30"):
        write(tmp_path / "s", list(range(30))).read(start, length)


def test_more_shards_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_OPEN_FILES", 2)
    store = write(tmp_path / "s", list(range(50)), shard_tokens=5)
    before = len(os.listdir("/proc/self/fd"))
    assert store.read(0, 50).tolist() == list(range(50))
    assert len(os.listdir("/proc/self/fd")) - before == 2
    seen: list[bool] = []

    def read_all() -> None:
        seen.append(all(store.read(i, 20).tolist() == list(range(i, i + 20)) for i in range(30)))

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)  # threads meet in the middle of everything
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == [True] * 4


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda p: None, "no such data folder", "seatrial data prepare"),
        (lambda p: p.write_text("x"), "is a file, not a folder", "seatrial data prepare"),
        (lambda p: p.mkdir(), "is empty", "seatrial data prepare"),
        (
            lambda p: (p.mkdir(), (p / "a.txt").write_text("x")),
            r"has no manifest\.json",
            "seatrial data prepare",
        ),
    ],
)
def test_no_store(tmp_path: Path, make, message: str, hint: str) -> None:
    folder = tmp_path / "store"
    make(folder)
    with pytest.raises(InputError, match=message) as e:
        TokenStore.open(folder)
    assert str(folder) in e.value.render()
    assert hint in e.value.render()


def test_bad_json_points_at_the_place(tmp_path: Path) -> None:
    write(tmp_path / "s", [1, 2, 3])
    (tmp_path / "s/manifest.json").write_text('{\n  "n_tokens": ,\n}')
    with pytest.raises(InputError) as e:
        TokenStore.open(tmp_path / "s")
    assert "manifest.json:2:15: error: bad JSON" in e.value.render()
    for content in ("[" * 100_000, '{"n_tokens": ' + "1" * 5000 + "}"):
        (tmp_path / "s/manifest.json").write_text(content)
        with pytest.raises(InputError, match="bad JSON in the manifest"):
            TokenStore.open(tmp_path / "s")


def edit(folder: Path, **changes: object) -> None:
    m = json.loads((folder / "manifest.json").read_text())
    for path, value in changes.items():
        at = m
        *parents, last = path.split("__")
        for key in parents:
            at = at[int(key) if key.isdigit() else key]
        if value is None:
            del at[last]
        else:
            at[last] = value
    (folder / "manifest.json").write_text(json.dumps(m))


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"dtype": None, "n_tokens": "many"},
            ["dtype: Field required", "n_tokens: Input should be a valid integer"],
        ),
        ({"n_tokens": 31}, ["n_tokens is 31, but its shards give 30"]),
        ({"max_token": 1000}, ["max_token is 1000, but its shards give 29"]),
        (
            {"shards__1__n_tokens": 11},
            ["n_tokens is 30, but its shards give 31", "11 tokens of uint16 are not 20 bytes"],
        ),
        ({"shards__0__file": "../../etc/passwd"}, ["shards.0.file: String should match"]),
        ({"schema_version": 2}, ["schema_version 2", "up to 1"]),
        ({"shards": []}, ["shards: List should have at least 1 item"]),
    ],
)
def test_a_manifest_that_makes_no_sense(
    tmp_path: Path, changes: dict[str, object], messages: list[str]
) -> None:
    write(tmp_path / "s", list(range(30)))
    edit(tmp_path / "s", **changes)
    with pytest.raises(InputError) as e:
        TokenStore.open(tmp_path / "s")
    for message in ["manifest.json", *messages]:
        assert message in e.value.render()


def test_all_wrong_sizes_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write(folder, list(range(30)))
    os.truncate(folder / "shard-00001.bin", 11)
    (folder / "shard-00002.bin").unlink()
    with (folder / "shard-00000.idx").open("ab") as f:
        f.write(b"more")
    with pytest.raises(InputError) as e:
        TokenStore.open(folder)
    text = e.value.render()
    assert "shard-00001.bin: error: truncated: 11 bytes, the manifest has 20" in text
    assert "shard-00002.bin: error: cannot be read: No such file" in text
    assert "shard-00000.idx: error: too long" in text
    assert len(TokenStore.open(folder, check_sizes=False).verify()) == 3


@pytest.mark.parametrize("name", ["shard-00001.bin", "shard-00000.idx"])
def test_verify_finds_one_flipped_bit(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "s"
    store = write(folder, list(range(30)))
    calls: list[tuple[int, int, str]] = []
    assert store.verify(lambda *a: calls.append(a)) == []
    assert calls[-1][0] == calls[-1][1] == 116
    data = bytearray((folder / name).read_bytes())
    data[5] ^= 4
    (folder / name).write_bytes(data)
    ((file, problem),) = TokenStore.open(folder).verify()
    assert file == str(folder / name)
    assert problem.startswith("damaged: SHA-256")


def test_file_truncated_while_in_use_is_an_error_not_a_crash(tmp_path: Path) -> None:
    store = write(tmp_path / "s", list(range(30)))
    assert store.read(0, 30).tolist() == list(range(30))
    os.truncate(tmp_path / "s/shard-00002.bin", 4)
    assert store.read(18, 4).tolist() == [18, 19, 20, 21]
    with pytest.raises(InputError, match="ends before byte") as e:
        store.read(18, 8)
    assert "shard-00002.bin" in e.value.render()


def test_an_unfinished_store_is_never_seen(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), StoreWriter(tmp_path / "s", ByteTokenizer()) as w:  # noqa: PT012
        w.append(np.array([1, 2]), np.array([0]))
        assert not (tmp_path / "s").exists()
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(OSError, match="too large"):
            write(tmp_path / "s", [1] * 100_000, shard_tokens=1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_replacing(tmp_path: Path) -> None:
    old = write(tmp_path / "s", list(range(30)))
    assert old.read(0, 2).tolist() == [0, 1]
    with pytest.raises(InputError, match="already contains a token store") as e:
        write(tmp_path / "s", [7])
    assert "--force" in e.value.render()
    assert write(tmp_path / "s", [7], replace=True).read(0, 1).tolist() == [7]
    assert TokenStore.open(tmp_path / "s").n_tokens == 1
    # Who had the old one open reads on in the old one.
    assert old.read(0, 2).tolist() == [0, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_force_never_replaces_what_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("years of work")
    with pytest.raises(InputError, match="not a token store; it is left unchanged"):
        write(tmp_path / "thesis", [1], replace=True)
    assert (tmp_path / "thesis/chapter.txt").read_text() == "years of work"


def test_an_empty_folder_is_a_fine_target(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    assert write(tmp_path / "s", [5]).n_tokens == 1


def test_a_target_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write next to"):
        write(tmp_path / "file" / "s", [1])


@pytest.mark.parametrize("tokens", [[0, 257], [-1]])
def test_ids_outside_the_tokenizer_are_refused(tmp_path: Path, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 257\)"):
        write(tmp_path / "s", tokens)
