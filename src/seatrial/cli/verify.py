"""`seatrial verify`: prove that a checkpoint is intact, or that a run has seen every sample exactly once."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from seatrial.base import units
from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, InputError, SeatrialError
from seatrial.cli.checkpoints import as_json, examine_all
from seatrial.record.folder import RunFolder
from seatrial.record.running import running
from seatrial.storage import is_remote
from seatrial.ui.out import Out
from seatrial.ui.summary import left_out_pair

if TYPE_CHECKING:
    from seatrial.checkpoint.survey import CheckpointReport
    from seatrial.record.audit import Audit
    from seatrial.record.proof import Proof

SCHEMA_VERSION = 1
_SHOWN = 20  # violations shown; an overwritten ledger has millions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "target",
        metavar="CHECKPOINT|RUN",
        help="a checkpoint's folder or s3:// address, a place with checkpoints, "
        "a run folder, or the name of a run in ./runs",
    )
    parser.add_argument(
        "--ledger", action="store_true", help="of a run: prove the ledger only, and read no checkpoint"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 all is proven, 1 something is not. Raises InputError if there is nothing to verify."""
    from seatrial.checkpoint.survey import InPlace, checkpoint_at, place_at

    out, started_at = Out(sys.stdout, plain=args.plain), time.monotonic()
    checkpoint = checkpoint_at(args.target)
    if checkpoint is not None:
        checkpoints: list[Any] = [checkpoint]
    elif (is_remote(args.target) or not _is_run(args.target)) and (
        place := place_at(args.target)
    ) is not None:
        checkpoints = [InPlace(place, step) for step in place.steps()]
    elif is_remote(args.target):
        raise InputError(
            f"there is no complete checkpoint at {args.target}",
            hint="give the address of a checkpoint, .../step-00000500, or of the place where a run keeps them",
        )
    else:
        return _verify_run(args, out, RunFolder.find(args.target), started_at)
    if args.ledger:
        raise InputError(f"{args.target} is not a run, so it has no ledger", hint="give a run folder")
    found = examine_all(checkpoints, live=False)
    return _report(args, out, None, found, [], started_at)


def _is_run(target: str) -> bool:
    try:
        RunFolder.find(target)
    except InputError:
        return False
    return True


def _verify_run(args: argparse.Namespace, out: Out, folder: RunFolder, started_at: float) -> int:
    from seatrial.checkpoint.survey import InPlace, places_of
    from seatrial.record.audit import audit

    found: list[CheckpointReport] = []
    problems: list[str] = []
    # Checkpoints first: any saved meanwhile must be in the ledger that is read afterwards.
    for _, place in [] if args.ledger else places_of(folder):
        try:
            checkpoints = [InPlace(place, step) for step in place.steps()]
            found += examine_all(checkpoints, live=running(folder) is not None)
        except SeatrialError as error:  # verify what is reachable
            problems.append(error.message)
    audited = audit(folder)
    problems += _disagreements(audited, found)
    return _report(args, out, audited, found, problems, started_at)


def _disagreements(audited: Audit, found: list[CheckpointReport]) -> list[str]:
    """Checkpoints whose recorded progress disagrees with the ledger."""
    entries = []
    for item in found:
        if item.progress is None:
            continue
        p = item.progress
        reasons = [audited.proof.disagreement(p.step, p.next_sample, p.generation)]
        batches, length = audited.job.batches, audited.job.sequence_length
        tokens = 0 if batches is None or length is None else batches.total(p.step) * length
        if tokens and p.tokens != tokens:
            reasons.append(f"it records {p.tokens} tokens, but {p.step} steps of the job are {tokens}")
        entries += [f"{item.where}: {reason}" for reason in reasons if reason is not None]
    return entries


