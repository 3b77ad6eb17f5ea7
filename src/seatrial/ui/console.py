"""Console output of a run while it trains, read entirely from the run folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from seatrial.record.events import Event
from seatrial.record.failure import Failure
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord
from seatrial.record.states import State
from seatrial.record.view import RunReader, RunView
from seatrial.ui import figures
from seatrial.ui.header import header_pairs
from seatrial.ui.out import Out, Pair
from seatrial.ui.recovery import Recoveries, message_of
from seatrial.ui.summary import live_pairs, print_events, print_headline, print_summary, summary_json

if TYPE_CHECKING:
    from seatrial.job import Job
    from seatrial.ui.live import LivePane

# The summary shows these in full.
_IN_SUMMARY = ("run_finished", "run_failed", "run_interrupted", "sample")


class TrainConsole:
    """Prints a header, steps and a summary on stderr; the summary's JSON on stdout.

    `poll` is called a few times per second and shows records of `generation` and later ones.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        total_steps: int | None = None,
        generation: int = 0,
        plain: bool = False,
        json_output: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.folder = folder
        self.out = Out(stream, plain=plain)
        self._json_output = json_output
        self._total = total_steps
        self._generation = generation
        self._reader = RunReader(folder, self._take)
        self._pending: list[
            tuple[MetricsRecord | Event, float | None]
        ] = []  # items to show, with the ETA at that time
        self._reported = 0  # number of the reader's problems already reported
        self._recoveries = Recoveries()
        self._began = time.time()
        self._live: LivePane | None = None
        self._stands: list[Pair] = []  # live lines about the run as a whole
        self._stands_until = 0.0  # when to refresh `_stands`, on the monotonic clock
        self._left_out = 0  # last step, including skipped ones after the last trained step

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
        """Print what will run. `resume_step`: the step of the checkpoint to resume from."""
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
        self._reader.poll()  # reading a long run takes seconds; nothing waits for it here

    def catch_up(self) -> None:
        """Print the current state and follow it from here: for a viewer that starts later."""
        self._reader = RunReader(self.folder)
        view = self._reader.view()
        self._reader.show = self._take
        self._total = view.job.steps
        self._recoveries = Recoveries(view.own_events)
        print_headline(self.out, view)
        print_events(self.out, view)

    def poll(self) -> None:
        """Show new records."""
        self._reader.poll()
        if self.out.styled and self._live is None:
            from seatrial.ui.live import LivePane

            self._live = LivePane(self.out.console)
        self._show_news()
        if self._live is not None:
            self._draw(self._live)

    def ended(self, state: State | None = None, reason: str = "", failure: Failure | None = None) -> RunView:
        """The view at the end. `state` and `reason`: known to the process that ran it.

        Missing details of `failure`, or all of it if None, come from the run folder.
        """
        view = self._reader.view(own=state is not None)
        if state is not None and state != view.state:
            # There was nothing to do, or the disk was too full to record the end.
            view.state, view.state_reason = state, reason or (failure.cause if failure is not None else state)
        if view.state == "failed":
            unknown = "it ended without reporting a reason; see the logs of its ranks"
            known = failure or view.failure or Failure(None, None, unknown, unknown, time.time())
            view.failure = known.completed(self.folder, view.generation)
        return view

    def summary(self, view: RunView, next_commands: Sequence[str] = ()) -> None:
        """Print the outcome.

        `next_commands` are printed verbatim; by default the `seatrial watch` command of the run.
        """
        self._show_news()
        self.close()
        commands = list(next_commands) or [f"seatrial watch {self.folder.path} --once"]
        print_summary(self.out, view, commands)
        if self._json_output:
            sys.stdout.write(summary_json(view, time.time(), commands))
            sys.stdout.flush()

    def close(self) -> None:
        """Release the terminal; `poll` takes it again."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def __enter__(self) -> TrainConsole:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, item: MetricsRecord | Event) -> None:
        if item.generation >= self._generation:
            self._pending.append((item, self._reader.eta_s(self._total)))

    def _show_news(self) -> None:
        problems = self._reader.problems
        for problem in problems[self._reported :]:
            self.out.line(f"warning: {problem}", "yellow")
        self._reported = len(problems)
        news, self._pending = self._pending, []
        # By time; at equal times, a step before events.
        for item, eta in sorted(news, key=lambda n: (n[0].time, isinstance(n[0], Event))):
            if isinstance(item, Event):
                self._show_event(item)
            elif self._live is None:
                self.out.line(figures.step_line(item, self._total, eta, figures.unit(self._reader.device)))

    def _draw(self, live: LivePane) -> None:
        from seatrial.ui.live import pane

        now = time.monotonic()
        if now >= self._stands_until:
            view = self._reader.view()
            self._stands, self._left_out = live_pairs(view, time.time()), view.step
            self._began = time.time() - (view.wall_time_s(time.time()) or 0.0)
            # For a large run or a slow file system: spend at most a twentieth of the time on it.
            self._stands_until = now + max(0.2, 20 * (time.monotonic() - now))
        last = self._reader.history.last
        live.update(
            *pane(
                last if last is not None and last.generation >= self._reader.start else None,
                self._total,
                self._reader.eta_s(self._total),
                max(0.0, time.time() - self._began),
                self._recoveries.underway(time.time()),
                unit=figures.unit(self._reader.device),
                step=self._left_out,
                pairs=self._stands,
            )
        )

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
            # Do not repeat a node or rank that the message names.
            named = not places or all(place in event.message for place in places)
            where = "" if named else f" on {' '.join(places)}"
            self.out.line(f"{event.severity}{where}: {message_of(event)}", style)
        elif event.kind.startswith("checkpoint_") or event.kind == "resumed":
            self.out.line(f"  {event.message}", "green" if event.kind == "checkpoint_saved" else "dim")
