"""Megatron's pair of files, against a reader and a writer of its own (megatron_format.py)."""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import megatron_format
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.data import megatron, megatron_import
from seatrial.data.megatron import export_pair, find_pair, open_pair
from seatrial.data.megatron_import import import_pair
from seatrial.data.prepare import resolve_stores
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import ByteTokenizer
from seatrial.data.writer import StoreWriter

WriteTokenizer = Callable[..., Path]
Documents = list[list[list[int]]]


def documents(store: TokenStore) -> list[list[int]]:
    starts = store.document_starts().astype(np.int64)
    assert starts[0] == 0
    return [part.tolist() for part in np.split(store.read(0, store.n_tokens), starts[1:])]


def joined(given_: Documents) -> list[list[int]]:
    """As a store has them: sequences one after the other, documents without tokens left out."""
    return [whole for document in given_ if (whole := [t for s in document for t in s])]


def make(folder: Path, texts: list[list[int]], *, dtype: str = "<u2", shard_tokens: int = 7) -> TokenStore:
    with StoreWriter(
        folder, ByteTokenizer(), shard_tokens=shard_tokens, replace=True, dtype=np.dtype(dtype)
    ) as w:
        for ids in texts:
            w.append(np.array(ids, dtype=np.int64), np.array([0]))
        return w.finish({})


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and tokens are read three and five at a time."""
    monkeypatch.setattr(megatron, "_ENTRIES", 3)
    monkeypatch.setattr(megatron, "_TOKENS", 5)
    monkeypatch.setattr(megatron_import, "_TOKENS", 5)


few = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
ids = st.integers(0, 256)


@pytest.mark.cluster  # for its time only
@few
@given(texts=st.lists(st.lists(ids, min_size=1, max_size=12), min_size=1, max_size=15), wide=st.booleans())
@pytest.mark.usefixtures("small_blocks")
def test_what_is_written_is_read_by_an_independent_reader(
    tmp_path: Path, texts: list[list[int]], wide: bool
) -> None:
    store = make(tmp_path / "store", texts, dtype="<u4" if wide else "<u2")
    pair = export_pair(store, tmp_path / "pair", force=True)
    assert (pair.n_tokens, pair.n_documents, pair.contiguous) == (store.n_tokens, len(texts), True)
    assert megatron_format.read(tmp_path / "pair") == (4 if wide else 8, [[text] for text in texts])
    again = import_pair(tmp_path / "pair", "bytes", tmp_path / "again", force=True)
    assert documents(again) == texts
    assert again.verify() == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "pair.bin", "pair.idx", "store"]


@pytest.mark.cluster  # for its time only
@few
@given(
    given_=st.lists(st.lists(st.lists(ids, max_size=6), max_size=4), min_size=1, max_size=9).filter(joined),
    code=st.sampled_from([3, 4, 5, 8]),
    backwards=st.booleans(),
    copy=st.booleans(),
)
@example(given_=[[[], [0]]], code=4, backwards=True, copy=False)
@pytest.mark.usefixtures("small_blocks")
def test_what_an_independent_writer_wrote_is_read(
    tmp_path: Path, given_: Documents, code: int, backwards: bool, copy: bool
) -> None:
    prefix = tmp_path / "theirs"
    megatron_format.write(prefix, given_, code, backwards=backwards)
    store = import_pair(prefix, "bytes", tmp_path / "store", copy=copy, shard_tokens=6, force=True)
    assert documents(store) == joined(given_)
    assert store.verify() == []
    assert store.max_token == max(t for d in joined(given_) for t in d)
    linked = (tmp_path / "store" / "shard-00000.bin").is_symlink()
    assert linked == store.manifest.source["linked"]
    contiguous = not backwards or sum(bool(s) for d in given_ for s in d) == 1
    assert linked == (not copy and code in (4, 8) and contiguous)


@pytest.mark.parametrize("code", [1, 2])
def test_bytes_are_widened(tmp_path: Path, code: int) -> None:
    megatron_format.write(tmp_path / "a", [[[1, 2, 100]]], code)
    assert documents(import_pair(tmp_path / "a.bin", "bytes", tmp_path / "store")) == [[1, 2, 100]]


@pytest.mark.usefixtures("small_blocks")
def test_a_document_too_long_for_a_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "_LONGEST", 4)
    texts = [[1] * 11, [2] * 4, [3], [4] * 8]
    store = make(tmp_path / "store", texts)
    export_pair(store, tmp_path / "pair")
    _, found = megatron_format.read(tmp_path / "pair")
    assert [[len(s) for s in d] for d in found] == [[4, 4, 3], [4], [1], [4, 4]]
    assert documents(import_pair(tmp_path / "pair", "bytes", tmp_path / "again")) == texts


def test_a_linked_store_notices_that_its_file_changed(tmp_path: Path) -> None:
    megatron_format.write(tmp_path / "a", [[[1, 2, 3]], [[4, 5]]], 8)
    store = import_pair(tmp_path / "a", "bytes", tmp_path / "store")
    assert store.read(0, 5).tolist() == [1, 2, 3, 4, 5]
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[4] = 7
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        TokenStore.open(tmp_path / "store").read(0, 5)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        TokenStore.open(tmp_path / "store")


def put(at: int, kind: str, value: int) -> Callable[[bytearray], None]:
    return lambda index: struct.pack_into(kind, index, at, value)


# Of the index of three documents of two sequences each, two tokens a sequence, uint16.
LENGTHS, POINTERS, BOUNDS = 34, 34 + 4 * 6, 34 + 12 * 6


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put(0, "<B", 0), "does not begin with MMIDIDX"),
        (put(9, "<Q", 2), "version 2 of the index; only version 1 is supported"),
        (put(17, "<B", 9), "type 9 is not a token type"),
        (put(17, "<B", 7), "it contains float32, not tokens"),
        (put(18, "<Q", 7), "truncated: 7 sequences and 4 document entries are 150 bytes"),
        (put(18, "<Q", 2**62), "truncated"),
        (put(26, "<Q", 3), "too long: 6 sequences and 3 document entries"),
        (lambda index: index.extend(bytes(6)), "it has a mode for each sequence"),
        (put(LENGTHS + 4, "<i", -1), "sequence 1: -1 tokens from byte 4 on are not in a.bin"),
        (
            put(LENGTHS + 20, "<i", 3),
            "sequence 5: 3 tokens from byte 20 on are not in a.bin, which has 24 bytes",
        ),
        (put(POINTERS + 16, "<q", 2**62), "sequence 2: 2 tokens from byte 4611686018427387904 on"),
        (put(POINTERS + 16, "<q", 9), "sequence 2: 2 tokens from byte 9 on"),
        (put(BOUNDS, "<q", 1), "the first document begins with sequence 1, not 0"),
        (put(BOUNDS + 8, "<q", 5), "document 1 ends before it begins"),
        (put(BOUNDS + 24, "<q", 7), "the last document ends with sequence 7, but there are 6"),
        (lambda index: index.__delitem__(slice(100, None)), "truncated"),
        (lambda index: index.__delitem__(slice(20, None)), "does not begin with MMIDIDX"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, damage: Callable[[bytearray], None], message: str) -> None:
    megatron_format.write(tmp_path / "a", [[[1, 2], [3, 4]]] * 3, 8)
    index = bytearray((tmp_path / "a.idx").read_bytes())
    damage(index)
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(InputError) as e:
        import_pair(tmp_path / "a", "bytes", tmp_path / "store")
    assert message in e.value.render()
    assert "a.idx" in e.value.render()
    assert not (tmp_path / "store").exists()


def test_a_bin_of_half_a_token_or_none_at_all(tmp_path: Path) -> None:
    megatron_format.write(tmp_path / "a", [[[1, 2]]], 8)
    with open(tmp_path / "a.bin", "ab") as f:
        f.write(b"x")
    with pytest.raises(InputError, match=r"a\.bin has 5 bytes, which is not a whole number of uint16"):
        open_pair(tmp_path / "a")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(InputError, match=r"cannot read .*a\.bin"):
        open_pair(tmp_path / "a.idx")


@pytest.mark.parametrize("code", [4, 5])
@pytest.mark.parametrize("wrong", [-1, 257])
def test_ids_of_another_tokenizer(tmp_path: Path, code: int, wrong: int) -> None:
    megatron_format.write(tmp_path / "a", [[[1, 2]], [[3, wrong]]], code)
    with pytest.raises(InputError, match=r"257 ids of the tokenizer 'bytes'|has 257 ids"):
        import_pair(tmp_path / "a", "bytes", tmp_path / "store")
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    store = make(tmp_path / "store", [[1, 2]])
    (tmp_path / "pair.idx").write_text("mine")
    with pytest.raises(InputError, match=r"pair\.idx exists"):
        export_pair(store, tmp_path / "pair")
    assert (tmp_path / "pair.idx").read_text() == "mine"
    assert not (tmp_path / "pair.bin").exists()
    export_pair(store, tmp_path / "pair", force=True)
    with pytest.raises(InputError, match="already contains a token store"):
        import_pair(tmp_path / "pair", "bytes", tmp_path / "store")


def test_what_names_a_pair(tmp_path: Path) -> None:
    megatron_format.write(tmp_path / "a.v2", [[[1]]], 8)
    for name in ("a.v2", "a.v2.bin", "a.v2.idx"):
        assert find_pair(tmp_path / name) == tmp_path / "a.v2"
    (tmp_path / "b.bin").write_text("text")
    (tmp_path / "b.idx").write_text("text")
    (tmp_path / "c.txt").write_text("text")
    for name in ("b", "b.bin", "c.txt", "nowhere"):
        assert find_pair(tmp_path / name) is None


@dataclass
class Data:
    train: str | list[str]
    tokenizer: str = "bytes"
    weights: list[float] | None = None
    cache_gb: float = 1.0
    text_key: str = "text"


def test_a_job_may_name_pairs(tmp_path: Path, write_tokenizer: WriteTokenizer) -> None:
    megatron_format.write(tmp_path / "a", [[[1, 2, 3]]], 8)
    megatron_format.write(tmp_path / "b", [[[2, 1]]], 8)
    spec = str(write_tokenizer(tmp_path / "t.json"))
    (tmp_path / "c.txt").write_text("def")
    data = Data(["a", str(tmp_path / "b.bin"), "c.txt"], spec, [1, 1, 1])
    stores = resolve_stores(data, tmp_path / "cache", tmp_path)
    assert [documents(s) for s in stores] == [[[1, 2, 3]], [[2, 1]], [[1, 4]]]
    before = {s.folder for s in stores}
    assert {s.folder for s in resolve_stores(data, tmp_path / "cache", tmp_path)} == before
    megatron_format.write(tmp_path / "a", [[[3, 3]]], 8)
    stores = resolve_stores(data, tmp_path / "cache", tmp_path)
    assert documents(stores[0]) == [[3, 3]]
    data.train = ["a", "nowhere", "void"]
    with pytest.raises(InputError) as e:
        resolve_stores(data, tmp_path / "cache", tmp_path)
    assert [d.message.split("/")[-1] for d in e.value.diagnostics] == ["nowhere", "void"]
