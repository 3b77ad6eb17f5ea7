"""Resolve `parallel = "auto"` for a run: a resume reuses the choice in plan.json, a changed cluster is planned again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from seatrial.base.errors import InputError
from seatrial.base.files import read_json
from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.devices import choose_device, driver_names
from seatrial.job.job import Job
from seatrial.job.schema import ParallelSection
from seatrial.job.settled import CHOSEN_TOO, fixed, settled
from seatrial.plan.cost.calibration import shipped
from seatrial.plan.measured.rates import measured_rates
from seatrial.plan.model.hardware import Hardware, hardware_of
from seatrial.plan.search.auto import choose, fingerprint
from seatrial.record.folder import RunFolder

# Values of keys that older records lack.
_OLDER = {"accumulate": "whole"}


def settle(job: Job, folder: RunFolder, *, fresh: bool = False) -> Job:
    """`job` with a layout: its own, or with `parallel = "auto"` the one chosen for its run `folder`.

    `Job.chosen` records the choice and its reasons; `why_now` in it, why no earlier choice was reused. Raises InputError
    if no layout is possible.
    """
    if not job.is_open:
        return job
    measured = measured_rates(folder.path, job)
    place = measured.at(place_here(job))
    recorded = None if fresh else _recorded(folder)
    why = "the first choice of this run"
    if recorded is not None:
        reused, why = _reused(job, place, recorded)
        if reused is not None:
            return reused
    chosen = choose(job, place, calibration=measured.calibration(shipped()))
    return settled(job, chosen.parallel, chosen.train, {**chosen.document(), "why_now": why})


def place_here(job: Job) -> Hardware:
    """The hardware that the job will run on: a virtual cluster uses this machine's devices, not the GPU in the job."""
    place = hardware_of(job)
    if job.cluster.launcher != "local":
        return place
    device, reason = choose_device(job.cluster)
    if device == "cpu":
        return replace(
            place,
            gpu=None,
            why_no_gpu=f"the ranks are CPU processes ({reason}), for which speed is not predicted",
        )
    names = set(driver_names())
    found = find_gpu(names.pop()) if len(names) == 1 else None
    return place if found is None else replace(place, gpu=found, why_no_gpu="")


def _recorded(folder: RunFolder) -> dict[str, Any] | None:
    """The choice of an earlier start; None if there is none, and empty, which `_reused` refuses, if it is unreadable."""
    try:
        plan = read_json(folder.plan_json)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    if not isinstance(plan, dict):
        return {}
    found = plan.get("chosen")
    return found if found is None or isinstance(found, dict) else {}


def _reused(job: Job, place: Hardware, recorded: Mapping[str, Any]) -> tuple[Job | None, str]:
    """The job with the recorded choice, or why it is not reused."""
    now, before = fingerprint(place), recorded.get("cluster")
    if not isinstance(before, dict):
        return None, "the recorded choice of an earlier start is unreadable"
    if differing := [key for key in now if before.get(key) != now[key]]:
        text = ", ".join(f"{key} {_shown(before.get(key))} -> {_shown(now[key])}" for key in differing)
        return None, f"the cluster changed: {text}"
    train: dict[str, Any] = {}
    for key in CHOSEN_TOO:
        value = recorded.get(key, _OLDER.get(key))
        if fixed(job, key) and getattr(job.train, key) != value:
            return None, f"train.{key} changed: {_shown(value)} -> {_shown(getattr(job.train, key))}"
        train[key] = value
    layout = recorded.get("layout")
    if not isinstance(layout, dict):
        return None, "the recorded choice of an earlier start is unreadable"
    sizes = {key: value for key, value in layout.items() if key != "world_size"}
    if isinstance(sizes.get("shard"), int) and isinstance(sizes.get("context"), int):
        sizes["shard"] //= max(1, sizes["context"])  # as in the job file
    sizes["reshard_after_forward"] = recorded.get("reshard_after_forward")
    sizes["async_tensor"] = recorded.get("async_tensor", False)  # older records lack it
    sizes["ring_attention"] = recorded.get("ring_attention")
    try:
        parallel = ParallelSection.model_validate(sizes)
        type(job.train).model_validate({**job.train.model_dump(), **train})
    except ValidationError:
        return None, "the recorded choice of an earlier start is unreadable"
    try:
        return settled(job, parallel, train, dict(recorded)), ""
    except InputError as error:
        return None, f"the rules reject the layout of the previous start: {error.diagnostics[0].message}"


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)