def _report(
    args: argparse.Namespace,
    out: Out,
    audited: Audit | None,
    found: list[CheckpointReport],
    problems: list[str],
    started_at: float,
) -> int:
    proof = None if audited is None else audited.proof
    bad = [item for item in found if item.state != "verified"]
    ok = not bad and not problems and (proof is None or proof.verdict == "proven")
    if args.json:
        document = {
            "schema_version": SCHEMA_VERSION,
            "target": args.target,
            "ok": ok,
            "ledger": None if audited is None else _ledger_json(audited),
            "checkpoints": [as_json(item, time.time()) for item in found],
            "problems": problems,
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        if audited is not None:
            _print_ledger(out, audited)
        for item in found:
            _print_checkpoint(out, item)
        for problem in problems:
            out.pair("problem", problem, "bold red")
        out.pair("result", "verified" if ok else "not verified", "bold green" if ok else "bold red")
    if audited is not None:
        for unread in audited.problems:
            print(f"warning: {unread}", file=sys.stderr)
    if found:
        size, seconds = sum(item.bytes for item in found), time.monotonic() - started_at
        print(f"read {units.memory(size)} in {units.duration(seconds)}", file=sys.stderr)
    if not ok:
        _print_hints(bad, proof)
    return EXIT_DONE if ok else EXIT_FAILED


def _ledger_json(audited: Audit) -> dict[str, Any]:
    proof = audited.proof
    return {
        "verdict": proof.verdict,
        "steps": proof.steps,
        "samples": proof.trained_samples,
        "global_batch": None if proof.batches is None else proof.batches.largest,
        "skipped_steps": proof.skipped,
        "steps_done_again": proof.redone,
        "generations": [
            {
                "generation": s.generation,
                "first_step": s.first,
                "last_step": s.last,
                "after_generation": s.parent,
                "ranks": audited.world_sizes.get(s.generation),
            }
            for s in proof.stretches
        ],
        "violations": [vars(v) for v in proof.violations],
        "unreadable": [vars(p) for p in audited.problems],
        "live": audited.live,
    }


def _print_ledger(out: Out, audited: Audit) -> None:
    proof = audited.proof
    style = {"proven": "bold green", "violated": "bold red", "unjudged": "bold yellow"}.get(proof.verdict, "")
    out.pair("ledger", _verdict(proof), style)
    if proof.stretches:
        out.pair("history", "\n".join(_history(audited)))
    if proof.redone:
        out.pair("redone", f"{proof.redone:,} steps after failures; the last attempt of each counts")
    if proof.skipped:
        out.pairs([left_out_pair(proof.skipped, proof.batches)])
    if audited.live:
        out.pair("note", "the run is active: this is its state when it was read")
    violations = [str(v) for v in proof.violations[:_SHOWN]]
    more = len(proof.violations) - _SHOWN
    if more > 0:
        violations.append(f"and {more:,} more")
    if violations:
        out.pair("violated", "\n".join(violations), "red")


def _verdict(proof: Proof) -> str:
    match proof.verdict:
        case "empty":
            return "empty: no step was done"
        case "unjudged":
            return "unjudged: job.toml has no global batch"
        case "violated":
            n = len(proof.violations)
            return f"not proven: {n:,} contradiction{'' if n == 1 else 's'}"
    return f"proven: {proof.steps:,} steps, {proof.trained_samples:,} samples, each seen exactly once and in order"


def _history(audited: Audit) -> list[str]:
    entries = []
    for s in audited.proof.stretches[-_SHOWN:]:
        ranks = audited.world_sizes.get(s.generation)
        on = "" if ranks is None else f" on {ranks} rank{'' if ranks == 1 else 's'}"
        after = "" if s.parent is None else f", after step {s.first - 1} of generation {s.parent}"
        entries.append(f"generation {s.generation}: steps {s.first:,} to {s.last:,}{on}{after}")
    hidden = len(audited.proof.stretches) - _SHOWN
    return ([f"{hidden} earlier generations"] if hidden > 0 else []) + entries


def _print_checkpoint(out: Out, found: CheckpointReport) -> None:
    size = f", {units.memory(found.bytes)} in {found.files} file{'' if found.files == 1 else 's'}"
    step = "" if found.step is None else f", step {found.step}"
    style = "" if found.state == "verified" else "bold red"
    what = f"{found.where}: {found.state}{step}{size if found.files else ''}"
    out.pair("checkpoint", "\n".join([what, *found.problems[:_SHOWN]]), style)


def _print_hints(bad: list[CheckpointReport], proof: Proof | None) -> None:
    if any(item.state == "damaged" for item in bad):
        print(
            "error: a checkpoint is damaged\n"
            "  hint: a resumed run quarantines it and uses the previous one; is the disk losing data (dmesg)?",
            file=sys.stderr,
        )
    if proof is not None and proof.verdict == "violated":
        print(
            "error: the records do not prove that every sample was seen once\n"
            "  hint: events.jsonl and control/coordinator.log show what happened around these steps",
            file=sys.stderr,
        )
    if proof is not None and proof.verdict == "empty":
        print(
            "error: no step was done, so nothing is proven\n  hint: run this again once the run has done some",
            file=sys.stderr,
        )
