"""Errors, units and atomic files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from seatrial.base import atomic, units
from seatrial.base.errors import Diagnostic, InputError, InternalError, RunFailed, SeatrialError


def test_a_diagnostic_points_at_its_place() -> None:
    text = Diagnostic(
        "expected an integer",
        "job.toml",
        3,
        9,
        length=5,
        source_line='steps = "200"',
        hint="remove the quotes",
    ).render()
    assert text == (
        "job.toml:3:9: error: expected an integer\n"
        '  3 | steps = "200"\n'
        "    |         ^^^^^\n"
        "  hint: remove the quotes"
    )


def test_the_caret_is_under_its_column_after_tabs() -> None:
    lines = Diagnostic("x", "f", 1, 3, source_line="\t\tkey").render().splitlines()
    assert lines[1].split("| ")[1].index("k") == lines[2].split("| ")[1].index("^")


def test_of_a_very_long_line_the_place_is_shown() -> None:
    line = "x = 1 # " + "a" * 1_000_000
    lines = Diagnostic("x", "f", 1, 500_000, length=9000, source_line=line).render().splitlines()
    assert all(len(text) < 300 for text in lines)
    assert "^" in lines[2]
    start = Diagnostic("x", "f", 1, 1, source_line=line).render().splitlines()
    assert start[1].startswith("  1 | x = 1 # aaa")


def test_all_problems_are_reported_at_once() -> None:
    error = InputError([Diagnostic("one", "f"), Diagnostic("two")])
    assert error.exit_code == 2
    assert error.render() == "f: error: one\nerror: two\n2 problems"


@pytest.mark.parametrize(
    ("kind", "code"), [(SeatrialError, 1), (RunFailed, 1), (InputError, 2), (InternalError, 3)]
)
def test_exit_codes(kind: type[SeatrialError], code: int) -> None:
    error = kind("no", hint="do")
    assert error.exit_code == code
    assert error.render() == "error: no\n  hint: do"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (units.count(0), "0"),
        (units.count(999), "999"),
        (units.count(1_234_567), "1.23M"),
        (units.count(72.7e9), "72.7B"),
        (units.count(999_999), "1M"),
        (units.memory(512), "512 B"),
        (units.memory(1.5 * 1024**3), "1.50 GiB"),
        (units.duration(0.25), "250 ms"),
        (units.duration(59.94), "59.9 s"),
        (units.duration(75), "1 min 15 s"),
        (units.duration(3600), "1 h 0 min"),
        (units.duration(90_000), "1 d 1 h"),
    ],
)
def test_units(text: str, wanted: str) -> None:
    assert text == wanted


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    atomic.write_json(path, {"n": 1})
    assert json.loads(path.read_text()) == {"n": 1}

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        atomic.write_json(path, {"n": 2})
    assert json.loads(path.read_text()) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_names_that_are_not_utf8_are_valid_json(tmp_path: Path) -> None:
    value = {"file": os.fsdecode(b"caf\xe9 \xc3\xa9"), "other": "\ud83d é"}
    atomic.write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == value
