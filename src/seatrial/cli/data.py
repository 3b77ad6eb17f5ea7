"""`seatrial data`: make token stores, look into them, check them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    from seatrial.data.store import TokenStore

_SHOWN_TOKENS = 64
_PLAIN_EVERY_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The three actions and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    make = actions.add_parser("prepare", help="turn text, JSONL or Parquet into token shards")
    make.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="text file, .jsonl, .parquet, a folder of them, or builtin:python-library",
    )
    make.add_argument("--out", required=True, metavar="FOLDER", help="where the token store goes")
    make.add_argument("--tokenizer", default="bytes", metavar="bytes|PATH", help="bytes, or a tokenizer.json")
    make.add_argument(
        "--text-key", default="text", metavar="KEY", help="key (JSONL) or column (Parquet) of the text"
    )
    make.add_argument("--shard-tokens", type=_positive, default=None, metavar="N", help="tokens a shard file")
    make.add_argument("--force", action="store_true", help="replace a token store that is there already")
    make.add_argument("--json", action="store_true", help="print the summary as JSON")

    show = actions.add_parser("show", help="what a token store holds")
    show.add_argument("folder", metavar="FOLDER")
    show.add_argument("--json", action="store_true", help="print it as JSON")

    verify = actions.add_parser("verify", help="compare every file with the manifest's hashes")
    verify.add_argument("folder", metavar="FOLDER")
    verify.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the action asked for; returns the exit code."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "prepare": _prepare,
        "show": _show,
        "verify": _verify,
    }
    return actions[args.action](args)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _prepare(args: argparse.Namespace) -> int:
    from seatrial.data.prepare import prepare
    from seatrial.data.writer import DEFAULT_SHARD_TOKENS

    began = time.monotonic()
    with _progress("preparing") as progress:
        store = prepare(
            args.source,
            args.tokenizer,
            args.out,
            text_key=args.text_key,
            shard_tokens=args.shard_tokens or DEFAULT_SHARD_TOKENS,
            progress=progress,
            force=args.force,
        )
    print(f"prepared {args.out} in {units.duration(time.monotonic() - began)}", file=sys.stderr)
    if args.json:
        _print_json(_summary(store))
    else:
        _print_summary(store)
    return EXIT_DONE


def _show(args: argparse.Namespace) -> int:
    from seatrial.data.sources import refuse_remote
    from seatrial.data.store import TokenStore

    refuse_remote(args.folder)
    store = TokenStore.open(args.folder)
    first = store.read(0, min(_SHOWN_TOKENS, store.n_tokens)).tolist()
    text = _decode(store, first)
    if args.json:
        shards = [s.model_dump() for s in store.manifest.shards]
        _print_json(_summary(store) | {"first_tokens": first, "first_text": text, "shards": shards})
        return EXIT_DONE
    _print_summary(store)
    if text is None:
        print(
            f"first ids   {' '.join(map(str, first[:16]))} ... (not decoded: only the bytes tokenizer is built in)"
        )
    else:
        print(f"first text  {text!r}")
    return EXIT_DONE


def _verify(args: argparse.Namespace) -> int:
    from seatrial.data.sources import refuse_remote
    from seatrial.data.store import TokenStore

    refuse_remote(args.folder)
    store = TokenStore.open(args.folder, check_sizes=False)
    with _progress("verifying") as progress:
        problems = store.verify(progress)
    n_files = 2 * len(store.manifest.shards)
    if args.json:
        found = [{"file": str(file), "message": message} for file, message in problems]
        _print_json({"schema_version": 1, "folder": args.folder, "ok": not problems, "problems": found})
    elif problems:
        for file, message in problems:
            print(f"{file}: {message}")
    else:
        print(f"{args.folder}: {n_files} files, {units.count(store.n_tokens)} tokens, all as written")
    if problems:
        print(
            f"error: {len(problems)} of {n_files} files are damaged\n"
            f"  hint: make the store again with: seatrial data prepare SOURCE... --out {args.folder} --force",
            file=sys.stderr,
        )
    return EXIT_FAILED if problems else EXIT_DONE


def _decode(store: TokenStore, ids: list[int]) -> str | None:
    """Text of `ids`, where the store's tokenizer is the built-in one."""
    from seatrial.data.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    return tokenizer.decode(ids) if store.tokenizer.digest == tokenizer.digest else None


def _summary(store: TokenStore) -> dict[str, Any]:
    m = store.manifest
    return {
        "schema_version": 1,
        "folder": str(store.folder),
        "tokenizer": m.tokenizer.model_dump(),
        "dtype": m.dtype,
        "n_tokens": m.n_tokens,
        "n_documents": m.n_documents,
        "max_token": m.max_token,
        "n_shards": len(m.shards),
        "n_bytes": sum(s.bytes + s.index.bytes for s in m.shards),
        "source": m.source,
    }


def _print_summary(store: TokenStore) -> None:
    m = store.manifest
    source = m.source
    end = m.tokenizer.end_of_document
    print(f"folder      {store.folder}")
    print(f"tokens      {m.n_tokens} ({units.count(m.n_tokens)}), largest id {m.max_token}")
    print(f"documents   {m.n_documents}")
    print(f"tokenizer   {m.tokenizer.name}, {m.tokenizer.vocab_size} ids, digest {m.tokenizer.digest[:12]}")
    print(
        f"ended by    {f'id {end}' if end is not None else 'nothing: the tokenizer has no end-of-document token'}"
    )
    on_disk = units.memory(sum(s.bytes + s.index.bytes for s in m.shards))
    print(f"shards      {len(m.shards)} of {m.dtype}, {on_disk}")
    print(
        f"source      {', '.join(source.get('sources', [])) or 'unknown'} ({source.get('n_files', '?')} files)"
    )
    if skipped := source.get("skipped_files"):
        print(f"skipped     {', '.join(f'{n} {what}' for what, n in skipped.items())}")
    if empty := source.get("empty_documents"):
        print(f"empty       {empty} documents without text were left out")
    if replaced := source.get("replaced_characters"):
        files = source.get("files_with_replaced_characters")
        print(f"replaced    {replaced} bytes or characters that are no UTF-8, in {files} files")


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[int, int, str], None]]:
    """Bytes done of bytes in all, on stderr: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _PlainProgress(verb)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=None)

        def update(done: int, total: int, what: str) -> None:
            del what
            bar.update(task, completed=done, total=total)

        yield update


class _PlainProgress:
    """A line each `_PLAIN_EVERY_S` seconds; short work prints none."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if now - self._last < _PLAIN_EVERY_S or not 0 < done < total:
            return
        self._last = now
        left = units.duration((now - self._began) * (total - done) / done)
        size = f"{units.memory(done)} of {units.memory(total)}"
        print(f"{self._verb}: {size} ({100 * done // total} %), {left} left, at {what}", file=sys.stderr)
