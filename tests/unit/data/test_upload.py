"""A token store to where objects are kept; here to a folder, in tests/cluster/test_s3_prepare.py to a service."""

from pathlib import Path

import pytest

from seatrial.base.errors import InputError
from seatrial.data.manifest import MANIFEST
from seatrial.data.prepare import prepare
from seatrial.data.store import TokenStore
from seatrial.data.upload import upload_store
from seatrial.storage.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    (tmp_path / "a.txt").write_text("twelve bytes")
    return prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "store", shard_tokens=5)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


class Gone(Exception):
    pass


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_it_arrives_whole_and_the_manifest_last(
    store: TokenStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    real = LocalStore.write
    monkeypatch.setattr(
        LocalStore, "write", lambda *a, **k: (seen.append(set(content(there))), real(*a, **k))[1]
    )
    told: list[tuple[int, int, str]] = []
    before = content(store.folder)
    upload_store(store, str(there), progress=lambda *a: told.append(a))
    assert content(there) == content(store.folder) == before
    assert seen == [set(before) - {MANIFEST}]
    total = sum(len(data) for name, data in before.items() if name != MANIFEST)
    assert told[-1] == (total, total, "shard-00002.xxh3")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_another_attempt_sends_what_is_missing(
    store: TokenStore, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    real = LocalStore.upload
    until = 4

    def upload(self: LocalStore, name: str, *args: object, **options: object) -> None:
        if len(sent) == until:
            raise Gone
        sent.append(name)
        real(self, name, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStore, "upload", upload)
    with pytest.raises(Gone):
        upload_store(store, str(there))
    assert MANIFEST not in content(there)
    # One that arrived was lost again, one of another size is there instead.
    (there / sent[0]).unlink()
    (there / sent[1]).write_bytes(b"")
    first, until = sent.copy(), 100
    upload_store(store, str(there))
    assert sent[4:6] == first[:2]
    assert sorted(set(sent[6:]) & set(first)) == []
    assert content(there) == content(store.folder)


def test_a_store_is_not_replaced_unasked_and_never_half(
    store: TokenStore, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_store(store, str(there))
    other = prepare([str(tmp_path / "a.txt")], "bytes", tmp_path / "other", shard_tokens=20)
    with pytest.raises(InputError, match="already contains a token store"):
        upload_store(other, str(there))
    assert content(there) == content(store.folder)

    def upload(*args: object, **options: object) -> None:
        assert MANIFEST not in content(there)
        raise Gone

    with monkeypatch.context() as gone:
        gone.setattr(LocalStore, "upload", upload)
        with pytest.raises(Gone):
            upload_store(other, str(there), force=True)
    with pytest.raises(InputError, match=r"has no manifest\.json"):
        TokenStore.open(there)
    upload_store(other, str(there), force=True)
    assert TokenStore.open(there).verify() == []
