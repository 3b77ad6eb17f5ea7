"""Tokenising in parts: the same store for any number of workers and attempts."""

import hashlib
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.base.errors import InputError, RunFailed
from seatrial.data import parts as parts_module
from seatrial.data import pool, readers, tokenise, workspace
from seatrial.data.parts import part_bytes, plan_parts
from seatrial.data.prepare import prepare
from seatrial.data.readers import cut
from seatrial.data.sources import find
from seatrial.data.store import TokenStore

pytestmark = pytest.mark.cluster  # takes its time

WriteTokenizer = Callable[..., Path]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 512 bytes, pieces of 64."""
    monkeypatch.setattr(parts_module, "_FEWEST_BYTES", 512)
    monkeypatch.setattr(parts_module, "_MOST_BYTES", 512)
    monkeypatch.setattr(readers, "PIECE_BYTES", 64)
    monkeypatch.setattr(tokenise, "_BATCH_BYTES", 100)


def content(folder: Path) -> dict[str, str]:
    """Every file of a store and its hash; nothing else may be there."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def write_corpus(folder: Path) -> Path:
    """A few kilobytes of every kind, some files larger than a part, some empty, with bytes that are no UTF-8."""
    rng = random.Random(7)
    words = ["def", "return", "x", "漢字", "é", "", "\n", "\n\n", " "]

    def text(n: int) -> str:
        return " ".join(rng.choice(words) for _ in range(n))

    folder.mkdir()
    (folder / "a.txt").write_text(text(900), encoding="utf-8")
    (folder / "b.txt").write_bytes(b"\xef\xbb\xbf" + text(500).encode() + b"\xff" * 3 + text(600).encode())
    (folder / "c.txt").write_text("x" * 2000)
    (folder / "empty.txt").write_text("")
    for i in range(40):
        (folder / f"d{i:02}.txt").write_text(text(rng.randrange(20)), encoding="utf-8")
    rows = [json.dumps({"text": text(rng.randrange(60))}, ensure_ascii=False) for _ in range(90)]
    rows[10], rows[20] = "", json.dumps({"text": ""})
    rows[30] = json.dumps({"text": "y" * 1500})  # a line longer than a part
    (folder / "e.jsonl").write_text("\n".join(rows), encoding="utf-8")
    table = pa.table({"text": [text(rng.randrange(30)) for _ in range(300)] + [None]})
    pq.write_table(table, folder / "f.parquet", row_group_size=25)
    return folder


