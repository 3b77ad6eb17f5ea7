import json
import os
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seatrial.base.errors import InputError, RunFailed
from seatrial.data import prepare as prepare_module
from seatrial.data import readers, tokenise
from seatrial.data.prepare import check_stores, check_validation, prepare, resolve_stores
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
WriteTokenizer = Callable[..., Path]


def documents(store: TokenStore) -> list[str]:
    tokens = store.read(0, store.n_tokens)
    parts = np.split(tokens, store.document_starts()[1:].astype(np.int64))
    assert all(p[-1] == 256 and 256 not in p[:-1] for p in parts)
    return [BYTES.decode(p.tolist()) for p in parts]


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_a_folder_in_order_and_what_was_left_out(tmp_path: Path) -> None:
    src = tmp_path / "src"
    (src / "b").mkdir(parents=True)
    (src / ".git").mkdir()
    (src / "b/one.md").write_text("one")
    (src / "b/three.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    (src / "a.txt").write_text("zero")
    (src / "empty.txt").write_text("")
    (src / ".hidden.txt").write_text("no")
    (src / ".git/config.txt").write_text("no")
    (src / "image.png").write_bytes(b"no")
    (src / "Makefile").write_text("no")
    (src / "dangling.txt").symlink_to(src / "nowhere")
    pq.write_table(pa.table({"text": ["two", None, "two and a half"]}), src / "b/table.parquet")
    store = prepare([str(src)], "bytes", tmp_path / "out")
    assert documents(store) == ["zero", "one", "two", "two and a half", "three", "four"]
    source = store.manifest.source
    assert source["skipped_files"] == {
        "hidden": 1,
        "hidden folder": 1,
        "neither a file nor a folder": 1,
        "no suffix": 1,
        "suffix .png": 1,
    }
    assert source["empty_documents"] == 2
    assert source["n_files"] == 5


def test_sources_keep_the_order_given(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    store = prepare([str(tmp_path / "b"), str(tmp_path / "a")], "bytes", tmp_path / "out")
    assert documents(store) == ["b", "a"]


def test_bytes_that_are_no_utf8_are_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok \xff\xfe end \xef\xbf\xbd")
    (tmp_path / "b.txt").write_text("fine é")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "half \\ud83d \xe9"}\n')
    store = prepare([str(tmp_path / x) for x in ("a.txt", "b.txt", "c.jsonl")], "bytes", tmp_path / "out")
    assert documents(store) == ["ok \ufffd\ufffd end \ufffd", "fine é", "half ? \ufffd"]
    assert store.manifest.source["replaced_characters"] == 4
    assert store.manifest.source["files_with_replaced_characters"] == 2


def test_byte_order_marks_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhi")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "there"}\r\n')
    assert documents(prepare([str(tmp_path)], "bytes", tmp_path / "out")) == ["hi", "there"]


@pytest.mark.parametrize(
    "text", ["ab\ncdé\n\nfghijklmnop\n", "é" * 40, "x" * 9, "\n\n\n", "漢字" * 9 + "\n" + "a" * 30]
)
def test_large_documents_are_cut_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 9)
    monkeypatch.setattr(tokenise, "_BATCH_BYTES", 20)
    (tmp_path / "a.txt").write_text(text)
    jsonl(tmp_path / "b.jsonl", [{"text": text}, {"text": ""}, {"text": "z"}])
    pq.write_table(pa.table({"text": [text]}), tmp_path / "c.parquet")
    store = prepare([str(tmp_path)], "bytes", tmp_path / "out", shard_tokens=16)
    assert documents(store) == [text, text, "z", text]
    assert store.manifest.source["replaced_characters"] == 0


