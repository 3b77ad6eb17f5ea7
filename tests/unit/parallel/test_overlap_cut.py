"""How rows are split into parts, and reordered."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from seatrial.parallel.overlap import Cut

cuts = st.builds(Cut.of, st.integers(1, 9), st.integers(1, 12), st.integers(1, 4), in_parts=st.booleans())


def _numbered(cut: Cut) -> torch.Tensor:
    """[B, T, 1], each position its own number."""
    T = cut.ranks * cut.positions
    return torch.arange(cut.sequences * T).view(cut.sequences, T, 1)


@given(cuts)
def test_in_parts_and_in_order_are_inverse(cut: Cut) -> None:
    x_BT1 = _numbered(cut)
    assert torch.equal(cut.in_order(cut.in_parts(x_BT1)), x_BT1)


@given(cuts)
def test_a_part_has_the_rows_of_its_all_gather(cut: Cut) -> None:
    """The rows of part p: what each rank sends as its part p, rank after rank."""
    ranks_BtD = _numbered(cut).chunk(cut.ranks, dim=1)
    sent = zip(*(cut.local_parts(x_BtD) for x_BtD in ranks_BtD), strict=True)
    gathered = torch.cat([piece.flatten() for of_all_ranks in sent for piece in of_all_ranks])
    assert torch.equal(cut.in_parts(_numbered(cut)), cut.after_gather(gathered[:, None]))
    assert torch.equal(cut.before_scatter(cut.after_gather(gathered[:, None])), gathered[:, None])


@given(cuts)
def test_parts_of_single_sequences_are_not_copied(cut: Cut) -> None:
    rows = cut.in_parts(_numbered(cut))
    ordered = cut.in_order(rows)
    if cut.parts in (1, cut.sequence_parts) and cut.sequence_parts == cut.sequences:
        assert ordered.data_ptr() == rows.data_ptr(), "a copy that nobody needs"
