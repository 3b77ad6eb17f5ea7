"""What a person sees of a run while it trains: all of it read from the run folder, as any other viewer would."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from seatrial.record import events, metrics
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Tail
from seatrial.record.metrics import MetricsRecord
from seatrial.record.typed import decode_all
from seatrial.record.view import ETA_WINDOW, Failure, State, eta_s, find_failure, read_view
from seatrial.ui import figures
from seatrial.ui.header import header_pairs
from seatrial.ui.out import Out
from seatrial.ui.recovery import Recoveries
from seatrial.ui.summary import print_summary, summary_json

if TYPE_CHECKING:
    from seatrial.job import Job
    from seatrial.ui.live import LivePane

# The summary tells of these, with all there is to say.
_IN_SUMMARY = ("run_finished", "run_failed", "run_interrupted", "sample")


class TrainConsole:
    """A header, then the steps as they come, then a summary; on stderr, the summary's JSON on stdout.

    `poll` is called a few times a second. It shows what generation `generation` and later ones wrote.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        total_steps: int | None,
        generation: int,
        plain: bool = False,
        json_output: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.folder = folder
        self.out = Out(stream, plain=plain)
        self._json_output = json_output
        self._total = total_steps
        self._generation = generation
        self._metrics = Tail(folder.metrics, metrics.NOUN)
        self._events = Tail(folder.events, events.NOUN)
        self._step_times: deque[float] = deque(maxlen=ETA_WINDOW)
        self._last: MetricsRecord | None = None
        self._recoveries = Recoveries()
        self._began = time.monotonic()
        self._live: LivePane | None = None

    def header(
        self,
        job: Job,
        *,
        device: str,
        device_reason: str,
        data_summary: str,
        memory: Sequence[tuple[str, str]] = (),
        notes: Sequence[str] = (),
        resume_step: int | None = None,
    ) -> None:
        """Say what will run, before it does. `resume_step` is the step of the checkpoint it goes on from."""
        self.out.line(job.name, "bold")
        for label, text in header_pairs(
            job, self.folder, self._generation, device, device_reason, data_summary, resume_step
        ):
            self.out.pair(label, text)
        for label, text in memory:
            self.out.pair(label, text)
        for note in notes:
            self.out.pair("note", note, "yellow")
        self.out.line()

    def skip_existing(self) -> None:
        """Take in what is in the files without printing it: for a viewer that comes later."""
        records, happened = self._take()
        for record in records:
            self._count(record)
        for event in happened:
            self._recoveries.take(event)

    def poll(self) -> None:
        """Show what was written since the last call."""
        records, happened = self._take()
        if self.out.styled and self._live is None:
            from seatrial.ui.live import LivePane

            self._live = LivePane(self.out.console)
        self._warn_of_problems()
        # In the order in which they happened; at the same instant, a step before what came of it.
        merged: list[MetricsRecord | Event] = sorted(
            [*records, *happened], key=lambda item: (item.time, isinstance(item, Event))
        )
        for item in merged:
            if isinstance(item, Event):
                self._show_event(item)
            else:
                self._count(item)
                if self._live is None:
                    self.out.line(figures.step_line(item, self._total, self._eta()))
        if self._live is not None:
            underway = self._recoveries.underway(time.time())
            self._live.update(
                self._last, self._total, self._eta(), time.monotonic() - self._began, underway=underway
            )

    def summary(
        self, state: State, *, failure: Failure | None = None, next_commands: Sequence[str] = ()
    ) -> None:
        """Say how it ended: `state` is "finished", "failed", "preempted" or "stopped".

        What `failure` leaves open, and all of it where it is None, comes from the run folder. `next_commands` are
        printed as they are; without any, there is the one to look at the run again.
        """
        self.poll()
        self.close()
        view = read_view(self.folder)
        view.state = state
        if state == "failed":
            failure = failure or find_failure(self.folder, view.events, view.generation)
            failure = failure or Failure("it ended without saying why; the logs of its ranks may tell")
            view.failure = failure.completed(self.folder, view.generation)
        commands = list(next_commands) or [f"seatrial watch {self.folder.path} --once"]
        print_summary(self.out, view, commands)
        if self._json_output:
            sys.stdout.write(summary_json(view, time.time(), commands))
            sys.stdout.flush()

    def close(self) -> None:
        """Give the terminal back; `poll` takes it again."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def __enter__(self) -> TrainConsole:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self) -> tuple[list[MetricsRecord], list[Event]]:
        records, wrong = decode_all(
            MetricsRecord,
            self._metrics.poll_numbered(),
            file=self.folder.metrics.name,
            noun=self._metrics.noun,
        )
        self._metrics.problems += wrong
        happened, wrong = decode_all(
            Event, self._events.poll_numbered(), file=self.folder.events.name, noun=self._events.noun
        )
        self._events.problems += wrong
        own = self._generation
        return [r for r in records if r.generation >= own], [e for e in happened if e.generation >= own]

    def _count(self, record: MetricsRecord) -> None:
        if self._last is not None and record.generation != self._last.generation:
            self._step_times.clear()
        self._last = record
        self._step_times.append(record.step_time_s)

    def _eta(self) -> float | None:
        if self._last is None or self._total is None:
            return None
        return eta_s(list(self._step_times), self._total - self._last.step)

    def _show_event(self, event: Event) -> None:
        if event.kind in _IN_SUMMARY:
            return
        line = self._recoveries.take(event)
        if line is not None:
            self.out.line(line.text, line.style)
            return
        if event.severity in ("warning", "error"):
            style = "bold red" if event.severity == "error" else "yellow"
            known = (("node", event.node), ("rank", event.rank))
            places = [f"{what} {number}" for what, number in known if number is not None]
            # Messages that name the place themselves are not given it twice.
            told = not places or all(place in event.message for place in places)
            where = "" if told else f" on {' '.join(places)}"
            self.out.line(f"{event.severity}{where}: {event.message}", style)
        elif event.kind.startswith("checkpoint_") or event.kind == "resumed":
            self.out.line(f"  {event.message}", "green" if event.kind == "checkpoint_saved" else "dim")

    def _warn_of_problems(self) -> None:
        for tail in (self._metrics, self._events):
            for problem in tail.problems:
                self.out.line(f"warning: {problem}", "yellow")
            tail.problems.clear()
