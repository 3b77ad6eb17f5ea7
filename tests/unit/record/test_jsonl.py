"""Lines survive crashes, other writers and whatever a disk does to them."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.record import jsonl


def test_round_trip_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    jsonl.append_line(path, {"a": 1, "text": "é\n\u2028"})
    with path.open("ab") as f:
        f.write(b"\n  \n")
    jsonl.append_line(path, {"a": 2})
    assert jsonl.read(path) == ([{"a": 1, "text": "é\n\u2028"}, {"a": 2}], [])
    assert path.read_bytes().count(b"\n") == 4


def test_missing_file_is_empty(tmp_path: Path) -> None:
    assert jsonl.read(tmp_path / "none") == ([], [])
    assert jsonl.Tail(tmp_path / "none").poll() == []


def test_non_finite_floats_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    jsonl.append_line(path, {"x": float("nan"), "y": [float("inf"), {"z": float("-inf")}], "n": 1.5})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "x": "NaN",
        "y": ["Infinity", {"z": "-Infinity"}],
        "n": 1.5,
    }


def test_a_lone_surrogate_loses_no_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    jsonl.append_line(path, {"m": "bad \udcff name"})
    assert jsonl.read(path) == ([{"m": "bad \udcff name"}], [])


@pytest.mark.parametrize("long_lived", [True, False])
def test_writer_never_appends_to_a_torn_line(tmp_path: Path, long_lived: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2,"b')
    if long_lived:
        with jsonl.LineWriter(path) as writer:
            writer.write({"a": 3})
            writer.write({"a": 4})
    else:
        jsonl.append_line(path, {"a": 3})
        jsonl.append_line(path, {"a": 4})
    values, problems = jsonl.read(path)
    assert values == [{"a": 1}, {"a": 3}, {"a": 4}]
    assert [(p.file, p.line) for p in problems] == [("a.jsonl", 2)]


def test_writer_starts_a_new_line_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    real_write = os.write
    calls = 0

    def short_then_full(fd: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return real_write(fd, data[:5])
        if calls == 2:
            raise OSError(28, "No space left on device")
        return real_write(fd, data)

    with jsonl.LineWriter(path) as writer:
        monkeypatch.setattr(os, "write", short_then_full)
        with pytest.raises(OSError, match="No space"):
            writer.write({"a": 1})
        writer.write({"a": 2})
    values, problems = jsonl.read(path)
    assert values == [{"a": 2}]
    assert [p.line for p in problems] == [1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"garbage", "not JSON"),
        (b"\x00\xff\xfe\x80", "not UTF-8"),
        (b"[1, 2]", "a JSON list where an object is expected"),
        (b"17", "a JSON int"),
        (b"null", "a JSON NoneType"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_used(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n' + line + b'\n{"a":3}\n')
    tail = jsonl.Tail(path)
    values, problems = jsonl.read(path)
    assert values == [{"a": 1}, {"a": 3}]
    assert len(problems) == 1
    assert str(problems[0]).startswith(f"a.jsonl:2: not a record ({reason}")
    assert (tail.poll(), tail.problems) == (values, problems)


def test_unfinished_last_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2')
    values, problems = jsonl.read(path)
    assert values == [{"a": 1}]
    assert str(problems[0]).startswith("a.jsonl:2: unfinished line")
    # A whole object that only lacks its newline is used: the next writer completes the line.
    path.write_bytes(b'{"a":1}\n{"a":2}')
    assert jsonl.read(path) == ([{"a": 1}, {"a": 2}], [])


def test_tail_gives_each_line_once_and_never_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = jsonl.Tail(path)
    path.write_bytes(b'{"a":1}\n{"a"')
    assert tail.poll() == [{"a": 1}]
    assert tail.poll() == []
    with path.open("ab") as f:
        f.write(b':2}\n\nbad\n{"a":3}\n{')
    assert tail.poll() == [{"a": 2}, {"a": 3}]
    assert [p.line for p in tail.problems] == [4]
    assert tail.poll() == []


def test_tail_of_the_recent_part(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'bad\n{"a":1}\n{"b":2}\nbad\n{"a":3}\nbad\n')
    recent = jsonl.Tail(path, recent_bytes=12)
    assert (recent.poll(), [p.line for p in recent.problems]) == ([{"a": 3}], [0])
    filtered = jsonl.Tail(path, recent_bytes=12, always=re.compile(b'"a":'))
    assert filtered.poll_numbered() == [(2, {"a": 1}), (5, {"a": 3})]
    assert [p.line for p in filtered.problems] == [6]
    with path.open("ab") as f:
        f.write(b'{"b":4}\n{"b":5')
    for tail in (recent, filtered):
        assert (tail.poll(), tail.rest(), len(tail.problems)) == ([{"b": 4}], [], 2)
    assert jsonl.Tail(path, recent_bytes=1 << 20).poll() == jsonl.Tail(path).poll()


def test_tail_begins_again_with_another_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n')
    tail = jsonl.Tail(path)
    tail.poll()
    path.rename(tmp_path / "old")
    assert tail.poll() == []
    path.write_bytes(b'{"b":1}\n{"b":2}\n{"b":3}\n')
    assert tail.poll() == [{"b": 1}, {"b": 2}, {"b": 3}]
    path.write_bytes(b'{"c":1}\n')  # the same file, cut
    assert tail.poll() == [{"c": 1}]


def test_writers_at_once_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def write(who: int) -> None:
        for i in range(100):
            jsonl.append_line(path, {"who": who, "i": i, "pad": "x" * 500})

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    values, problems = jsonl.read(path)
    assert problems == []
    assert {(v["who"], v["i"]) for v in values} == {(w, i) for w in range(4) for i in range(100)}
    assert len(values) == 400


@settings(max_examples=100, deadline=None)
@given(blob=st.binary(max_size=300))
def test_no_bytes_raise(tmp_path_factory: pytest.TempPathFactory, blob: bytes) -> None:
    path = tmp_path_factory.mktemp("blob") / "a.jsonl"
    path.write_bytes(b'{"first":1}\n' + blob + b'\n{"last":1}\n')
    values, problems = jsonl.read(path)
    assert values[0] == {"first": 1}
    assert values[-1] == {"last": 1}
    tail = jsonl.Tail(path)
    assert (tail.poll(), tail.problems) == (values, problems)


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers()), min_size=1),
    cut=st.integers(min_value=0),
)
def test_a_crash_anywhere_costs_one_line_at_most(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, object]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    with jsonl.LineWriter(path) as writer:
        for record in records:
            writer.write(record)
    data = path.read_bytes()
    cut %= len(data) + 1
    path.write_bytes(data[:cut])
    whole = data[:cut].count(b"\n")
    jsonl.append_line(path, {"after": True})
    values, problems = jsonl.read(path)
    assert values[:whole] == records[:whole]
    assert values[-1] == {"after": True}
    assert len(values) + len(problems) in (whole + 1, whole + 2)
    assert len(problems) <= 1


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_file_that_is_taken_away_is_not_written_in_silence(how: str, tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.jsonl"
    path.parent.mkdir()
    with jsonl.LineWriter(path) as writer:
        writer.write({"n": 1})
        if how == "moved":
            path.parent.rename(tmp_path / "elsewhere")
        else:
            path.unlink()
        with pytest.raises(FileNotFoundError, match="was moved or deleted while it was written"):
            writer.write({"n": 2})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"a":1}\n{"a":2}\n',
        b'{"a":1}\n\n{"a":2}',
        b'{"a":1}\n{"a":',
        b'x\n{"a":1}\n[]\n\xff\n',
        b"\n\n",
        b"x",
    ],
)
def test_one_after_the_other_is_the_same(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    problems: list[jsonl.Problem] = []
    values = list(jsonl.each_numbered(path, "a record", problems))
    assert (values, problems) == jsonl.read_numbered(path, "a record")
    assert list(jsonl.each_numbered(tmp_path / "none", "a record", problems)) == []


def test_a_tail_takes_a_long_file_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 64)
    path = tmp_path / "a.jsonl"
    lines = [{"n": n, "text": "x" * (90 if n == 5 else 10)} for n in range(20)]
    path.write_bytes(b"".join(map(jsonl.encode, lines)) + b'{"n": 20')
    tail = jsonl.Tail(path)
    parts = list(tail.parts())
    assert [value for part in parts for _, value in part] == lines
    assert [number for part in parts for number, _ in part] == list(range(1, 21))
    assert len(parts) > 5
    assert (list(tail.parts()), tail.problems) == ([], [])


def test_the_rest_of_a_file_without_a_writer_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert jsonl.Tail(path).rest() == []
    path.write_bytes(b'{"a":1}\n{"a":2}')
    tail = jsonl.Tail(path)
    assert tail.poll() == [{"a": 1}]
    assert tail.rest() == [(2, {"a": 2})]
    assert tail.rest() == []
    jsonl.append_line(path, {"a": 3})  # the next start begins with a newline
    assert tail.poll_numbered() == [(3, {"a": 3})]
    with path.open("ab") as f:
        f.write(b'{"a":')
    assert (tail.poll(), tail.rest()) == ([], [])
    assert [str(p)[:29] for p in tail.problems] == ["a.jsonl:4: unfinished line, n"]
    jsonl.append_line(path, {"a": 5})
    assert tail.poll_numbered() == [(5, {"a": 5})]


def test_an_unreadable_file_is_reported_once_by_tail(tmp_path: Path) -> None:
    tail = jsonl.Tail(tmp_path)
    assert (tail.poll(), tail.poll()) == ([], [])
    assert [p.message for p in tail.problems] == ["cannot be read (is a folder, not a regular file)"]
