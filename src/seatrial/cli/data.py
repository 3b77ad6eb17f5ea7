"""`seatrial data`: create, inspect, verify, import and export token stores."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED
from seatrial.cli.progress import Progress
from seatrial.record.jsonl import plain
from seatrial.ui.figures import printable

if TYPE_CHECKING:
    from seatrial.data.manifest import Manifest
    from seatrial.data.store import TokenStore

_SHOWN_TOKENS = 64
_CACHE_BYTES = 1 << 30  # of shards read from an object store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    make = actions.add_parser("prepare", help="turn text, JSONL or Parquet into token shards")
    make.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="text, .jsonl or .parquet file, also as .gz, .bz2, .xz or .zst; a folder of them; or "
        "builtin:python-library",
    )
    make.add_argument(
        "--out", required=True, metavar="FOLDER", help="path of the new token store; or s3://BUCKET/PREFIX"
    )
    make.add_argument("--tokenizer", default="bytes", metavar="bytes|PATH", help="bytes, or a tokenizer.json")
    make.add_argument(
        "--text-key",
        default="text",
        metavar="KEY",
        help="key (JSONL) or column (Parquet) of the text; lines without it that have `messages` are conversations",
    )
    make.add_argument(
        "--shard-tokens", type=_positive, default=None, metavar="N", help="tokens per shard file"
    )
    make.add_argument(
        "--workers",
        type=_positive,
        default=None,
        metavar="N",
        help="tokeniser processes; default: one per core for large sources. The store does not depend on it",
    )
    make.add_argument("--force", action="store_true", help="replace an existing token store")
    make.add_argument("--json", action="store_true", help="print the summary as JSON")

    take = actions.add_parser(
        "import", help="make a token store from a Megatron dataset (NAME.bin and NAME.idx)"
    )
    take.add_argument("pair", metavar="NAME", help="NAME, NAME.bin or NAME.idx")
    take.add_argument("--out", required=True, metavar="FOLDER", help="path of the new token store")
    take.add_argument("--tokenizer", required=True, metavar="bytes|PATH", help="the tokenizer of the dataset")
    take.add_argument(
        "--copy", action="store_true", help="copy the tokens; otherwise the store links to NAME.bin"
    )
    take.add_argument("--force", action="store_true", help="replace an existing token store")
    take.add_argument("--json", action="store_true", help="print the summary as JSON")

    give = actions.add_parser("export", help="write a token store as a Megatron dataset")
    give.add_argument("folder", metavar="FOLDER", help="a token store, or its s3:// address")
    give.add_argument("--format", choices=["megatron"], default="megatron", help="NAME.bin and NAME.idx")
    give.add_argument(
        "--out", required=True, metavar="NAME", help="path of the two files without .bin and .idx"
    )
    give.add_argument("--force", action="store_true", help="replace existing files")
    give.add_argument("--json", action="store_true", help="print the summary as JSON")

    show = actions.add_parser("show", help="describe a token store")
    show.add_argument("folder", metavar="FOLDER", help="a token store, or its s3:// address")
    show.add_argument("--json", action="store_true", help="print it as JSON")

    verify = actions.add_parser("verify", help="compare every file with the manifest's hashes")
    verify.add_argument("folder", metavar="FOLDER", help="a token store, or its s3:// address")
    verify.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the requested action; returns the exit code."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "prepare": _prepare,
        "import": _import,
        "export": _export,
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
    from seatrial.storage.names import is_remote

    started_at = time.monotonic()
    with Progress("preparing") as progress:
        options = {
            "text_key": args.text_key,
            "shard_tokens": args.shard_tokens or DEFAULT_SHARD_TOKENS,
            "workers": args.workers,
            "progress": progress,
            "note": progress.line,
            "force": args.force,
        }
        if is_remote(args.out):
            from seatrial.data.upload import prepare_remote

            manifest = prepare_remote(args.source, args.tokenizer, args.out, **options)
        else:
            manifest = prepare(args.source, args.tokenizer, args.out, **options).manifest
    print(f"prepared {args.out} in {units.duration(time.monotonic() - started_at)}", file=sys.stderr)
    return _print(args, args.out, manifest)


def _import(args: argparse.Namespace) -> int:
    from seatrial.data.megatron_import import import_pair

    with Progress("importing") as progress:
        store = import_pair(
            Path(args.pair),
            args.tokenizer,
            Path(args.out),
            copy=args.copy,
            force=args.force,
            progress=progress,
        )
    if store.manifest.source["linked"]:
        print(
            f"{args.out} links to {store.manifest.source['sources'][0]}: do not change or move it",
            file=sys.stderr,
        )
    return _print(args, args.out, store.manifest)


def _export(args: argparse.Namespace) -> int:
    from seatrial.data.megatron import export_pair

    store = _open(args.folder)
    with Progress("exporting") as progress:
        pair = export_pair(store, Path(args.out), force=args.force, progress=progress)
    if args.json:
        _print_json(
            {
                "schema_version": 1,
                "files": [str(pair.bin), str(pair.idx)],
                "dtype": pair.kind.name,
                "n_tokens": pair.n_tokens,
                "n_documents": pair.n_documents,
                "n_sequences": pair.n_sequences,
            }
        )
    else:
        print(f"files       {pair.bin}, {pair.idx}")
        print(f"tokens      {pair.n_tokens} of {pair.kind.name} ({units.count(pair.n_tokens)})")
        print(f"documents   {pair.n_documents}")
    return EXIT_DONE


def _open(place: str, *, check_sizes: bool = True) -> TokenStore:
    from seatrial.data.store import TokenStore
    from seatrial.storage.names import is_remote

    if not is_remote(place):
        return TokenStore.open(place, check_sizes=check_sizes)
    from seatrial.data.cache import cache_folder
    from seatrial.data.stream import StreamedStore

    return StreamedStore.stream(place, cache_folder(), _CACHE_BYTES, check_sizes=check_sizes)


def _show(args: argparse.Namespace) -> int:
    store = _open(args.folder)
    first = store.read(0, min(_SHOWN_TOKENS, store.n_tokens)).tolist()
    text = _decode(store, first)
    if args.json:
        shards = [s.model_dump() for s in store.manifest.shards]
        _print_json(
            _summary(args.folder, store.manifest)
            | {"first_tokens": first, "first_text": text, "shards": shards}
        )
        return EXIT_DONE
    _print_summary(args.folder, store.manifest)
    if text is None:
        print(
            f"first ids   {' '.join(map(str, first[:16]))} ... (not decoded: only the bytes tokenizer is built in)"
        )
    else:
        print(f"first text  {text!r}")
    return EXIT_DONE


def _verify(args: argparse.Namespace) -> int:
    store = _open(args.folder, check_sizes=False)
    with Progress("verifying") as progress:
        problems = store.verify(progress)
    n_files = sum(2 + (s.chunks is not None) for s in store.manifest.shards)
    if args.json:
        found = [{"file": str(file), "message": message} for file, message in problems]
        _print_json({"schema_version": 1, "folder": args.folder, "ok": not problems, "problems": found})
    elif problems:
        for file, message in problems:
            print(f"{file}: {message}")
    else:
        print(f"{args.folder}: {n_files} files, {units.count(store.n_tokens)} tokens, all intact")
    if problems:
        print(
            f"error: {len(problems)} of {n_files} files are damaged\n"
            f"  hint: recreate the store with: seatrial data prepare SOURCE... --out {args.folder} --force",
            file=sys.stderr,
        )
    return EXIT_FAILED if problems else EXIT_DONE


def _decode(store: TokenStore, ids: list[int]) -> str | None:
    """Text of `ids`, if the store's tokenizer is the built-in one."""
    from seatrial.data.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    return tokenizer.decode(ids) if store.tokenizer.digest == tokenizer.digest else None


