"""Upload a token store to an object store: every file first, the manifest last, which commits the store."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from seatrial.base.atomic import write_text
from seatrial.base.errors import InputError
from seatrial.base.files import read_json
from seatrial.data.assembly import Progress
from seatrial.data.manifest import MANIFEST, Manifest, is_store
from seatrial.data.parts import plan_parts
from seatrial.data.prepare import prepare
from seatrial.data.sources import find
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import digest_with_template, load_tokenizer
from seatrial.data.workspace import Note
from seatrial.data.writer import DEFAULT_SHARD_TOKENS
from seatrial.storage.objects import Readable
from seatrial.storage.store import Store, open_store

# Next to the files of the local store: the list of those that have been uploaded.
_ARRIVED = ".uploaded.json"


def prepare_remote(
    sources: Sequence[str],
    tokenizer_spec: str,
    url: str,
    *,
    text_key: str = "text",
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    workers: int | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
    force: bool = False,
) -> Manifest:
    """Like `prepare`, then upload the store to `url` on an object store.

    It is made in a hidden folder of the current one, which is removed after the upload. Until then another
    attempt with the same sources resumes there, either the tokenising or the upload.
    """
    check_remote_target(url, force=force)
    tokenizer = load_tokenizer(tokenizer_spec)
    digest = digest_with_template(tokenizer)
    parts = plan_parts(find(sources), tokenizer_digest=digest, text_key=text_key)
    text = "".join([url, str(shard_tokens), *(part.fingerprint for part in parts)])
    folder = _local_folder(url, hashlib.sha256(text.encode()).hexdigest())
    if is_store(folder):
        store = TokenStore.open(folder)
        if note is not None:
            note(f"resuming an earlier attempt: {folder} is complete and will be uploaded")
    else:
        store = prepare(
            sources,
            tokenizer_spec,
            folder,
            text_key=text_key,
            shard_tokens=shard_tokens,
            workers=workers,
            progress=progress,
            note=note,
        )
    upload_store(store, url, force=force, progress=progress)
    shutil.rmtree(folder)
    return store.manifest


def check_remote_target(url: str, *, force: bool) -> Store:
    """The object store at `url`, if a token store may be written there. InputError if one exists, without `force`."""
    objects = open_store(url)
    if not force and objects.size(MANIFEST) is not None:
        raise InputError(
            f"{url} already contains a token store",
            hint="--force replaces it; use another --out to keep both",
        )
    return objects


def upload_store(
    store: TokenStore, url: str, *, force: bool = False, progress: Progress | None = None
) -> None:
    """Copy the local `store` to `url`. Resumes an interrupted attempt: files that arrived are not sent again.

    With `force` the manifest of an old store is removed first: its partly replaced files must not pass for a store.
    InputError if there is a store already; StorageError if the service fails, after its own retries.
    """
    objects = check_remote_target(url, force=force)
    if force:
        objects.remove([MANIFEST])
    arrived = _arrived(store.folder, url)
    files = [
        (file.file, file.bytes)
        for shard in store.manifest.shards
        for file in (shard, shard.index, shard.chunks)
        if file is not None
    ]
    total, done = sum(size for _, size in files), 0
    for name, size in files:
        if name not in arrived or objects.size(name) != size:
            with open(store.folder / name, "rb", buffering=0) as f:

                def report(sent: int, of: int, name: str = name, before: int = done) -> None:
                    del of
                    if progress is not None:
                        progress(before + sent, total, name)

                objects.upload(name, Readable(f.fileno(), size), progress=report)
            arrived.append(name)
            content = json.dumps({"url": url, "files": arrived})
            write_text(store.folder / _ARRIVED, content, durable=False)
        done += size
        if progress is not None:
            progress(done, total, name)
    objects.write(MANIFEST, (store.folder / MANIFEST).read_bytes())
    (store.folder / _ARRIVED).unlink(missing_ok=True)


def _arrived(folder: Path, url: str) -> list[str]:
    try:
        content = read_json(folder / _ARRIVED)
        return list(content["files"]) if content["url"] == url else []
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _local_folder(url: str, fingerprint: str) -> Path:
    """The local folder of the store for `url`, in the current folder: the same for the same work."""
    return Path(f".{os.path.basename(url.rstrip('/'))}.upload-{fingerprint[:12]}")
