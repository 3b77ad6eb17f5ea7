"""The faults of each scenario: injected from outside, or by a rank into itself."""

from __future__ import annotations

import signal
from collections.abc import Callable

from seatrial.drill.copies import Plan
from seatrial.drill.drill_run import DrillRun
from seatrial.drill.injection import Planted
from seatrial.job import Job

SLOW_MBIT = 20.0  # capacity of a slowed network


# -- from outside


def wait(run: DrillRun, plan: Plan) -> None:
    """Do nothing from outside: ranks inject these faults into themselves."""


def _bystander(run: DrillRun) -> int:
    """A node that trains and is not the coordinator; if there is no such node, any that trains."""
    nodes = run.state.training_nodes()
    return next((n for n in reversed(nodes) if n != run.state.coordinator), nodes[-1])


def kill_rank(run: DrillRun, plan: Plan) -> None:
    run.wait_step(plan.fault)
    run.kill_rank(0)  # it writes the records: none may be lost or duplicated


def kill_agent(run: DrillRun, plan: Plan) -> None:
    run.wait_step(plan.fault)
    run.kill_agent(_bystander(run))


def kill_coordinator(run: DrillRun, plan: Plan) -> None:
    """Kill the coordinator's node, and if that was a spare, its successor's too: one of the killed nodes trains."""
    state = run.state
    run.wait_until(lambda state: state.furthest >= plan.fault and state.coordinator is not None)
    assert state.coordinator is not None
    first, training = state.coordinator, state.training_nodes()
    run.kill_nodes([first])
    if first in training:
        return
    run.wait_until(lambda state: state.coordinator != first and state.present.issuperset(training))
    run.kill_nodes([state.coordinator])


def kill_two(run: DrillRun, plan: Plan) -> None:
    run.wait_step(plan.fault)
    run.kill_nodes(run.state.training_nodes()[:2])


def freeze(run: DrillRun, plan: Plan) -> None:
    run.wait_step(plan.fault)
    run.freeze_rank(max(run.state.ranks))


def kill_two_ranks(run: DrillRun, plan: Plan) -> None:
    """Kill the first and the last rank, in most jobs on different nodes."""
    run.wait_step(plan.fault)
    for rank in (0, max(run.state.ranks)):
        run.kill_rank(rank)


def kill_in_recovery(run: DrillRun, plan: Plan) -> None:
    """Kill a second rank as soon as recovery from the first failure begins."""
    run.wait_step(plan.fault)
    run.kill_rank(max(run.state.ranks))
    begin = run.injections[-1].time
    run.wait_until(lambda state: state.since(begin, ("recovering",)) is not None and 0 in state.ranks)
    run.kill_rank(0, before="in the recovery from that, ")


def pause_agent(run: DrillRun, plan: Plan) -> None:
    """Pause the agent of a node that is not the coordinator, while its ranks are being started."""
    nodes = _wait_for_generation(run)
    run.pause_agent(next(n for n in nodes if n != run.state.coordinator or len(nodes) == 1), _long(run))


def pause_coordinator(run: DrillRun, plan: Plan) -> None:
    _wait_for_generation(run)
    assert run.state.coordinator is not None
    run.pause_agent(run.state.coordinator, _long(run))


def _wait_for_generation(run: DrillRun) -> list[int]:
    """Wait until a generation is started; returns its nodes."""
    run.wait_until(lambda state: state.since(0.0, ("generation_started",)) is not None)
    started = run.state.since(0.0, ("generation_started",))
    assert started is not None
    return sorted((started.data or {})["slots"].values())


def _long(run: DrillRun) -> float:
    """Longer than an agent may stay silent."""
    return 2 * run.job.resilience.silence_s


def fork_server(signum: signal.Signals) -> Callable[[DrillRun, Plan], None]:
    def inject(run: DrillRun, plan: Plan) -> None:
        run.wait_step(plan.fault)
        run.signal_fork_server(_bystander(run), signum)

    return inject


def edit_job(run: DrillRun, plan: Plan) -> None:
    """Edit the run's job file and kill a rank; then run the same command again, which rewrites the file."""
    run.wait_step(plan.fault)
    run.wait_saved(1)
    run.kill_rank(max(run.state.ranks), before=run.edit_job())
    run.wait_end()
    run.wait_gone()
    run.rerun()