def _print(args: argparse.Namespace, place: str, manifest: Manifest) -> int:
    if args.json:
        _print_json(_summary(place, manifest))
    else:
        _print_summary(place, manifest)
    return EXIT_DONE


def _summary(place: str, m: Manifest) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "folder": place,
        "tokenizer": m.tokenizer.model_dump(),
        "dtype": m.dtype,
        "n_tokens": m.n_tokens,
        "n_counted": m.n_counted,
        "n_documents": m.n_documents,
        "max_token": m.max_token,
        "n_shards": len(m.shards),
        "n_bytes": _bytes(m),
        "source": m.source,
    }


def _bytes(m: Manifest) -> int:
    return sum(s.bytes + s.index.bytes + (s.chunks.bytes if s.chunks else 0) for s in m.shards)


def _print_summary(place: str, m: Manifest) -> None:
    from seatrial.data.sources import describe_skipped

    source = m.source
    end = m.tokenizer.end_of_document
    print(f"folder      {place}")
    print(f"tokens      {m.n_tokens} ({units.count(m.n_tokens)}), largest id {m.max_token}")
    if m.n_counted < m.n_tokens:
        print(f"in the loss {m.n_counted} of these tokens ({m.n_counted / m.n_tokens:.1%})")
    print(f"documents   {m.n_documents}")
    print(f"tokenizer   {m.tokenizer.name}, {m.tokenizer.vocab_size} ids, digest {m.tokenizer.digest[:12]}")
    print(
        f"ended by    {f'id {end}' if end is not None else 'nothing: the tokenizer has no end-of-document token'}"
    )
    print(f"shards      {len(m.shards)} of {m.dtype}, {units.memory(_bytes(m))}")
    print(
        f"source      {', '.join(source.get('sources', [])) or 'unknown'} ({source.get('n_files', '?')} files)"
    )
    for i, line in enumerate(
        describe_skipped(source.get("skipped_files", {}), source.get("skipped_examples", {}))
    ):
        print(f"{'skipped' if i == 0 else '':<12}{printable(line)}")
    if empty := source.get("empty_documents"):
        print(f"empty       {empty} documents without text were skipped")
    if replaced := source.get("replaced_characters"):
        files = source.get("files_with_replaced_characters")
        print(f"replaced    {replaced} bytes or characters that are not UTF-8, in {files} files")


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False))
