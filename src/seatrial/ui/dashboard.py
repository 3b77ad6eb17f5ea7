"""The full-screen views of `seatrial watch`. Pure."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from seatrial.base import units
from seatrial.record.nodes import current_nodes
from seatrial.record.states import State
from seatrial.record.view import RunView
from seatrial.ui import figures
from seatrial.ui.out import LABEL_WIDTH, Pair
from seatrial.ui.recovery import message_of
from seatrial.ui.summary import STATE_STYLES, alert_pairs, live_pairs, shown_events

if TYPE_CHECKING:
    from rich.console import RenderableType

    from seatrial.plan.report.step_waterfall import StepWaterfall
    from seatrial.record.frontier import Account

ViewName = Literal["overview", "ranks", "step", "events"]
KEYS: dict[str, ViewName] = {"1": "overview", "2": "ranks", "3": "step", "4": "events"}

# Distinct for the colour-blind too (Okabe and Ito), in the order of `record.stages.STAGES`; waiting is light.
_STAGE_STYLES = {
    "data": "#e69f00",
    "host": "#f0e442",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "optimizer": "#009e73",
    "save": "#cc79a7",
}
_WAITING = ("#d55e00", "#a05a2c", "#7b6888", "#999999", "#bbbbbb", "#dddddd", "#eeeeee")

# Deviation of a rank's own work from its peers, in shares of a step: from much less work to much more.
_STEPS_OF_MAP = ((-0.05, "#2166ac"), (-0.02, "#67a9cf"), (0.02, "#d9d9d9"), (0.05, "#f4a582"))
_MUCH_MORE = "#b2182b"


@dataclass(frozen=True)
class ViewState:
    """The state of a run to draw. `account` and `waterfall`: of its last generation; None if not recorded."""

    view: RunView
    now: float  # unix seconds
    account: Account | None
    pipeline: int  # pipeline stages; own work is compared among the ranks of a stage; 1 if unknown
    waterfall: StepWaterfall | None
    why_no_prediction: str
    underway: str | None  # the current recovery
    goodput: Sequence[Pair] = ()


def draw(shown: ViewState, which: ViewName, width: int, height: int) -> RenderableType:
    """The view, in `height` lines of `width` columns."""
    top = [_headline(shown), *_progress(shown)]
    room = height - len(top) - 2  # an empty line, and the keys
    body = {"overview": _overview, "ranks": _ranks, "step": _step, "events": _events}[which]
    lines = [
        Text.assemble(line, no_wrap=True, overflow="ellipsis")
        for line in body(shown, width, room)[: max(0, room)]
    ]
    padding = [Text("")] * max(0, room - len(lines))
    return Group(*top, Text(""), *lines, *padding, _keys(which))


def _headline(shown: ViewState) -> Text:
    view = shown.view
    state: State = view.state
    text = Text.assemble(
        (view.folder.path.name, "bold"),
        "  ",
        (state, STATE_STYLES.get(state, "bold yellow")),
        f"  generation {view.generation}" if view.generation else "",
        no_wrap=True,
        overflow="ellipsis",
    )
    if shown.underway is not None:
        text.append(f"  {figures.printable(shown.underway)}", "yellow")
    return text


def _progress(shown: ViewState) -> list[RenderableType]:
    """A progress bar with the ETA, then the age and the figures of the last step."""
    view, last, total = shown.view, shown.view.last, shown.view.job.steps
    if last is None:
        waited = view.wall_time_s(shown.now)
        since = "" if waited is None else f" after {units.duration(waited)}"
        return [Text(f"no step yet{since}", "dim")]
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        Text(f"step {figures.step_of(view.step, total)}", "bold"),
        ProgressBar(total=total or 1, completed=view.step if total else 0),
        Text(_left(shown)),
    )
    age = max(0.0, shown.now - last.time)
    late = view.state == "running" and age > figures.late_after_s(last, view.job.batches)
    line = Text.assemble(
        ("last step ", "dim"),
        (f"{figures.eta(age)} ago", "bold red" if late else "bold"),
        ("  loss ", "dim"),
        (f"{last.loss:.4f}", "bold"),
        ("  grad ", "dim"),
        f"{last.grad_norm:.2f}  {figures.speed(last, figures.unit(view.device))}",
        no_wrap=True,
        overflow="ellipsis",
    )
    return [bar, line]


def _left(shown: ViewState) -> str:
    """The ETA, and the plan's for the same steps."""
    view, waterfall = shown.view, shown.waterfall
    text = f"ETA {figures.eta(view.eta_s)}" if view.state == "running" else ""
    predicted = None if waterfall is None else waterfall.predicted_step_s
    if predicted is None or view.job.steps is None or view.eta_s is None:
        return text
    planned = predicted * (view.job.steps - view.step)
    return f"{text}, by the plan {figures.eta(planned)}"


