"""The proof of the ledger: no false alarm over any history, and every change of a line that says something else is found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from run_histories import BATCH, HISTORIES, Run

from seatrial.base.batches import BatchSizes
from seatrial.record import events
from seatrial.record.audit import audit
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import append_line, encode
from seatrial.record.ledger import LedgerRecord, LedgerWriter, ledger_gaps, read_ledger
from seatrial.record.proof import Evidence, Proof, prove

BATCHES = BatchSizes.of(BATCH)


def judge(ledger: list[LedgerRecord], evidence: Evidence | None = None) -> Proof:
    return prove(enumerate(ledger, 1), BATCHES, evidence)


def told(proof: Proof) -> list[str]:
    return [str(v) for v in proof.violations]


def line(step: int, generation: int = 1, *, skipped: bool = False) -> LedgerRecord:
    return LedgerRecord(step, (step - 1) * BATCH, step * BATCH, generation, skipped)


def lines(generation: int, first: int, last: int) -> list[LedgerRecord]:
    return [line(step, generation) for step in range(first, last + 1)]


# -- any history, undamaged and damaged


@settings(max_examples=300)
@given(history=HISTORIES)
def test_no_false_alarm(history: list[tuple[Any, ...]]) -> None:
    run = Run().play([*history, ("train", 2)])
    proof = judge(run.ledger, run.evidence)
    assert told(proof) == []
    assert proof.verdict == "proven"
    assert proof.steps == run.step
    assert proof.skipped == [step for step, left_out in sorted(run.done.items()) if left_out]
    assert proof.trained_samples == BATCH * sum(not left_out for left_out in run.done.values())
    assert proof.redone >= 0
    # What `watch` shows has to agree.
    assert ledger_gaps(run.ledger, BATCHES) == []


def meaning(ledger: list[LedgerRecord]) -> dict[int, tuple[list[LedgerRecord], set[LedgerRecord]]]:
    """What each generation did: what it trained, in order, and what it left out, which it may say several times."""
    found: dict[int, tuple[list[LedgerRecord], set[LedgerRecord]]] = defaultdict(lambda: ([], set()))
    for record in ledger:
        trained, left_out = found[record.generation]
        left_out.add(record) if record.skipped else trained.append(record)
    return found


def can_have_been_written(ledger: list[LedgerRecord], starts: Mapping[int, int]) -> bool:
    """Whether each step follows the one before: of its own generation, or for the first line of an earlier one.

    A step that is left out may also be one that was passed already, and taken back.
    """
    course: dict[int, list[int]] = defaultdict(list)
    for record in ledger:
        if not course[record.generation] and record.step > starts.get(record.generation, -1) + 1:
            return False
        before = course[record.generation] or [
            s for g in course if g < record.generation for s in course[g] if s == record.step - 1
        ]
        passed = record.skipped and bool(course[record.generation]) and record.step <= max(before)
        if not passed and record.step != max(before, default=0) + 1:
            return False
        course[record.generation].append(record.step)
    return True


def known_from_it_alone(run: Run, record: LedgerRecord) -> bool:
    """Whether no other record tells of this line: rank 0 died right after it, or it says again that a step is left out."""
    if record.skipped:
        return (record.generation, record.step) not in run.skips or run.ledger.count(record) > 1
    return record.step not in run.trained.get(record.generation, [])


@pytest.mark.cluster  # for its time only
@settings(max_examples=1500)
@given(
    history=HISTORIES,
    how=st.sampled_from(["drop", "double", "swap", "alter"]),
    data=st.data(),
)
def test_every_changed_line_is_found(history: list[tuple[Any, ...]], how: str, data: st.DataObject) -> None:
    run = Run().play([*history, ("train", 2)])
    ledger = list(run.ledger)
    at = data.draw(st.integers(0, len(ledger) - 1))
    touched = [ledger[at]]
    if how == "drop":
        del ledger[at]
    elif how == "double":
        ledger.insert(data.draw(st.integers(at, len(ledger))), ledger[at])
    elif how == "swap":
        other = data.draw(st.integers(0, len(ledger) - 1))
        touched.append(ledger[other])
        ledger[at], ledger[other] = ledger[other], ledger[at]
    else:
        name = data.draw(st.sampled_from(["step", "first_sample", "end_sample", "generation", "skipped"]))
        if name == "skipped":
            ledger[at] = replace(ledger[at], skipped=not ledger[at].skipped)
        else:
            value = data.draw(st.integers(-1, 12 * BATCH) | st.integers(-(2**63), 2**63))
            assume(value != getattr(ledger[at], name))
            ledger[at] = replace(ledger[at], **{name: value})
    proof = judge(ledger, run.evidence)
    if meaning(ledger) == meaning(run.ledger) and can_have_been_written(ledger, run.starts):
        # The event of a step left out may be lost only where its line is its generation's last, which may have changed.
        explained = {step for _, step in run.skips}
        if all(record.step in explained for record in ledger if record.skipped):
            assert told(proof) == []
    elif not any(known_from_it_alone(run, record) for record in touched):
        assert proof.verdict == "violated"


# -- what is said


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        ([line(1), line(3)], ["ledger.jsonl:2: step 2 is missing in generation 1"]),
        ([line(1), line(2), line(2)], ["ledger.jsonl:3: step 2 was done twice in generation 1"]),
        (
            [line(1), line(3), line(2), line(4)],
            [
                "ledger.jsonl:2: step 2 is missing in generation 1",
                "ledger.jsonl:3: step 2 of generation 1 is out of order",
            ],
        ),
        (
            [line(1), line(2), line(5, 2), line(6, 2)],
            [
                "ledger.jsonl:3: steps 3 to 4 are missing: generation 2 begins with step 5, and none before it had "
                "reached step 4"
            ],
        ),
        (
            [line(1), LedgerRecord(2, 5, 9, 1), line(3)],
            ["ledger.jsonl:2: step 2 has the samples 5 to 8 instead of 4 to 7"],
        ),
        # A damaged number spoils its own line, and no other.
        (
            [line(1), replace(line(2), step=10**12), line(3), line(4)],
            ["ledger.jsonl:2: step 1000000000000 has the samples 4 to 7 instead of 3999999999996 to 3999999999999"],
        ),
        (
            [line(1), line(2, 0)],
            ["ledger.jsonl:2: step 2 of generation 0 does not exist: both count from 1"],
        ),
        (
            [*lines(2, 2, 3), *lines(1, 1, 4)],
            ["ledger.jsonl:1: step 1 is missing: generation 2 begins with step 2, and none before it had reached step 1"],
        ),
        ([line(2), line(3), line(1)], ["ledger.jsonl:1: step 1 is missing: generation 1 begins with step 2, "
          "and none before it had reached step 1",
          "ledger.jsonl:3: step 1 of generation 1 is out of order: it began with step 2"]),
    ],
)  # fmt: skip
def test_words(ledger: list[LedgerRecord], said: list[str]) -> None:
    assert told(judge(ledger)) == said


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        (
            Evidence(trained={1: [1, 2, 3, 4]}),
            "metrics.jsonl has step 4 of generation 1, the ledger ends with step 3",
        ),
        (
            Evidence(trained={2: [1]}),
            "metrics.jsonl has step 1 of generation 2, the ledger does not contain it",
        ),
        (Evidence(trained={1: [1, 3]}), "step 2 of generation 1 is in the ledger, but not in metrics.jsonl"),
        (
            Evidence(finished=4),
            "according to events.jsonl the run finished with step 4, but the ledger ends with step 3",
        ),
        (Evidence(starts={2: 0}), "ledger.jsonl:1: generation 1 was never begun according to events.jsonl"),
        (
            Evidence(skipped=frozenset({(1, 2)})),
            "step 2 was skipped in generation 1, according to events.jsonl, but not in the ledger",
        ),
    ],
)
def test_words_of_other_records(evidence: Evidence, said: str) -> None:
    assert said in told(judge(lines(1, 1, 3), evidence))


def test_missing_entries_in_unreadable_records_prove_nothing() -> None:
    evidence = Evidence(trained={1: [1, 3]}, metrics_whole=False)
    assert judge(lines(1, 1, 3), evidence).verdict == "proven"
    ledger = [line(1), line(2, skipped=True), line(3)]
    assert judge(ledger, Evidence(events_whole=False)).verdict == "proven"
    assert told(judge(ledger)) == ["ledger.jsonl:2: step 2 is skipped, and events.jsonl has no reason for it"]


def test_lost_first_line_is_found_when_the_step_was_repeated() -> None:
    ledger = [*lines(1, 1, 8), *lines(2, 6, 9)]  # generation 2 went on after step 4
    assert judge(ledger).verdict == "proven"  # the ledger alone cannot know
    assert told(judge(ledger, Evidence(starts={1: 0, 2: 4}))) == [
        "ledger.jsonl:9: step 5 is missing in generation 2: it resumed after step 4 according to events.jsonl, "
        "and begins with step 6"
    ]


def test_a_skipped_step_has_seen_no_samples() -> None:
    ledger = [*lines(1, 1, 5), line(5, skipped=True), *lines(1, 6, 8), *lines(2, 7, 10)]
    proof = judge(ledger, Evidence(skipped=frozenset({(1, 5)})))
    assert (proof.verdict, proof.steps, proof.skipped, proof.redone) == ("proven", 10, [5], 2)
    assert proof.trained_samples == 9 * BATCH
    # Redone from before it by a generation that did not leave it out.
    proof = judge([*ledger, *lines(3, 4, 6)], Evidence(skipped=frozenset({(1, 5)})))
    assert (proof.verdict, proof.steps, proof.skipped) == ("proven", 6, [])


def test_without_a_global_batch_it_is_not_judged() -> None:
    assert prove(enumerate(lines(1, 1, 3), 1), None).verdict == "unjudged"
    assert prove([], BATCHES).verdict == "empty"


def test_a_checkpoint_must_agree() -> None:
    proof = judge([*lines(1, 1, 8), *lines(3, 7, 9)])
    assert proof.disagreement(6, 24, 1) is None
    assert proof.disagreement(9, 36, 3) is None
    assert proof.disagreement(9, 40, 3) == "it continues at sample 40, but step 9 ends before sample 36"
    assert proof.disagreement(9, 36, 2) == "the ledger has no step 9 of generation 2 or before"


# -- from a run's folder


@pytest.fixture
def run_folder(folder: RunFolder) -> RunFolder:
    """Two generations of four ranks, then of two; the second went on after step 4."""
    folder.job_toml.write_text(f"[train]\nsteps = 8\nglobal_batch = {BATCH}\nsequence_length = 2\n")
    writer = LedgerWriter(folder)
    for generation, start, end, ranks in ((1, 0, 6, 4), (2, 4, 8, 2)):
        events.append(
            folder, "run_started", "", generation=generation, data={"layout": {"world_size": ranks}}
        )
        if start:
            events.append(folder, "resumed", "", generation=generation, data={"step": start})
        for record in lines(generation, start + 1, end):
            writer.write(record)
            append_line(folder.metrics, {"step": record.step, "generation": generation})
    writer.close()
    events.append(folder, "run_finished", "", generation=2)
    return folder


def test_a_folder(run_folder: RunFolder) -> None:
    found = audit(run_folder)
    assert found.problems == []
    assert told(found.proof) == []
    assert (found.proof.steps, found.proof.redone) == (8, 2)
    assert found.world_sizes == {1: 4, 2: 2}
    assert [(s.generation, s.first, s.last, s.parent) for s in found.proof.stretches] == [
        (1, 1, 6, None),
        (2, 5, 8, 1),
    ]


def test_a_crash_in_the_midst_of_a_line(run_folder: RunFolder) -> None:
    """Generation 1 was killed while it wrote step 7; whoever came next began a new line."""
    text = run_folder.ledger.read_bytes().splitlines(keepends=True)
    torn = encode(vars(line(7)))[:20]
    run_folder.ledger.write_bytes(b"".join(text[:6]) + torn + b"\n" + b"".join(text[6:]))
    found = audit(run_folder)
    assert [str(p) for p in found.problems] == [
        "ledger.jsonl:7: not a ledger record (not JSON: Unterminated string starting at at column 11)"
    ]
    assert found.proof.verdict == "proven"
    # The same in the midst of what a generation did is a line that is lost.
    run_folder.ledger.write_bytes(b"".join(text[:3]) + torn + b"\n" + b"".join(text[4:]))
    assert told(audit(run_folder).proof) == ["ledger.jsonl:5: step 4 is missing in generation 1"]


def test_the_last_line_of_the_run_is_lost(run_folder: RunFolder) -> None:
    text = run_folder.ledger.read_bytes()
    run_folder.ledger.write_bytes(text[:-10])
    assert told(audit(run_folder).proof) == [
        "metrics.jsonl has step 8 of generation 2, the ledger ends with step 7",
        "according to events.jsonl the run finished with step 8, but the ledger ends with step 7",
    ]


def test_damaged_records_beside_it_raise_no_alarm(run_folder: RunFolder) -> None:
    for path in (run_folder.metrics, run_folder.events):
        text = path.read_bytes().splitlines(keepends=True)
        del text[1]
        path.write_bytes(b"".join([text[0], b"\xff\n", *text[1:]]))
    found = audit(run_folder)
    assert len(found.problems) == 2
    assert found.proof.verdict == "proven"
    run_folder.job_toml.unlink()
    assert audit(run_folder).proof.verdict == "unjudged"


def test_a_step_left_out_again_after_a_rollback_is_done_once(folder: RunFolder) -> None:
    """Left out, and after a rollback to before it left out again: two lines of one step that nobody did twice."""
    writer = LedgerWriter(folder)
    for record in (line(1), line(2, skipped=True), line(3), line(2, skipped=True), line(4)):
        writer.write(record)
    writer.close()
    records, _ = read_ledger(folder)
    assert [r.step for r in records] == [1, 2, 3, 4]
    assert ledger_gaps(records, BATCHES) == []
