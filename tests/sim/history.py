"""What one random history is made of: the job's settings, the policy, and the faults to come. All from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from seatrial.control.machine.policy import Rule
from seatrial.control.machine.types import Settings

HANG_S = 12.0  # without progress for so long, the coordinator's watch reports a hang
LEAVE_S = 25.0  # what a signalled agent has until it ends
KILL_S = 0.8  # an agent that has fenced itself needs at most so long to kill

ACTIONS = {
    "worker_exit": ("restart", "evict"),
    "oom": ("restart", None),
    "hang": ("restart", "evict"),
    "agent_exit": ("restart", "evict"),
    "node_silent": ("restart", "evict"),
    "xid:79": ("evict", None),
    "xid:74": ("reset", "evict"),
    "congestion": ("record", None),
    "retransmissions": ("tolerate", "evict"),
    "app_error": ("stop", None),
}
RULES = {name: Rule(name, "test", action, repeat, "test") for name, (action, repeat) in ACTIONS.items()}  # type: ignore[arg-type]


@dataclass
class Fault:
    """Something that happens at `time`; what it hits is drawn then."""

    time: float
    kind: str


@dataclass
class History:
    """One run and its luck."""

    seed: int
    random: random.Random
    settings: Settings
    steps: int
    faults: list[Fault]
    quiet: float  # no fault comes after this time
    delay_s: float  # longest delay of a message
    early: bool  # losses without certainty are reported at once, not only after `silence_s`
    rejoin_s: float  # longest time that an agent needs to find a new coordinator
    bad_node: int | None = None  # its ranks fail soon after a start ...
    bad_times: int = 0  # ... so often
    poison: tuple[int, int, str] | None = (
        None  # the rank of this slot fails at this step, always, with this signal
    )
    flush: tuple[float, float] = (0.6, 0.3)  # how often a flush works, fails; otherwise nobody ever answers
    test_passes: float = 0.7  # how often a node passes its test
    cold: int = 0  # nodes that the run did not count with
    heals: bool = True  # whether what is down at the end of the faults comes back

    @property
    def bound(self) -> float:
        """The time by which the run must be over, if nodes are there: generous, but finite."""
        s = self.settings
        recovery = s.stop_within_s + s.fence_s + s.node_wait_s + s.flush_wait_s + HANG_S + 10
        tries = s.max_same_failure * 3 + s.evict_after * 2 + 6
        return self.quiet + s.join_wait_s + s.preempt_grace_s + tries * recovery + 20.0 * self.steps


KINDS = {
    "die": 6.0,
    "return": 8.0,
    "cut": 6.0,
    "heal": 8.0,
    "rank": 5.0,
    "hang": 2.0,
    "stale": 3.0,
    "evicting": 0.6,
    "resetting": 1.2,
    "tolerated": 1.2,
    "recorded": 0.6,
    "application": 0.03,
    "coordinator": 2.0,
    "halfway": 1.2,
    "slow stop": 2.0,
    "several": 1.0,
    "leave": 3.0,
    "replace": 3.0,
}


def draw(seed: int) -> History:
    """The history of `seed`."""
    r = random.Random(seed)
    nodes = int(256 ** (r.random() ** 1.6))
    spares = min(nodes - 1, r.choice((0, 0, 1, 1, 2, 3, nodes // 8)))
    slots = nodes - spares
    shapes = [slots, *(n for n in range(slots - 1, 0, -1) if r.random() < 0.4)]
    early = r.random() < 0.3
    silence = r.choice((1.0, 3.0))
    settings = Settings(
        slots=slots,
        shapes=tuple(shapes) if r.random() < 0.8 else (slots,),
        spares=spares,
        first_generation=r.choice((1, 1, 7)),
        max_restarts=r.choice((100, 100, 100, 100, 100, 100, 20, 3, 0)),
        max_same_failure=r.choice((3, 3, 3, 3, 5, 5, 5, 2, 1)),
        join_wait_s=r.choice((0.0, 20.0, 60.0, 60.0)),
        node_wait_s=r.choice((0.0, 0.0, 4.0)),
        silence_s=silence,
        fence_s=silence + KILL_S if early else KILL_S,
        stop_grace_s=1.0,
        flush_wait_s=4.0,
        preempt_grace_s=8.0,
        burst_s=r.choice((0.0, 5.0)),
        in_place=r.random() < 0.5,
        shrink=r.random() < 0.8,
        grow=r.random() < 0.8,
        evict_after=r.choice((1, 2, 2, 3)),
    )
    quiet = r.choice((15.0, 30.0, 60.0))
    calm = r.choice((1.5, 4.0, 10.0, 40.0))  # seconds between two faults
    faults, time = [], 0.0
    names, weights = list(KINDS), list(KINDS.values())
    while (time := time + r.expovariate(1 / calm)) < quiet:
        faults.append(Fault(time, r.choices(names, weights)[0]))
    if r.random() < 0.1:
        kinds = ("preempt", "preempt", "leave all", "leave all", "interrupt")
        faults.append(Fault(r.random() * quiet, r.choice(kinds)))
    history = History(
        seed,
        r,
        settings,
        steps=r.choice((5, 20, 40, 40)),
        faults=faults,
        quiet=quiet,
        delay_s=r.choice((0.01, 0.1, 0.4)),
        early=early,
        rejoin_s=r.choice((0.2, 1.0)),
    )
    if r.random() < 0.08:
        history.bad_node, history.bad_times = r.randrange(nodes), r.randint(1, 8)
    if r.random() < 0.08:
        signal = r.choice(("worker_exit", "oom", "hang"))
        history.poison = (r.randint(1, history.steps), r.randrange(settings.shapes[-1]), signal)
    if r.random() < 0.15:
        history.heals = False
    history.cold = r.choice((0, 0, 0, 1, 2))
    return history
