"""`seatrial train JOB`: run a job to its end; the same command again resumes it."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
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
from seatrial.cli.validate import job_arguments, train_command
from seatrial.record import events
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.states import State
from seatrial.record.view import Failure, RunView

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
            done = f"all {job.train.steps} steps are done already"
            console.out.line(f"{done}; --fresh starts over")
            view = console.ended("finished", done)
            console.summary(view, _next(args, voyage, EXIT_DONE, view))
            return EXIT_DONE
        outcome = voyage.run(tick=console.poll)
        view = console.ended(_STATES[outcome.exit_code], failure=_failure(outcome))
        console.summary(view, _next(args, voyage, outcome.exit_code, view))
        return outcome.exit_code


def _tell_memory(voyage: Voyage, ready: Ready) -> list[tuple[str, str]]:
    """Lines of the header, and the same data for an event."""
    from seatrial.plan.host import in_words

    lines = list(in_words(ready.account))
    copies, _ = ready.account.copies
    notable = bool(ready.notes) or copies < min(1, voyage.job.resilience.snapshot_every_steps) * 2
    with contextlib.suppress(OSError):  # the launch will report that the folder cannot be written
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


def _next(args: argparse.Namespace, voyage: Voyage, code: int, view: RunView) -> list[str]:
    """Suggested commands, each with what it does."""
    path = voyage.opened.folder.path
    look = f"seatrial watch {shlex.quote(str(path))} --once"
    if code == EXIT_DONE:
        return [f"seatrial export {shlex.quote(str(path))} --out {shlex.quote(path.name)}-hf", look]
    if view.diverged is not None:
        return [*_after_divergence(args, voyage, view, view.diverged), look]
    try:
        step = voyage.resume_step
        what = "starts over: there is no checkpoint yet" if step is None else f"resumes after step {step}"
    except SeatrialError as error:  # the storage may be what ended the run
        what = error.message
    return [f"{train_command(args)}   # {what}", look]


def _after_divergence(args: argparse.Namespace, voyage: Voyage, view: RunView, end: Event) -> list[str]:
    """Not the same command: it would reach the same step with the same budget, and fail there again."""
    path, job = view.folder.path, voyage.job
    lower = f"{job.optimizer.lr / 3:.2g}"
    commands = [
        f"{train_command(args, '--fresh', lr=lower)}   # starts over with a third of the learning rate; keeps the old run"
    ]
    if view.checkpoints:
        told = (end.data or {}).get("step")
        troubled = told if type(told) is int else view.step + 1
        while troubled - 1 in view.skipped_steps:
            troubled -= 1
        steps = [c.step for c in view.checkpoints]
        step = max((s for s in steps if s < troubled), default=max(steps))
        others = ", ".join(str(s) for s in steps if s != step)
        more = 2 * max(1, job.resilience.max_skipped_steps)
        commands += [
            f"seatrial export {shlex.quote(str(path))} --step {step} --out {shlex.quote(path.name)}-{step}-hf"
            "   # for model.init_from of a job with another name and learning rate"
            + (f"; there are also {others}" if others else ""),
            f"{train_command(args, '--set', f'resilience.max_skipped_steps={more}')}"
            f"   # if it is the samples: resumes after step {max(steps)}, and may leave out {more} steps in all",
        ]
    if end.rank is not None:
        commands.append(
            f"seatrial check {shlex.quote(str(args.job))}   # only rank {end.rank} on node {end.node} "
            "computed it: is its hardware well?"
        )
    return commands
