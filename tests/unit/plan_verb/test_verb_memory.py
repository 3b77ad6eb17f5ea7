"""The kinds of memory that the verb lists add up to the stated total."""

from __future__ import annotations

import re

import pytest

from seatrial.base.units import GIB, MIB
from seatrial.plan.cost.memory import Memory
from seatrial.ui.plan_words import held

MEMORY = Memory(
    parameters=2 * GIB,
    gradients=2 * GIB,
    optimizer=4 * GIB,
    gathered=8 * GIB,
    unsharded_gradients=15 * GIB,
    activations=20 * GIB,
    logits=0.0,
    messages=1 * GIB,
    runtime=3 * GIB,
    streams=5 * GIB,
)


def total(text: str) -> float:
    assert text.endswith(" GiB")
    return sum(float(n) for n in re.findall(r"[\d.]+", text)) * GIB


@pytest.mark.parametrize("most", [None, 3, 5])
def test_memory_parts_add_up_to_reserved_memory(most: int | None) -> None:
    text = held(MEMORY, gpu=True, most=most)
    assert total(text) == pytest.approx(MEMORY.reserved, rel=0.01)
    assert (re.search(r"other \d", text) is not None) == (most is not None)


def test_without_reserved_memory_parts_add_up_to_allocated() -> None:
    text = held(MEMORY, gpu=False)
    assert total(text) == pytest.approx(MEMORY.allocated, rel=0.01)
    assert "CUDA" not in text
    assert "fragmentation" not in text


def test_small_parts_have_smaller_units() -> None:
    small = Memory(2048.0, 0.0, 4096.0, 0.0, 0.0, 3.0 * MIB, 0.0, 0.0, 0.7 * GIB)
    assert held(small, gpu=False) == "activations 3 MiB"
    assert "activations 3 MiB" in held(
        Memory(1e5, 1e5, 1e5, 0.0, 0.0, 3.0 * MIB, 0.0, 0.0, 0.7 * GIB), gpu=False
    )