def remake_data(run: DrillRun, plan: Plan) -> None:
    """Like `edit_job`, with recreated data; then the original data and the same command again."""
    run.wait_step(plan.fault)
    run.wait_saved(1)
    with run.remade_data() as what:
        run.kill_rank(max(run.state.ranks), before=what)
        run.wait_end()
        run.wait_gone()
    run.rerun()


def slow(run: DrillRun, plan: Plan) -> None:
    run.wait_step(1)
    rank = max(run.state.ranks)
    with run.slowed_rank(rank, stopped_s=0.006, going_s=0.002) as cycle:
        begin = run.injections[-1].time

        def noticed() -> bool:
            cycle()
            return run.state.since(begin, ("straggler", "recovering")) is not None

        run.wait_until(lambda state: noticed() or state.furthest >= run.job.train.steps - 1)


def cut(run: DrillRun, plan: Plan) -> None:
    run.wait_step(plan.fault)
    node = _bystander(run)
    pids = [place.pid for place in run.state.ranks.values() if place.node == node]
    run.cut_network(node)
    before, cut_at = run.state.generation, run.injections[-1].time
    run.wait_until(lambda state: any(m.time > cut_at and m.generation > before for m in state.metrics))
    # No message can reach them: they must stop by themselves before their successors start.
    run.expect_gone(pids, f"rank of node {node}, which was cut off, beside its successor")


def slow_network(run: DrillRun, plan: Plan) -> None:
    run.wait_step(plan.cadence.snapshot)
    node = _bystander(run)
    run.slow_network(node, SLOW_MBIT)
    begin = run.injections[-1].time
    run.wait_until(
        lambda state: (
            state.since(begin, ("straggler", "signal", "recovering")) is not None
            or state.furthest >= run.job.train.steps - 1
        )
    )
    run.restore_network(node)


def xid(code: int, text: str) -> Callable[[DrillRun, Plan], None]:
    def inject(run: DrillRun, plan: Plan) -> None:
        run.wait_step(plan.fault)
        run.write_kernel_log(_bystander(run), code, text)

    return inject


def damage(run: DrillRun, plan: Plan) -> None:
    run.wait_step(plan.fault)
    run.wait_saved(2)
    run.kill_everything()
    run.wait_end()
    run.wait_gone()
    run.damage_newest_checkpoint()  # from now on it can be detected
    run.rerun()


def preempt(run: DrillRun, plan: Plan) -> None:
    run.wait_step(plan.fault)
    run.ask_to_leave()
    run.wait_end()
    run.wait_gone()
    run.rerun()


# -- faults that ranks inject into themselves


def hang(job: Job, plan: Plan) -> tuple[Planted, ...]:
    rank = job.layout.world_size // 2
    return (Planted("hang", rank, plan.fault, f"rank {rank} does not enter a collective"),)


def gil(job: Job, plan: Plan) -> tuple[Planted, ...]:
    rank = min(1, job.layout.world_size - 1)
    return (Planted("gil", rank, plan.fault, f"rank {rank} holds the GIL and computes forever"),)


def nan(job: Job, plan: Plan) -> tuple[Planted, ...]:
    rank = job.layout.world_size - 1
    return (Planted("nan", rank, plan.fault, f"a gradient of rank {rank} is NaN"),)


def flip(job: Job, plan: Plan) -> tuple[Planted, ...]:
    rank = job.layout.world_size - 1  # in the last replica
    return (Planted("flip", rank, plan.fault, f"a bit of a weight in the memory of rank {rank} is flipped"),)


def miscount(job: Job, plan: Plan) -> tuple[Planted, ...]:
    rank = job.layout.world_size - 1
    step = plan.cadence.unverified_snapshot  # so that the newest snapshots are damaged too
    return (Planted("miscount", rank, step, f"rank {rank} computes one weight wrongly"),)


def die(job: Job, plan: Plan) -> tuple[Planted, ...]:
    rank = job.layout.world_size - 1
    return (Planted("die", rank, plan.fault, f"SIGKILL to rank {rank} while its part is being written"),)


def enospc(job: Job, plan: Plan) -> tuple[Planted, ...]:
    rank = job.layout.world_size - 1
    return (Planted("enospc", rank, plan.fault, f"no space is left when rank {rank} saves"),)
