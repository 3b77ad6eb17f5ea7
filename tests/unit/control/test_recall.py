"""The state of a term as the next coordinator finds it: whole, damaged, or no file at all. It is never ended by it."""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

import pytest
from test_coordinator import GENERATION, Begin, begin, running

__all__ = ["begin"]  # a fixture

VALUES = (None, "x", "²", "a" * 80, "x\x00", -1, 10**30, 70000, 1.5, True, [], {}, [[]], {"": 1}, [0, 0])


def damage(document: Any, rng: random.Random) -> None:
    """Replace one value somewhere in `document`, or leave one out."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in (
            list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        ):
            places.append((value, key))
            walk(value[key])

    walk(document)
    parent, key = rng.choice(places)
    if rng.random() < 0.2:
        del parent[key]
    else:
        parent[key] = copy.deepcopy(rng.choice(VALUES))


def takes_over(begin: Begin) -> None:
    """A new coordinator finds what is there, and can work with the agents that come."""
    following = begin()
    following.coordinator.tick()
    following.join(0, 1, 2)
    for node in (0, 1):
        following.agents[node].beat(GENERATION, 5)
    following.coordinator.tick()


def test_a_plausible_state_is_restored(begin: Begin) -> None:
    term = running(begin)
    term.agents[1].exits(3, GENERATION)
    for node in (0, 1):
        term.agents[node].stops(GENERATION)
    remembered = term.memory()
    assert remembered["machine"]["generation"] == GENERATION + 1
    following = begin()
    assert following.coordinator.machine.generation == GENERATION + 1
    assert following.coordinator.executor.roster.keys() == {0, 1, 2}


@pytest.mark.parametrize("seed", range(200))
def test_damage_does_not_end_the_next_coordinator(begin: Begin, seed: int) -> None:
    term = running(begin)
    rng, state = random.Random(seed), term.coordinator.hold.state
    text = state.read_text()
    if rng.random() < 0.1:
        text = text[: rng.randrange(len(text))]
    else:
        document = json.loads(text)
        for _ in range(rng.randint(1, 3)):
            damage(document, rng)
        text = json.dumps(document)
    state.write_text(text)
    takes_over(begin)


@pytest.mark.parametrize("made", ["pipe", "folder", "link", "deep", "null"])
def test_an_implausible_state_is_ignored(begin: Begin, made: str, capfd: pytest.CaptureFixture[str]) -> None:
    term = running(begin)
    state = term.coordinator.hold.state
    text = state.read_text()
    state.unlink()
    if made == "pipe":
        os.mkfifo(state)
    elif made == "folder":
        state.mkdir()
    elif made == "link":
        (state.parent / "elsewhere").write_text(text)
        state.symlink_to("elsewhere")
    else:
        state.write_text("[" * 100_000 if made == "deep" else "null")
    following = begin()
    assert following.coordinator.executor.world is None
    told = capfd.readouterr().err
    if made == "deep":
        state = following.coordinator.hold.state  # it was taken over as it was
    assert made == "null" or f"{state} is not used: " in told
