"""A term has one holder, and a holder learns that its term is over."""

from __future__ import annotations

import threading
from pathlib import Path

from seatrial.control import lease as leases
from seatrial.control.lease import Lease


def make(term: int, node: int = 0) -> Lease:
    return Lease(term, node, "127.0.0.1", 1000 + node, 0.0)


def compete(folder: Path, term: int, node: int, barrier: threading.Barrier, won: list[int]) -> None:
    barrier.wait()
    if leases.claim(folder, make(term, node)):
        won.append(node)


def test_of_many_that_claim_one_has_it(tmp_path: Path) -> None:
    for term in range(1, 20):
        won: list[int] = []
        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=compete, args=(tmp_path, term, n, barrier, won)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = won
        assert leases.newest(tmp_path) == make(term, winner)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{t:08d}.json" for t in range(1, 20)]


def test_no_lease_and_a_damaged_one(tmp_path: Path) -> None:
    assert leases.newest(tmp_path / "missing") is None
    assert leases.last_term(tmp_path) == 0
    assert leases.claim(tmp_path, make(1))
    (tmp_path / "00000002.json").write_text("{")
    newest = leases.newest(tmp_path)
    assert newest is not None
    assert (newest.term, newest.port) == (2, 0)  # its number counts; there is nobody to be called


def test_a_holder_learns_of_a_newer_term(tmp_path: Path) -> None:
    assert leases.claim(tmp_path, make(1))
    before = leases.renewed(tmp_path, 1)
    assert leases.renew(tmp_path, 1)
    assert leases.renewed(tmp_path, 1) >= before
    assert leases.claim(tmp_path, make(2, node=1))
    assert not leases.renew(tmp_path, 1)
