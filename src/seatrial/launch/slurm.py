"""Slurm: one job for all nodes with one agent each, or an array of one-node jobs; a follow-up job continues the run.

The job is a shell script kept in the run folder. Facts it relies on (Slurm 22.05, docs/clusters.md):

- With `--no-kill` on sbatch and srun and `srun --kill-on-bad-exit=0 --wait=0` a lost node is dropped from the job, and
  job and step continue. Losing the batch node ends the job; therefore a follow-up job is queued from the start.
- `--signal=USR1@S` reaches the agents and not the script; agents take it as a command to save and exit.
- Output through srun is lost when the job is cancelled, so each agent has its own file.
- Only output requested with --parsable, --format or --noheader is parsed: JSON differs between versions.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from seatrial.base import process
from seatrial.base.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED, Diagnostic, InputError, RunFailed
from seatrial.base.files import read_json
from seatrial.check.reports.report_exclude import slurm as hostlist
from seatrial.job.finding import RuleViolation
from seatrial.job.schema_launchers import SlurmSection
from seatrial.launch.base import LEAVE, NO_OUTCOME, Identity, Status
from seatrial.plan.measured.rates import MOST_DAYS
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.job import Job

SCRIPT = "job.sh"
_TIMEOUT_S = 60.0  # per command: slurmctld's own MessageTimeout is 10 s
_BEFORE_LIMIT_S = 30  # between the end of the grace period and the time limit
_QUEUED = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
# Of a batch script, or chosen anew: the number of nodes.
_NOT_OF_SALLOC = ("--nodes=", "--array=", "--signal=", "--open-mode=", "--output=", "--no-requeue")


class SlurmLauncher:
    """Submits with sbatch, and starts agents with srun inside the job."""

    name = "slurm"
    restarts = False

    def check(self, job: Job) -> None:
        """Raise InputError with every reason against a start. If none is found here, ask Slurm too (--test-only)."""
        section = slurm_section(job)
        problems = [job.located(finding) for finding in _findings(section)]
        missing = [name for name in _COMMANDS if shutil.which(name) is None]
        if missing:
            problems.append(
                job.located(
                    RuleViolation(
                        ("cluster.launcher",),
                        f"not found on this machine: {', '.join(missing)}",
                        "start it on a login node of the cluster, with Slurm's commands in PATH",
                    )
                )
            )
        if not problems:
            problems += self._test_only(job)
        if problems:
            raise InputError(problems)

    def _test_only(self, job: Job) -> list[Diagnostic]:
        """slurmctld's objections to the job: an unknown partition or account, more nodes than there are."""
        words = ["sbatch", "--test-only", *_options(job, RunFolder(Path("/dev/null"))), "--wrap=true"]
        done = run_command(words)
        if done.returncode == 0:
            return []
        message = _message_of(done)
        return [
            job.located(
                RuleViolation(
                    ("slurm", "cluster.launcher"), f"Slurm refuses the job: {message}", shlex.join(words)
                )
            )
        ]

    def render(self, job: Job, folder: RunFolder, generation: int = 1) -> dict[str, str]:
        """The job script."""
        section = slurm_section(job)
        path = folder.path.absolute()
        script = path / "launch" / f"{generation:06d}" / SCRIPT
        array = section.form == "array"
        attempt = "$SLURM_ARRAY_JOB_ID" if array else "$SLURM_JOB_ID"
        run, interpreter = ("--run", str(path)), job.cluster.python
        container = _container(section)
        begin = process.python("seatrial.launch.begin", *run, interpreter=interpreter)
        if container:
            begin = ["srun", "--nodes=1", "--ntasks=1", *container, *begin]
        output = path / "logs" / ("slurm-%A-node%a.log" if array else "slurm-%j-node%t.log")
        agents = agents_command(job, folder, output)
        lines = ["#!/bin/bash"]
        lines += [f"#SBATCH {_quoted(option)}" for option in _options(job, folder)]
        lines += [
            "",
            "# Signals are for the agents; the script must outlive them to report how the run ended.",
            "trap : TERM USR1 USR2",
        ]
        lines += section.setup
        lines += [
            "",
            "# Joins the run, or begins its next start; leaves if the run is over.",
            f'{shlex.join(begin)} --submitted {generation} --attempt "{attempt}"',
            f"code=$?; [ $code = {LEAVE} ] && exit 0; [ $code = 0 ] || exit $code",
        ]
        if section.follow_up:
            lines += ["", *_follow_up(script, path / "control/follow_up", attempt, array=array)]
        outcome = f"{shlex.join(begin)} --outcome"
        cancel = (
            f'case $code in {EXIT_PREEMPTED}|{NO_OUTCOME}) ;; *) [ -z "$next" ] || scancel "$next" ;; esac'
        )
        lines += ["", shlex.join(agents), "agents=$?", ""]
        if array:
            lines += ["# The run may continue without this node: the follow-up job is for the run."]
            if section.follow_up:
                lines += [f'[ -z "$next" ] || {{ {outcome}; code=$?; {cancel}; }}']
            lines += ["exit $agents", ""]
        else:
            lines += [
                "# srun's status is also that of a lost node: the run itself records how it ended.",
                outcome,
                "code=$?",
                f"# If no agent could begin ({EXIT_BAD_INPUT}: bad input), those of the next job could not either.",
                f"[ $code = {NO_OUTCOME} ] && [ $agents = {EXIT_BAD_INPUT} ] && code={EXIT_BAD_INPUT}",
                *([cancel] if section.follow_up else []),
                "exit $code",
                "",
            ]
        return {SCRIPT: "\n".join(lines)}

    def identity(self, environment: Mapping[str, str]) -> Identity:
        """Identity from the variables that srun sets for a task."""
        missing = [k for k in ("SLURM_JOB_ID", "SLURM_PROCID") if k not in environment]
        if missing:
            raise InputError(
                f"this is not a task of a Slurm job step: {', '.join(missing)} not set",
                hint="the job that `seatrial train` submits starts the agents; by hand: --node N",
            )
        job = environment["SLURM_JOB_ID"]
        task = environment.get("SLURM_ARRAY_TASK_ID")
        # Without a topology plugin the address is only the node's name and carries no topology.
        switched = "switch" in environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
        here = environment.get("SLURM_LAUNCH_NODE_IPADDR")
        return Identity(
            node=int(environment["SLURM_PROCID"] if task is None else task),
            incarnation=f"{job}.{environment.get('SLURM_RESTART_COUNT', '0')}",
            attempt=environment.get("SLURM_ARRAY_JOB_ID", job),
            order=environment["SLURM_TOPOLOGY_ADDR"] if switched else "",
            peers=(here,) if here else (),
        )

    def submit(self, files: Mapping[str, Path]) -> str:
        """Submit the script; the id of the job, or of the array."""
        done = run_command(["sbatch", "--parsable", str(files[SCRIPT])])
        if done.returncode != 0:
            raise RunFailed(
                f"sbatch refused the job: {_message_of(done)}", hint=f"the job is {files[SCRIPT]}"
            )
        return done.stdout.strip().partition(";")[0]  # ";CLUSTER" follows in a federation

    def status(self, handle: str) -> Status:
        """State from squeue, which knows only pending and running jobs; "unknown" if it does not answer."""
        try:
            done = run_command(["squeue", "--noheader", f"--jobs={handle}", "--format=%T %r"])
        except RunFailed as error:
            return Status("unknown", error.message)
        if done.returncode != 0:
            if "Invalid job id" in done.stderr:
                return Status("gone", "not in the queue")
            return Status("unknown", _message_of(done))
        lines = sorted(set(done.stdout.splitlines()))
        states = [line.split()[0] for line in lines]
        if not states:
            return Status("gone", "not in the queue")
        running = any(state not in _QUEUED for state in states)
        return Status("running" if running else "queued", "; ".join(lines))

    def signal(self, handle: str, how: Literal["preempt", "end"]) -> None:
        """Send USR1 to running agents and cancel pending jobs; for "end", or if nothing runs, cancel everything.

        If squeue does not answer, the run may be running: then it must be able to save.
        """
        if how == "preempt" and self.status(handle).state in ("running", "unknown"):
            self._cancel("--state=PENDING", handle)
            self._cancel("--signal=USR1", handle)
        else:
            self._cancel(handle)

    def _cancel(self, *words: str) -> None:
        done = run_command(["scancel", *words])
        if done.returncode != 0 and "Invalid job id" not in done.stderr:
            raise RunFailed(f"scancel failed: {_message_of(done)}")

    def logs(self, handle: str) -> Sequence[str]:
        """None: the script and the agents write to the run folder's logs."""
        return []

    def warnings(self, grace_s: float) -> Sequence[str]:
        """Warn if KillWait, the time a plain scancel leaves between SIGTERM and SIGKILL, is shorter than `grace_s`."""
        found = re.search(
            r"^KillWait\s*=\s*(\d+)", run_command(["scontrol", "show", "config"]).stdout, re.MULTILINE
        )
        if found is None or int(found[1]) >= grace_s:
            return []
        return [
            f"KillWait of this Slurm is {found[1]} s, less than resilience.preempt_grace_s = {grace_s:g}: a plain scancel, "
            "or a preemption by Slurm without GraceTime, may end the run before it is saved"
        ]


