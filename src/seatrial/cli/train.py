"""`seatrial train JOB`: run a job to its end; the same command again resumes it."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from seatrial.base import process, units
from seatrial.base.errors import (
    EXIT_DONE,
    SeatrialError,
)
from seatrial.cli.attach import STATES, follow_to_end
from seatrial.cli.validate import job_arguments, train_command
from seatrial.record import events
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.launches import known_launch
from seatrial.record.view import RunView

if TYPE_CHECKING:
    from seatrial.launch.preflight import Ready
    from seatrial.launch.session import Session

_POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    job_arguments(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="start over; an existing run is renamed, not deleted"
    )
    parser.add_argument(
        "--render", action="store_true", help="print what would be started, but start nothing"
    )
    parser.add_argument(
        "--detach", action="store_true", help="start the run and return; `seatrial attach` follows it"
    )
    parser.add_argument("--plain", action="store_true", help="one line per step, also on a terminal")
    parser.add_argument(
        "--json", action="store_true", help="print the summary as one JSON document on stdout"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 done, 1 the run failed, 2 bad input, 75 preempted (state saved), 130 interrupted."""
    from seatrial.launch import launcher_for
    from seatrial.launch.base import Scheduled
    from seatrial.launch.preflight import preflight
    from seatrial.launch.session import prepare_session
    from seatrial.ui.console import TrainConsole

    ready = preflight(args.job, args.set, args.runs, fresh=args.fresh, ignore_memory=args.ignore_memory)
    job = ready.job
    launcher = launcher_for(job)
    if args.render:
        files = launcher.render(job, RunFolder(args.runs / job.name))
        for name, text in files.items():
            sys.stdout.write(text if len(files) == 1 else f"# --- {name}\n{text}\n")
        return EXIT_DONE
    if args.detach and not isinstance(launcher, Scheduled):
        return _in_background(args, RunFolder(args.runs / job.name))
    session = prepare_session(job, args.runs, fresh=args.fresh)
    memory = _report_memory(session, ready)
    folder = session.opened.folder
    with (
        session.opened as opened,
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
            device=session.device,
            device_reason=session.device_reason,
            data_summary=_data(session),
            memory=memory,
            notes=[*opened.notes, *ready.notes],
            resume_step=session.resume_step,
        )
        if session.complete:
            done = f"all {job.train.steps} steps are already done"
            console.out.line(f"{done}; --fresh starts over")
            view = console.ended("finished", done)
            console.summary(view, _next(args, session, EXIT_DONE, view))
            return EXIT_DONE
        if isinstance(launcher, Scheduled):
            launch = session.submit(launcher)
            console.out.pair("submitted", f"{launch.launcher} {launch.handle}", "bold")
            console.out.pair("follow", f"seatrial attach {shlex.quote(str(folder.path))}")
            console.out.pair("stop", f"seatrial stop {shlex.quote(str(folder.path))}")
            return EXIT_DONE if args.detach else follow_to_end(console, folder)
        outcome = session.run(tick=console.poll)
        view = console.ended(STATES[outcome.exit_code], failure=outcome.failure)
        console.summary(view, _next(args, session, outcome.exit_code, view))
        return outcome.exit_code


def _in_background(args: argparse.Namespace, folder: RunFolder) -> int:
    """Run this command without --detach as a process that outlives this one; wait until the run has begun or it exited.

    Exit code: 0, or that of a process that has exited.
    """
    args.runs.mkdir(parents=True, exist_ok=True)
    log = args.runs / f".{folder.path.name}.log"
    before = known_launch(folder)
    command = [*process.python("seatrial"), *(word for word in sys.argv[1:] if word != "--detach"), "--plain"]
    with log.open("w") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    while child.poll() is None and known_launch(folder) in (None, before):
        time.sleep(_POLL_S)
    if child.returncode is not None:
        sys.stderr.write(log.read_text())
        return child.returncode
    print(f"process {child.pid} runs the job; its output is in {log}")
    print(f"  seatrial attach {shlex.quote(str(folder.path))}   # follows it")
    print(f"  seatrial stop {shlex.quote(str(folder.path))}   # saves the state and ends it")
    return EXIT_DONE


def _report_memory(session: Session, ready: Ready) -> list[tuple[str, str]]:
    """The memory lines of the header; also records the same data as an event."""
    from seatrial.plan.cost.host import in_words

    lines = list(in_words(ready.account))
    copies, _ = ready.account.copies
    notable = bool(ready.notes) or copies < min(1, session.job.resilience.snapshot_every_steps) * 2
    with contextlib.suppress(OSError):  # the launch will report that the folder is not writable
        events.append(
            session.opened.folder,
            "memory_planned",
            "; ".join(f"{label}: {text}" for label, text in lines),
            severity="warning" if notable else "info",
            generation=session.opened.generation,
            data={**ready.account.document(), "notes": list(ready.notes)},
        )
    return lines


def _data(session: Session) -> str:
    data, stores = session.job.data, session.stores
    weights = data.weights or [1.0]
    total = sum(weights)
    sources = [
        source if len(stores) == 1 else f"{100 * weight / total:.3g} % {source}"
        for source, weight in zip(data.sources, weights, strict=True)
    ]
    tokens = units.count(sum(store.n_tokens for store in stores))
    return f"{', '.join(sources)}, {tokens} tokens ({stores[0].tokenizer.name})"


def _next(args: argparse.Namespace, session: Session, code: int, view: RunView) -> list[str]:
    """Suggested commands, each with its effect."""
    path = session.opened.folder.path
    look = f"seatrial watch {shlex.quote(str(path))} --once"
    if code == EXIT_DONE:
        return [f"seatrial export {shlex.quote(str(path))} --out {shlex.quote(path.name)}-hf", look]
    if view.diverged is not None:
        return [*_after_divergence(args, session, view, view.diverged), look]
    try:
        step = session.resume_step
        what = "starts over: there is no checkpoint yet" if step is None else f"resumes after step {step}"
    except SeatrialError as error:  # the storage may have caused the end of the run
        what = error.message
    return [f"{train_command(args)}   # {what}", look]


def _after_divergence(args: argparse.Namespace, session: Session, view: RunView, end: Event) -> list[str]:
    """Commands after a divergence. Not the same one: at the same step, with the same budget, it would fail again."""
    path, job = view.folder.path, session.job
    lower = f"{job.optimizer.lr / 3:.2g}"
    commands = [
        f"{train_command(args, '--fresh', lr=lower)}   # starts over with a third of the learning rate; keeps the old run"
    ]
    if view.checkpoints:
        ended_at = (end.data or {}).get("step")
        troubled = ended_at if type(ended_at) is int else view.step + 1
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
            f"   # if the samples are the cause: resumes after step {max(steps)}, and may skip {more} steps in all",
        ]
    if end.rank is not None:
        commands.append(
            f"seatrial check {shlex.quote(str(args.job))}   # only rank {end.rank} on node {end.node} "
            "computed it: is its hardware faulty?"
        )
    return commands
