"""The series of a whole run, from its folder: what `/metrics` of the coordinator's agent and of the web process have."""

from __future__ import annotations

import time
from collections.abc import Mapping

from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.frontier import account
from seatrial.record.goodput import goodput
from seatrial.record.nodes import Nodes
from seatrial.record.series import series
from seatrial.record.stages import read_generation
from seatrial.record.view import RunReader, RunView

_STEPS = 32  # recent ones, whose mean is the split
_SPLIT_EVERY_S = 60.0  # reads one file per rank


class RunSeries:
    """Follows one run; each poll reads only new records."""

    def __init__(self, folder: RunFolder) -> None:
        self._reader = RunReader(folder)
        self._split: tuple[float, dict[str, float]] | None = None  # when it was made, monotonic

    def read(self, now: float) -> dict[str, float]:
        """`run_values` of the run at unix time `now`."""
        view, at = self._reader.view(), time.monotonic()
        if self._split is None or not self._split[1] or at - self._split[0] >= _SPLIT_EVERY_S:
            self._split = at, recent_split(view)
        return run_values(view, now, self._split[1])


def run_values(view: RunView, now: float, split: Mapping[str, float] | None = None) -> dict[str, float]:
    """Series -> value of a run at unix time `now`; unknown values are absent. `view` must not be a brief one.

    `split`: that of `recent_split`, which may be of some time ago; None: of now.
    """
    last, own, validated = view.last, view.own_events, view.history.validation
    nodes = Nodes(own)
    known: dict[str, float | None] = {
        "run_running": float(view.state == "running"),
        "run_start_timestamp_seconds": own[0].time if own else None,
        "run_generation": view.generation or None,
        "run_step": view.step,
        "run_target_step": view.job.steps,
        "run_eta_seconds": view.eta_s if view.state == "running" else None,
        "run_checkpoints": len(view.checkpoints),
        "run_checkpoint_interval_steps": view.job.checkpoint_steps or _chosen_interval(own),
        "run_ranks": _ranks(own),
        "run_nodes": len([n for n in nodes.training if n not in nodes.gone]) if nodes.training else None,
        "run_spare_nodes": len(nodes.spares) if nodes.training else None,
    }
    if last is not None:
        known |= {
            "run_last_step_timestamp_seconds": last.time,
            "run_loss": last.loss,
            "run_validation_loss": validated[-1][1] if validated else None,
            "run_gradient_norm": last.grad_norm,
            "run_router_aux_loss": last.router_aux_loss,
            "run_expert_load_max_ratio": last.expert_load_max,
            "run_expert_load_min_ratio": last.expert_load_min,
            "run_idle_experts": last.idle_experts,
            "run_learning_rate": last.lr,
            "run_tokens": view.tokens,
            "run_tokens_per_second": last.tokens_per_s,
            "run_mfu_ratio": last.mfu,
            "run_memory_bytes": last.memory_bytes,
            "run_step_seconds": last.step_time_s,
        }
    if view.latest is not None:
        known |= {
            "run_checkpoint_step": view.latest.step,
            "run_checkpoint_timestamp_seconds": view.latest.time,
        }
    spent = goodput(view, now)
    known |= {"run_ettr_ratio": spent.ettr, "run_mtbf_seconds": spent.mtbf_s}
    run = view.folder.path.absolute().name
    found = {series(name, run=run): float(value) for name, value in known.items() if value is not None}
    for cause, seconds in spent.seconds.items():
        found[series("run_goodput_seconds", run=run, cause=cause)] = seconds
    for stage, seconds in (recent_split(view) if split is None else split).items():
        found[series("run_step_stage_seconds", run=run, stage=stage)] = seconds
    return found


def recent_split(view: RunView) -> dict[str, float]:
    """Stage -> seconds of a recent step; empty until all ranks have recorded one. Reads a file of each rank."""
    stages, _ = read_generation(view.folder, view.generation, most=_STEPS)
    found = account(stages)
    return {} if found is None else found.seconds


def _ranks(events: list[Event]) -> int | None:
    """The size of the last generation's layout."""
    for event in reversed(events):
        layout = (event.data or {}).get("layout") if event.kind == "generation_started" else None
        if isinstance(layout, dict):
            size = layout.get("world_size")
            return size if type(size) is int else None
    return None


def _chosen_interval(events: list[Event]) -> int | None:
    """Steps between two checkpoints, where the run chooses them (`checkpoint.every_steps = "auto"`)."""
    chosen = [(event.data or {}).get("steps") for event in events if event.kind == "checkpoint_interval"]
    return chosen[-1] if chosen and type(chosen[-1]) is int else None