@pytest.mark.usefixtures("small_parts")
def test_any_number_of_workers_makes_the_same_store(
    tmp_path: Path, write_tokenizer: WriteTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = str(write_corpus(tmp_path / "corpus"))
    for spec in ("bytes", str(write_tokenizer(tmp_path / "t.json"))):
        stores = []
        for workers in (1, 2, 3):
            out = tmp_path / f"out{workers}"
            store = prepare([corpus], spec, out, workers=workers, shard_tokens=3000, force=True)
            assert store.verify() == []
            stores.append(content(out))
        assert stores[0] == stores[1] == stores[2]
        with monkeypatch.context() as whole:
            whole.setattr(parts_module, "_FEWEST_BYTES", 1 << 30)
            whole.setattr(parts_module, "_MOST_BYTES", 1 << 30)
            prepare([corpus], spec, tmp_path / "whole", shard_tokens=3000, force=True)
        assert content(tmp_path / "whole") == stores[0]
    source = store.manifest.source
    assert source["files_with_replaced_characters"] == 1
    assert source["replaced_characters"] == 3
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.usefixtures("small_parts")
def test_the_parts_are_the_sources_and_nothing_twice(tmp_path: Path) -> None:
    found = find([str(write_corpus(tmp_path / "corpus"))])
    parts = plan_parts(found, tokenizer_digest="d", text_key="text")
    assert len(parts) > 30
    assert sum(p.size for p in parts) == sum(f.size for f in found.files)
    assert len({p.fingerprint for p in parts}) == len(parts)
    kinds = {(p.spans[0].file.kind, p.goes_on) for p in parts}
    assert kinds >= {("text", True), ("jsonl", True), ("parquet", True), ("text", False)}
    at: dict[Path, int | None] = {}
    for span in (s for p in parts for s in p.spans):
        assert at.get(span.file.path, 0) == span.begin
        at[span.file.path] = span.end
    assert list(at) == [f.path for f in found.files]
    assert set(at.values()) == {None}


def test_parts_of_real_sizes() -> None:
    assert [part_bytes(n) for n in (0, 1 << 20, 1 << 31, 1 << 40)] == [1 << 22, 1 << 22, 1 << 23, 1 << 25]
    # A source that grows a little keeps its parts.
    assert part_bytes(3 << 30) == part_bytes((3 << 30) + 123_456_789)


@given(
    st.lists(st.sampled_from([b"ab", b"\n", "é".encode(), "漢".encode(), b"x" * 7]), max_size=60).map(
        b"".join
    ),
    st.integers(5, 20),
    st.lists(st.integers(1, 12), max_size=4),
)
def test_blocks_are_the_same_when_read_from_the_middle(text: bytes, limit: int, steps: list[int]) -> None:
    whole = list(cut(io.BytesIO(text), limit))
    assert b"".join(whole) == text
    blocks: list[bytes] = []
    first = 0
    for step in steps:
        # As the planner does: a span begins where there is at least one byte of another block.
        if (first + step) * limit >= len(text):
            break
        blocks += cut(io.BytesIO(text), limit, first, first + step)
        first += step
    assert blocks + list(cut(io.BytesIO(text), limit, first)) == whole


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("workers", [1, 3])
def test_problems_are_reported_at_their_lines_by_any_worker(tmp_path: Path, workers: int) -> None:
    rows = [json.dumps({"text": f"row {i}"}) for i in range(1, 200)]
    rows[4] = "?"
    rows[150] = '{"body": 1}'
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "b.jsonl").write_text('\n{"text": 3}\n')
    with pytest.raises(InputError) as e:
        prepare([str(tmp_path)], "bytes", tmp_path / "out", workers=workers)
    places = [(Path(d.file or "").name, d.line) for d in e.value.diagnostics]
    assert places == [("a.jsonl", 5), ("a.jsonl", 151), ("b.jsonl", 2)]
    (tmp_path / "a.jsonl").write_text("?\n" * 900)
    with pytest.raises(InputError) as e:
        prepare([str(tmp_path)], "bytes", tmp_path / "out", workers=workers)
    assert [d.line for d in e.value.diagnostics] == list(range(1, 21))


class Stopped(Exception):
    pass


@pytest.mark.usefixtures("small_parts")
def test_an_attempt_goes_on_where_another_ended(tmp_path: Path) -> None:
    corpus = [str(write_corpus(tmp_path / "corpus"))]
    prepare(corpus, "bytes", tmp_path / "wanted", shard_tokens=2000)
    parts = len(plan_parts(find(corpus), tokenizer_digest="", text_key="text"))
    rng = random.Random(3)
    for round_ in range(12):
        left, attempts, read = rng.randrange(1, 25), 0, 0

        def progress(done: int, total: int, name: str) -> None:
            nonlocal left, read
            left, read = left - 1, read + 1
            if left == 0:
                raise Stopped

        notes: list[str] = []
        out = tmp_path / f"out{round_}"
        while True:
            attempts += 1
            try:
                prepare(corpus, "bytes", out, shard_tokens=2000, progress=progress, note=notes.append)
                break
            except Stopped:
                assert not out.exists()
                left = rng.randrange(8, 60)
        assert content(out) == content(tmp_path / "wanted")
        assert attempts > 2
        done = [int(note.split(": ")[1].split(" ")[0]) for note in notes if note.startswith("resuming")]
        assert len(notes) - len(done) in (
            attempts - 1,
            attempts - 2,
        )  # the first may have ended with nothing done
        assert done == sorted(done)
        assert 0 < done[-1] <= parts
        assert read < 8 * parts * 2  # not everything again in each attempt


