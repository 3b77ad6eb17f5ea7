"""The judge on synthetic run folders: what is in order passes, and each thing that is not is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.base.batches import BatchSizes
from seatrial.base.errors import RunFailed
from seatrial.drill.evidence import Criteria, Evidence, Replay, read_evidence
from seatrial.drill.expectation import Expectation
from seatrial.drill.injection import Injection
from seatrial.drill.judge import Check, Judgement, judge, unjudged
from seatrial.drill.weights import Difference
from seatrial.job.layout import Layout
from seatrial.record.events import Event
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import append_line
from seatrial.record.ledger import LedgerRecord
from seatrial.record.metrics import MetricsRecord

STEPS, BATCH = 12, 4
FAULT = 7  # the last step before it
SNAPSHOT = 6  # what is gone on from
KILLED = 100.0 + FAULT + 0.5

RANK_KILLED = Expectation("same", ("rank_failed", "recovering"), "rank", named_by=("recovering",))
NODE_LOST = Expectation("same", ("node_lost", "recovering"), "node", named_by=("recovering",), replaced=True)
HALF = Layout(replicate=1, shard=2)
SHRUNK = replace(NODE_LOST, world="other", follows=("shrunk", "grown"))


def loss(step: int) -> float:
    return 5.0 / step


def metric(step: int, generation: int, time: float, value: float | None = None) -> MetricsRecord:
    return MetricsRecord(
        step=step,
        tokens=step * 10,
        loss=loss(step) if value is None else value,
        grad_norm=2.0 / step,
        lr=0.1,
        step_time_s=1.0,
        data_wait_s=0.0,
        tokens_per_s=10.0,
        tokens_per_s_per_gpu=1.0,
        mfu=None,
        memory_bytes=None,
        time=time,
        generation=generation,
    )


@dataclass
class Story:
    """A run in which rank 3 of node 1 was killed after step 7, found 0.2 s later, and that went on from step 6."""

    folder: RunFolder
    metrics: list[MetricsRecord] = field(default_factory=list)
    ledger: list[LedgerRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    injections: list[Injection] = field(default_factory=list)
    criteria: Criteria = field(
        default_factory=lambda: Criteria(
            STEPS, BatchSizes.of(BATCH), 3, 4, {s: (loss(s), 2.0 / s) for s in range(1, STEPS + 1)}
        )
    )
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for step in range(1, FAULT + 1):
            self.step(step, 1, 100.0 + step)
        self.injections.append(Injection(KILLED, "kill_rank", "SIGKILL to rank 3", FAULT, 1, 3))
        self.event("recovering", KILLED + 0.2, 1, node=1, rank=3)
        slots = {"0": 0, "1": 1}
        self.event("generation_started", KILLED + 0.3, 2, data={"slots": slots})
        for step in range(SNAPSHOT + 1, STEPS + 1):
            self.step(step, 2, KILLED + 2.0 + step - SNAPSHOT)

    def step(self, step: int, generation: int, time: float) -> None:
        self.metrics.append(metric(step, generation, time))
        self.ledger.append(LedgerRecord(step, (step - 1) * BATCH, step * BATCH, generation))

    def event(
        self,
        kind: str,
        time: float,
        generation: int,
        *,
        node: int | None = None,
        rank: int | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        self.events.append(Event(time, generation, kind, "info", f"about {kind}", node, rank, data))

    def evidence(self) -> Evidence:
        """By way of the files, as in earnest."""
        self.folder.path.mkdir(parents=True)
        for path, records in (
            (self.folder.metrics, self.metrics),
            (self.folder.ledger, self.ledger),
            (self.folder.events, self.events),
        ):
            for record in records:
                append_line(path, vars(record))
        seen: dict[str, Any] = {"exits": [0], "left": [], "weights": Difference(40)}
        seen |= self.more
        replay = {key: seen.pop(key) for key in ("replay", "replay_problem") if key in seen}
        return replace(read_evidence(self.folder, self.injections, **seen), **replay)

    def judged(self, expected: Expectation = RANK_KILLED) -> Judgement:
        return judge(expected, self.evidence(), self.criteria)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(RunFolder(tmp_path / "run"))


def test_a_recovery_in_order_passes_with_its_figures(story: Story) -> None:
    result = story.judged()
    assert result.verdict == "PASS", result.why()
    assert result.why() == ""
    assert result.detected_in_s == pytest.approx(0.2)
    assert result.recovered_in_s == pytest.approx(3.0)
    assert (result.steps_redone, result.work_lost_s, result.largest_difference) == (1, 1.0, 0.0)


def change_record(story: Story, index: int, **values: Any) -> None:
    story.metrics[index] = replace(story.metrics[index], **values)


def wrong_loss(story: Story) -> None:
    change_record(story, -1, loss=loss(STEPS) * (1 + 1e-15) + 1e-16)


def wrong_norm(story: Story) -> None:
    change_record(story, -1, grad_norm=1.0)


def loss_that_is_no_number(story: Story) -> None:
    change_record(story, -1, loss=float("nan"))


def missing_ledger_step(story: Story) -> None:
    story.ledger = [r for r in story.ledger if r.step != 9]


def sample_seen_twice(story: Story) -> None:
    story.ledger[-1] = replace(story.ledger[-1], first_sample=(STEPS - 1) * BATCH - 1)


def ledger_ends_early(story: Story) -> None:
    story.ledger.pop()


def wrong_rank_named(story: Story) -> None:
    story.events[0] = replace(story.events[0], rank=2)


def wrong_node_named(story: Story) -> None:
    story.events[0] = replace(story.events[0], node=0)


def nobody_named(story: Story) -> None:
    story.events[0] = replace(story.events[0], node=None, rank=None)


def never_noticed(story: Story) -> None:
    story.events.clear()


def noticed_before_it_happened(story: Story) -> None:
    story.events[0] = replace(story.events[0], time=KILLED - 1)


def another_world_goes_unnoticed(story: Story) -> None:
    story.more["weights"] = Difference(40, ["model/a"], [], 1e-9, "model/a")


def tensor_missing(story: Story) -> None:
    story.more["weights"] = Difference(40, [], ["model/a"])


def no_checkpoint(story: Story) -> None:
    story.more |= {"weights": None, "weights_problem": "there is no step-00000012"}


def something_left(story: Story) -> None:
    story.more["left"] = ["123 python"]


def failed_in_the_end(story: Story) -> None:
    story.more["exits"] = [1]


def started_again(story: Story) -> None:
    story.more["exits"] = [1, 0]


def never_ended(story: Story) -> None:
    story.more |= {"overdue": True, "exits": []}


def too_many_steps_again(story: Story) -> None:
    for step in range(2, STEPS + 1):
        story.step(step, 3, KILLED + 20.0 + step)


def never_went_on(story: Story) -> None:
    story.metrics = [m for m in story.metrics if m.generation == 1]


def steps_missing(story: Story) -> None:
    story.metrics = [m for m in story.metrics if m.step != 9]


def never_injected(story: Story) -> None:
    story.injections.clear()


def false_alarm(story: Story) -> None:
    story.event("recovering", 101.0, 1)


@pytest.mark.parametrize(
    ("spoil", "check", "says"),
    [
        (wrong_loss, "losses", "loss of step 12"),
        (wrong_norm, "losses", "gradient norm of step 12"),
        (loss_that_is_no_number, "losses", "loss of step 12"),
        (missing_ledger_step, "ledger", "step 9 is missing"),
        (sample_seen_twice, "ledger", "seen twice"),
        (ledger_ends_early, "ledger", "ends with step 11"),
        (wrong_rank_named, "named", "rank 3 was expected to be named, but recovering names node 1 rank 2"),
        (wrong_node_named, "named", "node 0 rank 3"),
        (nobody_named, "named", "names no node or rank"),
        (never_noticed, "detected", "no rank_failed or recovering event"),
        (noticed_before_it_happened, "no false alarm", "before the fault"),
        (another_world_goes_unnoticed, "weights", "1 of 40 tensors"),
        (tensor_missing, "weights", "model/a"),
        (no_checkpoint, "weights", "there is no step-00000012"),
        (something_left, "nothing left", "123 python"),
        (failed_in_the_end, "ended", "exit 1, not 0"),
        (started_again, "ended", "exit 1 then 0, not 0"),
        (never_ended, "ended", "stopped by the drill"),
        (too_many_steps_again, "steps redone", "at most 3"),
        (never_went_on, "recovered", "no step was trained"),
        (steps_missing, "losses", "step 9"),
        (never_injected, "injected", "never injected"),
        (false_alarm, "no false alarm", "before the fault"),
    ],
)
def test_each_fault_of_the_run_is_found(
    story: Story, spoil: Callable[[Story], None], check: str, says: str
) -> None:
    spoil(story)
    result = story.judged()
    assert result.verdict == "FAIL"
    found = {c.name: c for c in result.checks}
    assert found[check].ok is False
    assert says in found[check].text


@pytest.mark.parametrize(("saved_at", "limit"), [(None, 7), (6, 6)])
def test_late_checkpoints_allow_more_steps_again(story: Story, saved_at: int | None, limit: int) -> None:
    """Due after step 4, with one every 4: not begun before the fault at step 7, or after step 6."""
    story.event("checkpoint_late", 104.0, 1, data={"step": 4, "writing": 2})
    if saved_at:
        story.event("checkpoint_saved", 107.0, 1, data={"step": saved_at})
    result = story.judged(replace(RANK_KILLED, redone="checkpoint"))
    assert {c.name: c.text for c in result.checks}["steps redone"] == f"1, at most {limit}"


def test_a_line_that_is_not_a_record_fails(story: Story) -> None:
    evidence = story.evidence()
    with open(story.folder.metrics, "a") as file:
        file.write("{oops}\n")
    again = read_evidence(story.folder, story.injections, exits=[0], left=[], weights=evidence.weights)
    assert judge(RANK_KILLED, again, story.criteria).verdict == "FAIL"


def test_a_node_that_must_go_and_stays(story: Story) -> None:
    result = story.judged(replace(RANK_KILLED, replaced=True))
    assert (result.verdict, "node 1 is still used" in result.why()) == ("FAIL", True)


def test_a_node_that_must_stay_and_goes(story: Story) -> None:
    story.events[1] = replace(story.events[1], data={"slots": {"0": 0, "1": 2}})
    result = story.judged(replace(RANK_KILLED, replaced=False))
    assert (result.verdict, "node 1 was dropped" in result.why()) == ("FAIL", True)


def shrink(story: Story) -> None:
    """The same, but without a spare: on to step 9 on one node, then on two again."""
    story.event("shrunk", KILLED + 0.3, 2)
    story.events[1] = replace(story.events[1], data={"slots": {"0": 0}, "layout": HALF.as_dict()})
    story.event("grown", KILLED + 6, 3)
    story.more["replay"] = Replay({m.step: (m.loss, m.grad_norm) for m in story.metrics}, Difference(40))


def test_another_world_is_held_to_a_tolerance(story: Story) -> None:
    change_record(story, -1, loss=loss(STEPS) * (1 + 5e-5))
    shrink(story)
    story.more["weights"] = Difference(40, ["model/a"], [], 1e-5, "model/a")
    result = story.judged(SHRUNK)
    assert result.verdict == "PASS", result.why()
    assert result.largest_difference == pytest.approx(5e-5)


def test_beyond_the_tolerance_another_world_fails(story: Story) -> None:
    change_record(story, -1, loss=loss(STEPS) * (1 + 2e-4))
    shrink(story)
    assert story.judged(SHRUNK).why().startswith("losses: loss of step 12 differs by 2.0e-04")


def check_of(result: Judgement, name: str) -> Check:
    return next(c for c in result.checks if c.name == name)


def test_below_fp32_only_the_first_step_is_near(story: Story) -> None:
    """Rounding magnifies the last bits: later steps, and weights, are compared with the replay alone."""
    story.criteria = replace(story.criteria, stays_near=False)
    change_record(story, -1, loss=loss(STEPS) * 1.1)
    shrink(story)
    story.more["weights"] = Difference(40, ["model/a"], [], 0.5, "model/a")
    result = story.judged(SHRUNK)
    assert result.verdict == "PASS", result.why()
    assert "after step 7 compared with the replay alone" in check_of(result, "losses").text
    assert "compared with the replay alone" in check_of(result, "weights").text
    assert "bit-equal" in check_of(result, "replay").text


def test_below_fp32_the_first_step_must_be_near(story: Story) -> None:
    story.criteria = replace(story.criteria, stays_near=False)
    first = next(n for n, m in enumerate(story.metrics) if m.generation == 2)
    change_record(story, first, grad_norm=story.metrics[first].grad_norm * 1.002)
    shrink(story)
    assert story.judged(SHRUNK).why().startswith("losses: gradient norm of step 7 differs by 2.0e-03")


def other_loss_than_the_replay(story: Story) -> None:
    change_record(story, -1, loss=loss(STEPS) * (1 + 1e-9))


def other_weights_than_the_replay(story: Story) -> None:
    losses = story.more["replay"].losses
    story.more["replay"] = Replay(losses, Difference(40, ["model/a"], [], 1e-9, "model/a"))


def tensor_missing_in_the_replay(story: Story) -> None:
    story.more["replay"] = Replay(story.more["replay"].losses, Difference(40, [], ["model/b"]))


@pytest.mark.parametrize("stays_near", [True, False])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (other_loss_than_the_replay, "loss of step 12 differs by 1.0e-09"),
        (other_weights_than_the_replay, "model/a by 1.0e-09"),
        (tensor_missing_in_the_replay, "model/b"),
    ],
)
def test_a_run_that_shrank_must_equal_its_replay(
    story: Story, spoil: Callable[[Story], None], says: str, stays_near: bool
) -> None:
    story.criteria = replace(story.criteria, stays_near=stays_near)
    shrink(story)
    spoil(story)
    result = story.judged(SHRUNK)
    assert result.verdict == "FAIL"
    assert says in check_of(result, "replay").text


def test_on_gpus_a_replay_is_held_to_their_tolerance(story: Story) -> None:
    at = {(STEPS, "loss"): 1e-6, (STEPS, "weights"): 1e-4}
    story.criteria = replace(story.criteria, tolerance=at)
    shrink(story)
    other_loss_than_the_replay(story)
    other_weights_than_the_replay(story)
    assert "as near as two undisturbed runs" in check_of(story.judged(SHRUNK), "replay").text


def test_without_its_replay_a_run_that_shrank_is_not_judged(story: Story) -> None:
    shrink(story)
    story.more |= {"replay": None, "replay_problem": "the undisturbed copy ended with exit code 1"}
    result = story.judged(SHRUNK)
    assert (result.verdict, result.why()) == (
        "UNJUDGED",
        "replay: the undisturbed copy ended with exit code 1",
    )


def test_the_layouts_of_the_steps_that_count(story: Story) -> None:
    whole = replace(HALF, replicate=2)
    story.event("generation_started", 99.0, 1, data={"layout": whole.as_dict(), "slots": {}})
    shrink(story)
    story.event("generation_started", KILLED + 6.1, 3, data={"layout": whole.as_dict(), "slots": {}})
    story.event("generation_started", KILLED + 7.1, 4, data={"layout": whole.as_dict(), "slots": {}})
    for generation, step in ((3, 10), (3, 11), (4, 11), (4, 12)):
        story.step(step, generation, KILLED + 10.0 + step)
    assert story.evidence().layouts() == [(whole, 6), (HALF, 9), (whole, 12)]


def test_a_generation_of_unknown_layout_is_said(story: Story) -> None:
    with pytest.raises(RunFailed, match="in which layout generation 1 trained"):
        story.evidence().layouts()


def test_each_quantity_has_a_tolerance_of_its_own(story: Story) -> None:
    change_record(story, -1, grad_norm=2.0 / STEPS * (1 + 5e-4))
    shrink(story)
    result = story.judged(SHRUNK)
    assert result.verdict == "PASS", result.why()
    assert "gradient norm 5.0e-04 (at most 0.001)" in next(
        c.text for c in result.checks if c.name == "losses"
    )


def test_beyond_its_tolerance_a_tensor_fails(story: Story) -> None:
    shrink(story)
    story.more["weights"] = Difference(40, ["model/a"], [], float("nan"), "model/a")
    assert story.judged(SHRUNK).verdict == "FAIL"


@pytest.mark.parametrize(("apart", "verdict"), [(9e-7, "PASS"), (1.1e-6, "FAIL")])
def test_where_bits_may_differ_a_tolerance_holds(story: Story, apart: float, verdict: str) -> None:
    story.criteria = replace(
        story.criteria,
        tolerance={
            (STEPS, "loss"): 1e-6,
            (STEPS, "gradient norm"): 1e-5,
            (STEPS, "weights"): 1e-4,
        },
    )
    story.more["weights"] = Difference(40, ["model/a"], [], 9e-5, "model/a")
    change_record(story, -1, loss=loss(STEPS) * (1 + apart), grad_norm=2.0 / STEPS * (1 + 9 * apart))
    result = story.judged()
    assert result.verdict == verdict, result.why()
    assert "allowed 1e-06" in result.why() or verdict == "PASS"


def test_a_tensor_beyond_the_tolerance_fails(story: Story) -> None:
    story.criteria = replace(story.criteria, tolerance={(STEPS, "weights"): 1e-4})
    story.more["weights"] = Difference(40, ["model/a"], [], 2e-4, "model/a")
    assert story.judged().why().endswith("(model/a), allowed 0.0001 of a tensor's 2-norm")


def test_before_it_shrank_the_bits_must_be_the_same(story: Story) -> None:
    shrink(story)
    change_record(story, 2, loss=loss(3) * (1 + 1e-9))
    result = story.judged(SHRUNK)
    assert (result.verdict, "loss of step 3" in result.why()) == ("FAIL", True)


def test_a_run_that_had_to_shrink_and_did_not_fails(story: Story) -> None:
    story.events[1] = replace(story.events[1], data={"slots": {"0": 0, "1": 2}})
    result = story.judged(SHRUNK)
    assert (result.verdict, result.why()) == ("FAIL", "shrunk: no shrunk event after the fault")


def test_without_a_shrink_any_world_has_to_be_bit_equal(story: Story) -> None:
    wrong_loss(story)
    assert story.judged(replace(RANK_KILLED, world="any")).verdict == "FAIL"


def test_a_run_that_goes_on_needs_no_recovery(story: Story) -> None:
    story.metrics = [m for m in story.metrics if m.generation == 1]
    story.ledger = [r for r in story.ledger if r.generation == 1]
    for step in range(FAULT + 1, STEPS + 1):
        story.step(step, 1, KILLED + step)
    story.events = []
    story.event("checkpoint_failed", KILLED + 0.1, 1, rank=0)
    story.event("checkpoint_failed", KILLED + 0.1, 1, rank=3)
    expected = Expectation(
        "same", ("checkpoint_failed",), "rank", recovers=False, redone="none", first_names=False
    )
    result = story.judged(expected)
    assert result.verdict == "PASS", result.why()
    assert result.recovered_in_s is None


def test_several_faults_have_to_be_detected_each(story: Story) -> None:
    story.injections.append(Injection(KILLED + 100, "kill_rank", "SIGKILL to rank 0", STEPS, 0, 0))
    result = story.judged(replace(RANK_KILLED, names="nothing"))
    assert (result.verdict, "SIGKILL to rank 0" in result.why()) == ("FAIL", True)


def test_what_could_not_be_run_is_unjudged() -> None:
    result = unjudged("network namespaces need root")
    assert (result.verdict, result.why()) == ("UNJUDGED", "needs: network namespaces need root")
    assert result.as_dict()["detected_in_s"] is None
