"""Start a run: create or find its folder, check it, lock it, and begin the next generation."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.base.atomic import fsync_folder, write_json, write_text
from seatrial.base.errors import InputError, RunFailed
from seatrial.base.files import flat, parse_toml, read_json, read_text
from seatrial.record import events, lock
from seatrial.record.folder import RunFolder
from seatrial.record.secret import make_secret

if TYPE_CHECKING:
    from seatrial.job import Job

PLAN_SCHEMA_VERSION = 1


@dataclass
class OpenedRun:
    """A run that this process holds: no other process can start it until `close`, or until this process ends."""

    folder: RunFolder
    generation: int  # 1 on the first start; one more at each start
    notes: list[str] = field(default_factory=list)  # to be shown to the user
    _lock_fd: int = -1

    def close(self) -> None:
        """Release the lock; the folder stays."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> OpenedRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_run(
    job: Job,
    root: Path = Path("runs"),
    *,
    fresh: bool = False,
    data: Mapping[str, object] | None = None,
    check: Callable[[RunFolder], None] = lambda folder: None,
) -> OpenedRun:
    """Create or find the run folder `root`/NAME of `job`, lock it and begin its next generation.

    `data` identifies the tokens (`TokenStore.identity`); with the job's own keys it determines whether two starts are
    the same run. With `fresh` an existing run is first renamed, never deleted. `check` may refuse the folder, once
    it is locked and before anything is changed. Raises InputError if the folder belongs to another job, is something
    else, or cannot be written; RunFailed if another process holds the run.
    """
    folder = RunFolder(root / job.name)
    try:
        return _open(job, folder, fresh, {**job.identity(), **(data or {})}, check)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _open(
    job: Job,
    folder: RunFolder,
    fresh: bool,
    identity: Mapping[str, object],
    check: Callable[[RunFolder], None],
) -> OpenedRun:
    notes: list[str] = []
    _refuse_foreign(folder)
    lock_fd = _lock(folder)
    try:
        check(folder)
        if fresh and _has_history(folder):
            notes.append(f"renamed the old run: {folder.path} is now {_move_aside(folder)}")
            os.close(lock_fd)
            lock_fd = -1
            lock_fd = _lock(folder)
        _check_identity(identity, folder)
        generation = folder.last_generation() + 1
        changes = _job_changes(job, folder)
        write_text(folder.generation_file, f"{generation}\n")
        for path in (folder.checkpoints, folder.logs, folder.reports, folder.ranks):
            path.mkdir(exist_ok=True)
        make_secret(folder)
        write_json(folder.identity_json, _comparable(identity))
        write_text(folder.job_toml, job.to_toml())
        before = _chosen_before(job, folder)
        chosen = before if job.chosen is None else dict(job.chosen)
        write_json(folder.plan_json, _plan(job) | ({} if chosen is None else {"chosen": chosen}))
        if chosen is not None and job.chosen is not None:
            text = f'parallel = "auto": {job.layout}'
            if chosen == before:
                notes.append(
                    f"{text}, as chosen by an earlier start of this run; see plan.json for the reasons"
                )
            else:
                notes.append(
                    f"{text}: {chosen.get('why_now')}; see plan.json for the reasons and the runners-up"
                )
                events.append(folder, "layout_chosen", notes[-1], generation=generation, data=chosen)
        if changes:
            text = ", ".join(f"{key} {_shown(old)} -> {_shown(new)}" for key, (old, new) in changes.items())
            notes.append(f"the job changed since the last start: {text}")
            data = {key: list(pair) for key, pair in changes.items()}
            events.append(folder, "job_changed", notes[-1], generation=generation, data=data)
    except BaseException:
        if lock_fd >= 0:
            os.close(lock_fd)
        raise
    return OpenedRun(folder, generation, notes, lock_fd)


def _refuse_foreign(folder: RunFolder) -> None:
    """Raise InputError for a non-empty folder that is not a run: it is never written to."""
    folder.check_records()
    path = folder.path
    hint = "give the job another `name`, or empty that folder; it was not changed"
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path} is a dangling link", hint=hint)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file, not a run folder", hint=hint)
    if path.is_dir() and not folder.is_run() and any(p != folder.control for p in path.iterdir()):
        raise InputError(f"{path} is not empty and is not a run folder", hint=hint)


def _lock(folder: RunFolder) -> int:
    while True:
        folder.control.mkdir(parents=True, exist_ok=True)
        try:
            return lock.acquire(folder.lock)
        except FileNotFoundError:  # renamed between the two lines by another start with --fresh
            continue
        except lock.LockHeld as held:
            who = "another process" if held.pid is None else f"process {held.pid}"
            raise RunFailed(
                f"{folder.path} is in use by {who}",
                hint=f"wait for it, stop it, or see `seatrial watch {folder.path}`; "
                "to run a second copy, give the job another `name`",
            ) from None


