"""The paths in a run folder, which is the source of truth; all views are derived from it."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from pathlib import Path

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import names_in, not_a_file, read_text

# Any of these makes a folder a run folder. job.toml alone does not: `seatrial init` writes such files anywhere.
_MARKS = ("control/lock", "control/identity.json", "plan.json", "events.jsonl", "metrics.jsonl")

_RANK_FILE = re.compile(r"rank([0-9]{1,9})(\..+)")
_COUNT = re.compile(r"[0-9]{1,18}")  # int() would accept digits of any script
_COUNT_BYTES = 64


class RunFolder:
    """The paths of one run. Creating an instance does not access the file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job_toml = path / "job.toml"
        self.plan_json = path / "plan.json"
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.interval_json = path / "interval.json"
        self.control = path / "control"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.reports = path / "reports"
        self.ranks = path / "ranks"
        self.telemetry = path / "telemetry"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def lock(self) -> Path:
        """Locked by the process that runs the run; contains its pid."""
        return self.control / "lock"

    @property
    def identity_json(self) -> Path:
        """The keys of the job that identify two starts as the same run."""
        return self.control / "identity.json"

    @property
    def inputs_json(self) -> Path:
        """Digests of job.toml and plan.json at the start of the last launch; see `record.inputs`."""
        return self.control / "inputs.json"

    @property
    def launch_json(self) -> Path:
        """The current start; see `record.launches`."""
        return self.control / "launch.json"

    @property
    def outcome_json(self) -> Path:
        """The outcome of the last start that has ended; see `record.launches`."""
        return self.control / "outcome.json"

    def stopped(self, generation: int) -> Path:
        """Created by `seatrial stop`: this generation's start accepts no more agents and gets no follow-up job."""
        return self.control / f"stopped-{generation:06d}"

    @property
    def follow_up(self) -> Path:
        """The scheduler's identifier of the job that waits to continue the run after this one."""
        return self.control / "follow_up"

    def rendered(self, generation: int) -> Path:
        """The files submitted to a scheduler for the start of this generation."""
        return self.path / "launch" / f"{generation:06d}"

    @property
    def generation_file(self) -> Path:
        """The generation number of the last start."""
        return self.control / "generation"

    @property
    def secret(self) -> Path:
        """The secret that authenticates the processes of the last start; see `record.secret`."""
        return self.control / "secret"

    @property
    def trackers(self) -> Path:
        """Push progress of each tracker, and logs of the pushing processes: see `watch.trackers`."""
        return self.control / "trackers"

    @property
    def leases(self) -> Path:
        """Past terms of coordinators, and the state the next coordinator takes over: see `control.net.lease`."""
        return self.control / "leases"

    @property
    def lease_json(self) -> Path:
        """The newest term, its holder, and its last heartbeat; see `record.alive`."""
        return self.control / "lease.json"

    @property
    def prometheus_targets(self) -> Path:
        """Addresses of the agents' `/metrics`, for Prometheus' file_sd_configs."""
        return self.control / "prometheus-targets.json"

    @property
    def columns(self) -> Path:
        """Parsed pieces of metrics and ledger, which can be made again from these; see `record.bulk`."""
        return self.control / "columns"

    @property
    def coordinator_log(self) -> Path:
        """The coordinators' decisions and their reasons, as text lines."""
        return self.control / "coordinator.log"

    @property
    def monitor_log(self) -> Path:
        """stderr of the monitor process, as text lines."""
        return self.control / "monitor.log"

    @property
    def alerts_delivered(self) -> Path:
        """Which alerts have been delivered to whom; see `watch.alerts.delivery`."""
        return self.control / "alerts_delivered.json"

    def rank_log(self, generation: int, node: int, rank: int) -> Path:
        """stdout and stderr of one rank in one generation."""
        return self.logs / f"{generation:06d}" / f"node{node}" / f"rank{rank}.log"

    def rank_error(self, generation: int, node: int, rank: int) -> Path:
        """The exception that ended one rank, as JSON; absent if there was none or it could not be written."""
        return self.rank_log(generation, node, rank).with_suffix(".error.json")

    def ranks_with(self, generation: int, ending: str) -> list[int]:
        """The ranks whose records of a generation include a file with this ending; none in runs of versions without it."""
        found = (_RANK_FILE.fullmatch(name) for name in sorted(names_in(self.ranks / f"{generation:06d}")))
        return [int(match[1]) for match in found if match is not None and match[2] == ending]

    def stages(self, generation: int, rank: int) -> Path:
        """The seconds that one rank spent in each stage of its steps; see `record.stages`."""
        return self.ranks / f"{generation:06d}" / f"rank{rank}.stages"

    def packed_stages(self, generation: int, rank: int) -> Path:
        """The older steps of `stages`, compressed."""
        return self.stages(generation, rank).with_suffix(".stages.zst")

    def collectives(self, generation: int, rank: int) -> Path:
        """The number and bytes of one rank's collectives in each step; see `record.collectives`."""
        return self.ranks / f"{generation:06d}" / f"rank{rank}.collectives.jsonl"

    def connections(self, generation: int, rank: int) -> Path:
        """The kernel's measurements of one rank's TCP connections; see `record.connections`."""
        return self.ranks / f"{generation:06d}" / f"rank{rank}.tcp.json"

    def port_counters(self, node: int) -> Path:
        """The counters of one node's RDMA ports when its agent started and now; see `record.node_counters`."""
        return self.path / "nodes" / f"node{node}.ports.json"

    def gpu_counters(self, node: int) -> Path:
        """The clocks and error counters of one node's GPUs; see `record.node_counters`."""
        return self.path / "nodes" / f"node{node}.gpus.json"

    def telemetry_of(self, node: int) -> Path:
        """Telemetry of one node; see `record.telemetry`."""
        return self.telemetry / f"node{node}"

    def trace(self, generation: int, rank: int) -> Path:
        """The torch.profiler trace of one rank; see `train.trace`."""
        return self.ranks / f"{generation:06d}" / f"rank{rank}.trace.json.gz"

    def traces(self) -> list[Path]:
        """The recorded ones."""
        return sorted(self.ranks.glob("*/rank*.trace.json.gz"))

    def last_generation(self) -> int:
        """The highest generation ever started here, 0 for none. Log folders make up for a damaged or stale file."""
        entries: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            entries.append(read_text(self.generation_file, most=_COUNT_BYTES).strip())
        with contextlib.suppress(OSError):
            entries += os.listdir(self.logs)
        return max((int(text) for text in entries if _COUNT.fullmatch(text)), default=0)

    def is_run(self) -> bool:
        """Whether a run was ever started in this folder."""
        return any(os.path.lexists(self.path / mark) for mark in _MARKS)

    def check_records(self) -> None:
        """Raise InputError listing every existing record that is not a regular file: a link, a pipe, a folder."""
        records = (self.job_toml, self.plan_json, self.events, self.metrics, self.ledger, self.interval_json)
        control = (self.lock, self.generation_file, self.identity_json, self.inputs_json, self.secret)
        more = (self.lease_json, self.launch_json, self.outcome_json, self.follow_up, self.coordinator_log)
        wrong = [error for path in (*records, *control, *more) if (error := not_a_file(path))]
        hint = "Seatrial writes regular files there: restore the file, or remove what is in its place"
        if wrong:
            raise InputError([Diagnostic(f"{e.filename} {e.strerror}", hint=hint) for e in wrong])

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run folder at `path`, for readers. Raises InputError if there is none, and as `check_records`."""
        folder = cls(path)
        if folder.is_run():
            folder.check_records()
            return folder
        if path.is_dir():
            what = f"{path} is not a run folder"
        elif path.exists():
            what = f"{path} is a file, not a run folder"
        else:
            what = f"there is no run folder {path}"
        raise InputError(what, hint=_nearby_hint(path))

    @classmethod
    def find(cls, name: str, root: Path = Path("runs")) -> RunFolder:
        """The run folder at the path `name`, else the run called `name` under `root`. Raises InputError."""
        for path in (Path(name), root / name):
            if cls(path).is_run():
                return cls.open(path)
        # Neither exists: report the one that was most likely meant.
        return cls.open(Path(name) if Path(name).exists() or "/" in name else root / name)


def _nearby_hint(path: Path) -> str:
    """Hint with run folders that could have been meant: inside `path`, or next to it."""
    inside = _runs_in(path) or _runs_in(path / "runs")
    if inside:
        return f"run folders in it: {_listed(inside)}"
    names = _runs_in(path.parent)
    close = difflib.get_close_matches(path.name, [n.name for n in names], n=1)
    if close:
        return f"did you mean {path.parent / close[0]}?"
    if names:
        return f"run folders beside it: {_listed(names)}"
    return "give the path of a run folder, such as runs/NAME; `seatrial train` creates one"


def _runs_in(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.iterdir() if RunFolder(p).is_run())
    except OSError:
        return []


def _listed(paths: list[Path], most: int = 8) -> str:
    text = ", ".join(str(p) for p in paths[:most])
    return text if len(paths) <= most else f"{text} and {len(paths) - most} more"
