"""In which order asynchronous tensor parallel launches collectives, computes products and waits, as one string.

G and S: an all-gather and a reduce-scatter are launched; P: a product; W: the oldest collective that nobody has waited for yet
is waited for, w: another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from seatrial.parallel import overlap


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The letters of what happens within it, also inside compiled layers (compiled before, since products are changed)."""
    letters: list[str] = []
    under_way: list[Any] = []

    def launching(letter: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            letters.append(letter)
            assert kwargs["async_op"]
            work = whole(*args, **kwargs)
            under_way.append(work)
            return work

        return launch

    def waiting(work: Any) -> None:
        letters.append("W" if work is under_way[0] else "w")
        under_way.remove(work)
        wait(work)

    def computing(whole: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            letters.append("P")
            return whole(*args, **kwargs)

        return compute

    names = ("all_gather_single", "reduce_scatter_single", "wait")
    gather, scatter, wait = (getattr(overlap, name) for name in names)
    products = {name: getattr(torch, name) for name in ("mm", "addmm")}
    try:
        for name, put in zip(names, (launching("G", gather), launching("S", scatter), waiting), strict=True):
            setattr(overlap, name, put)
        for name, whole in products.items():
            setattr(torch, name, computing(whole))
        yield letters
    finally:
        for name, whole in zip(names, (gather, scatter, wait), strict=True):
            setattr(overlap, name, whole)
        for name, whole in products.items():
            setattr(torch, name, whole)
    assert not under_way, "something that was launched was never waited for"


def layer(parts: int) -> tuple[str, str]:
    """What one layer does, forward and backward."""
    gathers, waits = "G" * parts, "W" * parts
    forward = (
        gathers + "WPPP" * parts  # q, k, v
        + "PS" * parts + waits  # o
        + gathers + "WPP" * parts  # gate, up
        + "PS" * parts + waits  # down
    )  # fmt: skip
    # Backward each weight has a product of its own, beside what is still under way or after the last part.
    backward = (
        gathers + "WP" * parts + "P"
        + gathers + "PPS" * parts + waits + "PP" + waits
        + gathers + "WP" * parts + "P"
        + gathers + "PPPS" * parts + waits + "PPP" + waits
    )  # fmt: skip
    return forward, backward
