"""Records read in bulk: the same view as line by line, whatever is in the files."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from run_histories import HISTORIES, Run
from test_history import record, write

from seatrial.record import bulk, jsonl
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import encode
from seatrial.record.ledger import LedgerRecord
from seatrial.record.metrics import MetricsRecord
from seatrial.record.view import RunView, read_view
from seatrial.watch.columns import ColumnCacheWriter

NOTHING = Path("/nonexistent")

# What a damaged or a foreign line of metrics.jsonl may be.
LINE = vars(record(7))
DAMAGED = [
    b"", b"{}", b"[]", b"{", b"null", b"\xff", b"torn", b'{"step":', b"{}{}", b"1e999",
    *(
        encode({**LINE, name: value})[:-1]
        for name in ("step", "loss", "mfu", "memory_bytes", "time", "generation")
        for value in (None, "NaN", "Infinity", True, 1, 1.5, 1e308, 10**30, -1, "x", [], {})
    ),
    *(encode({k: v for k, v in LINE.items() if k != name})[:-1] for name in LINE),
    *(encode(LINE)[:-1].replace(b'"loss":', b'"loss":' + literal) for literal in (b"NaN,", b"NaN,\"x\":", b"-")),
    encode({**LINE, "extra": {"watts": 1.0}, "unknown": 1})[:-1],
    *(encode({**LINE, "validation_loss": loss})[:-1] for loss in (2.5, None, "NaN", "x")),
    b" " + encode(LINE)[:-1] + b" \t",
]  # fmt: skip


def seen(view: RunView) -> list[Any]:
    """What a view shows of metrics and ledger."""
    columns = ("loss", "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "time", "validation_loss")
    history = view.history
    return [
        *(view.state, view.generation, repr(view.first), repr(view.last), view.step, view.tokens, view.eta_s),
        *(history.steps, history.generations, *(repr(list(history.column(name))) for name in columns)),
        *map(list, (view.log.steps, view.log.generations, view.log.times)),
        *(view.ledger_steps, view.ledger_gaps, view.skipped_steps, [str(p) for p in view.problems]),
    ]


def both_ways(folder: RunFolder) -> tuple[list[Any], list[Any]]:
    """In bulk, in pieces of a few lines whose columns are kept or not; and line by line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_BULK_BYTES", 1)
        patch.setattr(jsonl, "PIECE_BYTES", 1500)
        in_bulk = seen(read_view(folder))
        keep_all(folder)
        assert seen(read_view(folder)) == in_bulk
    shutil.rmtree(folder.columns, ignore_errors=True)
    return in_bulk, seen(read_view(folder))


def keep_all(folder: RunFolder) -> list[Path]:
    following = ColumnCacheWriter(folder)
    for _ in range(20):
        following.poll(0.0)
    return sorted(folder.columns.glob("*"))


@settings(max_examples=60)
@given(history=HISTORIES)
def test_it_is_the_same_as_line_by_line(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[Any, ...]]
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    for path, data in write(folder, Run().play(history)).items():
        path.write_bytes(data)
    in_bulk, by_line = both_ways(folder)
    assert in_bulk == by_line


def test_so_it_is_with_damaged_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    whole = write(folder, Run().play([("train", 9)]))
    for path, data in whole.items():
        path.write_bytes(data)
    before, at = whole[folder.metrics].splitlines(keepends=True), 6
    for damaged in DAMAGED:
        folder.metrics.write_bytes(b"".join([*before[:at], damaged + b"\n", *before[at + 1 :]]))
        in_bulk, by_line = both_ways(folder)
        assert in_bulk == by_line, damaged


def test_so_it_is_with_ledgers_of_every_kind(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lines = write(folder, Run().play([("train", 9)]))[folder.ledger].splitlines(keepends=True)
    values = json.loads(lines[5])
    odd = [
        {**values, "step": 0}, {**values, "step": 3}, {**values, "first_sample": 1}, {**values, "end_sample": 1},
        {**values, "skipped": True}, {**values, "generation": 0}, {**values, "generation": 2, "step": 3},
    ]  # fmt: skip
    del values["skipped"]
    for other in [*odd, values]:
        for at in (0, 6, len(lines)):
            folder.ledger.write_bytes(b"".join([*lines[:at], encode(other), *lines[at:]]))
            in_bulk, by_line = both_ways(folder)
            assert in_bulk == by_line, (other, at)


def test_regular_data_is_taken_as_columns() -> None:
    """And so the other tests do not compare line by line with itself."""
    data = b"".join(encode(vars(record(n))) for n in range(1, 4))
    found = bulk.columns(MetricsRecord, bytearray(data), NOTHING)
    assert found is not None
    assert found["step"].tolist() == [1, 2, 3]
    ledger = b"".join(encode(vars(LedgerRecord(n, 8 * n - 8, 8 * n, 1))) for n in range(1, 4))
    found = bulk.columns(LedgerRecord, bytearray(ledger), NOTHING)
    assert found is not None
    assert not found["skipped"].any()
    assert bulk.columns(MetricsRecord, bytearray(data + b"{}\n"), NOTHING) is None


def test_kept_columns_are_read_in_place_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BULK_BYTES", 1)
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 32 * 220)
    folder = RunFolder(tmp_path)
    for path, data in write(folder, Run().play([("train", 80)])).items():
        path.write_bytes(data)
    by_json = seen(read_view(folder))
    kept = keep_all(folder)
    assert len(kept) == 2 + 1 + 1  # whole pieces and the last one of the metrics, that of the ledger

    parsed: list[bytes] = []
    parse = bulk._parse

    def counted(cls: Any, data: bytes) -> bulk.Columns | None:
        parsed.append(data)
        return parse(cls, data)

    monkeypatch.setattr(bulk, "_parse", counted)
    assert seen(read_view(folder)) == by_json
    after = len(parsed)
    assert 2 <= after <= 4
    assert max(map(len, parsed)) < 200 + 300, (
        "only what follows the last piece of each file: a part and a line"
    )

    damaged, other, torn = kept[0], kept[1], kept[2]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    other.write_bytes(kept[-1].read_bytes() + b" ")
    torn.write_bytes(b"")
    assert seen(read_view(folder)) == by_json
    assert len(parsed) == 2 * after + 3