def _findings(section: SlurmSection) -> list[RuleViolation]:
    found = []
    if section.cold_spares and section.form != "array":
        found.append(
            RuleViolation(
                ("slurm.cold_spares",),
                "cold spares are jobs of an array; one allocation has all its nodes from the start",
                'set form = "array", or cluster.spares for spares inside the allocation',
            )
        )
    if section.form == "array" and (section.segment or section.switches):
        key = "segment" if section.segment else "switches"
        found.append(
            RuleViolation(
                (f"slurm.{key}",), f"{key} has no effect on an array of one-node jobs", f"remove {key}"
            )
        )
    if section.time is not None and not _TIME.fullmatch(section.time):
        found.append(
            RuleViolation(
                ("slurm.time",),
                f"{section.time!r} is not a Slurm time limit",
                "days-hours:minutes:seconds, as in 2-00:00:00; a number alone is minutes",
            )
        )
    for i, option in enumerate(section.options):
        if not option.startswith("--") or "\n" in option:
            found.append(
                RuleViolation(
                    (f"slurm.options.{i}", "slurm.options"),
                    f"{option!r} is not a long option of sbatch",
                    'write each as one text: "--comment=pretraining"',
                )
            )
    if section.container_mounts and not section.container_image:
        found.append(
            RuleViolation(
                ("slurm.container_mounts",), "mounts without an image", "add container_image, or remove it"
            )
        )
    return found


