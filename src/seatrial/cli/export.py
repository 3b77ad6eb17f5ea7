"""`seatrial export`: write a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial import __version__
from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, InputError, RunFailed, SeatrialError
from seatrial.base.files import parse_toml, read_text
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import read_ledger
from seatrial.record.view import read_job_facts
from seatrial.storage import StorageError, is_remote
from seatrial.ui import figures, model_card

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
    """Declare the verb's arguments."""
    parser.add_argument(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        help="a run (its newest checkpoint is exported), or one checkpoint: its folder, such as "
        "runs/NAME/checkpoints/step-00000500, or its address on an object store",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="of a run: the checkpoint of step N, not the newest"
    )
    parser.add_argument(
        "--allow-older",
        action="store_true",
        help="of a run: if its newest checkpoint is damaged or unreachable, export the newest intact one",
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
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with [model.lora]: write the adapter alone, as PEFT reads it, instead of the merged weights",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


@dataclass(frozen=True)
class _Choice:
    """Checkpoints that may be exported, and what is known about their run."""

    candidates: list[Checkpoint]  # best first
    run: RunFolder | None
    steps: list[int]  # of all checkpoints found, newest first
    aside: list[tuple[int, str]]  # step and name of quarantined checkpoints
    unseen: int  # number of the run's places that did not answer


def run(args: argparse.Namespace) -> int:
    """Write the folder; returns the exit code."""
    choice = _choose(args.source, args.step, args.allow_older)
    tokenizer, note = _tokenizer(args.tokenizer, choice.run)
    written, weights, provenance = _write(args, choice, tokenizer)
    checkpoint = weights.where
    if args.json:
        summary = {
            "schema_version": 1,
            "folder": str(args.out),
            "checkpoint": checkpoint,
            "step": weights.step,
            "newest": provenance["newest"],
            "not_taken": provenance["not_taken"],
            "left_out_steps": provenance["left_out_steps"],
            "family": weights.arch.family,
            "parameters": weights.arch.base.parameters(),
            "adapter": args.adapter,
            "dtype": written.dtype,
            "files": written.files,
            "weights_bytes": written.bytes,
            "tokenizer": None if tokenizer is None else str(tokenizer),
        }
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    else:
        print(f"folder      {args.out}")
        print(f"checkpoint  {checkpoint} (step {weights.step})")
        if provenance["not_taken"]:
            not_taken = "; ".join(f"{item['checkpoint']}: {item['why']}" for item in provenance["not_taken"])
            print(f"note        {model_card.NEWEST[provenance['newest']]} Not taken: {not_taken}")
        if provenance["left_out_steps"]:
            print(f"skipped     {figures.steps(provenance['left_out_steps'])}")
        print(f"model       {_model(weights, args.adapter)}, {written.dtype}")
        print(f"weights     {units.memory(written.bytes)} in {len(written.files)} file(s)")
        print(f"tokenizer   {note}")
    return EXIT_DONE


def _choose(source: str, step: int | None, allow_older: bool) -> _Choice:
    """The checkpoints to try, best first. An older one may replace the requested one only with `allow_older`."""
    from seatrial.checkpoint.manifest import step_of
    from seatrial.checkpoint.survey import InFolder, InPlace, checkpoint_at, places_of

    checkpoint = checkpoint_at(source)
    if checkpoint is not None or is_remote(source):
        if checkpoint is None:
            hint = "give the address of one checkpoint, such as s3://BUCKET/PREFIX/NAME/step-00000500"
            raise InputError(f"there is no complete checkpoint at {source}", hint=hint)
        if step is not None or allow_older:
            option = "--allow-older" if step is None else "--step"
            raise InputError(
                f"{option} chooses among the checkpoints of a run, and {source} is one checkpoint"
            )
        if not isinstance(checkpoint, InFolder):
            return _Choice([checkpoint], None, [], [], 0)
        beside = checkpoint.folder.absolute().parent
        run_folder = RunFolder(beside.parent)
        if not run_folder.job_toml.is_file():
            return _Choice([checkpoint], None, [], [], 0)
        steps = sorted(filter(None, map(step_of, beside.iterdir())), reverse=True)
        return _Choice([checkpoint], run_folder, steps, [], 0)
    if step is not None and allow_older:
        raise InputError("--step and --allow-older are mutually exclusive", hint="choose one")
    run_folder = RunFolder.find(source)
    found: list[tuple[int, int, Checkpoint]] = []
    aside: list[tuple[int, str]] = []
    problems: list[SeatrialError] = []
    for number, (_, place) in enumerate(places_of(run_folder)):
        try:
            found += [(-n, number, InPlace(place, n)) for n in place.steps()]
            named = [(re.match(r"step-(\d+)", name), name) for name in place.set_aside_names()]
            aside += [(int(match[1]), name) for match, name in named if match is not None]
        except StorageError as error:
            problems.append(error)
    found.sort(key=lambda item: item[:2])
    steps = sorted({-n for n, _, _ in found}, reverse=True)
    for problem in problems:
        print(problem.render(), file=sys.stderr)
    if problems and not (found and (allow_older or step in steps)):
        wanted = "its newest checkpoint" if step is None else f"its checkpoint of step {step}"
        raise RunFailed(
            f"not every checkpoint location of {run_folder.path} could be read, so {wanted} is unknown",
            hint=f"check the storage; {_others(steps)}",
        )
    if not found:
        raise InputError(
            f"{run_folder.path} has no complete checkpoint yet",
            hint="one is written every checkpoint.every_steps steps and at the end of the run",
        )
    if step is not None and step not in steps:
        listed = ", ".join(map(str, sorted(steps)))
        raise InputError(f"{run_folder.path} has no checkpoint of step {step}", hint=f"there are: {listed}")
    newest = steps[0] if step is None else step
    candidates = [checkpoint for n, _, checkpoint in found if allow_older or -n == newest]
    return _Choice(candidates, run_folder, steps, aside, len(problems))


def _others(steps: list[int]) -> str:
    if not steps:
        return "see `seatrial checkpoints RUN` for others"
    listed = ", ".join(map(str, steps[:8]))
    return f"use --step N for another one (there are {listed}), --allow-older for the newest intact one"


def _write(
    args: argparse.Namespace, choice: _Choice, tokenizer: Path | None
) -> tuple[Written, CheckpointWeights, dict[str, Any]]:
    """Write the first undamaged candidate. Every byte is verified as it is read."""
    # Imported here: they load torch, which `seatrial export --help` does not need.
    from seatrial.checkpoint.manifest import Damaged
    from seatrial.checkpoint.survey import InPlace
    from seatrial.model.hf_write import write_huggingface
    from seatrial.model.lora import MergedWeights
    from seatrial.model.lora_write import write_adapter

    damage: list[str] = []
    not_taken = [
        {"checkpoint": "a location of the run's checkpoints", "why": "did not answer"}
    ] * choice.unseen
    for candidate in choice.candidates:
        try:
            weights = candidate.open()
            try:
                provenance = _provenance(choice, weights, not_taken, not args.allow_older)
                arch, model = weights.arch, _model(weights, args.adapter)
                if args.adapter:
                    if arch.lora is None:
                        raise InputError(
                            f"{candidate.where} has no adapter: its run had no [model.lora]",
                            hint="remove --adapter",
                        )
                    written = write_adapter(
                        weights,
                        arch,
                        args.out,
                        dtype=args.dtype,
                        tokenizer=tokenizer,
                        notes=model_card.notes(provenance, model, library="peft"),
                    )
                else:
                    written = write_huggingface(
                        weights if arch.lora is None else MergedWeights(weights, arch),
                        arch.base,
                        args.out,
                        dtype=args.dtype,
                        max_shard_bytes=args.max_shard,
                        tokenizer=tokenizer,
                        notes=model_card.notes(provenance, model),
                        progress=_Progress(),
                    )
            finally:
                weights.close()
        except Damaged as error:
            if isinstance(candidate, InPlace) and candidate.step not in candidate.place.steps():
                raise RunFailed(
                    f"{candidate.where} was removed while it was being read",
                    hint="the run is active and keeps only its newest ones; export again",
                ) from None
            damage.append(error.message)
            not_taken.append({"checkpoint": Path(candidate.where).name, "why": "damaged"})
            if candidate is not choice.candidates[-1]:
                print(f"damaged: {candidate.where}: {error.message}", file=sys.stderr)
        else:
            return written, weights, provenance
    if args.allow_older:
        raise RunFailed(
            f"every checkpoint of the run is damaged; the oldest: {damage[-1]}",
            hint="the disk is losing data: repair it, then train again with --fresh",
        )
    first = choice.candidates[0]
    others = [step for step in choice.steps if isinstance(first, InPlace) and step != first.step]
    which = f"the newest checkpoint, {first.where}," if others and args.step is None else first.where
    raise RunFailed(f"{which} is damaged: {damage[0]}", hint=_others(others))


def _provenance(
    choice: _Choice, weights: CheckpointWeights, not_taken: list[dict[str, str]], named: bool
) -> dict[str, Any]:
    """Origin of the weights, for the exported folder. Without paths, because the folder may be published."""
    progress, run_folder = weights.manifest.progress, choice.run
    newer = [step for step in choice.steps if step > progress.step]
    not_taken = [
        *not_taken,
        *(
            {"checkpoint": name, "why": "was quarantined"}
            for step, name in choice.aside
            if step > progress.step
        ),
    ]
    if named and newer:
        not_taken.append({"checkpoint": f"step {newer[0]}", "why": f"step {progress.step} was requested"})
    left_out, job_steps, tokens = None, None, progress.tokens
    if run_folder is not None:
        job_steps = read_job_facts(run_folder)[0].steps
        records, _ = read_ledger(run_folder)
        if records:
            left_out = [r.step for r in records if r.skipped and r.step <= progress.step]
            # progress.tokens includes skipped steps.
            tokens -= len(left_out) * (tokens // max(1, progress.step))
    return {
        "seatrial": __version__,
        "run": None if run_folder is None else run_folder.path.absolute().name,
        "step": progress.step,
        "job_steps": job_steps,
        "tokens": tokens,
        "generation": progress.generation,
        "left_out_steps": left_out,  # null: unknown
        "checkpoint": Path(weights.where).name,
        "checkpoint_time": weights.manifest.time,
        "job_sha256": weights.manifest.job_sha256,
        "code": weights.manifest.code,
        # null: unknown, for a checkpoint given by its own path, or if a place did not answer
        "newest": False if newer else True if choice.steps and not choice.unseen else None,
        "not_taken": not_taken,
    }


def _model(weights: CheckpointWeights, adapter: bool) -> str:
    arch = weights.arch
    whole = f"{arch.family}, {units.count(arch.base.parameters())} parameters"
    if arch.lora is None:
        return whole
    own = f"LoRA of rank {arch.lora.rank}, {units.count(arch.trained_parameters())} parameters"
    return f"{own}, for {whole}" if adapter else f"{whole}, with {own} merged"


def _tokenizer(given: Path | None, run_folder: RunFolder | None) -> tuple[Path | None, str]:
    """The tokenizer.json to copy, and a note about it."""
    if given is not None:
        return given, f"copied from {given}"
    if run_folder is None or not run_folder.job_toml.is_file():
        return None, "none: the checkpoint is in no run folder (--tokenizer names one)"
    # Read as plain TOML: the job may be of an older version, and only this key matters.
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
