"""The end of a run's records, against the whole of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seatrial.base.batches import BatchSizes
from seatrial.base.files import parse_json
from seatrial.record import recent
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import append_line
from seatrial.record.ledger import LedgerRecord, LedgerWriter, ledger_gaps, read_ledger
from seatrial.record.metrics import MetricsRecord, MetricsWriter, current_history, read_metrics
from seatrial.record.recent import recent_ledger, recent_metrics, skipped_steps
from seatrial.record.view import read_view


def metrics(step: int, generation: int = 1) -> MetricsRecord:
    return MetricsRecord(
        step, step * 8, 2.5 + step, 1.0, 1e-3, 0.5, 0.1, 16.0, 2.0, None, 10**15, 1.7e9, generation
    )


def ledger(step: int, generation: int = 1, *, skipped: bool = False) -> LedgerRecord:
    return LedgerRecord(step, (step - 1) * 8, step * 8, generation, skipped)


def write(folder: RunFolder, *records: LedgerRecord | MetricsRecord) -> None:
    ledgers, all_metrics = LedgerWriter(folder), MetricsWriter(folder)
    for record in records:
        if isinstance(record, LedgerRecord):
            ledgers.write(record)
        else:
            all_metrics.write(record)
    ledgers.close()
    all_metrics.close()


def test_nothing_there(folder: RunFolder) -> None:
    assert (recent_metrics(folder, 5), recent_ledger(folder, 5), skipped_steps(folder)) == ([], [], [])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.integers(1, 40),
    restarts=st.lists(st.tuples(st.integers(0, 10), st.integers(0, 12)), max_size=3),
    count=st.integers(1, 12),
)
def test_it_is_the_end_of_the_history(
    folder: RunFolder, steps: int, restarts: list[tuple[int, int]], count: int
) -> None:
    folder.metrics.unlink(missing_ok=True)
    done = [metrics(s) for s in range(1, steps + 1)]
    at = steps
    for generation, (back, forth) in enumerate(restarts, 2):
        at = max(0, at - back)
        done += [metrics(s, generation) for s in range(at + 1, at + forth + 1)]
        at += forth
    write(folder, *done)
    whole = current_history(read_metrics(folder)[0])
    recent = recent_metrics(folder, count)
    assert recent == (whole[-len(recent) :] if recent else [])
    if len(done) <= 4 * count:
        assert len(recent) == min(count, len(whole)), "the file is short: all of it was read"


def test_damage_and_other_text_do_not_matter(folder: RunFolder) -> None:
    write(folder, *(metrics(s) for s in range(1, 4)), *(ledger(s) for s in range(1, 4)))
    for path in (folder.metrics, folder.ledger):
        with path.open("ab") as f:
            f.write(b'\xff\xfe\n[1, 2]\n7\n{"step": "x", "skipped":true}\n{"step": 4, "torn')
    assert [r.step for r in recent_metrics(folder, 9)] == [1, 2, 3]
    assert [r.step for r in recent_ledger(folder, 9)] == [1, 2, 3]
    assert skipped_steps(folder) == []


def test_a_long_run_costs_no_more(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    line = b'{"step":%d,"first_sample":0,"end_sample":8,"generation":1,"skipped":%s}\n'
    folder.ledger.write_bytes(
        b"".join(line % (s, b"true" if s % 40_000 == 7 else b"false") for s in range(1, 120_001))
    )
    parsed: list[bytes] = []
    monkeypatch.setattr(recent, "parse_json", lambda line: (parsed.append(line), parse_json(line))[1])
    assert [r.step for r in recent_ledger(folder, 3)] == [119_998, 119_999, 120_000]
    assert skipped_steps(folder) == [7, 40_007, 80_007]
    assert len(parsed) < 10, "three records at the end and three that were skipped"


def test_a_step_that_was_left_out_is_in_the_ledger(folder: RunFolder) -> None:
    write(folder, ledger(1), ledger(2, skipped=True), ledger(3))
    read, problems = read_ledger(folder)
    assert problems == []
    assert [r.skipped for r in read] == [False, True, False]
    assert ledger_gaps(read, BatchSizes.of(8)) == []


def test_trained_taken_back_and_left_out_in_one_generation(folder: RunFolder) -> None:
    write(folder, ledger(1), ledger(2), ledger(2, skipped=True), ledger(3))
    read, _ = read_ledger(folder)
    assert ledger_gaps(read, BatchSizes.of(8)) == []
    assert [r.step for r in read if r.skipped] == [2]
    # After a rollback to before it, it is left out again; nothing is done twice.
    write(folder, ledger(2, skipped=True))
    assert ledger_gaps(read_ledger(folder)[0], BatchSizes.of(8)) == []


def test_a_ledger_of_an_older_version(folder: RunFolder) -> None:
    append_line(folder.ledger, {"step": 1, "first_sample": 0, "end_sample": 8, "generation": 1})
    assert read_ledger(folder)[0] == [ledger(1)]


def test_the_view_reports_them(folder: RunFolder) -> None:
    write(folder, ledger(1), ledger(2, skipped=True))
    assert read_view(folder).skipped_steps == [2]
    write(folder, ledger(2, 2))  # a later generation did it after all
    assert read_view(folder).skipped_steps == []