def _options(job: Job, folder: RunFolder) -> list[str]:
    """The options for sbatch, each as one word."""
    section, cluster = slurm_section(job), job.cluster
    logs = folder.logs.absolute()
    exclude = ",".join(filter(None, [section.exclude, hostlist(_unfit(folder)).strip()]))
    nodes = cluster.nodes + cluster.spares
    array = section.form == "array"
    gres = section.gres or (None if cluster.device == "cpu" else f"gpu:{cluster.gpus_per_node}")
    given = {
        "job-name": job.name,
        "nodes": 1 if array else nodes,
        "ntasks-per-node": 1,
        "array": f"0-{nodes + section.cold_spares - 1}%{nodes}" if array else None,
        "partition": section.partition,
        "account": section.account,
        "qos": section.qos,
        "reservation": section.reservation,
        "time": section.time,
        "gres": gres,
        "constraint": section.constraint,
        "exclude": exclude or None,
        "segment": section.segment,
        "switches": section.switches,
        "mem": 0,
        "signal": f"USR1@{int(job.resilience.preempt_grace_s) + _BEFORE_LIMIT_S}",
        "open-mode": "append",
        "output": str(logs / ("slurm-%A_%a.out" if array else "slurm-%j.out")),
    }
    options = [f"--{key}={value}" for key, value in given.items() if value is not None]
    # Both a requeued job and a follow-up job would continue the run.
    options += ["--exclusive", "--no-kill", "--no-requeue", *section.options]
    return options