def interrupted(corpus: list[str], out: Path) -> Path:
    """The workspace of an attempt that ended when some shards were complete and some parts wait for the next."""
    calls = 0

    def progress(done: int, total: int, name: str) -> None:
        nonlocal calls
        calls += 1
        if done > 0.7 * total:
            raise Stopped

    with pytest.raises(Stopped):
        prepare(corpus, "bytes", out, shard_tokens=2000, progress=progress)
    space = out.parent / f".{out.name}.tmp-work"
    assert (space / "shard-00001.bin").exists()
    assert sorted(space.glob("parts/*.bin"))
    return space


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("damage", [flip, cut_short, Path.unlink])
@pytest.mark.parametrize(
    "which", ["shard-00000.bin", "shard-00001.idx", "state.json", "parts/*.bin", "parts/*.json"]
)
def test_what_was_damaged_meanwhile_is_done_again(
    tmp_path: Path, which: str, damage: Callable[[Path], None]
) -> None:
    corpus = [str(write_corpus(tmp_path / "corpus"))]
    prepare(corpus, "bytes", tmp_path / "wanted", shard_tokens=2000)
    space = interrupted(corpus, tmp_path / "out")
    damage(sorted(space.glob(which))[-1])
    prepare(corpus, "bytes", tmp_path / "out", shard_tokens=2000)
    assert content(tmp_path / "out") == content(tmp_path / "wanted")
    assert not space.exists()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("other", ["text", "shards", "tokenizer"])
def test_what_belongs_to_something_else_is_not_used(
    tmp_path: Path, other: str, write_tokenizer: WriteTokenizer
) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    interrupted([str(corpus)], tmp_path / "out")
    spec, shard_tokens = "bytes", 2000
    if other == "text":
        (corpus / "a.txt").write_text("another text")
    elif other == "shards":
        shard_tokens = 1999
    else:
        spec = str(write_tokenizer(tmp_path / "t.json"))
    for name in ("out", "wanted"):
        prepare([str(corpus)], spec, tmp_path / name, shard_tokens=shard_tokens)
    assert content(tmp_path / "out") == content(tmp_path / "wanted")


@pytest.mark.usefixtures("small_parts")
def test_one_process_at_a_time(tmp_path: Path) -> None:
    corpus = [str(write_corpus(tmp_path / "corpus"))]
    out = tmp_path / "out"

    def progress(done: int, total: int, name: str) -> None:
        with pytest.raises(RunFailed, match=f"is being prepared by process {os.getpid()}"):
            prepare(corpus, "bytes", out)

    prepare(corpus, "bytes", out, progress=progress)
    assert TokenStore.open(out).verify() == []


@pytest.mark.usefixtures("small_parts")
def test_killed_worker_is_reported_and_next_attempt_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = [str(write_corpus(tmp_path / "corpus"))]
    real = pool._Worker.give
    given_ = 0

    def give(worker: pool._Worker, part: parts_module.Part, *, only_check: bool) -> None:
        nonlocal given_
        given_ += 1
        real(worker, part, only_check=only_check)
        if given_ == 9:
            worker._process.kill()

    with monkeypatch.context() as dying:
        dying.setattr(pool._Worker, "give", give)
        with pytest.raises(RunFailed, match="a tokeniser process was killed by SIGKILL") as e:
            prepare(corpus, "bytes", tmp_path / "out", workers=2)
    assert "run the same command again" in (e.value.hint or "")
    notes: list[str] = []
    prepare(corpus, "bytes", tmp_path / "out", note=notes.append)
    prepare(corpus, "bytes", tmp_path / "wanted")
    assert len(notes) == 1
    assert content(tmp_path / "out") == content(tmp_path / "wanted")


def test_a_file_that_changes_while_it_is_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    real = readers.Reader._valid

    def valid(reader: readers.Reader, raw: bytes) -> bytes:
        path.write_text("some other text")
        return real(reader, raw)

    monkeypatch.setattr(readers.Reader, "_valid", valid)
    with pytest.raises(InputError, match="changed while it was being read"):
        prepare([str(path)], "bytes", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_part_is_not_trusted_without_its_hash(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    space = workspace.Workspace(tmp_path / "out", 10)
    parts = plan_parts(find([str(tmp_path)]), tokenizer_digest="d", text_key="text")
    with space:
        space.parts.joinpath("part-00000000.json").write_text(
            '{"fingerprint": "' + parts[0].fingerprint + '"}'
        )
        assert space.find(parts).results == {}
    assert not space.folder.exists()