def _overview(shown: ViewState, width: int, room: int) -> list[Text]:
    view = shown.view
    problems = [Pair("damaged", str(problem), "yellow") for problem in view.problems[-3:]]
    lines = [_pair(pair) for pair in (*problems, *alert_pairs(view))]
    loss = view.history.column("loss")
    if len(loss) > 1:
        lines += _chart("loss", loss, width, max(3, min(8, room // 4)))
    lines += _split_bar(shown.account, width)
    rest = [pair for pair in live_pairs(view, shown.now) if pair.label not in ("loss", "alert")]
    lines += [_pair(pair) for pair in (*shown.goodput, *rest)]
    if shown.account is not None:
        lines += [Text(""), *_map(shown, width, max(2, room // 4))]
    left = room - len(lines) - 1
    if left > 1:
        lines += [Text(""), *_event_lines(view, left - 1)]
    return lines


def _ranks(shown: ViewState, width: int, room: int) -> list[Text]:
    if shown.account is None:
        return [Text("the ranks have not recorded the stages of any step of this generation yet", "dim")]
    from seatrial.record.frontier import excess_over_peers

    account = shown.account
    deviation = excess_over_peers(account.split.own_s, shown.pipeline)
    worst = sorted(range(account.ranks), key=lambda rank: -abs(deviation[rank]))[: max(3, room // 4)]
    lines = _map(shown, width, room - len(worst) - 3)
    lines += [Text(""), Text("rank  node  own work per step   against its peers", "bold")]
    nodes = current_nodes(shown.view.events, account.ranks)
    for rank in worst:
        node = nodes[rank * len(nodes) // account.ranks] if nodes else "?"
        own = units.duration(float(account.split.own_s[rank]))
        share = 100 * deviation[rank] / account.split.step_s
        lines.append(Text(f"{rank:>4}  {node!s:>4}  {own:>18}  {share:+.1f} % of a step"))
    return lines


def _step(shown: ViewState, width: int, room: int) -> list[Text]:
    """The step time by stage, measured and planned."""
    lines = _split_bar(shown.account, width)
    waterfall = shown.waterfall
    if waterfall is None:
        return lines or [Text("the ranks have not recorded the stages of any step yet", "dim")]
    rows = [*waterfall.shown, waterfall.total]
    name = max(len(row.name) for row in rows)
    predicted = waterfall.predicted_step_s is not None
    title = f"{'':<{name}}  {'measured':>9}"
    lines += [Text(""), Text(f"{title}  {'planned':>9}  ratio" if predicted else title, "bold")]
    for row in rows:
        measured, planned = (
            "unknown" if s is None else units.duration(s) for s in (row.seconds, row.predicted_s)
        )
        ratio = "" if row.ratio is None else f"{row.ratio:5.2f}"
        line = f"{row.name:<{name}}  {measured:>9}"
        lines.append(Text(f"{line}  {planned:>9}  {ratio}" if predicted else line))
    notes = [] if predicted else [f"no prediction: {shown.why_no_prediction}"]
    for note in (*notes, *waterfall.notes()):
        lines += [Text(part, "dim") for part in textwrap.wrap(note, max(20, width))]
    return lines


def _events(shown: ViewState, width: int, room: int) -> list[Text]:
    return _event_lines(shown.view, room)


def _event_lines(view: RunView, most: int) -> list[Text]:
    lines = []
    for event in shown_events(view)[-max(1, most) :]:
        style = {"error": "red", "warning": "yellow"}.get(event.severity, "")
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.time))
        text = figures.printable(message_of(event)).replace("\n", "; ")
        lines.append(Text.assemble((when, "dim"), f"  {text}", style=style))
    return lines


def _chart(name: str, values: Sequence[float], width: int, height: int) -> list[Text]:
    """All `values` as an area chart of `height` lines."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return [Text(f"{name}: no finite value", "bold red")]
    label = max(len(f"{v:.4g}") for v in (min(finite), max(finite)))
    rows = figures.area(values, max(8, width - label - LABEL_WIDTH - 1), height)
    marks = [f"{max(finite):.4g}", *[""] * (height - 2), f"{min(finite):.4g}"]
    return [
        Text.assemble(
            (f"{name if i == 0 else '':<{LABEL_WIDTH}}", "cyan"), (f"{mark:>{label}} ", "dim"), (row, "blue")
        )
        for i, (mark, row) in enumerate(zip(marks, rows, strict=True))
    ]


def _split_bar(account: Account | None, width: int) -> list[Text]:
    """One bar of the stages of a step, with a legend."""
    if account is None:
        return []
    room = max(10, width - LABEL_WIDTH)
    bar = Text(f"{'step time':<{LABEL_WIDTH}}", "cyan")
    names = Text(" " * LABEL_WIDTH)
    waiting = iter(_WAITING)
    total, passed, drawn = account.split.step_s, 0.0, 0
    names.append(f"{units.duration(total)}  ", "bold")
    for stage, seconds in account.seconds.items():
        style = _STAGE_STYLES.get(stage) or next(waiting)
        passed += seconds
        end = round(room * passed / total)
        bar.append("█" * (end - drawn), style)
        drawn = end
        share = 100 * seconds / total
        if share >= 0.5:
            names.append("■ ", style).append(f"{stage.replace('_', ' ')} {share:.0f} %  ")
    return [bar, names]


def _map(shown: ViewState, width: int, room: int) -> list[Text]:
    """A heat map with one cell per rank, grouped by node: own work against the peers of the same pipeline rank."""
    from seatrial.record.frontier import excess_over_peers

    account = shown.account
    assert account is not None
    nodes: list[int] | list[str] = current_nodes(shown.view.events, account.ranks) or ["?"]
    deviation = excess_over_peers(account.split.own_s, shown.pipeline) / account.split.step_s
    each = account.ranks // len(nodes)
    label = max(len(str(node)) for node in nodes)
    cell = label + 1 + each + 2
    across = max(1, (width - LABEL_WIDTH) // cell)
    most = max(1, room - 1) * across
    chosen = sorted(
        range(len(nodes)), key=lambda slot: -abs(deviation[slot * each : (slot + 1) * each]).max()
    )
    chosen = sorted(chosen[:most])
    left_out = len(nodes) - len(chosen)
    lines = []
    for begin in range(0, len(chosen), across):
        line = Text(f"{'own work' if not begin else '':<{LABEL_WIDTH}}", "cyan")
        for slot in chosen[begin : begin + across]:
            line.append(f"{nodes[slot]!s:>{label}} ", "dim")
            for value in deviation[slot * each : (slot + 1) * each]:
                line.append("■", next((style for most, style in _STEPS_OF_MAP if value < most), _MUCH_MORE))
            line.append("  ")
        lines.append(line)
    legend = Text(" " * LABEL_WIDTH, "dim")
    legend.append("own work against peers, share of a step: ")
    for style, words in zip(
        [*(style for _, style in _STEPS_OF_MAP), _MUCH_MORE],
        ("< -5 %", "-5 to -2 %", "even", "2 to 5 %", "> 5 %"),
        strict=True,
    ):
        legend.append("■ ", style).append(f"{words}  ")
    if left_out:
        legend.append(f"{left_out:,} nodes that deviate less are not shown")
    return [*lines, legend]


def _pair(pair: Pair) -> Text:
    text = figures.printable(pair.text).replace("\n", "; ")
    return Text.assemble((f"{pair.label:<{LABEL_WIDTH}}", "cyan"), (text, pair.style))


def _keys(which: ViewName) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for key, name in KEYS.items():
        line.append(f" {key} {name} ", "reverse" if name == which else "dim")
    return line.append(" q quit ", "dim")
