"""The live lines at the foot of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from seatrial.base import units
from seatrial.record.metrics import MetricsRecord
from seatrial.ui import figures

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class LivePane:
    """A progress bar with the last step's figures, redrawn in place; vanishes on close."""

    def __init__(self, console: Console) -> None:
        # Drawn by `update` alone: no thread of rich's beside ours. stdout is data and may be another file: not rerouted.
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()

    def update(
        self,
        last: MetricsRecord | None,
        total: int | None,
        eta_s: float | None,
        waited_s: float,
        *,
        underway: str | None = None,
    ) -> None:
        """Draw. `last` is None before the first step, for which `waited_s` seconds have been waited.

        `underway` is the recovery that the run is in.
        """
        self._live.update(pane(last, total, eta_s, waited_s, underway), refresh=True)

    def close(self) -> None:
        self._live.stop()


def pane(
    last: MetricsRecord | None,
    total: int | None,
    eta_s: float | None,
    waited_s: float,
    underway: str | None = None,
) -> RenderableType:
    """Two lines that fit 80 columns: how far, and how well."""
    if last is None:
        said = (
            f"starting: no step yet after {waited_s:.0f} s"
            if underway is None
            else figures.printable(underway)
        )
        return Text(said, style="yellow" if underway else "dim", no_wrap=True, overflow="ellipsis")
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        Text(f"step {figures.step_of(last.step, total)}", style="bold"),
        ProgressBar(total=total or 1, completed=last.step if total else 0),
        Text(f"ETA {figures.eta(eta_s)}" if total is None or last.step < total else "finishing"),
    )
    if underway is not None:
        return Group(
            bar, Text(figures.printable(underway), style="yellow", no_wrap=True, overflow="ellipsis")
        )
    how = Text.assemble(
        ("loss ", "dim"),
        (f"{last.loss:.4f}", "bold"),
        ("  grad ", "dim"),
        f"{last.grad_norm:.2f}  ",
        figures.speed(last),
        ("  step ", "dim"),
        units.duration(last.step_time_s),
        no_wrap=True,
        overflow="ellipsis",
    )
    return Group(bar, how)
