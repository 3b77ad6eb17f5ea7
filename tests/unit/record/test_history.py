"""What a view keeps of a run's records, step by step: the same as reading all of them at once, and quick."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_histories import BATCH, HISTORIES, Run

from seatrial.base.batches import BatchSizes
from seatrial.record import events
from seatrial.record import view as view_module
from seatrial.record.folder import RunFolder
from seatrial.record.history import History, LedgerSummary, Pace
from seatrial.record.jsonl import encode
from seatrial.record.ledger import LedgerRecord, ledger_gaps
from seatrial.record.metrics import MetricsRecord, current_history
from seatrial.record.view import RunReader, read_brief, read_view

BATCHES = BatchSizes.of(BATCH)
JOB = f"[train]\nsteps = 2000\nglobal_batch = {BATCH}\nsequence_length = 16\n"


def record(step: int, generation: int = 1, seconds: float = 1.0) -> MetricsRecord:
    return MetricsRecord(
        step, step * 64, 5.0 / step, 1.0, 1e-3, seconds, 0.0, 64.0, 32.0, None, None, 100.0 + step, generation
    )


# -- the steps


def test_validation_losses_of_the_steps_that_led_here() -> None:
    history = History()
    for each in (record(1), replace(record(2), validation_loss=3.0), record(3)):
        history.add(each)
    history.add(replace(record(4), validation_loss=float("nan")))
    history.add(record(2, 2))  # done again, before its validation
    assert history.validation == []
    history.add(replace(record(2, 2), validation_loss=2.5, validation_time_s=0.5))
    history.add(replace(record(4, 2), validation_loss=2.25))
    assert history.validation == [(2, 2.5), (4, 2.25)]
    assert list(history.column("loss")) == [5.0, 2.5, 1.25], "one of each step"


# Each generation goes on from somewhere before where the last one was, and does some steps.
GENERATIONS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=6)


@given(generations=GENERATIONS)
def test_history_is_what_reading_all_of_it_gives(generations: list[tuple[int, int]]) -> None:
    history, written, step = History(), [], 0
    for generation, (back, steps) in enumerate(generations, 1):
        step = max(0, step - back)
        for _ in range(steps):
            step += 1
            written.append(record(step, generation))
            history.add(written[-1])
    last = {r.step: r for r in written}
    wanted = current_history(last.values())
    assert list(zip(history.steps, history.generations, strict=True)) == [
        (r.step, r.generation) for r in wanted
    ]
    assert list(history.column("loss")) == [r.loss for r in wanted]
    assert (history.first, history.last) == ((wanted[0], wanted[-1]) if wanted else (None, None))
    for generation in range(len(generations) + 2):
        since = [r.time for r in wanted if r.generation >= generation]
        assert list(history.column("time", generation)) == since


def test_a_rollback_takes_back_what_was_done() -> None:
    history = History()
    for step in (1, 2, 3, 4, 5, 3):
        history.add(record(step))
    assert history.steps == [1, 2, 3]
    history.add(record(4, 2))
    history.add(record(5, 1))  # written late, by a generation that was given up
    assert (history.steps, history.generations) == ([1, 2, 3, 4], [1, 1, 1, 2])


# -- the ledger


def book_of(ledger: list[LedgerRecord]) -> LedgerSummary:
    book = LedgerSummary()
    for line in ledger:
        book.add(line)
    return book


@settings(max_examples=300)
@given(history=HISTORIES)
def test_the_book_agrees_with_the_proof_over_any_history(history: list[tuple[Any, ...]]) -> None:
    run = Run().play([*history, ("train", 2)])
    book = book_of(run.ledger)
    assert not book.odd
    assert book.steps == run.step
    assert sorted(book.skipped) == [step for step, left_out in sorted(run.done.items()) if left_out]


@pytest.mark.cluster  # slow
@settings(max_examples=500)
@given(history=HISTORIES, draw=st.data())
def test_what_contradicts_the_ledger_is_never_passed_over(history: list[tuple[Any, ...]], draw: Any) -> None:
    ledger = Run().play([*history, ("train", 4)]).ledger
    at = draw.draw(st.integers(0, len(ledger) - 1))
    line = ledger[at]
    change = draw.draw(
        st.sampled_from(
            [
                [],
                [line, line],
                [replace(line, step=line.step + 1)],
                [replace(line, first_sample=line.first_sample + 1)],
                [replace(line, end_sample=line.end_sample - 1)],
                [replace(line, generation=line.generation + 1)],
                [replace(line, step=-line.step)],
            ]
        )
    )
    changed = ledger[:at] + change + ledger[at + 1 :]
    if ledger_gaps(changed, BATCHES):
        book = book_of(changed)
        assert book.odd or book.batches != BATCHES


# -- how long it takes to the end


def etas(seconds: list[float], generations: list[int] | None = None, total: int = 400) -> list[float]:
    """The ETA after each step that tells one."""
    pace, told = Pace(BATCHES), []
    for step, (s, generation) in enumerate(
        zip(seconds, generations or [1] * len(seconds), strict=True), start=1
    ):
        pace.add(generation, step, s)
        eta = pace.eta_s(step, total)
        told += [] if eta is None else [eta]
    return told


def steady(told: list[float]) -> float:
    """The largest jump from one step to the next, as a factor."""
    return max(max(a / b, b / a) for a, b in itertools.pairwise(told))


NOISE = random.Random(5)
SLOW_FIRST = [60.0] + [NOISE.uniform(0.9, 1.1) for _ in range(100)]
# Name -> (seconds of each step, its generation, seconds a step that the ETA should be made of)
RECORDED: dict[str, tuple[list[float], list[int], float]] = {
    # The first step of a start compiles and connects.
    "slow first step": (SLOW_FIRST, [1] * 101, 1.0),
    # A recovery every ten steps, after which the first step takes long.
    "recoveries": (
        [30.0 if n % 10 == 0 else NOISE.uniform(0.9, 1.1) for n in range(101)],
        [1 + n // 10 for n in range(101)],
        1.0,
    ),
    # Every tenth step is verified and copied.
    "every tenth is slow": ([1.0 if (n + 1) % 10 else 3.0 for n in range(101)], [1] * 101, 1.2),
    "one step in two is slow": ([1.0 if n % 2 else 3.0 for n in range(101)], [1] * 101, 2.0),
    # A disk that hangs for a minute, twice.
    "hiccups": (
        [60.0 if n in (40, 41, 70) else NOISE.uniform(0.9, 1.1) for n in range(101)],
        [1] * 101,
        1.0,
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_eta_does_not_jump(name: str) -> None:
    seconds, generations, a_step = RECORDED[name]
    told = etas(seconds, generations)
    assert steady(told[10:]) < 1.1, told
    assert told[-1] == pytest.approx(a_step * (400 - 101), rel=0.1)


def test_the_eta_follows_a_lasting_change() -> None:
    told = etas([1.0] * 100 + [2.0] * 60)
    assert told[-1] == pytest.approx(2.0 * (400 - 160))


def test_the_eta_knows_that_the_batch_grows() -> None:
    pace, batches = Pace(BatchSizes.of(8, [(50, 2), (50, 4)])), BatchSizes.of(8, [(50, 2), (50, 4)])
    for step in range(1, 200):
        pace.add(1, step, 0.5 * batches.size(step))
        if step > 1:
            assert pace.eta_s(step, 400) == pytest.approx(
                0.5 * (50 * 2 + 50 * 4 + 300 * 8 - batches.total(step))
            )


def test_without_enough_steps_there_is_no_eta() -> None:
    pace = Pace(BATCHES)
    assert pace.eta_s(0, 10) is None
    pace.add(1, 1, 57.0)
    assert pace.eta_s(1, 11) is None, "a first step tells nothing of those that follow"
    pace.add(1, 2, 2.0)
    pace.add(1, 3, float("nan"))
    assert (pace.eta_s(2, 12), pace.eta_s(12, 9)) == (20.0, 0.0)
    assert pace.eta_s(2, 12, since=2) is None, "another start may be on another machine"


# -- reading on


def line(record: MetricsRecord) -> bytes:
    """As in metrics.jsonl: what a step does not have is left out."""
    return encode({k: v for k, v in vars(record).items() if v is not None or k in ("mfu", "memory_bytes")})


def write(folder: RunFolder, run: Run) -> dict[Path, bytes]:
    """The files of a run that was played, as they are at its end."""
    folder.job_toml.write_text(JOB)
    measured = [record(step, g) for g, steps in sorted(run.trained.items()) for step in steps]
    begun = [vars(events.Event(1.0, g, "run_started", "info", f"generation {g}")) for g in sorted(run.starts)]
    return {
        folder.metrics: b"".join(map(line, measured)),
        folder.ledger: b"".join(encode(vars(r)) for r in run.ledger),
        folder.events: b"".join(map(encode, begun)) + b"torn",
    }


@settings(max_examples=60)
@given(history=HISTORIES, draw=st.data())
def test_followed_or_read_at_once_it_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[Any, ...]], draw: Any
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    whole = write(folder, Run().play(history))
    reader = RunReader(folder)
    shown: list[object] = []
    reader.show = shown.append
    for cut in sorted(draw.draw(st.lists(st.floats(0, 1), max_size=5))):
        for path, data in whole.items():
            path.write_bytes(data[: int(cut * len(data))])
        reader.poll()
    for path, data in whole.items():
        path.write_bytes(data)
    followed, fresh = reader.view(), read_view(folder)
    for name in (
        "state",
        "state_reason",
        "generation",
        "events",
        "ledger_steps",
        "ledger_gaps",
        "skipped_steps",
    ):
        assert getattr(followed, name) == getattr(fresh, name)
    assert (followed.history.steps, followed.eta_s) == (fresh.history.steps, fresh.eta_s)
    assert followed.problems == fresh.problems
    assert [str(p)[:28] for p in fresh.problems] == [f"events.jsonl:{len(fresh.events) + 1}: unfinished l"]
    assert len(shown) == sum(data.count(b"\n") for p, data in whole.items() if p != folder.ledger)


@settings(max_examples=60)
@given(history=HISTORIES, filler=st.integers(0, 30))
def test_a_brief_view_is_the_end_of_the_whole_one(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[Any, ...]], filler: int
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    for path, data in write(folder, Run().play(history)).items():
        path.write_bytes(data)
    for n in range(filler):  # what happens between the events that decide the state
        events.append(folder, "checkpoint_verified", f"step {n}", generation=1)
    whole = read_view(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view_module, "_BRIEF_BYTES", 2000)
        brief = read_brief(folder)
    for name in ("state", "state_reason", "generation", "first_generation", "step", "last", "job"):
        assert getattr(brief, name) == getattr(whole, name), name
    assert (brief.history.steps, brief.events) == (
        whole.history.steps[-len(brief.history.steps) or len(whole.history.steps) :],
        [e for e in whole.events if e in brief.events],
    )
    assert sum(e.kind == "checkpoint_verified" for e in brief.events) < 20


def test_a_brief_view_reads_no_more_of_a_longer_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode: Callable[..., Any] = view_module.decode_all
    counts: list[int] = []

    def counted(cls: type, numbered: list[Any], **more: Any) -> Any:
        counts.append(len(numbered))
        return decode(cls, numbered, **more)

    monkeypatch.setattr(view_module, "decode_all", counted)
    for steps in (1500, 3000):
        for path, data in write(folder, Run().play([("train", steps)])).items():
            path.write_bytes(data)
        view = read_brief(folder)
        assert (view.step, view.problems[1:], view.ledger_gaps) == (steps, [], [])
        assert 0 < sum(counts) < 300
        counts.clear()


def test_a_poll_reads_only_what_is_new(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """So to follow a run costs the same at its end as at its beginning."""
    decode: Callable[..., Any] = view_module.decode_all
    counts: list[int] = []

    def counted(cls: type, numbered: list[Any], **more: Any) -> Any:
        counts.append(len(numbered))
        return decode(cls, numbered, **more)

    run = Run().play([("train", 700)])
    for path, data in write(folder, run).items():
        path.write_bytes(data)
    monkeypatch.setattr(view_module, "decode_all", counted)
    reader = RunReader(folder)
    reader.poll()
    assert sum(counts) == 700 + 700 + 1
    counts.clear()
    for _ in range(10):
        run.train(1)
        with folder.metrics.open("ab") as f:
            f.write(line(record(run.step)))
        with folder.ledger.open("ab") as f:
            f.write(encode(vars(run.ledger[-1])))
        view = reader.view()
    assert (view.history.last, view.ledger_steps) == (record(710), 710)
    # One that is over may have a torn last line, which is looked at as well.
    assert sum(counts) == 10 + 10


def test_a_replaced_file_is_read_from_the_start(folder: RunFolder) -> None:
    for path, data in write(folder, Run().play([("train", 9)])).items():
        path.write_bytes(data)
    shown: list[object] = []
    reader = RunReader(folder, shown.append)
    assert reader.view().history.steps == list(range(1, 10))
    for path, data in write(folder, Run().play([("train", 3)])).items():
        path.unlink()
        path.write_bytes(data)
    shown.clear()
    view = reader.view()
    assert (view.history.steps, view.ledger_steps, len(view.events)) == ([1, 2, 3], 3, 1)
    assert [r for r in shown if isinstance(r, MetricsRecord)] == [record(1), record(2), record(3)]
    shown.clear()
    with folder.metrics.open("ab") as f:
        f.write(encode(vars(record(4))))
    reader.poll()
    assert shown == [record(4)]


@pytest.mark.parametrize("when", ["NaN", "Infinity", -1.0, 1e30, 10**30, "x"])
def test_a_time_out_of_range_is_a_damaged_line(folder: RunFolder, when: object) -> None:
    for path, data in write(folder, Run().play([("train", 3)])).items():
        path.write_bytes(data)
    folder.metrics.write_bytes(folder.metrics.read_bytes() + encode({**vars(record(4)), "time": when}))
    folder.events.write_bytes(encode({**vars(events.Event(1.0, 1, "resumed", "info", "m")), "time": when}))
    view = read_view(folder)
    assert [str(p).partition(" is ")[0] for p in view.problems] == [
        "events.jsonl:1: not an event (`time`",
        "metrics.jsonl:4: not a metrics record (`time`",
    ]
    assert view.history.steps == [1, 2, 3]
