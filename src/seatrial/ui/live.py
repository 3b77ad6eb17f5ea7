"""The live lines at the bottom of a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from seatrial.base import units
from seatrial.record.metrics import MetricsRecord
from seatrial.ui import figures
from seatrial.ui.out import LABEL_WIDTH, Pair

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LEFT_ABOVE = 6  # terminal lines kept free for events


class LivePane:
    """A progress bar, the last step's figures and the run's state, redrawn in place; removed on close."""

    def __init__(self, console: Console) -> None:
        # Drawn by `update` only, without rich's refresh thread. stdout carries data and is not redirected.
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()

    def update(self, *lines: RenderableType) -> None:
        """Draw as many of `lines` as fit; each takes one or two terminal lines."""
        room = max(1, self._live.console.size.height - _LEFT_ABOVE)
        self._live.update(Group(*lines[:room]), refresh=True)

    def close(self) -> None:
        self._live.stop()


def pane(
    last: MetricsRecord | None,
    total: int | None,
    eta_s: float | None,
    waited_s: float,
    underway: str | None = None,
    *,
    unit: str = "GPU",
    step: int = 0,
    pairs: Sequence[Pair] = (),
) -> list[RenderableType]:
    """Progress, figures of the last step, and `pairs`, each on one line of any width.

    `last` is None before the first step, after waiting `waited_s` seconds. `underway` describes the current recovery.
    `step` is set if steps after the last one were skipped.
    """
    rest = [_pair(pair) for pair in pairs]
    if underway is not None:
        text = Text(figures.printable(underway), style="yellow", no_wrap=True, overflow="ellipsis")
    elif last is None:
        text = Text(f"starting: no step yet after {waited_s:.0f} s", style="dim", no_wrap=True)
    else:
        text = _figures(last, unit)
    if last is None:
        return [text, *rest]
    step = max(step, last.step)
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        Text(f"step {figures.step_of(step, total)}", style="bold"),
        ProgressBar(total=total or 1, completed=step if total else 0),
        Text(f"ETA {figures.eta(eta_s)}" if total is None or step < total else "finishing"),
    )
    return [bar, text, *rest]


def _figures(last: MetricsRecord, unit: str) -> Text:
    return Text.assemble(
        ("loss ", "dim"),
        (f"{last.loss:.4f}", "bold"),
        ("  grad ", "dim"),
        f"{last.grad_norm:.2f}  ",
        "" if last.validation_loss is None else f"validation {last.validation_loss:.4f}  ",
        figures.speed(last, unit),
        ("  step ", "dim"),
        units.duration(last.step_time_s),
        no_wrap=True,
        overflow="ellipsis",
    )


def _pair(pair: Pair) -> Text:
    text = figures.printable(pair.text).replace("\n", "; ")
    return Text.assemble(
        (f"{pair.label:<{LABEL_WIDTH}}", "cyan"), (text, pair.style), no_wrap=True, overflow="ellipsis"
    )
