"""Resolve the data sources of a job to token stores that fit the job."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, Protocol

from seatrial.base.errors import Diagnostic, InputError, RunFailed
from seatrial.base.files import open_file
from seatrial.data.assembly import Assembly, Progress
from seatrial.data.blend import Blend
from seatrial.data.manifest import is_store
from seatrial.data.megatron import find_pair
from seatrial.data.megatron_import import import_pair
from seatrial.data.parts import Part, plan_parts
from seatrial.data.pool import InProcess, Pool, Work
from seatrial.data.sources import BUILTIN_LIBRARY, SourceFiles, find, refuse_remote
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import Tokenizer, digest_with_template, load_tokenizer
from seatrial.data.workspace import Note, Workspace
from seatrial.data.writer import DEFAULT_SHARD_TOKENS, StoreWriter, check_target, temporary_prefix
from seatrial.storage.names import is_remote

# Part of the names of cached stores: an old cache must not be reused after `prepare` changes its output.
_FORMAT = 2
_WORTH_A_WORKER = 1 << 27  # bytes of source


class DataSection(Protocol):
    """The keys of a job's [data] section that are used here."""

    @property
    def train(self) -> str | list[str]: ...

    @property
    def weights(self) -> list[float] | None: ...

    @property
    def validation(self) -> str | None: ...

    @property
    def tokenizer(self) -> str: ...

    @property
    def text_key(self) -> str: ...

    @property
    def cache_gb(self) -> float: ...


def prepare(
    sources: Sequence[str],
    tokenizer_spec: str,
    out: Path | str,
    *,
    text_key: str = "text",
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    workers: int | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
    force: bool = False,
) -> TokenStore:
    """Tokenise `sources` into a new store at `out`; `store.manifest.source` records what was read and skipped.

    `workers` processes share the work; None uses as many as there are cores and the work justifies. The store is the
    same, byte for byte, whatever their number, and whether or not it was made in one attempt: what is done when an
    attempt ends, however it ends, is kept in a hidden folder next to `out`, and the next attempt resumes from it.
    `note` is called when such a folder is found and when one is left.

    InputError: nothing to read, unreadable files and lines (up to 20 at once), an `out` that exists.
    RunFailed: the disk or a worker failed. Then nothing is at `out`, or what was there before.
    """
    refuse_remote(str(out))
    out = Path(out)
    check_target(out, replace=force)
    tokenizer = load_tokenizer(tokenizer_spec)
    found = find(sources)
    parts = plan_parts(found, tokenizer_digest=digest_with_template(tokenizer), text_key=text_key)
    try:
        with Workspace(out, shard_tokens, note) as space:
            done = space.find(parts)
            if done.n_parts:
                space.note(f"resuming an earlier attempt: {done.n_parts} of {len(parts)} parts are done")
            work = Work(tokenizer_spec, tokenizer, text_key, space.parts)
            assembly = Assembly(space, parts, done, progress)
            n = _workers(workers, parts, found)
            with (
                StoreWriter(
                    out, tokenizer, shard_tokens=shard_tokens, replace=force, work_folder=assembly.work_folder
                ) as writer,
                InProcess(work) if n == 1 else Pool(work, n) as team,
            ):
                counted = assembly.run(team, writer)
                if writer.n_tokens == 0:
                    space.clear_up()  # nothing to resume from
                    raise InputError(
                        f"no text in {', '.join(sources)}: {len(found.files)} files, every document empty",
                        hint="give files that contain text",
                    )
                return writer.finish(
                    {
                        "sources": list(sources),
                        "text_key": text_key,
                        "n_files": len(found.files),
                        "n_bytes": sum(f.size for f in found.files),
                        "skipped_files": dict(sorted(found.skipped.items())),
                        "skipped_examples": dict(sorted(found.examples.items())),
                        "empty_documents": counted.empty,
                        "replaced_characters": counted.replaced,
                        "files_with_replaced_characters": counted.replaced_files,
                    }
                )
    except OSError as e:
        raise RunFailed(
            f"cannot write the token store {out}: {e.strerror or e}",
            hint="free some space, or give another folder, and run it again: finished work is kept",
        ) from e


