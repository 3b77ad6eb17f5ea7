"""ledger.jsonl: which samples each step trained on, as proof that none was lost or seen twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seatrial.base.batches import BatchSizes
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import LineWriter, Problem, each_numbered, read_numbered
from seatrial.record.typed import decode, decode_all

NOUN = "a ledger record"


@dataclass(frozen=True)
class LedgerRecord:
    """Step `step` trained on samples first_sample, ..., end_sample - 1 of the global order. Steps count from 1.

    With `skipped` they were skipped on purpose: the step made no update.
    """

    step: int
    first_sample: int
    end_sample: int
    generation: int
    skipped: bool = False


class LedgerWriter:
    """Appends to ledger.jsonl; the caller ensures that it is the only writer."""

    def __init__(self, folder: RunFolder) -> None:
        self._writer = LineWriter(folder.ledger)

    def write(self, record: LedgerRecord) -> None:
        """Append one record. Raises OSError if the write fails."""
        self._writer.write(vars(record))

    def sync(self) -> None:
        """Fsync what was written."""
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def read_ledger(folder: RunFolder) -> tuple[list[LedgerRecord], list[Problem]]:
    """The records of each step's last generation, by step; and the lines that are not records.

    That is one record per step, unless one generation did a step twice; `ledger_gaps` must see that.
    """
    numbered, problems = read_numbered(folder.ledger, NOUN)
    records, wrong = decode_all(LedgerRecord, numbered, file=folder.ledger.name, noun=NOUN)
    return _last_generation(records), sorted(problems + wrong, key=lambda p: p.line)


def each_ledger_line(folder: RunFolder, problems: list[Problem]) -> Iterator[tuple[int, LedgerRecord]]:
    """Every record with its line number (from 1), in file order; lines that are not records go to `problems`."""
    for number, values in each_numbered(folder.ledger, NOUN, problems):
        try:
            yield number, decode(LedgerRecord, values)
        except ValueError as error:
            problems.append(Problem(folder.ledger.name, number, f"not {NOUN} ({error})"))


def ledger_gaps(records: Sequence[LedgerRecord], batches: BatchSizes) -> list[str]:
    """Contradictions to "every step once, every sample once", as messages; empty if there are none.

    Steps must be 1, 2, ..., each once in its last generation, with its samples. Steps that were skipped on purpose are in
    the ledger.
    """
    gaps: list[str] = []
    expected_step = 1
    sample = 0  # where the next range has to start
    for record in _last_generation(records):
        if record.step < expected_step:
            if record.step < 1:
                gaps.append(f"step {record.step} does not exist: steps count from 1")
            else:
                gaps.append(f"step {record.step} was done twice in generation {record.generation}")
            continue
        if record.step > expected_step:
            gaps.append(missing_steps(expected_step, record.step - 1))
            sample = batches.first_sample(record.step)
        if record.first_sample != sample:
            what = "skipped" if record.first_sample > sample else "seen twice"
            low, high = sorted((record.first_sample, sample))
            gaps.append(
                f"step {record.step} starts at sample {record.first_sample}, not at {sample}: {_samples(low, high)} {what}"
            )
        found, size = record.end_sample - record.first_sample, batches.size(record.step)
        if found != size:
            gaps.append(f"step {record.step} has {found} samples, not {size}")
        sample = record.end_sample
        expected_step = record.step + 1
    return gaps


def missing_steps(first: int, last: int) -> str:
    return f"step {first} is missing" if first == last else f"steps {first} to {last} are missing"


def _samples(first: int, end: int) -> str:
    return f"sample {first}" if end == first + 1 else f"samples {first} to {end - 1}"


def _last_generation(records: Sequence[LedgerRecord]) -> list[LedgerRecord]:
    last: dict[int, int] = {}
    left_out: set[tuple[int, int]] = set()
    for record in records:
        last[record.step] = max(record.generation, last.get(record.step, record.generation))
        if record.skipped:
            left_out.add((record.step, record.generation))
    # Trained, rolled back and then skipped, all in one generation: the skip counts. A skipped step is skipped again
    # whenever the run rolls back to before it; that does not count as twice.
    own: list[LedgerRecord] = []
    seen: set[LedgerRecord] = set()
    for record in records:
        if record.generation != last[record.step] or record in seen:
            continue
        if record.skipped:
            seen.add(record)
        elif (record.step, record.generation) in left_out:
            continue
        own.append(record)
    return sorted(own, key=lambda r: r.step)
