"""`seatrial export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, InputError, RunFailed, SeatrialError
from seatrial.base.files import parse_toml, read_text
from seatrial.record.folder import RunFolder
from seatrial.storage import StorageError, is_remote

if TYPE_CHECKING:
    from seatrial.checkpoint.read import CheckpointWeights
    from seatrial.checkpoint.survey import Checkpoint
    from seatrial.model.hf_write import Written

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
        help="a run (its newest checkpoint is taken), or one checkpoint: its folder, such as "
        "runs/NAME/checkpoints/step-00000500, or its address on an object store",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="of a run: the checkpoint of step N, not the newest"
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
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json to copy (default: the one that the run was trained with)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the folder; returns the exit code."""
    candidates, run_folder = _candidates(args.source, args.step)
    tokenizer, note = _tokenizer(args.tokenizer, run_folder)
    written, weights = _write(args, candidates, tokenizer)
    checkpoint = weights.where
    if args.json:
        summary = {
            "schema_version": 1,
            "folder": str(args.out),
            "checkpoint": checkpoint,
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


def _candidates(source: str, step: int | None) -> tuple[list[Checkpoint], RunFolder | None]:
    """The checkpoints to try, the best first; and the run that they are of, where that can be told."""
    from seatrial.checkpoint.survey import InFolder, InPlace, checkpoint_at, places_of

    checkpoint = checkpoint_at(source)
    if checkpoint is not None or is_remote(source):
        if checkpoint is None:
            hint = "give the address of one checkpoint, such as s3://BUCKET/PREFIX/NAME/step-00000500"
            raise InputError(f"there is no complete checkpoint at {source}", hint=hint)
        if step is not None:
            raise InputError(f"--step chooses among the checkpoints of a run, and {source} is one checkpoint")
        if not isinstance(checkpoint, InFolder):
            return [checkpoint], None
        run_folder = RunFolder(checkpoint.folder.absolute().parent.parent)
        return [checkpoint], run_folder if run_folder.job_toml.is_file() else None
    run_folder = RunFolder.find(source)
    found: list[tuple[int, int, Checkpoint]] = []
    problems: list[SeatrialError] = []
    for number, (_, place) in enumerate(places_of(run_folder)):
        try:
            found += [(-n, number, InPlace(place, n)) for n in place.steps()]
        except StorageError as error:  # the fallback may have what is wanted
            problems.append(error)
    found.sort(key=lambda item: item[:2])
    wanted = [checkpoint for n, _, checkpoint in found if step in (None, -n)]
    for problem in problems:
        print(problem.render(), file=sys.stderr)
    if not wanted and problems:
        raise problems[0]
    if not found:
        raise InputError(
            f"{run_folder.path} has no complete checkpoint yet",
            hint="one is written every checkpoint.every_steps steps and at the end of the run",
        )
    if not wanted:
        steps = ", ".join(str(-n) for n in sorted({n for n, _, _ in found}))
        raise InputError(f"{run_folder.path} has no checkpoint of step {step}", hint=f"it has: {steps}")
    return wanted, run_folder


def _write(
    args: argparse.Namespace, candidates: list[Checkpoint], tokenizer: Path | None
) -> tuple[Written, CheckpointWeights]:
    """Write the first of the candidates that is not damaged. Every byte is verified as it is read."""
    # Not at the top: they load torch, and `seatrial export --help` needs none.
    from seatrial.checkpoint.manifest import Damaged
    from seatrial.model.hf_write import write_huggingface

    damage = ""
    for candidate in candidates:
        try:
            weights = candidate.open()
            try:
                written = write_huggingface(
                    weights,
                    weights.arch,
                    args.out,
                    dtype=args.dtype,
                    max_shard_bytes=args.max_shard,
                    tokenizer=tokenizer,
                    progress=_Progress(),
                )
            finally:
                weights.close()
        except Damaged as error:
            damage = error.message
            print(f"damaged: {candidate.where}: {damage}", file=sys.stderr)
        else:
            return written, weights
    if len(candidates) == 1:
        hint = "export another one: see `seatrial checkpoints RUN`"
        raise RunFailed(f"{candidates[0].where} is damaged: {damage}", hint=hint)
    raise RunFailed(
        f"every checkpoint of the run is damaged; the oldest: {damage}",
        hint="the disk loses data: see to it, then train again with --fresh",
    )


def _tokenizer(given: Path | None, run_folder: RunFolder | None) -> tuple[Path | None, str]:
    """The tokenizer.json to copy, and what to say about it."""
    if given is not None:
        return given, f"copied from {given}"
    if run_folder is None or not run_folder.job_toml.is_file():
        return None, "none: the checkpoint lies in no run folder (--tokenizer names one)"
    # Read as plain TOML: of an older version's job only this one key matters here.
    try:
        data = parse_toml(read_text(run_folder.job_toml)).get("data")
    except (OSError, ValueError) as error:
        return None, f"none: {run_folder.job_toml} cannot be used ({error})"
    name = data.get("tokenizer", "bytes") if isinstance(data, dict) else "bytes"
    if name == "bytes" or not isinstance(name, str):
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
