"""Runs as they happen to ledgers: trained, rolled back, crashed, gone on from somewhere, in two generations at once.

A history is drawn as a list of things that happen; `Run` plays it and leaves the ledger and the evidence that a real run
would. It does what `train.recorder` and `train.generation` do, in fewer words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from seatrial.record.ledger import LedgerRecord
from seatrial.record.proof import Evidence

BATCH = 4


@dataclass
class Run:
    """Plays a history; `ledger`, `trained`, `starts` and `skips` are what is left of it."""

    ledger: list[LedgerRecord] = field(default_factory=list)
    trained: dict[int, list[int]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    skips: set[tuple[int, int]] = field(default_factory=set)
    generation: int = 0
    step: int = 0
    snapshot: int = 0
    checkpoints: list[int] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    late: list[LedgerRecord] = field(default_factory=list)  # of a generation that is not dead yet
    done: dict[int, bool] = field(default_factory=dict)  # step -> whether it was left out, in what led here
    _highest: int = 0

    def begin(self, step: int) -> None:
        """A generation goes on after `step`."""
        self.generation += 1
        self.step, self._highest = step, 0
        self.starts[self.generation] = step
        self.snapshot = min(self.snapshot, step)
        self.checkpoints = [c for c in self.checkpoints if c <= step]
        self.done = {s: out for s, out in self.done.items() if s <= step}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            step = self.step + 1
            if step in self.left_out:
                self.leave_out(told=False)
                continue
            self.step = step
            self.done[step] = False
            if step > self._highest:
                self.write(step)
                self._highest = step
            self.measure(self.generation, step)
            if self.late:
                record = self.late.pop(0)
                self.ledger.append(record)
                self.measure(record.generation, record.step)

    def leave_out(self, *, told: bool) -> None:
        self.step += 1
        self.done[self.step] = True
        self.write(self.step, skipped=True)
        self._highest = max(self._highest, self.step)
        if self.step not in self.left_out and told:
            self.skips.add((self.generation, self.step))
        self.left_out.add(self.step)

    def go_back(self) -> None:
        self.step = self.snapshot
        self.checkpoints = [c for c in self.checkpoints if c <= self.step]
        self.done = {s: out for s, out in self.done.items() if s <= self.step}

    def write(self, step: int, *, skipped: bool = False) -> None:
        self.ledger.append(LedgerRecord(step, (step - 1) * BATCH, step * BATCH, self.generation, skipped))

    def measure(self, generation: int, step: int) -> None:
        self.trained.setdefault(generation, []).append(step)

    def play(self, history: list[tuple[Any, ...]]) -> Run:
        self.begin(0)
        for what, *how in history:
            getattr(self, f"on_{what}")(*how)
        return self

    # -- what happens

    def on_train(self, steps: int) -> None:
        self.train(steps)

    def on_save(self) -> None:
        self.checkpoints.append(self.step)

    def on_copy(self) -> None:
        self.snapshot = self.step

    def on_not_finite(self) -> None:
        """Redone, rolled back, replayed, left out."""
        wanted = self.step
        self.go_back()
        while self.step < wanted:
            self.train(1)
        self.leave_out(told=True)

    def on_spike(self) -> None:
        """Trained already, and then taken back and left out."""
        self.train(1)
        wanted = self.step
        if self.snapshot >= wanted or wanted in self.left_out:
            return
        self.go_back()
        while self.step < wanted - 1:
            self.train(1)
        self.leave_out(told=True)

    def on_crash(self, where: str, lost: str, zombie: int) -> None:
        """The generation is over; the next one goes on from what `where` says.

        With `lost` rank 0 died in the midst of its records: before the metrics of its last step (or before the event that
        tells of a step left out), or in the midst of the ledger's line. `zombie`: so many more steps are done by ranks that
        did not hear of it at once, and what they write comes late.
        """
        old, step = self.generation, self.step
        if step not in self.checkpoints and step != self.snapshot and self._last_line_is_of_this_step():
            if self.ledger[-1].skipped:
                if lost == "metrics":
                    self.skips.discard((old, step))
            elif lost != "nothing" and self.trained[old][-1] == step:
                self._lose(where, lost)
                step = self.step
        elif lost != "nothing":
            lost = "nothing"
        late = []
        if lost == "nothing" and where != "carried" and self._highest == step:
            late = [s for s in range(step + 1, step + 1 + zombie) if s not in self.left_out]
            late = late if late == list(range(step + 1, step + 1 + zombie)) else []
        sources = {
            "carried": step,
            "memory": self.snapshot,
            "disk": max(self.checkpoints, default=0),
            "fresh": 0,
        }
        self.begin(sources[where])
        self.late = [LedgerRecord(s, (s - 1) * BATCH, s * BATCH, old) for s in late]

    def _last_line_is_of_this_step(self) -> bool:
        return bool(self.ledger) and (self.ledger[-1].generation, self.ledger[-1].step) == (
            self.generation,
            self.step,
        )

    def _lose(self, where: str, lost: str) -> None:
        self.trained[self.generation].pop()
        if lost == "line":
            self.ledger.pop()
        if where == "carried":  # others have done it, and tell rank 0 of the next generation
            if lost == "line":
                self.write(self.step)
            self.measure(self.generation, self.step)
        elif lost == "line":
            self.step -= 1

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            starts=dict(self.starts),
            trained={g: list(steps) for g, steps in self.trained.items()},
            skipped=frozenset(self.skips),
        )


HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 5)),
        st.tuples(st.just("save")),
        st.tuples(st.just("copy")),
        st.tuples(st.just("not_finite")),
        st.tuples(st.just("spike")),
        st.tuples(
            st.just("crash"),
            st.sampled_from(["carried", "memory", "disk", "fresh"]),
            st.sampled_from(["nothing", "nothing", "metrics", "line"]),
            st.integers(0, 2),
        ),
    ),
    min_size=1,
    max_size=12,
)
