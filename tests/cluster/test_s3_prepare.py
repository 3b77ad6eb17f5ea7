"""`seatrial data prepare --out s3://...`, its verbs on such a store, and a pair exported from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moto_server import Disturbance, Line, MotoServer
from seatrial.cli.main import main
from seatrial.data.manifest import MANIFEST
from seatrial.data.prepare import prepare
from seatrial.storage import StorageError, open_store
from seatrial.storage.s3 import S3Store

pytestmark = [pytest.mark.cluster, pytest.mark.ci]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with some text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "corpus").mkdir()
    for i in range(20):
        (tmp_path / "corpus" / f"{i:02}.txt").write_text(f"text {i} " * 50)
    return tmp_path


def test_prepared_looked_at_verified_and_exported(
    corpus: Path, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{s3_url}/tokens/v1"
    assert main(["data", "prepare", "corpus", "--out", url, "--shard-tokens", "3000"]) == 0
    local = prepare([str(corpus / "corpus")], "bytes", corpus / "local", shard_tokens=3000)
    objects = open_store(url)
    for path in local.folder.iterdir():
        if path.name != MANIFEST:  # it says what was named as the source
            assert objects.read(path.name) == path.read_bytes()
    assert len(objects.names()) == len(list(local.folder.iterdir()))
    assert sorted(os.listdir(corpus)) == ["corpus", "local"]
    assert f"folder      {url}" in capsys.readouterr().out

    assert main(["data", "show", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["first_text"].startswith("text 0 text 0")
    assert main(["data", "verify", url]) == 0
    assert "all intact" in capsys.readouterr().out
    assert main(["data", "export", url, "--out", "pair"]) == 0
    assert (corpus / "pair.bin").stat().st_size == 2 * local.n_tokens

    assert main(["data", "prepare", "corpus", "--out", url]) == 2
    assert "already contains a token store" in capsys.readouterr().err
    assert main(["data", "prepare", "corpus", "--out", url, "--force"]) == 0
    capsys.readouterr()
    objects.write("shard-00000.bin", b"\0" + objects.read("shard-00000.bin")[1:])
    assert main(["data", "verify", url]) == 1
    assert f"{url}/shard-00000.bin: damaged: SHA-256" in capsys.readouterr().out


def test_an_interrupted_upload_is_resumed(
    corpus: Path,
    s3_server: MotoServer,
    s3_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, sent = f"{s3_url}/tokens", []
    command = ["data", "prepare", "corpus", "--out", url, "--shard-tokens", "3000"]
    real = S3Store.upload

    def upload(self: S3Store, name: str, *args: Any, **options: Any) -> None:
        if len(sent) == 4:
            raise StorageError("unreachable", "write", f"{url}/{name}", "the line is cut")
        sent.append(name)
        real(self, name, *args, **options)

    monkeypatch.setattr(S3Store, "upload", upload)
    assert main(command) == 1
    assert "the line is cut" in capsys.readouterr().err
    assert [entry.name for entry in open_store(url).names()] == sorted(sent)
    monkeypatch.setattr(S3Store, "upload", real)
    line = Line(s3_server.port)
    try:
        with monkeypatch.context() as disturbed:
            disturbed.setenv("AWS_ENDPOINT_URL", line.endpoint)
            place = f"/{url.removeprefix('s3://')}/shard-00002.bin"
            line.disturb(Disturbance(f"PUT {place}".encode(), at=100))
            assert main(command) == 0
        assert line.happened == 1
    finally:
        line.close()
    assert "is complete and will be uploaded" in capsys.readouterr().err
    assert main(["data", "verify", url]) == 0
    assert sorted(os.listdir(corpus)) == ["corpus"]
