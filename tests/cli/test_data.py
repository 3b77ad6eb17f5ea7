import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from seatrial.base.errors import SeatrialError
from seatrial.cli import data, progress


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*args: object) -> Result:
        parser = argparse.ArgumentParser(prog="seatrial data")
        data.add_arguments(parser)
        try:
            code = data.run(parser.parse_args([str(a) for a in args]))
        except SeatrialError as e:
            captured = capsys.readouterr()
            return Result(e.exit_code, captured.out, captured.err + e.render())
        except SystemExit as e:
            code = int(e.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "hello.txt"
    path.write_text("hello\n")
    return path


def test_prepare_show_verify(cli: Callable[..., Result], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    made = cli("prepare", text, "--out", out)
    assert made.code == 0
    assert made.out == (
        f"folder      {out}\n"
        "tokens      7 (7), largest id 256\n"
        "documents   1\n"
        "tokenizer   bytes, 257 ids, digest 267cc3ef5772\n"
        "ended by    id 256\n"
        "shards      1 of uint16, 38 B\n"
        f"source      {text} (1 files)\n"
    )
    assert made.err.startswith(f"prepared {out} in ")
    shown = cli("show", out)
    assert shown == (0, made.out + "first text  'hello\\n'\n", "")
    verified = cli("verify", out)
    assert verified == (0, f"{out}: 3 files, 7 tokens, all intact\n", "")


def test_json(cli: Callable[..., Result], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    made = json.loads(cli("prepare", text, "--out", out, "--shard-tokens", "3", "--json").out)
    assert made["schema_version"] == 1
    assert (made["n_tokens"], made["n_documents"], made["n_shards"]) == (7, 1, 3)
    shown = json.loads(cli("show", out, "--json").out)
    assert shown["schema_version"] == 1
    assert shown["first_text"] == "hello\n"
    assert shown["first_tokens"] == [*b"hello\n", 256]
    assert [s["n_tokens"] for s in shown["shards"]] == [3, 3, 1]
    verified = json.loads(cli("verify", out, "--json").out)
    assert verified == {"schema_version": 1, "folder": str(out), "ok": True, "problems": []}


def test_the_summary_reports_what_was_left_out(cli: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(b"a\xff")
    (tmp_path / "in/b.txt").write_bytes(b"")
    (tmp_path / "in/c.bin").write_bytes(b"")
    (tmp_path / "in/c2.bin").write_bytes(b"")
    (tmp_path / "in/d.txt").write_bytes(bytes(100))
    out = cli("prepare", tmp_path / "in", "--out", tmp_path / "store").out
    assert "skipped     2 suffix .bin (c.bin, ...)\n            1 not text: binary data (d.txt)\n" in out
    assert "empty       1 documents without text were skipped\n" in out
    assert "replaced    1 bytes or characters that are not UTF-8, in 1 files\n" in out


def test_force(cli: Callable[..., Result], text: Path, tmp_path: Path) -> None:
    assert cli("prepare", text, "--out", tmp_path / "s").code == 0
    again = cli("prepare", text, "--out", tmp_path / "s")
    assert again.code == 2
    assert "already contains a token store" in again.err
    assert "hint: --force" in again.err
    assert cli("prepare", text, "--out", tmp_path / "s", "--force").code == 0


def test_verify_fails_on_damage(cli: Callable[..., Result], text: Path, tmp_path: Path) -> None:
    cli("prepare", text, "--out", tmp_path / "s")
    shard = tmp_path / "s/shard-00000.bin"
    shard.write_bytes(b"jello\n".replace(b"", b"\0")[1:13] + b"\0\1")
    damaged = cli("verify", tmp_path / "s")
    assert damaged.code == 1
    assert damaged.out.startswith(f"{shard}: damaged: SHA-256")
    assert "error: 1 of 3 files are damaged" in damaged.err
    shard.unlink()
    report = cli("verify", tmp_path / "s", "--json")
    assert report.code == 1
    document = json.loads(report.out)
    assert document["ok"] is False
    assert document["problems"][0]["file"] == str(shard)
    assert cli("show", tmp_path / "s").code == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prepare", "nowhere", "--out", "OUT"], "no such file or folder: nowhere"),
        (["prepare", "s3://b/k", "--out", "OUT"], "s3:// addresses are not supported"),
        (["prepare", "builtin:python-library", "--out", "s3://b/k"], "'b' is not a bucket's name"),
        (["prepare", "builtin:python-library", "--out", "gs://bucket/k"], "not an address of a store"),
        (["prepare", "x", "--out", "OUT", "--workers", "0"], "must be at least 1"),
        (["import", "nowhere", "--out", "OUT", "--tokenizer", "bytes"], "cannot read nowhere.bin"),
        (["import", "nowhere", "--out", "OUT"], "required: --tokenizer"),
        (["export", "nowhere", "--out", "OUT"], "no such data folder"),
        (["export", "nowhere", "--out", "OUT", "--format", "parquet"], "invalid choice"),
        (
            ["prepare", "builtin:python-library", "--out", "OUT", "--tokenizer", "no.json"],
            "the tokenizer no.json does not exist",
        ),
        (
            ["prepare", "builtin:python-library", "--out", "OUT", "--tokenizer", "/dev/zero"],
            "the tokenizer /dev/zero is not a file",
        ),
        (["prepare", "x", "--out", "OUT", "--shard-tokens", "0"], "must be at least 1"),
        (["prepare", "x"], "required: --out"),
        (["show", "OUT"], "no such data folder"),
        (["verify", "OUT"], "no such data folder"),
        (["show", "s3://b/k"], "'b' is not a bucket's name"),
        ([], "required: ACTION"),
    ],
)
def test_bad_input(
    cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli(*[str(tmp_path / "out") if a == "OUT" else a for a in args])
    assert result.code == 2
    assert message in result.err
    assert result.out == ""
    assert list(tmp_path.iterdir()) == []


def test_other_tokenizers_show_ids(cli: Callable[..., Result], text: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    t = Tokenizer(models.WordLevel({"hello": 0, "?": 1}, unk_token="?"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.save(str(tmp_path / "t.json"))
    out = cli("prepare", text, "--out", tmp_path / "s", "--tokenizer", tmp_path / "t.json").out
    assert "ended by    nothing: the tokenizer has no end-of-document token\n" in out
    shown = cli("show", tmp_path / "s")
    assert "first ids   0 ..." in shown.out
    assert json.loads(cli("show", tmp_path / "s", "--json").out)["first_text"] is None


def test_plain_progress_is_sparse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Progress("preparing") as told:
        for second in range(26):
            now[0] = float(second)
            told(second << 20, 100 << 20, "a.txt")
        # The next thing: what was done of it before does not count for how fast it goes.
        for second in range(26, 40):
            now[0] = float(second)
            told((50 << 20) + ((second - 26) << 20), 200 << 20, "b.txt")
    assert capsys.readouterr().err.splitlines() == [
        "preparing: 10.00 MiB of 100.00 MiB (10 %), 1 min 30 s left, at a.txt",
        "preparing: 20.00 MiB of 100.00 MiB (20 %), 1 min 20 s left, at a.txt",
        "preparing: 60.00 MiB of 200.00 MiB (30 %), 2 min 20 s left, at b.txt",
    ]


def test_workers_make_the_same_store(cli: Callable[..., Result], text: Path, tmp_path: Path) -> None:
    for workers in ("1", "2"):
        assert cli("prepare", text, "--out", tmp_path / workers, "--workers", workers).code == 0
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()


def test_to_megatron_and_back(cli: Callable[..., Result], text: Path, tmp_path: Path) -> None:
    cli("prepare", text, "--out", tmp_path / "store")
    pair = tmp_path / "pair"
    exported = cli("export", tmp_path / "store", "--out", pair)
    assert exported == (
        0,
        f"files       {pair}.bin, {pair}.idx\ntokens      7 of uint16 (7)\ndocuments   1\n",
        "",
    )
    refused = cli("export", tmp_path / "store", "--out", pair)
    assert refused.code == 2
    assert f"{pair}.bin exists\n  hint: --force" in refused.err
    again = json.loads(cli("export", tmp_path / "store", "--out", pair, "--force", "--json").out)
    assert (again["n_documents"], again["dtype"]) == (1, "uint16")
    imported = cli("import", f"{pair}.bin", "--tokenizer", "bytes", "--out", tmp_path / "again")
    assert imported.code == 0
    assert f"source      {pair}.bin (2 files)\n" in imported.out
    assert imported.err == f"{tmp_path}/again links to {pair}.bin: do not change or move it\n"
    assert cli("show", tmp_path / "again").out.endswith("first text  'hello\\n'\n")
    copied = cli(
        "import", pair, "--tokenizer", "bytes", "--out", tmp_path / "again", "--force", "--copy", "--json"
    )
    assert copied.err == ""
    assert json.loads(copied.out)["source"]["linked"] is False
