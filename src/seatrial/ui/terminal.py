"""`seatrial watch` full-screen on a terminal, until the run ends or the user quits."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from typing import Any

from rich.console import Console
from rich.live import Live

from seatrial.base.errors import InputError
from seatrial.record.folder import RunFolder
from seatrial.record.view import RunReader
from seatrial.ui.dashboard import KEYS, ViewName, ViewState, draw
from seatrial.ui.goodput_words import goodput_pairs
from seatrial.ui.recovery import Recoveries
from seatrial.ui.step_split import account_of, pipeline_of, waterfall_of_run

_DRAW_S = 1.0
_SPLIT_S = 10.0  # between two reads of the ranks' records
_LEAVE = ("q", "Q", "\x1b", "\x04")


class Terminal:
    """Takes over the screen and reads single keys; restores the terminal on exit."""

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self._reader = RunReader(folder)
        self._which: ViewName = "overview"
        self._live = Live(console=console, auto_refresh=False, screen=True, redirect_stdout=False)
        self._was: Any = None  # saved attributes of stdin, if it is a terminal
        self._due = self._split_due = 0.0  # on the monotonic clock
        self._shown: ViewState | None = None

    def __enter__(self) -> Terminal:
        if sys.stdin.isatty():
            self._was = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()
        if self._was is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._was)

    def show(self, for_s: float) -> bool:
        """Keep the screen up to date for `for_s` seconds or until a key; false if the user quits."""
        now = time.monotonic()
        if now >= self._due:
            self._read()
            # On a large run or a slow file system: at most a tenth of the time.
            self._due = time.monotonic() + max(_DRAW_S, 9 * (time.monotonic() - now))
        if self._was is None:
            time.sleep(for_s)
            return True
        if not select.select([sys.stdin], [], [], for_s)[0]:
            return True
        key = sys.stdin.read(1)
        if key in KEYS:
            self._which = KEYS[key]
            self._draw()
        return key not in ("", *_LEAVE)

    def _read(self) -> None:
        view, now = self._reader.view(), time.monotonic()
        if self._shown is None or now >= self._split_due or view.generation != self._shown.view.generation:
            account, pipeline = account_of(view), 1
            waterfall, why = waterfall_of_run(view, account)
            with contextlib.suppress(InputError):  # `why` has the reason
                pipeline = 1 if account is None else pipeline_of(view, account)
            goodput = goodput_pairs(view, time.time())
            self._split_due = time.monotonic() + max(_SPLIT_S, 20 * (time.monotonic() - now))
        else:
            account, pipeline = self._shown.account, self._shown.pipeline
            waterfall, why = self._shown.waterfall, self._shown.why_no_prediction
            goodput = list(self._shown.goodput)
        underway = Recoveries(view.own_events).underway(time.time()) if view.state == "running" else None
        self._shown = ViewState(view, time.time(), account, pipeline, waterfall, why, underway, goodput)
        self._draw()

    def _draw(self) -> None:
        assert self._shown is not None
        size = self._live.console.size
        self._live.update(draw(self._shown, self._which, size.width, size.height), refresh=True)
