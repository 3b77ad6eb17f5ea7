"""A whole drill: its folder, the data, the references, and one scenario after the other, each judged when it ends."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base import units
from seatrial.base.errors import InputError, RunFailed, SeatrialError
from seatrial.checkpoint.manifest import Damaged
from seatrial.data.prepare import blend_of, check_stores, data_cache, resolve_stores
from seatrial.drill import weights
from seatrial.drill.copies import LEAST_STEPS, Cadence, Plan, copy_of
from seatrial.drill.drill_run import DrillRun, Overdue, RunEnded
from seatrial.drill.evidence import Criteria, Evidence, Replay, read_evidence
from seatrial.drill.injection import Injection, Planted
from seatrial.drill.judge import Judgement, judge, unjudged
from seatrial.drill.reference import Reference, longer, run_reference, run_replay
from seatrial.drill.run_state import RunState
from seatrial.drill.scenarios import Scenario, returns_of
from seatrial.job.changed import Change, Copy
from seatrial.launch import launcher_for
from seatrial.launch.netns import Hosts, Unavailable
from seatrial.storage import is_remote

if TYPE_CHECKING:
    from seatrial.data.store import TokenStore
    from seatrial.job import Job

_SPARE_TIME_S = 90.0  # what detection and recovery may add to a run before it counts as overdue
_FIRST_STEPS = 6  # a first step that takes this many times the reference's is a hang
_LEAST_FIRST_STEP_S = 45.0  # the machine may be busy with something else
_MOST_DATA_BYTES = 1 << 30  # largest data set to copy for a scenario that changes its data
_RECOVERY_S = 5.0  # what detection and recovery usually add, for the estimate


@dataclass(frozen=True)
class Result:
    """Outcome of one scenario."""

    scenario: Scenario
    judgement: Judgement
    seconds: float = 0.0  # of the run
    folder: Path | None = None
    changes: Sequence[Change] = ()
    injections: Sequence[Injection] = ()


@dataclass(frozen=True)
class Progress:
    """State of a drill in progress, for its watcher."""

    name: str  # of the scenario, or "reference"
    number: int  # out of `of`
    of: int
    step: int
    steps: int
    eta_s: float | None  # until the whole drill is done


Watcher = Callable[[Progress], None]


@dataclass
class Drill:
    """Runs scenarios on copies of one job. Writes nothing outside `root` and the data cache of `runs`."""

    job: Job
    runs: Path
    scenarios: Sequence[Scenario]
    cadence: Cadence
    seed: int = 0
    seconds: float = 0.0  # of scenarios that are `lasting`
    watch: Watcher | None = None
    finished: Callable[[Result], None] | None = None
    root: Path = field(init=False)
    results: list[Result] = field(default_factory=list)
    # By whether it has replicas for comparison.
    references: dict[bool, Reference] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)  # by scenario

    def __post_init__(self) -> None:
        if self.cadence.steps < LEAST_STEPS:
            raise InputError(
                f"--steps {self.cadence.steps} is too few: the copy has to cross several snapshots and checkpoints",
                hint=f"at least {LEAST_STEPS}",
            )
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.root = self.runs / ".drill" / f"{self.job.name}-{stamp}"

    def prepare(self) -> None:
        """Check what can be checked and create the drill's folder. Raises InputError."""
        launcher_for(self.job).check(self.job)
        train = self.job.train
        self._stores: list[TokenStore] = resolve_stores(self.job.data, data_cache(self.runs), Path.cwd())
        check_stores(
            self._stores,
            blend_of(self.job.data),
            vocab_size=self.job.architecture.vocab_size,
            sequence_length=train.sequence_length,
            global_batch=train.global_batch,
            tokenizer_spec=self.job.data.tokenizer,
        )
        try:
            self.root.mkdir(parents=True)
        except OSError as error:
            raise InputError(
                f"cannot make the drill's folder {self.root}: {error.strerror}",
                hint="run it in a folder that you may write to, or give --runs",
            ) from error

    def run_all(self) -> None:
        """Run the reference, then each scenario; `results` grows by one at a time."""
        self._reference(replicas=False, steps=self.cadence.steps)
        for scenario in self.scenarios:
            result = self._run_scenario(scenario)
            self.results.append(result)
            if self.finished is not None:
                self.finished(result)

    # -- one scenario

    def _run_scenario(self, scenario: Scenario) -> Result:
        reason = scenario.missing(self.job)
        if reason is not None:
            return Result(scenario, unjudged(reason))
        plan = self._plan(scenario)
        try:
            stores = self._own_data(scenario) if scenario.own_data else None
            copy = self._copy(
                scenario.name, plan, spares=scenario.spares, replicas=scenario.replicas, stores=stores
            )
            launcher_for(copy.job).check(copy.job)
        except InputError as error:
            return Result(scenario, unjudged(error.message))
        with contextlib.ExitStack() as stack:
            hosts = None
            if scenario.network:
                try:
                    hosts = stack.enter_context(Hosts(copy.job.cluster.nodes + copy.job.cluster.spares))
                except Unavailable as error:
                    return Result(scenario, unjudged(error.message))
            reference = self._reference(replicas=scenario.replicas, steps=plan.steps)
            return self._judge(scenario, plan, copy, reference, hosts)

    def _judge(
        self, scenario: Scenario, plan: Plan, copy: Copy, reference: Reference, hosts: Hosts | None
    ) -> Result:
        limit = 3 * reference.step_s * plan.steps + _SPARE_TIME_S
        if scenario.lasting:  # a rank that freezes in the first step after a recovery is detected late
            limit += 2 * plan.seconds + 3 * plan.first_step_s
        run = DrillRun(
            self.root,
            copy.job,
            limit_s=limit,
            hosts=hosts,
            on_poll=lambda state: self._report(scenario.name, state),
        )
        overdue = False
        try:
            run.start(self._planted(scenario, copy.job, plan), returns_of(scenario, copy.job))
            try:
                with contextlib.suppress(RunEnded):  # the judge evaluates how it ended
                    scenario.inject(run, plan)
                run.wait_end()
                run.wait_gone()
            except Overdue:
                overdue = True
        finally:
            run.close()
        difference, problem = self._compare(run, reference, plan.steps)
        evidence = read_evidence(
            run.folder,
            run.injections,
            exits=run.exits,
            left=run.left,
            overdue=overdue,
            weights=difference,
            weights_problem=problem,
        )
        if scenario.expect.world != "same" and math.isfinite(evidence.shrunk_at()) and difference is not None:
            evidence = self._with_replay(evidence, scenario, copy.job, run, plan.steps)
        criteria = Criteria(
            steps=plan.steps,
            batches=copy.job.train.batches,
            snapshot_every=_copied_every(copy.job, node_lost=bool(scenario.expect.replaced)),
            checkpoint_every=plan.cadence.checkpoint,
            reference=reference.losses,
            tolerance=reference.tolerance(plan.steps),
            stays_near=copy.job.train.precision == "fp32",
        )
        judgement = judge(scenario.expect, evidence, criteria)
        return Result(scenario, judgement, run.seconds, run.folder.path, copy.changes, tuple(run.injections))

    def _with_replay(
        self, evidence: Evidence, scenario: Scenario, job: Job, run: DrillRun, steps: int
    ) -> Evidence:
        """`evidence` with an undisturbed run in the same layouts, or why there is none."""
        try:
            name = f"{scenario.name}, replayed without the fault"
            replay = run_replay(
                self.root, job, evidence.layouts(), on_poll=lambda state: self._report(name, state)
            )
        except RunFailed as error:
            return replace(evidence, replay_problem=error.message)
        difference, problem = self._compare(run, replay, steps)
        if difference is None:
            return replace(evidence, replay_problem=problem)
        return replace(evidence, replay=Replay(replay.losses, difference))

    def _compare(
        self, run: DrillRun, reference: Reference, steps: int
    ) -> tuple[weights.Difference | None, str]:
        ours = run.folder.checkpoints / f"step-{steps:08d}"
        if not ours.is_dir():
            return None, f"there is no {ours.name}"
        try:
            return weights.compare(ours, reference.checkpoint(steps)), ""
        except (Damaged, OSError) as error:
            return None, error.message if isinstance(error, SeatrialError) else str(error)

    def _planted(self, scenario: Scenario, job: Job, plan: Plan) -> list[Planted]:
        return [
            replace(fault, marker=str(self.root / f"{job.name}.fired-{number}.json"))
            for number, fault in enumerate(scenario.planted(job, plan))
        ]

    # -- the copies and the references

    def _plan(self, scenario: Scenario) -> Plan:
        """The scenario's plan, made once from the first reference's step time: later references end at its steps."""
        if scenario.name not in self.plans:
            self.plans[scenario.name] = self._make_plan(scenario)
        return self.plans[scenario.name]

    def _make_plan(self, scenario: Scenario) -> Plan:
        known = self.references[False]
        step_s = max(known.step_s, 1e-3)
        steps = max(self.cadence.steps, scenario.least_steps)
        if scenario.least_seconds:
            steps = max(steps, self.cadence.fault + math.ceil(scenario.least_seconds / step_s))
        if scenario.lasting:
            # Faults are injected until the time is over; the remaining steps are trained undisturbed.
            steps = max(steps, math.ceil(self.seconds / step_s))
        return Plan(
            self.cadence,
            self._saved(steps),
            self.seed,
            self.seconds if scenario.lasting else 0.0,
            max(_LEAST_FIRST_STEP_S, _FIRST_STEPS * known.first_step_s),
        )

    def _saved(self, steps: int) -> int:
        """`steps`, rounded up to a step at which a run that continues past it has a checkpoint."""
        every = self.cadence.checkpoint
        return -(-steps // every) * every

    def _own_data(self, scenario: Scenario) -> list[str]:
        """Copy the token stores, for a scenario that changes them. Raises InputError if that is too large or remote."""
        total = sum(shard.bytes for store in self._stores for shard in store.manifest.shards)
        if total > _MOST_DATA_BYTES or any(is_remote(store.address) for store in self._stores):
            raise InputError(f"the data ({units.memory(total)}) would have to be copied")
        copies = []
        for number, store in enumerate(self._stores):
            folder = self.root / f"{scenario.name}.data-{number}"
            shutil.copytree(store.address, folder)
            copies.append(str(folder))
        return copies

    def _copy(
        self,
        name: str,
        plan: Plan,
        *,
        spares: int,
        replicas: bool,
        keep: int = 0,
        stores: Sequence[str] | None = None,
    ) -> Copy:
        return copy_of(
            self.job,
            name=name,
            stores=stores or [store.address for store in self._stores],
            plan=plan,
            spares=spares,
            replicas=replicas,
            keep=keep,
        )

    def _reference(self, *, replicas: bool, steps: int) -> Reference:
        """The undisturbed run, made or continued to at least `steps`."""
        known = self.references.get(replicas)
        if known is not None and known.steps >= steps:
            return known
        wanted = {steps}
        if self.references:
            # One start for each number of steps that a scenario needs: only its last step is sure to be saved, since a
            # checkpoint that is due while slow storage writes another is put off.
            wanted |= {self._plan(s).steps for s in self.scenarios if s.replicas == replicas}
        for number in sorted(wanted):
            if known is None or known.steps < number:
                known = self.references[replicas] = self._continued(known, number, replicas=replicas)
        assert known is not None
        return known

    def _continued(self, known: Reference | None, steps: int, *, replicas: bool) -> Reference:
        """`known` continued to `steps`, or a new one."""
        name = "reference-replicas" if replicas else "reference"
        copy = self._copy(
            name, Plan(self.cadence, self._saved(steps)), spares=0, replicas=replicas, keep=10_000
        )
        if known is not None:
            copy = longer(known, copy)
        reference = self._undisturbed(name, copy)
        if reference.device != "cpu":
            again = replace(copy.job, file=copy.job.file.model_copy(update={"name": f"{name}-again"}))
            reference = replace(
                reference, again=self._undisturbed(f"{name}-again", Copy(again, copy.changes))
            )
            reference.judge_again()
        return reference

    def _undisturbed(self, name: str, copy: Copy) -> Reference:
        return run_reference(self.root, copy, on_poll=lambda state: self._report(name, state))

    # -- reporting progress

    def _report(self, name: str, state: RunState) -> None:
        if self.watch is None:
            return
        number = len(self.results) + 1
        steps = state.steps
        self.watch(Progress(name, number, len(self.scenarios), state.furthest, steps, self.eta_s()))

    def eta_s(self) -> float | None:
        """Seconds until the whole drill is done, from the runs so far; None before the first reference."""
        known = self.references.get(False)
        if known is None:
            return None
        done = [r.seconds for r in self.results if r.seconds]
        usual = sum(done) / len(done) if done else known.seconds + _RECOVERY_S
        return usual * (len(self.scenarios) - len(self.results))


def _copied_every(job: Job, *, node_lost: bool) -> int:
    """Number of steps after which the affected state is snapshotted again; 0: no snapshot survives the fault."""
    kept = job.resilience
    apart = kept.copies > 1 or job.layout.survives_a_node(job.cluster.gpus_per_node)
    return kept.snapshot_every_steps if kept.copies and (apart or not node_lost) else 0
