"""`seatrial train JOB`: run a job to its end; the same command again resumes it."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base import units
from seatrial.base.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    SeatrialError,
)
from seatrial.cli.validate import job_arguments
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.view import Failure, State

if TYPE_CHECKING:
    from seatrial.launch.base import Outcome
    from seatrial.launch.preflight import Ready
    from seatrial.launch.voyage import Voyage

_STATES: dict[int, State] = {
    EXIT_DONE: "finished",
    EXIT_FAILED: "failed",
    EXIT_BAD_INPUT: "failed",
    EXIT_PREEMPTED: "preempted",
    EXIT_INTERRUPTED: "stopped",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    job_arguments(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="start over; an existing run is moved aside, not deleted"
    )
    parser.add_argument("--render", action="store_true", help="print what would be started, start nothing")
    parser.add_argument("--plain", action="store_true", help="a line a step, also on a terminal")
    parser.add_argument(
        "--json", action="store_true", help="print the summary as one JSON document on stdout"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 done, 1 the run failed, 2 bad input, 75 preempted (state saved), 130 interrupted."""
    from seatrial.launch import launcher_for
    from seatrial.launch.preflight import preflight
    from seatrial.launch.voyage import prepare_voyage
    from seatrial.ui.console import TrainConsole

    ready = preflight(args.job, args.set, args.runs, fresh=args.fresh, ignore_memory=args.ignore_memory)
    job = ready.job
    if args.render:
        sys.stdout.write(launcher_for(job).render(job, RunFolder(args.runs / job.name)))
        return EXIT_DONE
    voyage = prepare_voyage(job, args.runs, fresh=args.fresh)
    memory = _tell_memory(voyage, ready)
    folder = voyage.opened.folder
    with (
        voyage.opened as opened,
        TrainConsole(
            folder,
            total_steps=job.train.steps,
            generation=opened.generation,
            plain=args.plain,
            json_output=args.json,
        ) as console,
    ):
        console.header(
            job,
            device=voyage.device,
            device_reason=voyage.device_reason,
            data_summary=_data(voyage),
            memory=memory,
            notes=[*opened.notes, *ready.notes],
            resume_step=voyage.resume_step,
        )
        if voyage.complete:
            console.out.line(f"all {job.train.steps} steps are done already; --fresh starts over")
            console.summary("finished", next_commands=_next(args, voyage, EXIT_DONE))
            return EXIT_DONE
        outcome = voyage.run(tick=console.poll)
        console.summary(
            _STATES[outcome.exit_code],
            failure=_failure(outcome),
            next_commands=_next(args, voyage, outcome.exit_code),
        )
        return outcome.exit_code


def _tell_memory(voyage: Voyage, ready: Ready) -> list[tuple[str, str]]:
    """Lines of the header, and the same as an event."""
    from seatrial.plan.host import in_words

    lines = list(in_words(ready.account))
    copies, _ = ready.account.copies
    notable = bool(ready.notes) or copies < min(1, voyage.job.resilience.snapshot_every_steps) * 2
    with contextlib.suppress(OSError):  # what starts next will say that the folder cannot be written
        events.append(
            voyage.opened.folder,
            "memory_planned",
            "; ".join(f"{label}: {text}" for label, text in lines),
            severity="warning" if notable else "info",
            generation=voyage.opened.generation,
            data={**ready.account.document(), "notes": list(ready.notes)},
        )
    return lines


def _failure(outcome: Outcome) -> Failure | None:
    """For the summary: a full disk may have kept it out of the run folder."""
    told = outcome.failure
    if told is None:
        return None
    return Failure(
        told.cause or told.message, told.node, told.rank, told.tail or None, told.log, told.hint or None
    )


def _data(voyage: Voyage) -> str:
    data, stores = voyage.job.data, voyage.stores
    weights = data.weights or [1.0]
    total = sum(weights)
    sources = [
        source if len(stores) == 1 else f"{100 * weight / total:.3g} % {source}"
        for source, weight in zip(data.sources, weights, strict=True)
    ]
    tokens = units.count(sum(store.n_tokens for store in stores))
    return f"{', '.join(sources)}, {tokens} tokens ({stores[0].tokenizer.name})"


def _next(args: argparse.Namespace, voyage: Voyage, code: int) -> list[str]:
    path = voyage.opened.folder.path
    if code == EXIT_DONE:
        return [f"seatrial export {path} --out {path.name}-hf", f"seatrial watch {path} --once"]
    words = ["seatrial", "train", str(args.job)]
    words += [w for s in args.set for w in ("--set", s)]
    if args.runs != Path("runs"):
        words += ["--runs", str(args.runs)]
    try:
        step = voyage.resume_step
        what = "starts over: there is no checkpoint yet" if step is None else f"resumes after step {step}"
    except SeatrialError as error:  # the storage may be what ended the run
        what = error.message
    return [f"{shlex.join(words)}   # {what}", f"seatrial watch {path} --once"]
