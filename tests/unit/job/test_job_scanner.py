"""The scanner and tomllib must see the same keys in every TOML text, and each span must hold what it names."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.job.scanner import scan

BARE = st.sampled_from(["a", "b", "-", "9_Z"])  # few, so that tables and keys meet again
INSIDE = st.text(
    st.characters(codec="utf-8", exclude_characters="\"'\\\x7f", exclude_categories=("C", "Zl", "Zp")),
    max_size=8,
)
BLANK = st.sampled_from(["", " ", "\t "])
COMMENT = st.sampled_from(["", ' # a [comment] = "x', "#'''"])


@st.composite
def keys(draw: Any) -> str:
    """A key as TOML text: bare or quoted."""
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return draw(BARE)
    return f'"{draw(INSIDE)}\\u0041\\""' if kind == 1 else f"'{draw(INSIDE)}'"


@st.composite
def dotted(draw: Any) -> str:
    dot = draw(st.sampled_from([".", " . "]))
    return dot.join(draw(st.lists(keys(), min_size=1, max_size=3)))


def multi_line(quote: str) -> st.SearchStrategy[str]:
    inner = st.lists(st.sampled_from(["a = 1", "[x]", "\n", "#", " ", "'", '"', "]", "}"]), max_size=6).map(
        "".join
    )
    return inner.filter(lambda t: quote not in t).map(lambda t: f"{quote * 3}{t}{quote * 3}")


SCALARS = st.one_of(
    st.integers().map(str),
    st.sampled_from(
        ["true", "inf", "-nan", "1e6", "0x_f".replace("_", ""), "1979-05-27 07:32:00", "07:32:00"]
    ),
    INSIDE.map(lambda t: f'"{t}\\\\\\" = ["'),
    INSIDE.map(lambda t: f"'{t} \\'"),
    multi_line('"'),
    multi_line("'"),
    st.sampled_from(["'''it''s'''''", '"""say \\""" "" """""', '"""\\\n  x"""']),
)


def containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    array = st.tuples(st.lists(inner, max_size=3), st.sampled_from([", ", ",\n  # note ]\n", " ,"])).map(
        lambda x: "[" + x[1].join(x[0]) + "]"
    )
    table = st.lists(st.tuples(dotted(), inner), max_size=3).map(
        lambda pairs: "{" + ", ".join(f"{k} = {v}" for k, v in pairs) + "}"
    )
    return st.one_of(array, table)


VALUES = st.recursive(SCALARS, containers, max_leaves=5)


@st.composite
def documents(draw: Any) -> str:
    """Lines that are often, not always, valid together; the test keeps the valid ones."""
    lines = []
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["pair", "pair", "pair", "table", "array", "blank"]))
        pad, end = draw(BLANK), draw(COMMENT)
        if kind == "pair":
            line = f"{pad}{draw(dotted())}{draw(BLANK)}={draw(BLANK)}{draw(VALUES)}{end}"
        elif kind == "table":
            line = f"{pad}[{draw(BLANK)}{draw(dotted())}]{end}"
        elif kind == "array":
            line = f"{pad}[[{draw(dotted())}{draw(BLANK)}]]{end}"
        else:
            line = pad + end
        # Keep only what tomllib accepts, so that long documents stay valid.
        try:
            tomllib.loads("\n".join([*lines, line]))
        except tomllib.TOMLDecodeError:
            continue
        lines.append(line)
    return draw(st.sampled_from(["\n", "\r\n"])).join(lines) + draw(st.sampled_from(["", "\n"]))


def key_paths(values: Any, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    """Every key that tomllib found, as a path."""
    found: set[tuple[str | int, ...]] = set()
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        inner = (*path, key)
        if isinstance(values, dict):
            found.add(inner)
        if isinstance(value, dict | list):
            found |= key_paths(value, inner)
    return found


@pytest.mark.cluster  # slow
@settings(deadline=None)
@given(documents())
def test_keys_are_those_of_tomllib(text: str) -> None:
    values = tomllib.loads(text)
    assert set(scan(text).keys) == key_paths(values)


@pytest.mark.cluster  # slow
@settings(deadline=None)
@given(documents())
def test_spans_hold_what_they_name(text: str) -> None:
    positions = scan(text)
    lines = text.replace("\r\n", "\n").split("\n")
    values = tomllib.loads(text)
    for path, span in positions.keys.items():
        said = lines[span.line - 1][span.column - 1 : span.column - 1 + span.length]
        assert tomllib.loads(f"{said} = 0") == {path[-1]: 0}
    for path, span in positions.values.items():
        said = lines[span.line - 1][span.column - 1 : span.column - 1 + span.length]
        value: Any = values
        for part in path:
            value = value[part]
        if isinstance(value, bool | int | str) and not said.startswith(('"""', "'''")):
            assert tomllib.loads(f"x = {said}")["x"] == value


def test_places_in_a_small_file() -> None:
    text = 'name = "x"\n\n[train]  # how\n  "steps" = 200\nrope.factor = [1, 22]\n'
    positions = scan(text)
    train_steps = positions.keys["train", "steps"]
    assert (train_steps.line, train_steps.column, train_steps.length) == (4, 3, 7)
    value = positions.values["train", "steps"]
    assert (value.line, value.column, value.length) == (4, 13, 3)
    item = positions.values["train", "rope", "factor", 1]
    assert (item.line, item.column, item.length) == (5, 19, 2)
    header = positions.keys["train",]
    assert (header.line, header.column, header.length) == (3, 2, 5)


@pytest.mark.parametrize("text", ["", "\n", "# only a comment", "\r\n\r\n"])
def test_nothing_to_find(text: str) -> None:
    positions = scan(text)
    assert not positions.keys
    assert not positions.values


def test_a_long_file() -> None:
    text = "\n".join(f"[s{i}]\nkey = [{i}, {{a = 'x'}}]" for i in range(5000))
    assert len(scan(text).keys) == 15000


def test_arrays_of_tables() -> None:
    text = "[[a]]\nx = 1\n[[a.b]]\ny = 2\n[[a.b]]\ny = 3\n[a.c]\nz = 4\n[[a]]\n[[a.b]]\ny = 5\n"
    positions = scan(text)
    assert set(positions.keys) == key_paths(tomllib.loads(text))
    assert positions.keys["a", 0, "b", 1, "y"].line == 6
    assert (positions.values["a", 0, "b", 1].line, positions.values["a", 0, "b", 1].column) == (5, 5)
    assert positions.values["a", 1].line == 9
    assert positions.keys["a", 1, "b", 0, "y"].line == 11