def test_every_bad_line_with_its_place(tmp_path: Path) -> None:
    bad = jsonl(
        tmp_path / "bad.jsonl",
        [
            {"text": "ok"},
            '{"text": "open',
            [1],
            {"body": "x", "id": 3},
            {"text": 5, "body": "x"},
            "",
            {"text": "ok"},
        ],
    )
    worse = jsonl(tmp_path / "worse.jsonl", ["nonsense"])
    with pytest.raises(InputError) as e:
        prepare([str(bad), str(worse)], "bytes", tmp_path / "out")
    text = e.value.render()
    assert f"{bad}:2:10: error: bad JSON: Unterminated string" in text
    assert f"{bad}:3: error: a line must be a JSON object, not a list" in text
    assert f"{bad}:4: error: no key 'text'\n  hint: keys there: body, id; choose one with --text-key" in text
    assert f"{bad}:5: error: 'text' must be a string, not a number\n  hint: string keys there: body" in text
    assert f"{worse}:1:1: error: bad JSON" in text
    assert text.endswith("5 problems")
    assert not (tmp_path / "out").exists()


def test_problems_stop_at_twenty(tmp_path: Path) -> None:
    bad = jsonl(tmp_path / "bad.jsonl", ["?"] * 1000)
    with pytest.raises(InputError) as e:
        prepare([str(bad)], "bytes", tmp_path / "out")
    assert len(e.value.diagnostics) == 20


def test_another_text_key(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"body": "one"}])
    pq.write_table(pa.table({"body": pa.array(["two"], pa.large_string()), "n": [1]}), tmp_path / "b.parquet")
    assert documents(prepare([str(tmp_path)], "bytes", tmp_path / "out", text_key="body")) == ["one", "two"]


def test_bad_parquet_files_all_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 this is no table PAR1")
    with pytest.raises(InputError) as e:
        prepare([str(tmp_path)], "bytes", tmp_path / "out")
    text = e.value.render()
    assert "a.parquet: error: no column 'text'\n  hint: string columns there: body" in text
    assert "b.parquet: error: column 'text' has int64, not strings" in text
    assert "c.parquet: error: bad Parquet file" in text


def test_parquet_of_many_row_groups(tmp_path: Path) -> None:
    rows = [f"row {i}" for i in range(10_000)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", row_group_size=1234)
    calls: list[tuple[int, int, str]] = []
    store = prepare([str(tmp_path)], "bytes", tmp_path / "out", progress=lambda *a: calls.append(a))
    assert documents(store) == rows
    size = (tmp_path / "a.parquet").stat().st_size
    assert calls[-1] == (size, size, "a.parquet")


def test_any_tokenizer_file(write_tokenizer: WriteTokenizer, tmp_path: Path) -> None:
    spec = str(write_tokenizer(tmp_path / "t.json", special_id=70_000))
    rows = [{"text": "def x"}, {"text": " "}, {"text": "return"}]
    source = str(jsonl(tmp_path / "a.jsonl", rows))
    store = prepare([source], spec, tmp_path / "out")
    assert store.manifest.dtype == "uint32"
    assert store.read(0, store.n_tokens).tolist() == [1, 3, 70_000, 70_000, 2, 70_000]
    spec = str(write_tokenizer(tmp_path / "t.json", special=None))
    store = prepare([source], spec, tmp_path / "out", force=True)
    assert store.tokenizer.end_of_document is None
    assert store.read(0, store.n_tokens).tolist() == [1, 3, 2]
    assert store.document_starts().tolist() == [0, 2, 2]


def test_every_unusable_source_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_text("")
    sources = [
        "s3://bucket/data",
        "builtin:novels",
        *(str(tmp_path / x) for x in ("nowhere", "empty", "images")),
    ]
    with pytest.raises(InputError) as e:
        prepare(sources, "bytes", tmp_path / "out")
    text = e.value.render()
    assert "s3:// addresses are not supported in this version" in text
    assert "aws s3 sync s3://bucket/data FOLDER" in text
    assert "no built-in corpus 'builtin:novels'\n  hint: there is builtin:python-library" in text
    assert f"no such file or folder: {tmp_path}/nowhere" in text
    assert f"no readable files in the folder {tmp_path}/empty: it is empty" in text
    assert "(skipped: 1 suffix .png (a.png))" in text
    with pytest.raises(InputError, match="s3://"):
        prepare([str(tmp_path)], "bytes", "s3://bucket/out")


def test_nothing_but_empty_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InputError, match="1 files, every document empty"):
        prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_full_disk_is_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    notes: list[str] = []
    with monkeypatch.context() as disk:
        disk.setattr(prepare_module.StoreWriter, "append", full)
        with pytest.raises(RunFailed, match="No space left on device") as e:
            prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "out", note=notes.append)
    assert "finished work is kept" in e.value.render()
    assert notes == [
        f"finished work is kept in {tmp_path}/.out.tmp-work: run the same command to continue, or delete the folder"
    ]
    assert not (tmp_path / "out").exists()
    notes.clear()
    assert documents(prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "out", note=notes.append)) == [
        "text"
    ]
    assert notes == ["resuming an earlier attempt: 1 of 1 parts are done"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "out"]


