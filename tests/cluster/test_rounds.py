"""A few of the rounds of rounds.py: what once stalled a run, and one that is drawn."""

from __future__ import annotations

import pytest
from rounds import Strike, play, prepare

from seatrial.drill.reference import Reference

pytestmark = [pytest.mark.cluster, pytest.mark.ci, pytest.mark.timed]

STALLED = {
    "everything stopped at the start": [Strike(2.0, "all")],
    "an agent stopped at the start": [Strike(2.0, "agent", "pause"), Strike(10.0, "rank", "kill")],
    "fork server stopped": [Strike(4.0, "fork server", "stop")],
    "writer and rank stopped": [Strike(5.0, "writer", "stop"), Strike(5.1, "rank", "stop")],
}
# Parts of these are also in the other, in tests/unit/control/test_watchdog.py, and in that of a stopped writer.
_LONG = ("an agent stopped at the start", "fork server stopped", "writer and rank stopped")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return prepare(tmp_path_factory.mktemp("rounds"))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in _LONG else ()) for n in STALLED]
)
def test_what_once_stalled_a_run(reference: Reference, name: str) -> None:
    number = 1000 + list(STALLED).index(name)
    problem, done, _ = play(reference.folder.path.parent, number, name, reference, STALLED[name])
    assert not problem, done


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.long)])
def test_two_faults_at_any_moment(reference: Reference, number: int) -> None:
    problem, done, _ = play(reference.folder.path.parent, number, f"suite {number}", reference)
    assert not problem, done
