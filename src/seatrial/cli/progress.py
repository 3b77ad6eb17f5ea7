"""Progress of long work on stderr: a bar on a terminal, otherwise an occasional line; both with the time left."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from seatrial.base import units

if TYPE_CHECKING:
    from rich import progress as rich_progress
    from rich.live import Live

    from seatrial.ui.out import Out

PLAIN_EVERY_S = 10.0
_RUN_EVERY_S = 15.0


class LiveLine:
    """The progress of the current run of several: on a terminal one line that is replaced, otherwise an occasional line."""

    def __init__(self, out: Out) -> None:
        self._out = out
        self._began = self._shown_at = time.monotonic()
        self._name = ""
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._out.styled:
            from rich.live import Live

            # Drawn by `show` alone: no extra thread next to the runs under test.
            self._live = Live(
                console=self._out.console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, name: str, text: str, more: str = "") -> None:
        """Show `text`, the seconds since the run `name` began, and `more`; may be called many times a second."""
        now = time.monotonic()
        if name != self._name:
            self._name, self._began, self._shown_at = name, now, now
        elif now - self._shown_at < (_RUN_EVERY_S if self._live is None else 0.2):
            return
        self._shown_at = now
        shown = f"{text}, {now - self._began:.0f} s{more}"
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(shown, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._out.line(shown)


class Progress:
    """Context manager, called with (bytes done, total bytes, current item). Total 0: unknown.

    Bytes done before the first call, by an earlier attempt, do not count towards the rate.
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._bar: rich_progress.Progress | None = None
        self._task: rich_progress.TaskID | None = None
        self._began = self._last = time.monotonic()
        self._first: int | None = None
        self._total = 0

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str) -> None:
        """Print a line that stays on the screen."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr)

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._first is None or total != self._total or done < self._first:  # the next item starts
            self._first, self._total = done, total
            self._began = self._last = time.monotonic()
            if self._bar is not None and self._task is not None:
                self._bar.remove_task(self._task)
                self._task = None
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self._verb, total=total or None, completed=done)
            self._bar.update(self._task, completed=done, total=total or None)
            return
        now = time.monotonic()
        if now - self._last < PLAIN_EVERY_S or not self._first < done < (total or done + 1):
            return
        self._last = now
        if not total:
            print(f"{self._verb}: {units.memory(done)} so far, at {what}", file=sys.stderr)
            return
        left = units.duration((now - self._began) * (total - done) / (done - self._first))
        size = f"{units.memory(done)} of {units.memory(total)}"
        print(f"{self._verb}: {size} ({100 * done // total} %), {left} left, at {what}", file=sys.stderr)