def agents_command(job: Job, folder: RunFolder, output: Path, *where: str) -> list[str]:
    """The srun that starts one agent on each node of a job, or on those that the options `where` name."""
    agent = process.python(
        "seatrial", "agent", "--run", str(folder.path.absolute()), interpreter=job.cluster.python
    )
    survive = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--unbuffered", "--open-mode=append")
    return ["srun", *where, *survive, f"--output={output}", *_container(slurm_section(job)), *agent]


def salloc_command(job: Job, folder: RunFolder, nodes: int) -> list[str]:
    """The salloc that allocates `nodes` nodes with the job's own options."""
    options = [option for option in _options(job, folder) if not option.startswith(_NOT_OF_SALLOC)]
    return ["salloc", f"--nodes={nodes}", *options]


def slurm_section(job: Job) -> SlurmSection:
    """The job's [slurm], or its defaults."""
    return job.file.slurm or SlurmSection()


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return name + equals + (shlex.quote(value) if value else "")


def _unfit(folder: RunFolder) -> list[str]:
    """The nodes that failed the last check of this job, if that is recent enough to trust."""
    try:
        report = read_json(folder.reports / "check.json")
        fresh = time.time() - report["time"] < MOST_DAYS * 86_400 and not report["simulated"]
        return [node for node, verdict in report["nodes"].items() if fresh and verdict == "FAIL"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # no usable report: the check is a separate step


def _container(section: SlurmSection) -> list[str]:
    """srun's options for pyxis; without --container-env a variable set in the image would override ours."""
    if section.container_image is None:
        return []
    options = [f"--container-image={section.container_image}"]
    if section.container_mounts is not None:
        options.append(f"--container-mounts={section.container_mounts}")
    ours = sorted(
        k for k in os.environ if k.startswith(("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "SEATRIAL_", "OMP_"))
    )
    return [*options, f"--container-env={','.join(ours)}"] if ours else options


def _follow_up(script: Path, record: Path, attempt: str, *, array: bool) -> list[str]:
    submit = f'next=$(sbatch --parsable --dependency=afterany:"{attempt}" {shlex.quote(str(script))})'
    lines = [
        "# Continues the run if this job ends before it: at its time limit, or with the node of this script.",
        "next=",
        f"if {submit}; then",
        f'    next=${{next%%;*}}; echo "$next" > {shlex.quote(str(record))}',
        "else",
        '    echo "no follow-up job could be submitted: the run will not continue after this job" >&2',
        "fi",
    ]
    if array:  # one follow-up job for the whole array
        lines[2:] = ['if [ "$SLURM_ARRAY_TASK_ID" = 0 ]; then', *(f"    {line}" for line in lines[2:]), "fi"]
    return lines


def run_command(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The output of one of Slurm's commands, whatever its exit status. Raises RunFailed if it does not answer."""
    try:
        return subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunFailed(
            f"`{words[0]}` cannot be used: {error}", hint="is Slurm's controller up? `scontrol ping`"
        ) from error


def _message_of(done: subprocess.CompletedProcess[str]) -> str:
    text = " ".join((done.stderr or done.stdout).split())
    return (
        re.sub(r"^(sbatch|scancel|squeue|scontrol): (error: )?", "", text) or f"exit status {done.returncode}"
    )
