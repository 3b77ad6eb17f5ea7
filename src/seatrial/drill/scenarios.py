"""The fault scenarios: what each does to the run, what it requires, and the expected outcome."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Callable
from dataclasses import dataclass

from seatrial.base.errors import InputError
from seatrial.drill import faults, storm
from seatrial.drill.copies import Plan
from seatrial.drill.drill_run import DrillRun
from seatrial.drill.expectation import Expectation
from seatrial.drill.injection import Planted
from seatrial.job import Job
from seatrial.job.numbers import either
from seatrial.job.shapes import shapes
from seatrial.train.health import straggler

_AWAY_S = 4.0  # until a lost node returns
_BACK_S = 14.0  # limit until it trains again, including its start
_FOUND_S = 10.0  # limit for detecting a stopped process

RECOVERING = "recovering"


def _none(job: Job, plan: Plan) -> tuple[Planted, ...]:
    return ()


def _no_reason(job: Job) -> str | None:
    return None


@dataclass(frozen=True)
class Scenario:
    """One fault, or several, and the expected outcome."""

    name: str
    about: str
    expect: Expectation
    inject: Callable[
        [DrillRun, Plan], None
    ]  # injects it into a started run; returns while that is still running
    planted: Callable[[Job, Plan], tuple[Planted, ...]] = _none
    spares: int = 0
    replicas: bool = False  # needs two replicas of the weights
    network: bool = False  # each node needs its own network
    returns: bool = False  # a node whose agent died returns after a while
    lasting: bool = False  # injects faults for --seconds
    own_data: bool = False  # needs a copy of the data
    least_steps: int = 0  # minimum number of steps, however short the copy is
    least_seconds: float = 0.0  # of training that must follow the fault
    missing: Callable[[Job], str | None] = _no_reason  # why this job cannot run it


# -- what a job needs


def _two_nodes(job: Job) -> str | None:
    return None if job.cluster.nodes > 1 else "the job has one node: no other can take over"


def _two_ranks(job: Job) -> str | None:
    return None if job.layout.world_size > 1 else "the job has one rank"


def _can_shrink(job: Job) -> str | None:
    if job.cluster.nodes < 2:
        return "the job has one node: no node would be left"
    if not (job.resilience.shrink and job.resilience.grow):
        return "the job forbids it (resilience.shrink or resilience.grow is false)"
    if len(shapes(job)) < 2:
        return f"{job.layout} has no replica to spare: no smaller layout fits fewer nodes"
    return None


def _compares(job: Job) -> str | None:
    if not job.resilience.verify_every_steps:
        return "the job compares no weights (resilience.verify_every_steps = 0)"
    return None


_NODE_LOST = ("node_lost", "agent_failed", RECOVERING)
_HUNG = ("step_overdue", "hang_blamed", RECOVERING)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "kill_rank",
        "SIGKILL to the rank that writes the records",
        Expectation("same", ("rank_failed", RECOVERING), "rank", named_by=(RECOVERING,), replaced=False),
        faults.kill_rank,
    ),
    Scenario(
        "kill_agent",
        "SIGKILL to a node's agent; a spare replaces it",
        Expectation("same", _NODE_LOST, "node", named_by=(RECOVERING,), replaced=True),
        faults.kill_agent,
        spares=1,
    ),
    Scenario(
        "kill_agent_without_spare",
        "SIGKILL to a node's agent; the run shrinks, and grows when the node returns",
        Expectation(
            "other", _NODE_LOST, "node", named_by=(RECOVERING,), follows=("shrunk", "grown"), replaced=True
        ),
        faults.kill_agent,
        returns=True,
        least_seconds=_BACK_S,
        missing=_can_shrink,
    ),
    Scenario(
        "kill_coordinator_node",
        "all processes of the coordinator's node killed at once; a spare replaces it",
        Expectation(
            "same",
            ("coordinator_elected", *_NODE_LOST),
            "node",
            named_by=("node_lost",),
            follows=("coordinator_elected",),
            replaced=True,
        ),
        faults.kill_coordinator,
        spares=2,  # if one of them is the coordinator, it is killed too
    ),
    Scenario(
        "kill_two_nodes",
        "all processes of two nodes killed at once; two spares replace them",
        Expectation("same", _NODE_LOST, "node", redone="checkpoint", named_by=("node_lost",), replaced=True),
        faults.kill_two,
        spares=2,
        missing=_two_nodes,
    ),
    Scenario(
        "kill_two_ranks",
        "SIGKILL to two ranks at once",
        Expectation("same", ("rank_failed", RECOVERING), "rank", named_by=("rank_failed",)),
        faults.kill_two_ranks,
        missing=_two_ranks,
    ),
    Scenario(
        "kill_rank_in_recovery",
        "SIGKILL to another rank while the run recovers from the loss of one",
        Expectation("same", ("rank_failed", RECOVERING), "rank", named_by=("rank_failed",)),
        faults.kill_in_recovery,
        missing=_two_ranks,
    ),
    Scenario(
        "kill_rank_in_save",
        "SIGKILL to a rank while its part of a checkpoint is being written",
        Expectation("same", ("rank_failed", RECOVERING), "rank", redone="two snapshots"),
        faults.wait,
        faults.die,
    ),
    Scenario(
        "kill_fork_server",
        "SIGKILL to the process that forks a node's ranks, and to these ranks",
        Expectation("same", ("nursery_failed", RECOVERING), "node"),
        faults.fork_server(signal.SIGKILL),
    ),
    Scenario(
        "freeze_fork_server",
        "SIGSTOP to the process that forks a node's ranks",
        Expectation("same", ("process_stopped", RECOVERING), "node"),
        faults.fork_server(signal.SIGSTOP),
        least_seconds=_FOUND_S,
    ),
    Scenario(
        "pause_agent_at_start",
        "a node's agent stopped for some seconds while its ranks are being started",
        Expectation("same", ("node_lost", RECOVERING), "node", named_by=("node_lost",)),
        faults.pause_agent,
        spares=1,
        missing=_two_nodes,
    ),
    Scenario(
        "pause_coordinator_at_start",
        "the same for the coordinator's node",
        Expectation(
            "same",
            ("coordinator_elected", "node_lost", RECOVERING),
            "nothing",
            follows=("coordinator_elected",),
        ),
        faults.pause_coordinator,
        spares=1,
        missing=_two_nodes,
    ),
    Scenario(
        "edited_job",
        "the run's job.toml edited, a rank killed, and the same command again",
        Expectation(
            "same",
            ("rank_failed", RECOVERING),
            "rank",
            redone="two checkpoints",
            exits=(2, 0),
            follows=("run_failed", "resumed"),
        ),
        faults.edit_job,
    ),
    Scenario(
        "remade_data",
        "the token store recreated, a rank killed; then the old one restored, and the same command again",
        Expectation(
            "same",
            ("rank_failed", RECOVERING),
            "rank",
            redone="two checkpoints",
            exits=(2, 0),
            follows=("run_failed", "resumed"),
        ),
        faults.remake_data,
        own_data=True,
    ),
    Scenario(
        "freeze_rank",
        "SIGSTOP to a rank",
        Expectation("same", _HUNG, "rank", named_by=("hang_blamed",)),
        faults.freeze,
    ),
    Scenario(
        "hang_in_collective",
        "a rank never enters a collective that its peers wait in",
        Expectation("same", _HUNG, "rank", named_by=("hang_blamed",)),
        faults.wait,
        faults.hang,
    ),
    Scenario(
        "hold_gil",
        "a rank computes forever in native code and holds the GIL",
        Expectation("same", _HUNG, "rank", named_by=("hang_blamed",)),
        faults.wait,
        faults.gil,
    ),
    Scenario(
        "slow_rank",
        "a rank gets a quarter of its CPU time",
        Expectation("same", ("straggler",), "rank", recovers=False, redone="none"),
        faults.slow,
        least_steps=straggler.STEPS * straggler.WINDOWS + 4,
    ),
    Scenario(
        "cut_network",
        "a node's network is cut; a spare replaces it, and the node fences itself",
        Expectation("same", ("node_lost", RECOVERING), "node", named_by=(RECOVERING,), replaced=True),
        faults.cut,
        spares=1,
        network=True,
        missing=_two_nodes,
    ),
    Scenario(
        "slow_network",
        f"a node's network carries {faults.SLOW_MBIT:g} Mbit/s",
        Expectation("same", ("straggler", "signal", RECOVERING), "node", recovers=False, redone="snapshot"),
        faults.slow_network,
        network=True,
        missing=_two_nodes,
    ),
    Scenario(
        "xid_79",
        "kernel log: a GPU has fallen off the bus; the node is evicted",
        Expectation("same", ("signal", RECOVERING), "node", replaced=True),
        faults.xid(79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        spares=1,
    ),
    Scenario(
        "xid_74",
        "kernel log: an NVLink error; the node leaves for a reset",
        Expectation("same", ("signal", RECOVERING), "node", replaced=True),
        faults.xid(74, "pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 1"),
        spares=1,
    ),
    Scenario(
        "xid_94",
        "kernel log: a contained memory error; the ranks restart on the same node",
        Expectation("same", ("signal", RECOVERING), "node", replaced=False),
        faults.xid(94, "pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No, D-RST: No"),
    ),
    Scenario(
        "disk_full",
        "no space left when one rank saves",
        Expectation("same", ("checkpoint_failed",), "rank", recovers=False, redone="none", first_names=False),
        faults.wait,
        faults.enospc,
    ),
    Scenario(
        "damaged_checkpoint",
        "bytes of the newest checkpoint inverted, everything killed, started again",
        Expectation(
            "same",
            ("checkpoint_damaged",),
            "nothing",
            redone="two checkpoints",
            exits=(-9, 0),
            follows=("checkpoint_set_aside", "resumed"),
        ),
        faults.damage,
    ),
    Scenario(
        "nan_gradient",
        "a gradient of one rank is NaN in one step",
        Expectation("same", ("nonfinite", RECOVERING), "rank", redone="one"),
        faults.wait,
        faults.nan,
    ),
    Scenario(
        "flipped_bit",
        "a bit of a weight in the memory of one replica is flipped",
        Expectation("same", ("corruption", RECOVERING), "rank", redone="two snapshots"),
        faults.wait,
        faults.flip,
        replicas=True,
        missing=_compares,
    ),
    Scenario(
        "wrong_update",
        "one replica computes a weight wrongly",
        Expectation("same", ("corruption", RECOVERING), "nothing", redone="two snapshots"),
        faults.wait,
        faults.miscount,
        replicas=True,
        missing=_compares,
    ),
    Scenario(
        "preemption",
        "SIGTERM: the state is saved, exit 75, and the same command resumes",
        Expectation(
            "same",
            ("preempted", "run_interrupted"),
            "nothing",
            redone="none",
            exits=(75, 0),
            follows=("resumed",),
        ),
        faults.preempt,
    ),
    Scenario(
        "storm",
        "random faults, one after the other, for --seconds",
        Expectation(
            "any",
            (RECOVERING, "rank_failed", "node_lost", "nonfinite", "signal"),
            "nothing",
            redone="checkpoint",
        ),
        storm.inject,
        storm.planted,
        spares=1,
        returns=True,
        lasting=True,
    ),
)


def returns_of(scenario: Scenario, job: Job) -> dict[int, float]:
    """node -> seconds until its agent, once dead, is started again."""
    nodes = job.cluster.nodes + job.cluster.spares
    return dict.fromkeys(range(nodes), _AWAY_S) if scenario.returns else {}


def chosen(names: str | None) -> list[Scenario]:
    """The scenarios of "a,b"; all of them for None. Raises InputError for an unknown name."""
    known = {s.name: s for s in SCENARIOS}
    if names is None:
        return list(SCENARIOS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    wrong = [name for name in wanted if name not in known]
    if wrong or not wanted:
        close = {near for name in wrong for near in difflib.get_close_matches(name.lower(), known, n=2)}
        meant = f"did you mean {either(sorted(close))}? " if close else ""
        raise InputError(
            f"there is no scenario {', '.join(wrong) or repr(names)}",
            hint=f"{meant}scenarios: {', '.join(known)}",
        )
    return [known[name] for name in dict.fromkeys(wanted)]
