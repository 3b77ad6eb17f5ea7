"""What can be named as a source: compressed files, what is not text, folders of everything."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from safetensors.numpy import save

from seatrial.base.errors import InputError, RunFailed
from seatrial.data import packed, readers, tokenise
from seatrial.data import parts as parts_module
from seatrial.data import prepare as prepare_module
from seatrial.data.prepare import prepare, resolve_stores
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import ByteTokenizer

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
LANGUAGES = [
    "plain",
    "Grüße, señor, français",
    "Привет, мир",
    "漢字とかな",
    "مرحبا بالعالم",
    "👩‍🚀🚀" * 3,
    "नमस्ते",
]


def documents(store: TokenStore) -> list[str]:
    tokens = store.read(0, store.n_tokens)
    pieces = np.split(tokens, store.document_starts()[1:].astype(np.int64))
    return [ByteTokenizer().decode(p.tolist()) for p in pieces]


def shards(folder: Path) -> dict[str, str]:
    """Every file of a store but its manifest, which names the sources, and its hash."""
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.iterdir()
        if p.name != "manifest.json"
    }


def parquet(rows: list[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), out, row_group_size=2)
    return out.getvalue()


def refused(source: Path | str, tmp_path: Path) -> str:
    """What is said of a source that cannot be used; it is named, and no store is left."""
    with pytest.raises(InputError) as e:
        prepare([str(source)], "bytes", tmp_path / "refused")
    assert str(source) in e.value.render()
    assert not (tmp_path / "refused").exists()
    return e.value.render()


CONTENT = {
    "a.txt": "one text\nof two lines, é漢字\n".encode(),
    "b.jsonl": b'\xef\xbb\xbf{"text": "first"}\n\n{"text": "second \\u00e9"}\r\n{"text": ""}\n',
    "c.parquet": parquet(["x", "yy", "", "zzz", "é"]),
}


# -- compressed


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", CONTENT)
def test_a_compressed_file_is_what_is_in_it(tmp_path: Path, name: str, suffix: str) -> None:
    (tmp_path / name).write_bytes(CONTENT[name])
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / f"{name}{suffix}").write_bytes(PACK[suffix](CONTENT[name]))
    plain = prepare([str(tmp_path / name)], "bytes", tmp_path / "plain")
    for source in (folder, folder / f"{name}{suffix}"):
        made = prepare([str(source)], "bytes", tmp_path / "out", force=True)
        assert shards(made.folder) == shards(plain.folder)
        assert made.manifest.source["empty_documents"] == plain.manifest.source["empty_documents"]
        assert made.manifest.source["replaced_characters"] == 0


@pytest.mark.parametrize("suffix", PACK)
def test_compression_is_known_by_the_content(tmp_path: Path, suffix: str) -> None:
    for name, kind in (("a.txt", ".txt"), ("b.jsonl", ".jsonl"), ("c.parquet", ".parquet")):
        wrong = tmp_path / f"wrong{kind}"  # a suffix that does not tell of the compression
        wrong.write_bytes(PACK[suffix](CONTENT[name]))
        (tmp_path / name).write_bytes(CONTENT[name])
        made = prepare([str(wrong)], "bytes", tmp_path / "out", force=True)
        plain = prepare([str(tmp_path / name)], "bytes", tmp_path / "plain", force=True)
        assert documents(made) == documents(plain)
        # and one that tells of what is not there
        (tmp_path / f"{name}{suffix}").write_bytes(CONTENT[name])
        made = prepare([str(tmp_path / f"{name}{suffix}")], "bytes", tmp_path / "out", force=True)
        assert documents(made) == documents(plain)


def test_parquet_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(CONTENT["c.parquet"])
    (tmp_path / "b.gz").write_bytes(gzip.compress(CONTENT["c.parquet"]))
    made = prepare([str(tmp_path / "a.txt"), str(tmp_path / "b.gz")], "bytes", tmp_path / "out")
    assert documents(made) == ["x", "yy", "zzz", "é"] * 2


@pytest.mark.parametrize("suffix", PACK)
def test_several_streams_in_one_file_are_one_text(tmp_path: Path, suffix: str) -> None:
    pack = PACK[suffix]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack(b"one ") + pack(b"") + pack(b"two") + bytes(8))  # zeros are padding
    assert documents(prepare([str(path)], "bytes", tmp_path / "out")) == ["one two"]


def test_skippable_frames_of_zstd(tmp_path: Path) -> None:
    frame = struct.pack("<II", 0x184D2A57, 4) + b"meta"
    path = tmp_path / "a.txt.zst"
    path.write_bytes(frame + PACK[".zst"](b"text") + frame)
    assert documents(prepare([str(path)], "bytes", tmp_path / "out")) == ["text"]


def corpus_of(folder: Path, *suffixes: str) -> Path:
    """Files of every kind, compressed as `suffixes` say, one after the other."""
    rng = random.Random(7)
    folder.mkdir()
    for i in range(12):
        suffix = suffixes[i % len(suffixes)]
        rows = [
            {"text": " ".join(rng.choice(LANGUAGES) for _ in range(rng.randrange(40)))} for _ in range(30)
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        for name, data in (
            (f"{i}.jsonl", text),
            (f"{i}.txt", b"\xef\xbb\xbf" + text[:-1]),
            (f"{i}.parquet", parquet([row["text"] for row in rows])),
        ):
            (folder / (name + suffix)).write_bytes(PACK[suffix](data) if suffix else data)
    return folder


@pytest.mark.cluster
def test_store_is_independent_of_workers_and_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "_FEWEST_BYTES", 512)
    monkeypatch.setattr(parts_module, "_MOST_BYTES", 512)
    monkeypatch.setattr(readers, "PIECE_BYTES", 64)
    monkeypatch.setattr(tokenise, "_BATCH_BYTES", 100)
    prepare([str(corpus_of(tmp_path / "plain", ""))], "bytes", tmp_path / "wanted", shard_tokens=3000)
    corpus = str(corpus_of(tmp_path / "packed", *PACK))
    for workers in (1, 2, 3):
        made = prepare([corpus], "bytes", tmp_path / "out", shard_tokens=3000, workers=workers, force=True)
        assert shards(made.folder) == shards(tmp_path / "wanted")
        assert made.verify() == []


def test_progress_counts_the_bytes_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 1000)
    monkeypatch.setattr(tokenise, "_BATCH_BYTES", 1000)
    rng = random.Random(1)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes(rng.choice(b"abcdefgh\n") for _ in range(200_000))))
    told: list[tuple[int, int]] = []
    prepare([str(path)], "bytes", tmp_path / "out", progress=lambda done, of, name: told.append((done, of)))
    size = path.stat().st_size
    assert {of for _, of in told} == {size}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({done for done, _ in told if 0 < done < size}) > 10


class Stopped(Exception):
    pass


@pytest.mark.cluster
def test_an_attempt_goes_on_where_another_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 500)
    monkeypatch.setattr(tokenise, "_BATCH_BYTES", 1000)
    monkeypatch.setattr(parts_module, "_FEWEST_BYTES", 512)
    monkeypatch.setattr(parts_module, "_MOST_BYTES", 512)
    corpus = [str(corpus_of(tmp_path / "in", *PACK))]
    prepare(corpus, "bytes", tmp_path / "wanted", shard_tokens=5000)
    left = attempts = 0
    rng = random.Random(5)

    def progress(done: int, of: int, name: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Stopped

    while True:
        left, attempts = rng.randrange(50, 300), attempts + 1
        try:
            prepare(corpus, "bytes", tmp_path / "out", shard_tokens=5000, progress=progress)
            break
        except Stopped:
            assert not (tmp_path / "out").exists()
    assert attempts > 2
    assert shards(tmp_path / "out") == shards(tmp_path / "wanted")


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", CONTENT)
def test_every_truncated_archive_is_refused(tmp_path: Path, name: str, suffix: str) -> None:
    whole = PACK[suffix](CONTENT[name])
    path = tmp_path / f"{name}{suffix}"
    for n in {*range(8), *range(8, len(whole), max(1, len(whole) // 20)), len(whole) - 1}:
        path.write_bytes(whole[:n])
        if suffix == ".bz2" and n in (1, 2, 3):
            assert b"BZh".startswith(whole[:n])  # alone it would be text: the suffix says what it is
        text = refused(path, tmp_path)
        assert "truncated" in text or "is not text" in text


@pytest.mark.parametrize("suffix", PACK)
def test_damaged_archives_are_refused(tmp_path: Path, suffix: str) -> None:
    rng = random.Random(3)
    text = "".join(rng.choice("abcdefghij \n") for _ in range(100_000)).encode()
    whole = PACK[suffix](text)
    path = tmp_path / f"a.txt{suffix}"
    for at in (len(whole) // 4, len(whole) // 2, len(whole) - 3):
        damaged = bytearray(whole)
        damaged[at] ^= 0x55
        path.write_bytes(damaged)
        assert "damaged" in refused(path, tmp_path) or "truncated" in refused(path, tmp_path)
    path.write_bytes(whole + b"more")
    assert "damaged" in refused(path, tmp_path)


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("suffix", PACK)
def test_a_decompression_bomb_is_refused(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](b"all work and no play " * 50_000))
    monkeypatch.setattr(packed, "_FREE_BYTES", 1 << 19)
    assert "bomb" in refused(path, tmp_path)
    path.write_bytes(PACK[suffix](b"all work and no play " * 20_000))  # small: no bomb
    assert len(documents(prepare([str(path)], "bytes", tmp_path / "out"))) == 1


def test_archives_in_archives_are_refused(tmp_path: Path) -> None:
    for suffix, pack in PACK.items():
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(pack(gzip.compress(b"text " * 1000)))
        assert "is not text: gzip data in" in refused(path, tmp_path)


@pytest.mark.ci
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "line"),
    [("a.txt.gz", b"word " * 200_000 + b"\n"), ("a.jsonl.zst", b'{"text": "%s"}\n' % (b"x y " * 99))],
)
def test_memory_is_bounded(tmp_path: Path, name: str, line: bytes) -> None:
    rng = random.Random(2)
    noise = bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz ", k=1 << 20))
    with open(tmp_path / "plain", "wb") as f:
        for i in range(200_000_000 // len(line) // 10):
            at = i * 997 % (1 << 19)
            f.write(
                line * 9
                + (
                    noise[at : at + 200] + b"\n"
                    if name == "a.txt.gz"
                    else b'{"text": "' + noise[at : at + 200] + b'"}\n'
                )
            )
    command = ["gzip", "-1"] if name.endswith(".gz") else [sys.executable, "-c", _ZSTD]
    with open(tmp_path / "plain", "rb") as source, open(tmp_path / name, "wb") as target:
        subprocess.run(command, stdin=source, stdout=target, check=True)
    (tmp_path / "plain").unlink()
    code = (
        "import sys\nfrom seatrial.data.prepare import prepare\n"
        "from seatrial.data import packed\npacked._MOST_TIMES = 10**6\n"
        "prepare([sys.argv[1]], 'bytes', sys.argv[2], workers=1)\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / name), str(tmp_path / "out")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert TokenStore.open(tmp_path / "out").n_tokens > 150_000_000
    assert int(out.stdout) * 1024 < 300 << 20  # the tokens alone are 380 MB


_ZSTD = "import sys, zstandard; zstandard.ZstdCompressor(level=1).copy_stream(sys.stdin.buffer, sys.stdout.buffer)"


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LONGEST_LINE", 1000)
    path = tmp_path / "a.jsonl.gz"
    good = b'{"text": "good"}\n'
    path.write_bytes(gzip.compress(good + b'{"text": "' + b"x" * 100_000 + b'"}\n' + good + b"?\n"))
    with pytest.raises(InputError) as e:
        prepare([str(path)], "bytes", tmp_path / "out")
    assert [d.line for d in e.value.diagnostics] == [2, 4]
    assert "longer than 1,000 bytes" in e.value.render()


# -- what is no text


def test_tensors_and_other_binaries_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    found = {
        "model.safetensors": save({"w": rng.standard_normal((64, 64))}),
        "zeros.safetensors": save({"w": np.zeros((64, 64))}),
        "a.bin": rng.integers(0, 256, 5000, dtype=np.uint8).tobytes(),
        "tokens.bin": rng.integers(0, 50_000, 5000, dtype=np.uint16).tobytes(),
        "zeros.dat": bytes(4096),
        "small.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\6\0\0\0\x1f\x15\xc4\x89",
        "a.tar": b"name.txt" + bytes(249) + b"ustar\x0000" + bytes(247) + b"text".ljust(512, b"\0"),
        "a.zip": b"PK\x03\x04\x14\0\0\0\x08\0" + bytes(range(256)),
    }
    for name, content in found.items():
        (tmp_path / name).write_bytes(content)
        assert "is not text" in refused(tmp_path / name, tmp_path)
    text = refused(tmp_path / "model.safetensors", tmp_path)
    assert "model.safetensors: error: is not text: a safetensors file" in text
    assert "a tar archive" in refused(tmp_path / "a.tar", tmp_path)
    with pytest.raises(InputError) as e:  # all at once
        prepare([str(tmp_path / name) for name in found], "bytes", tmp_path / "out")
    assert len(e.value.diagnostics) == len(found)


def test_text_in_any_language_is_text(tmp_path: Path) -> None:
    for i, line in enumerate(LANGUAGES):
        (tmp_path / f"{i}.txt").write_text(line)
        (tmp_path / f"long{i}.txt").write_text(line * 9000)  # a character is cut where the look ends
    (tmp_path / "marks.txt").write_text("a\tb\x0cc\r\n\x1b[31mred\x1b[0m\x08" * 100)
    (tmp_path / "few.txt").write_text("some text\0 with a NUL, which is valid UTF-8")
    store = prepare([str(tmp_path)], "bytes", tmp_path / "out")
    assert store.n_documents == 2 * len(LANGUAGES) + 2
    assert store.manifest.source["skipped_files"] == {}
    assert store.manifest.source["replaced_characters"] == 0


@pytest.mark.parametrize(
    ("encoding", "why"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-be", None),
        ("utf-32", "UTF-32"),
        ("cp1251", "UTF-8"),
        ("shift-jis", "UTF-8"),
    ],
)
def test_other_encodings_are_refused_with_what_to_do(tmp_path: Path, encoding: str, why: str | None) -> None:
    text = {"shift-jis": "漢字とかな交じりの文\n"}.get(encoding, "Привет, мир\n")
    path = tmp_path / "a.txt"
    path.write_bytes((text * 50).encode(encoding))
    said = refused(path, tmp_path)
    assert "is not text" in said
    if why:
        assert why in said
        assert "iconv -f" in said


def test_big_endian_with_its_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xfe\xff" + ("hello\n" * 9).encode("utf-16-be"))
    assert "UTF-16" in refused(tmp_path / "a.txt", tmp_path)


def test_a_handful_of_bad_bytes_are_replaced_and_counted_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\xff")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 " + b"word " * 4000 + b"\xff" * 150)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"caf\xe9 au lait"))
    store = prepare([str(tmp_path)], "bytes", tmp_path / "out")
    assert store.n_documents == 3
    assert store.manifest.source["replaced_characters"] == 153
    assert store.manifest.source["files_with_replaced_characters"] == 3


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("tail", [b"\xff\xfe\x80", bytes(3)], ids=["bytes", "zeros"])
def test_a_file_that_ends_in_rubbish_is_refused(
    tmp_path: Path, tail: bytes, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The look at its begin does not see it; one of them is cut into parts.
    monkeypatch.setattr(readers, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(parts_module, "_FEWEST_BYTES", 1 << 16)
    path = tmp_path / f"a.txt{suffix}"
    for n in (3000, 300_000):
        content = b"a line of text\n" * 20_000 + tail * n
        path.write_bytes(gzip.compress(content) if suffix else content)
        text = refused(path, tmp_path)
        assert f"of its {len(content):,} bytes are NUL or not UTF-8" in text
        counted = int(text.split("at least ")[1].split()[0].replace(",", ""))
        assert len(content) // 100 < counted <= 3 * n
    path.write_bytes(b"a line of text\n" * 20_000 + tail * 900)
    assert prepare([str(path)], "bytes", tmp_path / "out").n_documents == 1


def test_bad_json_numbers_are_a_problem_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "n": ' + "1" * 5000 + "}\n")
    assert "a.jsonl:1: error: bad JSON" in refused(path, tmp_path)


# -- folders, and what is no file


def test_skipped_files_are_reported_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / ".git").mkdir(parents=True)
    (folder / "sub").mkdir()
    (folder / "a.txt").write_text("text")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "row"}\n'))
    (folder / "empty.txt").write_text("")
    (folder / "weights.txt").write_bytes(save({"w": np.ones((8, 8))}))
    (folder / "wide.txt").write_text("hello there", encoding="utf-16")
    (folder / "image.png").write_bytes(b"no")
    (folder / "photo.png.gz").write_bytes(gzip.compress(b"no"))
    (folder / "README").write_text("no")
    (folder / ".hidden.txt").write_text("no")
    (folder / ".git" / "c.txt").write_text("no")
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    (folder / "linked.txt").symlink_to(folder / "a.txt")
    (folder / "sub" / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(folder / "socket.txt"))
    store = prepare([str(folder)], "bytes", tmp_path / "out")
    assert documents(store) == ["text", "row", "text"]
    source = store.manifest.source
    assert source["empty_documents"] == 1
    assert source["skipped_files"] == {
        "hidden": 1,
        "hidden folder": 1,
        "link to a folder": 1,
        "neither a file nor a folder": 3,
        "no suffix": 1,
        "not text: UTF-16 text": 1,
        "not text: a safetensors file": 1,
        "suffix .png": 1,
        "suffix .png.gz": 1,
    }
    assert source["skipped_examples"]["not text: a safetensors file"] == "weights.txt"
    assert source["skipped_examples"]["link to a folder"] == "sub/loop"
    assert source["skipped_examples"].keys() == source["skipped_files"].keys()


def test_a_folder_with_nothing_but_binaries(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(bytes(100))
    text = refused(tmp_path / "in", tmp_path)
    assert "no readable files in the folder" in text
    assert "1 not text: binary data (a.txt)" in text


@pytest.mark.parametrize("make", ["fifo", "socket", "null", "zero", "loop"])
def test_what_is_not_a_file_is_refused_without_blocking(tmp_path: Path, make: str) -> None:
    path = tmp_path / "a.jsonl"
    if make == "fifo":
        os.mkfifo(path)
    elif make == "loop":
        path.symlink_to(path)
    elif make == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(path))
    else:
        path.symlink_to(f"/dev/{make}")
    with pytest.raises(InputError):
        prepare([str(path)], "bytes", tmp_path / "out")


def test_an_unreadable_file_in_a_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "b.txt").write_text("text")
    real = open

    def refuse(path: object, *args: object, **kwargs: object) -> object:
        if str(path).endswith("b.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(InputError) as e:
        prepare([str(tmp_path / "in")], "bytes", tmp_path / "out")
    assert "b.txt: error: cannot be read: Permission denied" in e.value.render()


def test_json_files_are_lines_or_named_as_text(tmp_path: Path) -> None:
    lines = tmp_path / "c4.json.gz"
    lines.write_bytes(gzip.compress(b'{"text": "one", "url": "x"}\n{"text": "two"}\n'))
    assert documents(prepare([str(lines)], "bytes", tmp_path / "out")) == ["one", "two"]
    (tmp_path / "one.json").write_text('{\n  "text": "one document"\n}\n')
    made = prepare([str(tmp_path / "one.json")], "bytes", tmp_path / "out", force=True)
    assert documents(made)[0].startswith("{\n")
    (tmp_path / "wide.json").write_text('{"text": "' + "x" * 100_000 + '"}\n{"text": "two"}\n')
    made = prepare([str(tmp_path / "wide.json")], "bytes", tmp_path / "out", force=True)
    assert documents(made) == ["x" * 100_000, "two"]
    (tmp_path / "small.json").write_text('{"name": "one line"}')
    assert "no key 'text'" in refused(tmp_path / "small.json", tmp_path)


# -- the key of the text


def test_a_missing_key_is_one_problem_with_a_count(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [json.dumps({"body": f"row {i}", "id": i}) for i in range(3000)]
    (folder / "a.jsonl").write_text("\n".join(rows))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    with pytest.raises(InputError) as e:
        prepare([str(folder)], "bytes", tmp_path / "out")
    (problem,) = e.value.diagnostics
    assert (problem.line, problem.count) == (1, 6000)
    text = e.value.render()
    assert text.startswith(f"{folder}/a.jsonl:1: error: no key 'text' (6,000 such lines were read)")
    assert "keys there: body, id" in text
    assert "--text-key" in text
    assert "data.text_key" in text
    made = prepare([str(folder)], "bytes", tmp_path / "out", text_key="body")
    assert made.n_documents == 6000


@pytest.mark.cluster
@pytest.mark.parametrize("workers", [1, 3])
def test_the_count_is_the_same_for_any_number_of_workers(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "_FEWEST_BYTES", 4096)
    monkeypatch.setattr(parts_module, "_MOST_BYTES", 4096)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ok"}\n' + '{"body": "x"}\n' * 2000 + '{"text": 5}\n{"text": 6}\n')
    with pytest.raises(InputError) as e:
        prepare([str(path)], "bytes", tmp_path / "out", workers=workers)
    assert [(d.line, d.count) for d in e.value.diagnostics] == [(2, 2000), (2002, 2)]


def test_a_wrong_key_does_not_read_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "_FEWEST_BYTES", 4096)
    monkeypatch.setattr(parts_module, "_MOST_BYTES", 4096)
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x"}\n' * 100_000)
    with pytest.raises(InputError) as e:
        prepare([str(path)], "bytes", tmp_path / "out")
    (problem,) = e.value.diagnostics
    assert 1000 < problem.count < 20_000


# -- what a job names


class Data:
    def __init__(self, train: str | list[str], text_key: str = "text") -> None:
        self.train = train
        self.text_key = text_key
        self.tokenizer = "bytes"
        self.weights = [1.0] * len(train) if isinstance(train, list) else None
        self.cache_gb = 1.0


def test_a_job_trains_on_compressed_text_and_blends_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(PACK[".zst"](b'{"body": "one"}\n{"body": "two"}\n'))
    (tmp_path / "b.txt.xz").write_bytes(PACK[".xz"](b"three"))
    data = Data(["a.jsonl.zst", "b.txt.xz"], "body")
    stores = resolve_stores(data, tmp_path / "cache", tmp_path)
    assert [documents(s) for s in stores] == [["one", "two"], ["three"]]
    folders = [s.folder for s in stores]
    assert [s.folder for s in resolve_stores(data, tmp_path / "cache", tmp_path)] == folders
    with pytest.raises(InputError, match="no key 'text'"):
        resolve_stores(Data("a.jsonl.zst"), tmp_path / "cache", tmp_path)
    (tmp_path / "c.bin").write_bytes(bytes(1000))
    (tmp_path / "b.txt.xz").write_bytes(PACK[".xz"](b"three")[:-5])
    with pytest.raises(InputError) as e:
        resolve_stores(Data(["a.jsonl.zst", "b.txt.xz", "c.bin"], "body"), tmp_path / "cache", tmp_path)
    assert "b.txt.xz: error: cannot be read: truncated" in e.value.render()
    assert "c.bin: error: is not text" in e.value.render()


def test_prepared_data_is_found_without_reading_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text"))
    first = resolve_stores(Data("a.txt.gz"), tmp_path / "cache", tmp_path)[0].folder
    monkeypatch.setattr(prepare_module, "prepare", None)
    monkeypatch.setattr("seatrial.data.sources.look", None)
    assert resolve_stores(Data("a.txt.gz"), tmp_path / "cache", tmp_path)[0].folder == first


def test_no_space_to_unpack_parquet_is_reported_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(CONTENT["c.parquet"]))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(readers.shutil, "copyfileobj", full)
    with pytest.raises(RunFailed, match="No space left on device"):
        prepare([str(tmp_path / "a.parquet.gz")], "bytes", tmp_path / "out")
