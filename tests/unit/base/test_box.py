from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seatrial.base.box import Box, chunk


@given(st.integers(0, 200), st.integers(1, 17))
def test_chunk_cuts_as_torch_does(length: int, parts: int) -> None:
    sizes = [len(t) for t in torch.arange(length).chunk(parts)] if length else []
    sizes += [0] * (parts - len(sizes))
    offset = 0
    for index, size in enumerate(sizes):
        assert chunk(length, parts, index) == (offset, size)
        offset += size
    assert offset == length


boxes = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)).map(
    lambda n: Box((n[0], n[1]), (n[2], n[3]))
)


@given(boxes, boxes)
def test_the_intersection_is_what_both_cover(a: Box, b: Box) -> None:
    whole = torch.zeros(20, 20, dtype=torch.int)
    whole[a.slices()] += 1
    whole[b.slices()] += 1
    both = a.intersect(b)
    if both is None:
        assert not (whole == 2).any()
    else:
        assert int((whole == 2).sum()) == both.numel > 0
        assert (whole[both.slices()] == 2).all()


def test_relative_and_narrow() -> None:
    box = Box((4, 8), (6, 2))
    part = box.narrow(0, 1, 3)
    assert part == Box((5, 8), (3, 2))
    assert part.relative_to(box) == Box((1, 0), (3, 2))
    assert Box.whole((3, 4)).numel == 12
    assert Box.whole(()).numel == 1
    with pytest.raises(ValueError, match="outside"):
        box.narrow(0, 4, 3)
    with pytest.raises(ValueError, match="as many offsets"):
        Box((1,), (1, 2))
    with pytest.raises(ValueError, match="negative"):
        Box((-1,), (1,))
