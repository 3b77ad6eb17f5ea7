"""What the control machine knows of its run, and how the next coordinator comes to know it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from seatrial.control.machine_counts import Counts
from seatrial.control.machine_types import Action, Event, How, Settings
from seatrial.control.roster import Roster

if TYPE_CHECKING:
    from seatrial.control.policy import Rule

FOREVER = float("inf")
_STORY = 40  # events that a failed assertion tells of

Phase = Literal["idle", "flushing", "adopting", "running", "finished"]


class State:
    """One run as one coordinator knows it. Times are not in the memory: another coordinator has another clock."""

    def __init__(
        self, settings: Settings, memory: dict[str, Any] | None, rules: Callable[[str], Rule]
    ) -> None:
        self.settings = settings
        self.rules = rules
        self.phase: Phase = "idle"
        self.generation = settings.first_generation - 1  # the newest that was started
        self.shape = 0
        self.slots = {slot: slot for slot in range(settings.slots)}
        self.started = False  # whether any generation was, in this run
        self.finished: dict[int, How] = {}  # node of this generation -> how its ranks left
        self.roster = Roster()
        self.counts = Counts()
        self._highest = self.generation  # of any generation that anybody spoke of
        self._reason = "first start"
        self._saved = False  # the state is on disk, or no more of it can be put there
        self._progressed = False  # this generation has done a step
        self._leaving: Literal["yielded", "preempted"] | None = None
        self._preempting = False
        self._outgoing: dict[int, list[Any]] = {}  # node -> what is done to it once it runs nothing
        self._ending: list[str] | None = None
        if memory is not None:
            self._recall(memory)
        self._members = set(self.slots.values())
        self._adopting: set[int] = set()  # nodes that are expected to run this generation still
        if memory is not None and memory["phase"] in ("running", "adopting"):
            self._adopting = self._members - self.finished.keys()
        self._begun = memory is None
        self._now = -FOREVER
        self._settled_at = -FOREVER  # by then every node has found the new coordinator, or stopped
        self._since: float | None = None  # when this wait for nodes began
        self._wait_told = False  # it was said that there are too few
        self._home_until: float | None = None
        self._wake = self._flush_by = self._leave_by = self._preempt_by = FOREVER
        self._actions: list[Action] = []
        self._story: deque[tuple[Event, list[Action]]] = deque(maxlen=_STORY)

    def memory(self) -> dict[str, Any]:
        """All that the next coordinator needs, as plain JSON."""
        return {
            "phase": self.phase,
            "generation": self.generation,
            "highest": self._highest,
            "shape": self.shape,
            "slots": [[slot, node] for slot, node in self.slots.items()],
            "started": self.started,
            "finished": [[node, how] for node, how in self.finished.items()],
            "reason": self._reason,
            "saved": self._saved,
            "progressed": self._progressed,
            "leaving": self._leaving,
            "preempting": self._preempting,
            "outgoing": [[node, *what] for node, what in self._outgoing.items()],
            "ending": self._ending,
            "roster": self.roster.to_memory(),
            "counts": self.counts.to_memory(),
        }

    def _recall(self, memory: dict[str, Any]) -> None:
        # What ran may run still. A flush is asked for again: whoever was to answer may be gone.
        self.phase = {"running": "adopting", "flushing": "idle"}.get(memory["phase"], memory["phase"])
        self.generation, self._highest = memory["generation"], memory["highest"]
        self.shape, self.slots, self.started = memory["shape"], dict(memory["slots"]), memory["started"]
        self.finished = dict(memory["finished"])
        self._reason, self._saved = memory["reason"], memory["saved"]
        self._progressed, self._leaving = memory["progressed"], memory["leaving"]
        self._preempting, self._ending = memory["preempting"], memory["ending"]
        self._outgoing = {node: what for node, *what in memory["outgoing"]}
        self.roster = Roster.from_memory(memory["roster"])
        self.counts = Counts.from_memory(memory["counts"])

    def story(self) -> str:
        """The last events and what they led to."""
        lines = [f"phase {self.phase}, generation {self.generation}, running {self.roster.running}"]
        for event, actions in self._story:
            lines += [str(event), *(f"    {action}" for action in actions)]
        return "\n".join(lines)

    def at_work(self, generation: int) -> bool:
        """Whether `generation` is the current one: its reports are then news, not the effect of a stop."""
        return generation == self.generation and self.phase in ("running", "adopting")

    def works(self, node: int) -> bool:
        """Whether the node has work in the current generation and has not left it cleanly."""
        return node in self._members and self.at_work(self.generation) and node not in self.finished
