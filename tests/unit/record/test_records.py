"""Metrics, ledger and events: what is written comes back, what is damaged is named."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.base.batches import BatchSizes
from seatrial.record import events
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import append_line
from seatrial.record.ledger import LedgerRecord, LedgerWriter, ledger_gaps, read_ledger
from seatrial.record.metrics import MetricsRecord, MetricsWriter, current_history, read_metrics
from seatrial.record.typed import decode


def metrics(step: int, generation: int = 1, **changes: Any) -> MetricsRecord:
    record = MetricsRecord(
        step, step * 100, 2.5, 0.8, 1e-3, 0.5, 0.01, 200.0, 25.0, None, 1024, 1e9 + step, generation
    )
    return dataclasses.replace(record, **changes)


def write(folder: RunFolder, *records: MetricsRecord) -> None:
    writer = MetricsWriter(folder)
    for record in records:
        writer.write(record)
    writer.close()


def test_metrics_have_exactly_the_fields_of_the_contract() -> None:
    assert [f.name for f in dataclasses.fields(MetricsRecord)] == [
        "step",
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "step_time_s",
        "data_wait_s",
        "tokens_per_s",
        "tokens_per_s_per_gpu",
        "mfu",
        "memory_bytes",
        "time",
        "generation",
        "extra",
        "validation_loss",
        "validation_time_s",
        "router_aux_loss",
        "loss_tokens",
        "expert_load_max",
        "expert_load_min",
        "idle_experts",
    ]


def test_metrics_round_trip_with_non_finite_values(folder: RunFolder) -> None:
    a = metrics(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf, mfu=0.41, memory_bytes=None)
    b = metrics(2, loss=0.1 + 0.2)
    write(folder, a, b)
    read, problems = read_metrics(folder)
    assert problems == []
    assert math.isnan(read[0].loss)
    assert dataclasses.replace(read[0], loss=0.0) == dataclasses.replace(a, loss=0.0)
    assert read[1] == b


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": "17"}, "`step` is '17'"),
        ({"step": True}, "`step` is True"),
        ({"step": 1.5}, "`step` is 1.5"),
        ({"loss": None}, "`loss` is None"),
        ({"loss": "high"}, "`loss` is 'high'"),
        ({"loss": 10**400}, "`loss` is 1000"),
        ({"mfu": []}, "`mfu` is []"),
        ({"memory_bytes": 1.5}, "`memory_bytes` is 1.5"),
    ],
)
def test_wrong_types_are_named_and_the_rest_is_used(
    folder: RunFolder, change: dict[str, Any], reason: str
) -> None:
    write(folder, metrics(1))
    append_line(folder.metrics, vars(metrics(2)) | change)
    write(folder, metrics(3))
    read, problems = read_metrics(folder)
    assert [r.step for r in read] == [1, 3]
    assert len(problems) == 1
    assert str(problems[0]).startswith(f"metrics.jsonl:2: not a metrics record ({reason}")
    assert len(str(problems[0])) < 120


def test_missing_and_unknown_keys(folder: RunFolder) -> None:
    values = vars(metrics(1)) | {"from_a_newer_version": 1}
    append_line(folder.metrics, values)
    del values["lr"], values["mfu"]
    append_line(folder.metrics, values)
    read, problems = read_metrics(folder)
    assert read == [metrics(1)]
    assert [str(p) for p in problems] == [
        "metrics.jsonl:2: not a metrics record (`lr` is missing, `mfu` is missing)"
    ]


def test_line_17_of_binary(folder: RunFolder) -> None:
    write(folder, *(metrics(i) for i in range(1, 17)))
    with folder.metrics.open("ab") as f:
        f.write(b"\x93\x00\xff" * 20 + b"\n")
    write(folder, *(metrics(i) for i in range(17, 20)))
    read, problems = read_metrics(folder)
    assert [r.step for r in read] == list(range(1, 20))
    assert [str(p) for p in problems] == ["metrics.jsonl:17: not a metrics record (not UTF-8 text)"]


def test_problems_of_both_kinds_are_in_the_order_of_lines(folder: RunFolder) -> None:
    folder.metrics.write_bytes(b'{"step": 1}\nx\n{}\n')
    assert [p.line for p in read_metrics(folder)[1]] == [1, 2, 3]


def test_last_generation_wins_per_step(folder: RunFolder) -> None:
    write(folder, metrics(1), metrics(2), metrics(3), metrics(2, 2, loss=9.0), metrics(1, 0))
    read, _ = read_metrics(folder)
    assert [(r.step, r.generation, r.loss) for r in read] == [(1, 1, 2.5), (2, 2, 9.0), (3, 1, 2.5)]
    # Generation 2 has taken back step 3 and not redone it yet.
    assert [r.step for r in current_history(read)] == [1, 2]


def ledger(*rows: tuple[int, int, int, int]) -> list[LedgerRecord]:
    return [LedgerRecord(*row) for row in rows]


def test_ledger_round_trip_keeps_what_the_check_must_see(folder: RunFolder) -> None:
    writer = LedgerWriter(folder)
    for record in ledger((1, 0, 8, 1), (2, 8, 16, 1), (3, 16, 24, 1), (3, 16, 24, 2), (3, 16, 24, 2)):
        writer.write(record)
    writer.close()
    read, problems = read_ledger(folder)
    assert problems == []
    assert read == ledger((1, 0, 8, 1), (2, 8, 16, 1), (3, 16, 24, 2), (3, 16, 24, 2))
    assert ledger_gaps(read, BatchSizes.of(8)) == ["step 3 was done twice in generation 2"]


@pytest.mark.parametrize(
    ("rows", "gaps"),
    [
        ([], []),
        ([(1, 0, 8, 1), (2, 8, 16, 1)], []),
        ([(1, 0, 8, 1), (2, 8, 16, 1), (2, 8, 16, 2), (3, 16, 24, 2)], []),
        ([(2, 8, 16, 1)], ["step 1 is missing"]),
        ([(1, 0, 8, 1), (5, 32, 40, 1)], ["steps 2 to 4 are missing"]),
        (
            [(1, 0, 8, 1), (2, 9, 17, 1)],
            ["step 2 starts at sample 9, not at 8: sample 8 skipped"],
        ),
        (
            [(1, 0, 8, 1), (2, 4, 12, 1)],
            ["step 2 starts at sample 4, not at 8: samples 4 to 7 seen twice"],
        ),
        ([(1, 0, 7, 1), (2, 7, 15, 1)], ["step 1 has 7 samples, not 8"]),
        ([(0, 0, 8, 1), (1, 0, 8, 1)], ["step 0 does not exist: steps count from 1"]),
    ],
)
def test_ledger_gaps(rows: list[tuple[int, int, int, int]], gaps: list[str]) -> None:
    assert ledger_gaps(ledger(*rows), BatchSizes.of(8)) == gaps


@settings(max_examples=100, deadline=None)
@given(
    steps=st.integers(1, 30),
    sizes=st.sets(st.integers(1, 9), min_size=1, max_size=3),
    phase=st.integers(1, 12),
    restarts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=4),
    damage=st.integers(0, 2),
    where=st.integers(1, 30),
)
def test_ledger_of_any_history_is_whole_until_a_step_is_damaged(
    steps: int, sizes: set[int], phase: int, restarts: list[tuple[int, int]], damage: int, where: int
) -> None:
    """Resuming from any earlier step leaves no gap; removing, moving or repeating one last record does."""
    *ramp, batch = sorted(sizes)
    batches = BatchSizes.of(batch, [(phase, size) for size in ramp])
    records = [LedgerRecord(s, *batches.samples(s), 1) for s in range(1, steps + 1)]
    for generation, (back, n) in enumerate(restarts, 2):
        start = min(back, steps)
        records += [
            LedgerRecord(s, *batches.samples(s), generation)
            for s in range(start + 1, min(start + n, steps) + 1)
        ]
    assert ledger_gaps(records, batches) == []
    step = 1 + where % steps
    last = max((r for r in records if r.step == step), key=lambda r: r.generation)
    others = [r for r in records if r is not last]
    if damage == 0 and step < steps:
        assert ledger_gaps([r for r in records if r.step != step], batches)
    elif damage == 1:
        moved = dataclasses.replace(last, first_sample=last.first_sample + 1, end_sample=last.end_sample + 1)
        assert ledger_gaps([*others, moved], batches)
    elif damage == 2:
        assert ledger_gaps([*records, last], batches)


def test_events(folder: RunFolder) -> None:
    events.append(folder, "run_started", "8 ranks", generation=1)
    events.append(
        folder, "rank_failed", "x", severity="error", generation=1, node=0, rank=3, data={"loss": math.nan}
    )
    append_line(folder.events, {"kind": 5})
    first, second = read_events(folder)[0]
    assert (first.kind, first.severity, first.node, first.rank, first.data) == (
        "run_started",
        "info",
        None,
        None,
        None,
    )
    assert (second.kind, second.severity, second.node, second.rank) == ("rank_failed", "error", 0, 3)
    assert second.data == {"loss": "NaN"}
    assert second.time >= first.time > 1.7e9
    assert str(read_events(folder)[1][0]).startswith("events.jsonl:3: not an event (`time` is missing")


def test_lines_resembling_a_valid_one_are_still_validated() -> None:
    """Lines that look like one before them, key by key and type by type, are taken as they are; no others."""
    right = vars(metrics(3))
    for _ in range(3):
        assert decode(MetricsRecord, right) == metrics(3)
    assert decode(MetricsRecord, dict(reversed(right.items()))) == metrics(3)
    assert decode(MetricsRecord, {**right, "new": 1}) == metrics(3)
    assert type(decode(MetricsRecord, {**right, "loss": 2}).loss) is float
    assert math.isnan(decode(MetricsRecord, {**right, "loss": "NaN"}).loss)
    for wrong in ({"step": True}, {"step": 1.5}, {"loss": "high"}, {"memory_bytes": "1"}, {"mfu": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            decode(MetricsRecord, {**right, **wrong})
    with pytest.raises(ValueError, match="`time` is missing"):
        decode(MetricsRecord, {name: value for name, value in right.items() if name != "time"})
    record = decode(MetricsRecord, right)
    assert (vars(record), hash(record)) == (right, hash(metrics(3)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.step = 4  # type: ignore[misc]
    older = {"step": 1, "first_sample": 0, "end_sample": 8, "generation": 1}
    assert decode(LedgerRecord, older) == decode(LedgerRecord, older) == LedgerRecord(1, 0, 8, 1)
