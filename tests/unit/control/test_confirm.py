"""Beats that do not show what was ordered."""

from __future__ import annotations

from seatrial.control.coordinator.confirm import WAIT_S, Confirmations


def test_a_node_that_runs_what_was_ordered_reports_nothing() -> None:
    told = Confirmations()
    assert [told.beat(1, 5, 5, 0, now) for now in (0.0, 100.0, 200.0)] == [None] * 3


def test_a_start_that_never_arrived_is_found() -> None:
    told = Confirmations()
    assert told.beat(1, 5, 4, 0, 100.0) is None
    assert told.beat(1, 5, 4, 0, 100.0 + WAIT_S - 0.1) is None
    assert told.beat(1, 5, 4, 0, 100.0 + WAIT_S) == "was ordered to run generation 5, but still reports 4"
    assert told.beat(1, 5, 4, 0, 101.0 + WAIT_S) is None, "once, and then again only if nothing follows"


def test_ranks_that_exited_unreported_are_found() -> None:
    told = Confirmations()
    assert told.beat(1, 5, 5, 2, 100.0) is None
    assert told.beat(2, 5, 5, 0, 101.0) is None
    assert told.beat(1, 5, 5, 2, 100.0 + WAIT_S) == "2 of its ranks have exited without a failure report"


def test_what_passes_or_is_explained_is_forgotten() -> None:
    told = Confirmations()
    told.beat(1, 5, 4, 0, 100.0)
    told.beat(1, 5, 5, 0, 101.0)
    told.beat(1, 6, 5, 0, 102.0)
    told.forget(1)
    assert told.beat(1, 6, 5, 0, 102.0 + WAIT_S) is None