def _has_history(folder: RunFolder) -> bool:
    """Whether the folder contains more than an unfinished first start leaves."""
    return any(p != folder.control for p in folder.path.iterdir()) or folder.identity_json.exists()


def _move_aside(folder: RunFolder) -> Path:
    number = 1
    while True:
        old = folder.path.with_name(f"{folder.path.name}.old-{number}")
        # rename() would replace an empty folder of that name, so look first; the lock keeps other starts out.
        if not old.exists() and not old.is_symlink():
            folder.path.rename(old)
            fsync_folder(old.parent)
            return old
        number += 1


def _check_identity(identity: Mapping[str, object], folder: RunFolder) -> None:
    """Raise InputError unless the stored identity is this job's, or there is none yet."""
    fresh_hint = (
        "start over with --fresh (the old run is renamed, not deleted), or give the job another `name`"
    )
    try:
        stored = read_json(folder.identity_json)
        if not isinstance(stored, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        # A first start that was killed leaves no identity, and nothing to lose. Otherwise the folder was damaged.
        if folder.metrics.exists() or any(folder.checkpoints.glob("step-*")):
            raise InputError(
                f"{folder.identity_json} is missing, so it is unknown whether this is the same run",
                hint=f"restore the file, or {fresh_hint}",
            ) from None
        return
    except ValueError as error:
        raise InputError(
            f"{folder.identity_json} is damaged ({error}), so it is unknown whether this is the same run",
            hint=f"restore the file, or {fresh_hint}",
        ) from None
    differing = _differences(stored, _comparable(identity))
    if differing:
        n = len(differing)
        lines = [f"{folder.path} belongs to another job; {n} {'key differs' if n == 1 else 'keys differ'}:"]
        lines += [
            f"  {key}: {_shown(old)} there, {_shown(new)} here" for key, (old, new) in differing.items()
        ]
        raise InputError("\n".join(lines), hint=fresh_hint)


def _job_changes(job: Job, folder: RunFolder) -> dict[str, tuple[Any, Any]]:
    """Keys of job.toml that differ from the last start's; none at a first start."""
    try:
        old = parse_toml(read_text(folder.job_toml))
    except (FileNotFoundError, ValueError):  # the first start, or an unreadable file
        return {}
    return _differences(flat(old), flat(tomllib.loads(job.to_toml())))


def _chosen_before(job: Job, folder: RunFolder) -> dict[str, Any] | None:
    """The `chosen` record of an earlier start that chose this same layout; None if there is none."""
    try:
        plan = read_plan(folder)
    except (OSError, ValueError):
        return None
    chosen = plan.get("chosen")
    if not isinstance(chosen, dict) or not isinstance(chosen.get("layout"), dict):
        return None
    # Older records have no `context` and no `expert`.
    return chosen if {"context": 1, "expert": 1, **chosen["layout"]} == job.layout.as_dict() else None


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (old, new)} where they differ; a missing key is None."""
    keys = dict.fromkeys([*new, *old])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` after a round trip through JSON, so that a tuple equals the list it was stored as."""
    out: dict[str, Any] = json.loads(json.dumps(values))
    return out


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _plan(job: Job) -> dict[str, Any]:
    layout, architecture = job.layout, job.architecture
    stages = [layout.stage_layers(s, architecture.num_hidden_layers) for s in range(layout.stages)]
    return {
        "schema_version": PLAN_SCHEMA_VERSION,
        "layout": layout.as_dict(),
        "architecture": architecture.as_dict(),
        "parameters": architecture.parameters(),
        "stages": [[stage[0], stage[-1]] for stage in stages if stage],
        "microbatches": job.microbatches,
    }


def _unwritable(folder: RunFolder, error: OSError) -> InputError:
    where = error.filename or folder.path
    return InputError(
        f"the run folder {folder.path} cannot be written: {error.strerror or error} ({where})",
        hint="make it writable, free space there, or use a folder that you may write to; nothing was started",
    )


def read_plan(folder: RunFolder) -> dict[str, Any]:
    """The content of plan.json."""
    value = read_json(folder.plan_json)
    if not isinstance(value, dict):
        raise ValueError(f"{folder.plan_json} is not a JSON object")
    return value


def add_to_plan(folder: RunFolder, key: str, value: Any) -> None:
    """Add one more key to plan.json."""
    write_json(folder.plan_json, {**read_plan(folder), key: value})