def test_the_python_library(tmp_path: Path) -> None:
    store = prepare(["builtin:python-library"], "bytes", tmp_path / "out")
    assert store.n_tokens > 5_000_000
    assert store.max_token == 256
    library = Path(sysconfig.get_paths()["stdlib"])
    first = (library / "__future__.py").read_text()
    assert BYTES.decode(store.read(0, len(first)).tolist()) == first
    assert store.verify() == []


def test_the_python_library_has_no_tests_and_no_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "a.py",
        "b/c.py",
        "b/test/x.py",
        "b/tests/x.py",
        "site-packages/x.py",
        "__pycache__/x.py",
        "d.txt",
    ):
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    assert documents(prepare(["builtin:python-library"], "bytes", tmp_path / "out")) == ["a.py", "b/c.py"]


@dataclass
class Data:
    train: str | list[str]
    tokenizer: str = "bytes"
    weights: list[float] | None = None
    cache_gb: float = 1.0
    text_key: str = "text"


def resolve_store(data: Data, cache: Path, base: Path) -> TokenStore:
    (store,) = resolve_stores(data, cache, base)
    return store


def test_resolve_prepares_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my text").mkdir()
    (tmp_path / "my text/a.txt").write_text("first")
    runs: list[str] = []
    real = prepare_module.prepare
    monkeypatch.setattr(prepare_module, "prepare", lambda *a, **k: (runs.append("run"), real(*a, **k))[1])

    def resolve() -> TokenStore:
        return resolve_store(Data("my text"), tmp_path / "cache", tmp_path)

    store = resolve()
    assert store.folder.parent == tmp_path / "cache"
    assert store.folder.name.startswith("my-text-")
    assert documents(store) == ["first"]
    assert resolve().folder == store.folder
    assert len(runs) == 1
    # The same size at another time is another text.
    (tmp_path / "my text/a.txt").write_text("other")
    os.utime(tmp_path / "my text/a.txt", ns=(1, 1))
    assert documents(resolve()) == ["other"]
    assert len(runs) == 2


def test_resolve_keeps_tokenizers_apart(write_tokenizer: WriteTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def x")
    write_tokenizer(tmp_path / "t.json")
    one = resolve_store(Data("a.txt"), tmp_path / "cache", tmp_path)
    two = resolve_store(Data("a.txt", "t.json"), tmp_path / "cache", tmp_path)
    assert one.folder != two.folder
    assert two.read(0, 3).tolist() == [1, 3, 4]


def test_resolve_makes_a_damaged_cache_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    folder = resolve_store(Data("a.txt"), tmp_path / "cache", tmp_path).folder
    os.truncate(folder / "shard-00000.bin", 2)
    left = folder.parent / f".{folder.name}.tmp-1"
    left.mkdir()
    assert documents(resolve_store(Data("a.txt"), tmp_path / "cache", tmp_path)) == ["text"]
    assert not left.exists()


def test_resolve_opens_a_store_and_does_not_repair_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    made = prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "store")
    assert resolve_store(Data("store"), tmp_path / "cache", tmp_path).folder == made.folder
    (tmp_path / "store/manifest.json").unlink()
    with pytest.raises(InputError, match=r"has no manifest\.json"):
        resolve_store(Data("store"), tmp_path / "cache", tmp_path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("nowhere", "no such file or folder"),
        ("empty", "it is empty"),
        ("s3://b/x", "is not a bucket's name"),
    ],
)
def test_resolve_bad_input(tmp_path: Path, train: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=message):
        resolve_store(Data(train), tmp_path / "cache", tmp_path)


