"""A term has one holder, and a holder learns that its term is over."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

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


WHOLE = {"term": 2, "node": 0, "address": "127.0.0.1", "port": 1000, "time": 0.0}


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {key: value}
            for key in WHOLE
            for value in (None, [], {}, True, 1.5 if key != "time" else "1", 7 if key == "address" else "x")
        ),
        {"term": 3},
        {"port": -1},
        {"port": 1 << 16},
        {"port": 10**40},
    ],
    ids=str,
)
def test_a_lease_of_wrong_values_counts_as_its_number(tmp_path: Path, wrong: dict[str, Any]) -> None:
    assert leases.claim(tmp_path, make(1))
    (tmp_path / "00000002.json").write_text(json.dumps(WHOLE | wrong))
    newest = leases.newest(tmp_path)
    assert newest is not None
    assert (newest.term, newest.node, newest.port) == (2, -1, 0)


@pytest.mark.parametrize("text", ["", "1", '"term"', "[]", "null", "[" * 100_000, "1" * 5000, "\ud800", "{}"])
def test_a_lease_that_is_no_document_counts_as_its_number(tmp_path: Path, text: str) -> None:
    assert leases.claim(tmp_path, make(1))
    (tmp_path / "00000002.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    newest = leases.newest(tmp_path)
    assert newest is not None
    assert (newest.term, newest.port) == (2, 0)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_file_counts_as_its_number_and_nobody_waits_for_it(tmp_path: Path, kind: str) -> None:
    assert leases.claim(tmp_path, make(1))
    path = tmp_path / "00000002.json"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to("00000001.json")
    newest = leases.newest(tmp_path)
    assert newest is not None
    assert (newest.term, newest.port) == (2, 0)
    assert leases.claim(tmp_path, make(3))


def test_names_that_only_look_like_numbers_are_no_leases(tmp_path: Path) -> None:
    assert leases.claim(tmp_path, make(1))
    for name in ("²", "0000000²", "٠٠٠٠٠٠٠٩", "00_000_09", "+0000009", "-0000009", " 0000009"):
        (tmp_path / f"{name}.json").write_text("{}")
    assert leases.last_term(tmp_path) == 1
    assert leases.newest(tmp_path) == make(1)


def test_to_renew_a_lease_that_is_a_link_touches_nothing_else(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("")
    os.utime(victim, (1, 1))
    (tmp_path / "00000001.json").symlink_to(victim)
    assert leases.renew(tmp_path, 1)
    assert victim.stat().st_mtime == 1
