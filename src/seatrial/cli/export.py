"""`seatrial export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import tomllib
from pathlib import Path

from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, InputError, RunFailed
from seatrial.record.folder import RunFolder

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to export, where to, and how."""
    parser.add_argument(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        help="a run (its newest checkpoint is taken), or one checkpoint: runs/NAME/checkpoints/step-00000500",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="a folder that does not exist, or is empty"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "stored"],
        default="stored",
        help="of the weights (default: stored)",
    )
    parser.add_argument(
        "--max-shard",
        type=_size,
        default=_size("5GB"),
        metavar="SIZE",
        help="largest weight file (default: 5GB)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the folder; returns the exit code."""
    # Not at the top: they load torch, and `seatrial export --help` needs none.
    from seatrial.checkpoint.read import CheckpointWeights
    from seatrial.model.hf_write import write_huggingface

    checkpoint = _checkpoint(args.source)
    tokenizer, note = _tokenizer(checkpoint)
    weights = CheckpointWeights(checkpoint)
    written = write_huggingface(
        weights,
        weights.arch,
        args.out,
        dtype=args.dtype,
        max_shard_bytes=args.max_shard,
        tokenizer=tokenizer,
        progress=_Progress(),
    )
    if args.json:
        summary = {
            "schema_version": 1,
            "folder": str(args.out),
            "checkpoint": str(checkpoint),
            "step": weights.step,
            "family": weights.arch.family,
            "parameters": weights.arch.parameters(),
            "dtype": written.dtype,
            "files": written.files,
            "weights_bytes": written.bytes,
            "tokenizer": None if tokenizer is None else str(tokenizer),
        }
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    else:
        parameters = units.count(weights.arch.parameters())
        print(f"folder      {args.out}")
        print(f"checkpoint  {checkpoint} (step {weights.step})")
        print(f"model       {weights.arch.family}, {parameters} parameters, {written.dtype}")
        print(f"weights     {units.memory(written.bytes)} in {len(written.files)} file(s)")
        print(f"tokenizer   {note}")
    return EXIT_DONE


def _checkpoint(source: str) -> Path:
    """A verified checkpoint: the folder `source` itself, or the newest undamaged one of the run that it names."""
    from seatrial.checkpoint.manifest import MANIFEST, Damaged, complete, verify

    path = Path(source)
    named = (path / MANIFEST).is_file()
    run_folder = path if named else RunFolder.find(source).path
    candidates = [path] if named else complete(RunFolder(run_folder).checkpoints)
    damage = ""
    for candidate in candidates:
        try:
            verify(candidate)
        except Damaged as error:
            damage = error.message
            print(f"damaged: {candidate}: {damage}", file=sys.stderr)
        else:
            return candidate
    if named:
        hint = f"export an older one: the folders beside {path.name}"
        raise RunFailed(f"{path} is damaged: {damage}", hint=hint)
    if candidates:
        raise RunFailed(
            f"every checkpoint of {run_folder} is damaged; the oldest: {damage}",
            hint="the disk loses data: see to it, then train again with --fresh",
        )
    raise InputError(
        f"{run_folder} has no complete checkpoint yet",
        hint="one is written every checkpoint.every_steps steps and at the end of the run",
    )


def _tokenizer(checkpoint: Path) -> tuple[Path | None, str]:
    """The tokenizer.json of the run that a checkpoint lies in, and what to say about it."""
    job_toml = RunFolder(checkpoint.absolute().parent.parent).job_toml
    if not job_toml.is_file():
        return None, "none: the checkpoint lies in no run folder"
    # Read as plain TOML: of an older version's job only this one key matters here.
    name = tomllib.loads(job_toml.read_text(encoding="utf-8")).get("data", {}).get("tokenizer", "bytes")
    if name == "bytes":
        return None, "none: the run was trained on bytes"
    path = Path(name)
    if not path.is_file():
        return None, f"not copied: {path}, which the run was trained with, is no longer there"
    return path, f"copied from {path}"


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|B?)", text.strip().upper())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return max(1, int(float(match[1]) * _SIZE_UNITS[match[2]]))


class _Progress:
    """A line on stderr for each weight file but the last."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if done < total:
            left = units.duration((time.monotonic() - self._began) * (total - done) / done)
            size = f"{units.memory(done)} of {units.memory(total)}"
            print(f"exporting: {size} ({100 * done // total} %), {left} left", file=sys.stderr)