def test_resolve_where_the_cache_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match="cannot keep prepared data"):
        resolve_store(Data("a.txt"), tmp_path / "a.txt" / "cache", tmp_path)


def test_of_many_callers_one_prepares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    runs: list[str] = []
    real = prepare_module.prepare
    n = 4
    all_found_no_cache = threading.Barrier(n)
    real_locked = prepare_module._locked

    def locked(folder: Path):
        all_found_no_cache.wait(timeout=30)
        return real_locked(folder)

    monkeypatch.setattr(prepare_module, "_locked", locked)
    monkeypatch.setattr(prepare_module, "prepare", lambda *a, **k: (runs.append("run"), real(*a, **k))[1])
    stores: list[TokenStore] = []
    threads = [
        threading.Thread(target=lambda: stores.append(resolve_store(Data("a.txt"), tmp_path / "c", tmp_path)))
        for _ in range(n)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(runs) == 1
    assert [documents(s) for s in stores] == [["text"]] * n


def test_check_stores_reports_everything(write_tokenizer: WriteTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("twelve bytes")
    store = prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "store")
    fits = {"vocab_size": 257, "sequence_length": 4, "global_batch": 3, "tokenizer_spec": "bytes"}
    check_stores([store], None, **fits)
    other = str(write_tokenizer(tmp_path / "t.json"))
    with pytest.raises(InputError) as e:
        check_stores([store], None, vocab_size=200, sequence_length=4, global_batch=4, tokenizer_spec=other)
    text = e.value.render()
    assert f"token id 256 in {tmp_path}/store/shard-00000.bin is beyond the vocabulary of 200" in text
    assert "has 13 tokens, 3 samples of 4: fewer than one global batch of 4" in text
    assert "was made with the tokenizer 'bytes'" in text
    assert len(e.value.diagnostics) == 3
    for key, value in (
        ("vocab_size", 256),
        ("global_batch", 4),
        ("sequence_length", 5),
        ("tokenizer_spec", other),
    ):
        with pytest.raises(InputError):
            check_stores([store], None, **{**fits, key: value})


def test_check_validation_reports_everything(write_tokenizer: WriteTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("twelve bytes")
    store = prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "store")
    (tmp_path / "a.txt").write_text("other bytes!")
    other = prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "other")
    fits = {"vocab_size": 257, "sequence_length": 4, "samples": 3, "tokenizer_spec": "bytes"}
    check_validation(store, [other], **fits)
    check_validation(store, [other], **{**fits, "samples": None})
    bpe = str(write_tokenizer(tmp_path / "t.json"))
    with pytest.raises(InputError) as e:
        check_validation(
            store, [other, store], vocab_size=200, sequence_length=4, samples=4, tokenizer_spec=bpe
        )
    text = e.value.render()
    assert "beyond the vocabulary of 200" in text
    assert "3 samples of 4: too few of train.validate_samples = 4" in text
    assert "use train.validate_samples = 3" in text
    assert "was made with the tokenizer 'bytes'" in text
    assert f"has the same tokens as {store.place}, which is trained on" in text
    assert len(e.value.diagnostics) == 4
    with pytest.raises(InputError, match="too few"):
        check_validation(store, [], **{**fits, "sequence_length": 13, "samples": None})
