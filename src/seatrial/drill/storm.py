"""The storm: random faults, one after the other or overlapping. The same seed gives the same choices."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from seatrial.drill.copies import Plan
from seatrial.drill.drill_run import DrillRun
from seatrial.drill.injection import Planted
from seatrial.job import Job

_LAST_STEPS = 3  # no faults in these: there must be steps left to recover in
_AT_ONCE = 0.25  # share of the faults that do not wait for the recovery from the previous one
_PLANTED = 5  # maximum number of faults that ranks inject into themselves
_LEAST_APART = 6  # minimum number of steps between two of these


def planted(job: Job, plan: Plan) -> tuple[Planted, ...]:
    """The faults that ranks inject into themselves, chosen beforehand: kind, rank and step."""
    choose = random.Random(f"{plan.seed} planted")
    first, end = plan.fault, plan.steps - _LAST_STEPS
    apart = max(_LEAST_APART, -(-(end - first) // _PLANTED))
    found = []
    for begin in range(first, end, apart):
        kind, what = choose.choice(
            (("nan", "a gradient of rank {} is NaN"), ("hang", "rank {} does not enter a collective"))
        )
        rank = choose.randrange(job.layout.world_size)
        step = choose.randrange(begin, min(begin + apart, end))
        found.append(Planted(kind, rank, step, what.format(rank)))
    return tuple(found)


def inject(run: DrillRun, plan: Plan) -> None:
    """Inject random faults one after another until the time is over or the run is nearly done."""
    choose = random.Random(f"{plan.seed} blown")
    last = plan.steps - _LAST_STEPS
    run.wait_step(plan.cadence.checkpoint + 1)  # before the first save it is unknown how long one may take
    end = time.time() + plan.seconds
    while time.time() < end and run.state.furthest < last:
        _inject_one(run, choose)
        struck = time.time()
        if choose.random() < _AT_ONCE:
            pause = choose.uniform(0.1, 2.0)
            run.wait_until(lambda state, until=struck + pause: time.time() >= until)  # type: ignore[misc]
            continue
        before, more = run.state.generation, choose.randint(1, 4)
        run.wait_until(
            lambda state, g=before, n=more: (  # type: ignore[misc]
                sum(m.generation > g for m in state.metrics) >= n or state.furthest >= last
            )
        )


def _inject_one(run: DrillRun, choose: random.Random) -> None:
    """Inject one fault from outside, chosen from those that are possible now."""
    state = run.state
    ranks = [rank for rank in sorted(state.ranks) if run.alive(rank)]
    nodes = state.training_nodes()
    possible: list[Callable[[], None]] = []
    if ranks:
        rank = choose.choice(ranks)
        possible += [lambda: run.kill_rank(rank), lambda: run.freeze_rank(rank)]
    cluster = run.job.cluster
    if nodes:
        node = choose.choice(nodes)
        possible.append(
            lambda: run.write_kernel_log(node, 94, "pid='<unknown>', name=<unknown>, Contained: SM (0x1)")
        )
        # One node at a time: killed nodes need a while to return.
        if len(state.present) == cluster.nodes + cluster.spares:
            possible += [lambda: run.kill_agent(node), lambda: run.kill_nodes([node])]
    if possible:
        choose.choice(possible)()
