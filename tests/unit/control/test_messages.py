"""What processes of a run, or of a check, send each other: it arrives as it was, or not at all, and somebody receives it."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import seatrial
from seatrial.check.live import messages as check
from seatrial.record import messages as msg

FOLDER = Path(seatrial.__file__).parent
MODULES = (msg, check)


def of(module: ModuleType, path: Path) -> bool:
    """Whether `msg` in this file is `module`."""
    return (FOLDER / "check/live" in path.parents) == (module is check)


SOURCES = {
    module: [
        p.read_text()
        for p in FOLDER.rglob("*.py")
        if p.name not in ("messages.py", "codec.py") and of(module, p)
    ]
    for module in MODULES
}


def directions(module: ModuleType) -> Iterator[tuple[str, tuple[type[msg.Message], ...]]]:
    """Each with its classes."""
    for name in re.findall(
        r"decode\([^()]*(?:\([^()]*\))?, msg\.(\w+)(?:, exact=False)?\)", "".join(SOURCES[module])
    ):
        yield name, typing.get_args(getattr(module, name)) or (getattr(module, name),)


DIRECTIONS = {module: dict(directions(module)) for module in MODULES}
# The answer to each order of a check is a direction of its own: `Order.answer` decodes nothing else.
DIRECTIONS[check] |= {
    order.__name__: typing.get_args(vars(order)["__orig_bases__"][0])
    for order in typing.get_args(check.AnyOrder)
}


def subclasses(cls: type) -> list[type]:
    return [s for direct in cls.__subclasses__() for s in (direct, *subclasses(direct))]


CLASSES = [
    cls for cls in subclasses(msg.Message) if "op" in vars(cls) and cls.__module__.startswith("seatrial.")
]
assert {cls.__module__ for cls in CLASSES} == {module.__name__ for module in MODULES}
assert len(CLASSES) > 50


def module_of(cls: type[msg.Message]) -> ModuleType:
    return next(module for module in MODULES if module.__name__ == cls.__module__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_message_has_one_direction_and_a_receiver(cls: type[msg.Message]) -> None:
    module = module_of(cls)
    (direction,) = [name for name, among in DIRECTIONS[module].items() if cls in among]
    same = [other.__name__ for other in DIRECTIONS[module][direction] if other.op == cls.op]
    assert same == [cls.__name__], "its op is its own"
    if len(DIRECTIONS[module][direction]) > 1:  # whoever receives another kind too tells them apart by class
        assert any(
            re.search(rf"(case|isinstance\(.*) ?[^:\n]*\bmsg\.{cls.__name__}\b", text)
            for text in SOURCES[module]
        )


# -- values of every field's type

TEXTS = st.text(max_size=5)
JSON = st.none() | st.booleans() | st.integers() | TEXTS | st.lists(st.integers(), max_size=2)


def values_for(name: str, hint: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if name == "time":
        return st.floats(0, 1e10)
    if origin is types.UnionType:
        return st.one_of([values_for(name, argument) for argument in arguments])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values_for("", arguments[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(TEXTS, values_for("", arguments[1]), max_size=2)
    if dataclasses.is_dataclass(hint):
        return instances(hint)
    plain = {int: st.integers(), str: TEXTS, bool: st.booleans(), type(None): st.none(), Any: JSON}
    return st.floats(allow_nan=False) if hint is float else plain[hint]


def instances(cls: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: values_for(f.name, hints[f.name]) for f in dataclasses.fields(cls)})


def among(cls: type[msg.Message]) -> Any:
    found = next(classes for classes in DIRECTIONS[module_of(cls)].values() if cls in classes)
    return typing.Union[found]  # noqa: UP007


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_message_arrives_as_it_was(cls: type[msg.Message]) -> None:
    @settings(max_examples=20, database=None, deadline=None)
    @given(instances(cls))
    def arrives(message: Any) -> None:
        before = dataclasses.replace(message)
        line = json.dumps(msg.encode(message))
        assert msg.decode(json.loads(line), among(cls)) == message == before
        (op, content), *_ = msg.encode(message).items()
        with pytest.raises(ValueError, match=f"^{op}: `no such field` is unknown$"):
            msg.decode({op: {**content, "no such field": 1}}, among(cls))

    arrives()


# -- and nothing else

STOP: dict[str, Any] = {"generation": 3, "grace_s": 1.5, "park": True, "kill": [1, 2]}


def test_the_stop_that_others_are_made_from() -> None:
    assert msg.decode({"stop": STOP}, msg.ToAgent) == msg.Stop(3, 1.5, park=True, kill=[1, 2])
    assert msg.decode({"stop": {**STOP, "grace_s": 2}}, msg.ToAgent) == msg.Stop(3, 2.0, True, [1, 2])
    without = {key: value for key, value in STOP.items() if key != "kill"}
    assert msg.decode({"stop": without}, msg.ToAgent) == msg.Stop(3, 1.5, park=True)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "not exactly one message: {}"),
        ({"stop": STOP, "go": {}}, "not exactly one message"),
        ({"halt": {}}, "unknown message 'halt'"),
        ({"ready": {}}, "unknown message 'ready'"),  # it goes the other way
        ({"stop": 3}, "stop: 3"),
        ({"stop": {}}, "stop: `generation` is missing, `grace_s` is missing, `park` is missing"),
        ({"stop": STOP | {"generation": True}}, "stop: `generation` is True"),
        ({"stop": STOP | {"generation": "3"}}, "stop: `generation` is '3'"),
        ({"stop": STOP | {"park": 1}}, "stop: `park` is 1"),
        ({"stop": STOP | {"grace_s": None}}, "stop: `grace_s` is None"),
        ({"stop": STOP | {"kill": [1, "2"]}}, "stop: `kill` is [1, '2']"),
        ({"stop": STOP | {"why": 1}}, "stop: `why` is unknown"),
        ({"go": {"op": "go"}}, "go: `op` is unknown"),
        ({"yield": {"generation": 1, "how": "done"}}, "yield: `how` is 'done'"),
        ({"yield": {"generation": 1, "how": ["yielded"]}}, "yield: `how` is ['yielded']"),
    ],
)
def test_an_invalid_message_is_named_in_the_error(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        msg.decode(values, msg.ToAgent)


def test_a_message_within_a_message_is_checked_too() -> None:
    joins = msg.AgentJoins(1, 2, "a", 3, 4, "i", "", None, "t", True, None, None, 5, [])
    values = msg.encode(joins)
    values["agent"]["left"] = {"generation": 1, "how": "lost", "offer_port": 3, "told": None}
    with pytest.raises(ValueError, match=r"^agent: `left`: `how` is 'lost'"):
        msg.decode(values, msg.Hello)


# -- between versions, as the agents of a check may be

HELLO: dict[str, Any] = {
    "version": "9",
    "python": "3.13.1",
    "pid": 1,
    "host": "a",
    "machine": "b",
    "port": 2,
    "gpus": 8,
    "rdma": ["mlx5_0"],
}


def test_a_message_of_another_version_is_read_if_wanted() -> None:
    values = {"hello": {**HELLO, "colour": "red"}}
    assert msg.decode(values, check.FromAgent, exact=False) == check.Hello(**HELLO)
    with pytest.raises(ValueError, match=r"^hello: `colour` is unknown$"):
        msg.decode(values, check.FromAgent)
    with pytest.raises(ValueError, match=r"^hello: `port` is '2'$"):
        msg.decode({"hello": HELLO | {"port": "2"}}, check.FromAgent, exact=False)


def test_an_order_has_no_answer_but_its_own() -> None:
    assert check.Ping.answer({"clock": {"clock": 2.5}}) == check.Clock(2.5)
    with pytest.raises(ValueError, match=r"^unknown message 'ports'$"):
        check.Ping.answer(msg.encode(check.Ports([1])))
    with pytest.raises(ValueError, match=r"^clock: `clock` is missing, `zone` is unknown$"):
        check.Ping.answer({"clock": {"zone": "UTC"}})
