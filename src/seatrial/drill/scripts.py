"""The faults of each scenario: injected from outside, or by a rank into itself."""

from __future__ import annotations

import signal
from collections.abc import Callable

from seatrial.drill.copies import Plan
from seatrial.drill.injection import Planted
from seatrial.drill.stage import Stage
from seatrial.job import Job

SLOW_MBIT = 20.0  # capacity of a slowed network


# -- from outside


def wait(stage: Stage, plan: Plan) -> None:
    """Do nothing from outside: ranks inject these faults into themselves."""


def _bystander(stage: Stage) -> int:
    """A node that trains and is not the coordinator; if there is no such node, any that trains."""
    nodes = stage.scene.training_nodes()
    return next((n for n in reversed(nodes) if n != stage.scene.coordinator), nodes[-1])


def kill_rank(stage: Stage, plan: Plan) -> None:
    stage.wait_step(plan.fault)
    stage.kill_rank(0)  # it writes the records: none may be lost or duplicated


def kill_agent(stage: Stage, plan: Plan) -> None:
    stage.wait_step(plan.fault)
    stage.kill_agent(_bystander(stage))


def kill_coordinator(stage: Stage, plan: Plan) -> None:
    """Kill the coordinator's node, and if that was a spare, its successor's too: one of the killed nodes trains."""
    scene = stage.scene
    stage.wait_until(lambda scene: scene.furthest >= plan.fault and scene.coordinator is not None)
    assert scene.coordinator is not None
    first, training = scene.coordinator, scene.training_nodes()
    stage.kill_nodes([first])
    if first in training:
        return
    stage.wait_until(lambda scene: scene.coordinator != first and scene.present.issuperset(training))
    stage.kill_nodes([scene.coordinator])


def kill_two(stage: Stage, plan: Plan) -> None:
    stage.wait_step(plan.fault)
    stage.kill_nodes(stage.scene.training_nodes()[:2])


def freeze(stage: Stage, plan: Plan) -> None:
    stage.wait_step(plan.fault)
    stage.freeze_rank(max(stage.scene.ranks))


def kill_two_ranks(stage: Stage, plan: Plan) -> None:
    """Kill the first and the last rank, in most jobs on different nodes."""
    stage.wait_step(plan.fault)
    for rank in (0, max(stage.scene.ranks)):
        stage.kill_rank(rank)


def kill_in_recovery(stage: Stage, plan: Plan) -> None:
    """Kill a second rank as soon as recovery from the first failure begins."""
    stage.wait_step(plan.fault)
    stage.kill_rank(max(stage.scene.ranks))
    begin = stage.injections[-1].time
    stage.wait_until(lambda scene: scene.since(begin, ("recovering",)) is not None and 0 in scene.ranks)
    stage.kill_rank(0, before="in the recovery from that, ")


def pause_agent(stage: Stage, plan: Plan) -> None:
    """Pause the agent of a node that is not the coordinator, while its ranks are being started."""
    nodes = _begun(stage)
    stage.pause_agent(next(n for n in nodes if n != stage.scene.coordinator or len(nodes) == 1), _long(stage))


def pause_coordinator(stage: Stage, plan: Plan) -> None:
    _begun(stage)
    assert stage.scene.coordinator is not None
    stage.pause_agent(stage.scene.coordinator, _long(stage))


def _begun(stage: Stage) -> list[int]:
    """Wait until a generation is started; returns its nodes."""
    stage.wait_until(lambda scene: scene.since(0.0, ("generation_started",)) is not None)
    started = stage.scene.since(0.0, ("generation_started",))
    assert started is not None
    return sorted((started.data or {})["slots"].values())


def _long(stage: Stage) -> float:
    """Longer than an agent may stay silent."""
    return 2 * stage.job.resilience.silence_s


def fork_server(signum: signal.Signals) -> Callable[[Stage, Plan], None]:
    def script(stage: Stage, plan: Plan) -> None:
        stage.wait_step(plan.fault)
        stage.signal_fork_server(_bystander(stage), signum)

    return script


def edit_job(stage: Stage, plan: Plan) -> None:
    """Edit the run's job file and kill a rank; then run the same command again, which rewrites the file."""
    stage.wait_step(plan.fault)
    stage.wait_saved(1)
    stage.kill_rank(max(stage.scene.ranks), before=stage.edit_job())
    stage.wait_end()
    stage.wait_gone()
    stage.again()


def remake_data(stage: Stage, plan: Plan) -> None:
    """Like `edit_job`, with recreated data; then the original data and the same command again."""
    stage.wait_step(plan.fault)
    stage.wait_saved(1)
    with stage.remade_data() as what:
        stage.kill_rank(max(stage.scene.ranks), before=what)
        stage.wait_end()
        stage.wait_gone()
    stage.again()


def slow(stage: Stage, plan: Plan) -> None:
    stage.wait_step(1)
    rank = max(stage.scene.ranks)
    with stage.slowed_rank(rank, stopped_s=0.006, going_s=0.002) as turn:
        begin = stage.injections[-1].time

        def noticed() -> bool:
            turn()
            return stage.scene.since(begin, ("straggler", "recovering")) is not None

        stage.wait_until(lambda scene: noticed() or scene.furthest >= stage.job.train.steps - 1)


def cut(stage: Stage, plan: Plan) -> None:
    stage.wait_step(plan.fault)
    node = _bystander(stage)
    pids = [place.pid for place in stage.scene.ranks.values() if place.node == node]
    stage.cut_network(node)
    before, cut_at = stage.scene.generation, stage.injections[-1].time
    stage.wait_until(lambda scene: any(m.time > cut_at and m.generation > before for m in scene.metrics))
    # No message can reach them: they must stop by themselves before their successors start.
    stage.expect_gone(pids, f"rank of node {node}, which was cut off, beside its successor")


def slow_network(stage: Stage, plan: Plan) -> None:
    stage.wait_step(plan.cadence.snapshot)
    node = _bystander(stage)
    stage.slow_network(node, SLOW_MBIT)
    begin = stage.injections[-1].time
    stage.wait_until(
        lambda scene: (
            scene.since(begin, ("straggler", "signal", "recovering")) is not None
            or scene.furthest >= stage.job.train.steps - 1
        )
    )
    stage.restore_network(node)


def xid(code: int, text: str) -> Callable[[Stage, Plan], None]:
    def script(stage: Stage, plan: Plan) -> None:
        stage.wait_step(plan.fault)
        stage.write_kernel_log(_bystander(stage), code, text)

    return script


def damage(stage: Stage, plan: Plan) -> None:
    stage.wait_step(plan.fault)
    stage.wait_saved(2)
    stage.kill_everything()
    stage.wait_end()
    stage.wait_gone()
    stage.damage_newest_checkpoint()  # from now on it can be detected
    stage.again()


def preempt(stage: Stage, plan: Plan) -> None:
    stage.wait_step(plan.fault)
    stage.ask_to_leave()
    stage.wait_end()
    stage.wait_gone()
    stage.again()


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
