"""How often to save, for `checkpoint.every_steps = "auto"`: Young's formula over measured costs and the failure rate.

    interval = sqrt(2 C M)        J. W. Young, CACM 17(9), 1974
    C = cost of one save in training time: the stall, plus the slowdown of the steps during the write
    M = mean time to failure of the job = 1 / (nodes x rate)
    rate = (1 + failures) / (1 / prior + node-days)

The rate is the mean of a gamma distribution: a published rate that counts as much as one failure, updated by the run's
own history. Every failure is assumed to go back to a checkpoint, though most go back to a snapshot in memory: saving
too often costs little, saving too rarely loses work for good. Pure except for `write_interval`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from seatrial.base import atomic
from seatrial.hardware.failures import Rate
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder

SCHEMA_VERSION = 1
FORMULA = "sqrt(2 * save_cost_s * mttf_s), between 2 * write_s and max_unsaved_s / 2"
_DAY_S = 86_400.0


def young(save_s: float, mttf_s: float) -> float:
    """Young's interval sqrt(2 w M), in seconds (J. W. Young, CACM 17(9), 1974)."""
    return math.sqrt(2 * save_s * mttf_s)


@dataclass(frozen=True)
class Interval:
    """The chosen interval, and every number it is derived from; times in seconds."""

    steps: int
    interval_s: float
    limited_by: str  # "" if the formula's own value applies
    save_cost_s: float
    write_s: float  # from the copy until the checkpoint is complete
    step_time_s: float
    mttf_s: float  # of the whole job
    nodes: int
    failures: int  # of this run so far
    node_days: float  # that this run has trained
    prior_per_node_day: float
    prior_source: str
    max_unsaved_s: float

    @property
    def reason(self) -> str:
        """One sentence for the user."""
        text = (
            f"a save costs {self.save_cost_s:.2f} s, a failure is expected every {self.mttf_s / 3600:.1f} h "
            f"({self.failures} in {self.node_days:.2g} node-days of this run, prior {self.prior_per_node_day:g} a "
            f"node and day): every {self.interval_s:.0f} s"
        )
        return text + (f", limited by {self.limited_by}" if self.limited_by else "")


def choose_interval(
    *,
    save_cost_s: float,
    write_s: float,
    step_time_s: float,
    nodes: int,
    failures: int,
    node_days: float,
    prior: Rate,
    max_unsaved_s: float,
) -> Interval:
    """The interval in whole steps, at least one. ValueError for a step time or prior that is not above 0."""
    if not (step_time_s > 0 and prior.per_node_day > 0 and nodes > 0):
        raise ValueError(f"no interval from {step_time_s=}, {prior=}, {nodes=}")
    rate = (1 + failures) / (1 / prior.per_node_day + node_days)
    mttf_s = _DAY_S / (nodes * rate)
    wanted, limited = young(max(0.0, save_cost_s), mttf_s), ""
    if wanted < 2 * write_s:  # the previous save must be complete, with a factor of two to spare
        wanted, limited = 2 * write_s, "the time that writing takes"
    if wanted > max_unsaved_s / 2:
        wanted, limited = max_unsaved_s / 2, "checkpoint.max_unsaved_s"
    # Round down: the limits are upper limits, and saving too often is the cheaper mistake.
    steps = max(1, math.floor(wanted / step_time_s))
    return Interval(
        steps=steps,
        interval_s=steps * step_time_s,
        limited_by=limited,
        save_cost_s=save_cost_s,
        write_s=write_s,
        step_time_s=step_time_s,
        mttf_s=mttf_s,
        nodes=nodes,
        failures=failures,
        node_days=node_days,
        prior_per_node_day=prior.per_node_day,
        prior_source=prior.source,
        max_unsaved_s=max_unsaved_s,
    )


def count_failures(events: Iterable[Event]) -> int:
    """The number of failures that the run has recovered from, according to its events."""
    return sum(event.kind == "recovering" for event in events)


def write_interval(folder: RunFolder, chosen: Interval) -> None:
    """Write it to interval.json of the run folder. Raises OSError."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "formula": FORMULA,
        **asdict(chosen),
        "reason": chosen.reason,
    }
    atomic.write_json(folder.interval_json, content)
