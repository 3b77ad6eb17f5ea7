"""Lines to a stream: styled on a terminal, plain everywhere else."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TextIO

from seatrial.ui.figures import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

LABEL_WIDTH = 13


class Pair(NamedTuple):
    """A label and its text, printed in `style` on a terminal."""

    label: str
    text: str
    style: str = ""


class Out:
    """One output stream. Imports `rich` only if it is needed."""

    def __init__(self, stream: TextIO | None = None, *, plain: bool = False) -> None:
        self.stream = sys.stderr if stream is None else stream
        # NO_COLOR (no-color.org) also disables the live line: users who set it want output that can be kept.
        self.styled = (
            not plain
            and self.stream.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        )
        self._console: Console | None = None
        self._unread = False

    @property
    def console(self) -> Console:
        """The rich console; only used if `styled`."""
        if self._console is None:
            from rich.console import Console

            self._console = Console(file=self.stream, highlight=False)
        return self._console

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line (or several), in `style` on a terminal. Prints nothing more once the reader is closed."""
        text = printable(text)
        if self.styled:
            from rich.text import Text

            self.console.print(Text(text, style=style), soft_wrap=True)
        elif not self._unread:
            try:
                print(text, file=self.stream, flush=True)
            except OSError as error:
                # `| head`, or a `tee` that died: a run must not end because its output is not read. But output lost
                # to a full disk is an error.
                if self.stream is sys.stdout and error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
                    raise
                self._unread = True

    def pair(self, label: str, text: str, style: str = "") -> None:
        """Print `label` and `text` in two columns; further lines of `text` are aligned under the first."""
        text = printable(text).replace("\n", "\n" + " " * (LABEL_WIDTH + 2))
        if self.styled:
            from rich.text import Text

            self.console.print(
                Text.assemble((f"  {label:<{LABEL_WIDTH}}", "cyan"), (text, style)), soft_wrap=True
            )
        else:
            self.line(f"  {label:<{LABEL_WIDTH}}{text}")

    def pairs(self, pairs: Iterable[Pair]) -> None:
        """Print each as `pair` does."""
        for pair in pairs:
            self.pair(*pair)

    def boxed(self, title: str, start: str, text: str) -> None:
        """Print `start` and `text` in a box, or without a terminal indented behind a rule."""
        start, text = printable(start), printable(text).rstrip()
        if self.styled:
            from rich import box
            from rich.panel import Panel
            from rich.text import Text

            body = Text.assemble((start, "bold"), text)
            self.rendered(
                Panel(body, title=Text(title), title_align="left", box=box.ROUNDED, border_style="dim")
            )
        else:
            self.line(f"  {title}")
            self.line("\n".join(f"  | {line}".rstrip() for line in (start + text).splitlines()))

    def rendered(self, what: RenderableType) -> None:
        """Print a rich renderable; only if `styled`."""
        self.console.print(what)