def test_a_piece_that_grows_replaces_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BULK_BYTES", 1)
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 32 * 200)
    folder, following = RunFolder(tmp_path), ColumnCacheWriter(RunFolder(tmp_path))
    whole = write(folder, Run().play([("train", 80)]))[folder.metrics]
    files: list[set[Path]] = []
    for end in range(0, len(whole), 150):
        folder.metrics.write_bytes(whole[:end])
        following.poll(0.0)
        files.append(set(folder.columns.glob("*")))
        assert len(files[-1]) <= end // (32 * 200) + 1, "the shorter one is deleted"
    assert len(set.union(*files)) > 30, "one for each part that was added"
    assert len(keep_all(folder)) == len(files[-1]), "another process keeps the same"
    with folder.metrics.open("ab") as f:
        f.write(b'{"step":' + b" " * 450)  # torn: the lines before are the same
    following.poll(0.0)
    assert set(folder.columns.glob("*")) == files[-1]
    with folder.metrics.open("ab") as f:
        f.write(b"1}\n" + whole[:2000])
    assert files[-1] - set(keep_all(folder)), "what another process had of a piece that grew is deleted"


def test_what_cannot_be_deleted_does_not_end_the_monitor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    (folder.columns / "a-folder").mkdir(parents=True)
    writer = ColumnCacheWriter(folder)
    writer.poll(0.0)
    writer.poll(1.0)
    assert capfd.readouterr().err.count("old column cache not deleted") == 1


def test_a_ledger_of_an_older_version_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines have no `skipped`, which Arrow gives as objects."""
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 1500)
    folder = RunFolder(tmp_path)
    lines = (
        {"step": n, "first_sample": 8 * n - 8, "end_sample": 8 * n, "generation": 1} for n in range(1, 60)
    )
    folder.ledger.write_bytes(b"".join(map(encode, lines)))
    before = seen(read_view(folder))
    assert keep_all(folder) == []
    assert seen(read_view(folder)) == before


def test_forged_columns_are_not_used(tmp_path: Path) -> None:
    """Whose own digest is right: of other fields, types and lengths."""
    data = b"".join(encode(vars(LedgerRecord(n, 8 * n - 8, 8 * n, 1))) for n in range(1, 40))
    path, names = tmp_path / xxhash.xxh3_128_hexdigest(data), list(vars(LedgerRecord(1, 0, 8, 1)))
    right = [(name, "<i8") for name in names]
    numbers = bytes(39 * 8 * len(names))

    def kept(columns: object, rows: object = 39, numbers: bytes = numbers) -> bytes:
        return json.dumps({"rows": rows, "columns": columns}).encode() + b"\n" + numbers

    saved = io.BytesIO()
    np.save(saved, np.zeros(39, right))  # as older versions kept them
    contents = [
        *(saved.getvalue(), b"", b"\n", b"[]\n", b"{}\n", b"\xff\n", b"[" * 100_000 + b"\n", numbers),
        *(kept(right, rows) for rows in (38, 40, -1, 1 << 60, 1 << 80, 1e999, None, [39], "")),
        *(kept(right[:-1]), kept([*right, ("more", "<i8")]), kept(right[::-1])),
        *(kept([(name, kind) for name in names]) for kind in (">f8", "O", "<U2", "<i4", "", None, [1])),
        *(kept(names), kept(None), kept(39), kept(right, numbers=b""), kept(right, numbers=numbers + b"x")),
    ]
    for content in contents:
        path.write_bytes(xxhash.xxh3_128_digest(content) + content)
        found = bulk.columns(LedgerRecord, bytearray(data), tmp_path)
        assert found is not None
        assert found["step"].tolist() == list(range(1, 40)), content[:200]
    path.write_bytes(xxhash.xxh3_128_digest(kept(right)) + kept(right))
    found = bulk.columns(LedgerRecord, bytearray(data), tmp_path)
    assert found is not None
    assert not found["step"].any(), "this one would be used"