def _workers(wanted: int | None, parts: Sequence[Part], found: SourceFiles) -> int:
    """The number of processes to use. By default only as many as outweigh the cost of starting them."""
    if wanted is None:
        wanted = min(len(os.sched_getaffinity(0)), sum(f.size for f in found.files) // _WORTH_A_WORKER)
    return max(1, min(wanted, len(parts)))


def data_cache(root: Path) -> Path:
    """The folder in which runs below `root` keep data that was not prepared beforehand."""
    return root / ".data"


def made_hashes(cache_root: Path) -> Path:
    """The folder for hashes of shards that were written without any, next to prepared data."""
    return cache_root / "hashes"


def blend_of(data: DataSection) -> Blend | None:
    """The assignment of the job's samples to sources; None if there is only one source."""
    if len(sources_of(data)) == 1:
        return None
    return Blend(data.weights or ())


def sources_of(data: DataSection) -> list[str]:
    """The sources in `data.train`, one or several."""
    return [data.train] if isinstance(data.train, str) else data.train


def open_stores(addresses: Sequence[str], cache_root: Path, cache_gb: float) -> list[TokenStore]:
    """The stores at `addresses`, which `resolve_stores` returned to another process of the run.

    That process has already compared the sizes of all files, which can take seconds: this is not repeated. What is
    read is verified in any case.
    """
    return [_held(_open(address, cache_root, cache_gb, check_sizes=False)) for address in addresses]


def _held(store: TokenStore, note: Note | None = None) -> TokenStore:
    """`store`, locked against replacement as long as it is referenced."""
    try:
        store.hold()
    except OSError as e:
        if note is not None:
            note(f"{store.place} cannot be locked ({e.strerror}): it is not protected from being replaced")
    return store


def _open(place: str, cache_root: Path, cache_gb: float, *, check_sizes: bool = True) -> TokenStore:
    if not is_remote(place):
        return TokenStore.open(place, made_hashes=made_hashes(cache_root), check_sizes=check_sizes)
    # Loads the object store client, which most runs do not need.
    from seatrial.data.cache import cache_folder
    from seatrial.data.stream import StreamedStore

    return StreamedStore.stream(place, cache_folder(), int(cache_gb * 1e9), check_sizes=check_sizes)


def resolve_stores(
    data: DataSection,
    cache_root: Path,
    base_folder: Path,
    progress: Progress | None = None,
    note: Note | None = None,
    *,
    sources: Sequence[str] | None = None,
) -> list[TokenStore]:
    """The token stores a job trains on, one for each source of `data.train`, in its order; or those of `sources`.

    A source is itself a store, local or on an object store, or is prepared once into `cache_root` and reused. Relative
    paths are resolved against `base_folder`. The cache's name contains a digest of the source's files (paths, sizes,
    times) and of the tokenizer. Of several concurrent callers one prepares, the others wait. A store is locked against
    replacement as long as it is referenced. InputError names every source that cannot be used.
    """
    tokenizer_spec = data.tokenizer if data.tokenizer == "bytes" else str(base_folder / data.tokenizer)
    stores: list[TokenStore] = []
    problems: list[Diagnostic] = []
    for source in sources_of(data) if sources is None else sources:
        try:
            store = _resolve(source, data, tokenizer_spec, cache_root, base_folder, progress, note)
            stores.append(_held(store, note))
        except InputError as e:
            problems.extend(e.diagnostics)
    if problems:
        raise InputError(problems)
    return stores


def resolve_validation(
    data: DataSection,
    cache_root: Path,
    base_folder: Path,
    progress: Progress | None = None,
    note: Note | None = None,
) -> TokenStore | None:
    """The store of `data.validation`, as `resolve_stores` finds or prepares it; None if the job names none."""
    if data.validation is None:
        return None
    sources = [data.validation]
    return resolve_stores(data, cache_root, base_folder, progress, note, sources=sources)[0]


def stores_identity(stores: Sequence[TokenStore]) -> dict[str, object]:
    """Identity of the samples of a run: each store's content, in order, and their tokenizers."""
    if len(stores) == 1:
        return stores[0].identity()
    each = [store.identity() for store in stores]
    return {key: [identity[key] for identity in each] for key in each[0]}


def _resolve(
    source: str,
    data: DataSection,
    tokenizer_spec: str,
    cache_root: Path,
    base_folder: Path,
    progress: Progress | None,
    note: Note | None,
) -> TokenStore:
    if is_remote(source):
        return _open(source, cache_root, data.cache_gb)
    pair: Path | None = None
    if not source.startswith("builtin:"):
        path = base_folder / source
        if is_store(path):
            return _open(str(path), cache_root, data.cache_gb)
        pair = find_pair(path)
        source = str(path)
    tokenizer = load_tokenizer(tokenizer_spec)
    # Without opening files: the cache key uses their names, sizes and times.
    found = find([source] if pair is None else [f"{pair}.bin", f"{pair}.idx"], look_inside=False)
    digest = _source_digest(source, found, tokenizer, data.text_key)
    stem = "python-library" if source == BUILTIN_LIBRARY else Path(source).name
    folder = cache_root / f"{re.sub(r'[^A-Za-z0-9._-]', '-', stem).lstrip('.-') or 'data'}-{digest[:12]}"
    if (cached := _open_cached(folder)) is not None:
        return cached
    with _locked(folder):
        if (cached := _open_cached(folder)) is not None:
            return cached
        # Under the lock no other process writes here: these were left by dead processes. A folder that can be resumed
        # from is not among them.
        for left in cache_root.glob(temporary_prefix(folder) + "[0-9]*"):
            shutil.rmtree(left, ignore_errors=True)
        if pair is not None:
            return import_pair(pair, tokenizer_spec, folder, progress=progress, force=True)
        return prepare(
            [source],
            tokenizer_spec,
            folder,
            text_key=data.text_key,
            progress=progress,
            note=note,
            force=True,
        )


def _source_digest(source: str, found: SourceFiles, tokenizer: Tokenizer, text_key: str) -> str:
    files: list[list[Any]]
    if source == BUILTIN_LIBRARY:
        # No times: another installation of the same Python is the same corpus.
        files = [[f.name, f.size] for f in found.files]
        version = platform.python_version()
    else:
        files = [[f.name, f.size, f.mtime_ns] for f in found.files]
        version = ""
    content = json.dumps([_FORMAT, version, digest_with_template(tokenizer), text_key, files])
    return hashlib.sha256(content.encode()).hexdigest()


def _open_cached(folder: Path) -> TokenStore | None:
    """The cached store, or None if there is no usable one: it is then prepared again."""
    if not folder.exists():
        return None
    try:
        return TokenStore.open(folder, made_hashes=made_hashes(folder.parent))
    except InputError:
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = folder.parent / f".{folder.name}.lock"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fd = open_file(lock, os.O_RDWR | os.O_CREAT)
    except OSError as e:
        raise InputError(
            f"cannot keep prepared data in {folder.parent}: {e.strerror}",
            hint="prepare it elsewhere with `seatrial data prepare` and name that folder as data.train",
        ) from e
    with open(fd, "rb+"):
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def check_stores(
    stores: Sequence[TokenStore],
    blend: Blend | None,
    *,
    vocab_size: int,
    sequence_length: int,
    global_batch: int,
    tokenizer_spec: str,
) -> None:
    """Raise InputError with every reason why a model of `vocab_size` cannot train on `stores`, blended by `blend`.

    A step takes `global_batch` samples of `sequence_length` tokens, each with one more token to predict.
    """
    problems: list[Diagnostic] = []
    shares = [Fraction(1)] if blend is None else blend.shares
    for store, share in zip(stores, shares, strict=True):
        wanted = ceil(share * global_batch)
        problems += misfits(store, vocab_size, sequence_length, wanted, global_batch, tokenizer_spec)
    if problems:
        raise InputError(problems)


def check_validation(
    store: TokenStore,
    stores: Sequence[TokenStore],
    *,
    vocab_size: int,
    sequence_length: int,
    samples: int | None,
    tokenizer_spec: str,
) -> None:
    """Raise InputError with every reason why `samples` of `store` cannot be what a model trained on `stores` is validated on.

    `samples` None: as many as there are.
    """
    problems = validation_misfits(store, vocab_size, sequence_length, samples, tokenizer_spec)
    same = next((each for each in stores if each.identity() == store.identity()), None)
    if same is not None:
        problems.append(
            Diagnostic(
                f"{store.place} has the same tokens as {same.place}, which is trained on",
                hint="name other data as data.validation",
            )
        )
    if problems:
        raise InputError(problems)


def validation_misfits(
    store: TokenStore, vocab_size: int, sequence_length: int, samples: int | None, tokenizer_spec: str
) -> list[Diagnostic]:
    """Problems of the validation store."""
    problems = misfits(store, vocab_size, sequence_length, 0, 0, tokenizer_spec)
    available = max(0, store.n_tokens - 1) // sequence_length
    if available < (samples or 1):
        wanted = "" if samples is None else f" of train.validate_samples = {samples}"
        problems.append(
            Diagnostic(
                f"{store.place} has {store.n_tokens} tokens, {available} samples of {sequence_length}: too few{wanted}",
                hint="provide more validation data"
                + (f", or use train.validate_samples = {available}" if samples and available else ""),
            )
        )
    return problems


def misfits(
    store: TokenStore,
    vocab_size: int,
    sequence_length: int,
    wanted: int,
    global_batch: int,
    tokenizer_spec: str,
) -> list[Diagnostic]:
    """Problems of one store, which provides `wanted` samples of a global batch."""
    problems = []
    bad = next((s for s in store.manifest.shards if s.max_token >= vocab_size), None)
    if bad is not None:
        problems.append(
            Diagnostic(
                f"token id {bad.max_token} in {store.where(bad.file)} is beyond the vocabulary of {vocab_size}",
                hint=f"the store's tokenizer {store.tokenizer.name!r} has {store.tokenizer.vocab_size} ids: "
                "use a model with at least that vocab_size, or another tokenizer",
            )
        )
    samples = max(0, store.n_tokens - 1) // sequence_length
    if samples < wanted:
        of_it = "" if wanted == global_batch else f"its {wanted} of "
        problems.append(
            Diagnostic(
                f"{store.place} has {store.n_tokens} tokens, {samples} samples of {sequence_length}: "
                f"fewer than {of_it}one global batch of {global_batch}",
                hint="provide more data, or use a smaller train.global_batch or train.sequence_length"
                + (", or a smaller weight" if of_it else ""),
            )
        )
    tokenizer = load_tokenizer(tokenizer_spec)
    if tokenizer.digest != store.tokenizer.digest:
        problems.append(
            Diagnostic(
                f"{store.place} was made with the tokenizer {store.tokenizer.name!r} "
                f"(digest {store.tokenizer.digest[:12]}), but the job has {tokenizer.name!r} "
                f"(digest {tokenizer.digest[:12]})",
                hint="set data.tokenizer to the tokenizer that made the store, or prepare the store again",
            )
        )
    return problems
