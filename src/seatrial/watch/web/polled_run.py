"""A run as read by one poll of its folder: what all pages are made from."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from seatrial.base.errors import InputError
from seatrial.plan.report.step_waterfall import StepWaterfall
from seatrial.record.folder import RunFolder
from seatrial.record.frontier import Account, account
from seatrial.record.goodput import Goodput, goodput
from seatrial.record.nodes import Nodes, current_nodes
from seatrial.record.stages import RankStages, read_generation
from seatrial.record.straggling import Straggling, straggling
from seatrial.record.telemetry import Sample, read_latest
from seatrial.record.view import RunReader, RunView
from seatrial.ui.recovery import Recoveries
from seatrial.ui.step_split import pipeline_of, waterfall_of_run

_STEPS = 64  # recent steps of every rank, for the step split and the heat map
_SLOW_S = 5.0  # between two reads of the ranks' records and of telemetry
_STRAGGLING_S = 120.0  # between two reads of sampled steps of the whole run
_SHARE = 20  # at most 1/20 of the time is spent on these reads


@dataclass(frozen=True)
class Ranks:
    """Recent steps of the last generation, from the ranks' records."""

    account: Account | None = None
    pipeline: int = 1  # pipeline stages; own work is compared among the ranks of a stage
    nodes: tuple[int, ...] = ()  # node of each slot; empty: unknown
    seconds: NDArray[np.float64] | None = None  # ranks x STAGES, median over recent steps
    waterfall: StepWaterfall | None = None
    why_no_prediction: str = ""

    @property
    def own_s(self) -> NDArray[np.float64]:
        assert self.account is not None
        return self.account.split.own_s


@dataclass
class PolledRun:
    """A run at `now` (unix seconds)."""

    view: RunView
    now: float
    ranks: Ranks
    telemetry: Mapping[int, Sample] = field(default_factory=dict)
    whole: Goodput | None = None  # where the time of the run went
    today: Goodput | None = None  # since midnight; None: the run did not run today
    complete: bool = False  # whether everything besides the view has been read

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.view.own_events)

    @property
    def underway(self) -> str | None:
        """The recovery in progress, as text."""
        if self.view.state != "running":
            return None
        return Recoveries(self.view.own_events).underway(self.now)


class PolledRunReader:
    """Follows one run; a poll reads only what was written since the last one."""

    def __init__(self, folder: RunFolder) -> None:
        self._reader = RunReader(folder)
        self._ranks = Ranks()
        self._telemetry: Mapping[int, Sample] = {}
        self._goodput: tuple[Goodput | None, Goodput | None] = None, None
        self._straggling: Straggling | None = None
        self._due = self._straggling_due = 0.0  # on the monotonic clock
        self._ranks_at = -math.inf
        self._generation = -1

    def first(self) -> Iterator[PolledRun]:
        """The first states, each with more data: reading a long run takes seconds."""
        view = self._reader.view()
        yield PolledRun(view, time.time(), self._ranks)
        self._ranks, self._ranks_at = _read_ranks(view), time.monotonic()
        yield PolledRun(view, time.time(), self._ranks)

    def poll(self) -> PolledRun:
        """The run now. Damage of the folder is not raised but listed in the view's problems."""
        view, started_at = self._reader.view(), time.monotonic()
        if started_at >= self._due or view.generation != self._generation:
            self._generation = view.generation
            if started_at - self._ranks_at > _SLOW_S / 2:
                self._ranks, self._ranks_at = _read_ranks(view), started_at
            self._telemetry = read_latest(view.folder)
            self._goodput = self._where_time_went(view)
            duration_s = time.monotonic() - started_at
            self._due = started_at + max(_SLOW_S, _SHARE * duration_s)
        return PolledRun(view, time.time(), self._ranks, self._telemetry, *self._goodput, complete=True)

    def _where_time_went(self, view: RunView) -> tuple[Goodput | None, Goodput | None]:
        if not view.generation:
            return None, None
        started_at = time.monotonic()
        if started_at >= self._straggling_due:
            self._straggling = straggling(view.folder, view.log)
            duration_s = time.monotonic() - started_at
            self._straggling_due = started_at + max(_STRAGGLING_S, 10 * _SHARE * duration_s)
        now = time.time()
        whole = goodput(view, now, straggling=self._straggling)
        since = midnight(now)
        if whole.end <= since:
            return whole, None
        return whole, goodput(view, now, since=since, straggling=self._straggling)


def midnight(now: float) -> float:
    """Unix time of the last midnight, in local time."""
    today = time.localtime(now)
    return time.mktime((today.tm_year, today.tm_mon, today.tm_mday, 0, 0, 0, 0, 0, -1))


def _read_ranks(view: RunView) -> Ranks:
    found, problems = read_generation(view.folder, view.generation, most=_STEPS)
    view.problems += [problem for problem in problems if problem not in view.problems]
    split = account(found)
    if split is None:
        return Ranks()
    waterfall, why = waterfall_of_run(view, split)
    pipeline = 1
    with contextlib.suppress(InputError):  # `why` has the reason
        pipeline = pipeline_of(view, split)
    return Ranks(
        split,
        pipeline,
        tuple(current_nodes(view.events, split.ranks)),
        _medians(found, split),
        waterfall,
        why,
    )


def _medians(found: Mapping[int, RankStages], split: Account) -> NDArray[np.float64]:
    """The median over the steps of `split`, shape (ranks, stages)."""
    rows = []
    for rank in range(split.ranks):
        each = found[rank]
        inside = (each.steps >= split.first_step) & (each.steps <= split.last_step)
        rows.append(np.median(each.seconds[inside], axis=0))
    return np.stack(rows)
