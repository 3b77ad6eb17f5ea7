"""A term has one holder; the next one ends its right, and a holder learns that it has ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from wired import Clock

from seatrial.control.net.lease import _RENEW_S, Disk, Hold, Lease, Leases, Succeeded, last_term

SILENCE_S = 3.0


def make(term: int, node: int = 0, count: int = 0) -> Lease:
    return Lease(term, node, "127.0.0.1", 1000 + node, 0.0, count)


def claim(folder: Path, lease: Lease) -> Hold | None:
    return Leases(folder).claim(lease, SILENCE_S)


def taken(folder: Path, lease: Lease) -> Hold:
    hold = claim(folder, lease)
    assert hold is not None
    return hold


def newest(folder: Path) -> Lease | None:
    return Leases(folder).newest()


@pytest.fixture
def leases(tmp_path: Path) -> Path:
    return tmp_path / "leases"


def compete(folder: Path, term: int, node: int, barrier: threading.Barrier, won: list[int]) -> None:
    mine = Leases(folder)
    mine.newest()
    barrier.wait()
    if mine.claim(make(term, node), SILENCE_S):
        won.append(node)


def test_of_many_that_claim_one_has_it(leases: Path) -> None:
    for term in range(1, 20):
        won: list[int] = []
        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=compete, args=(leases, term, n, barrier, won)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = won
        found = newest(leases)
        assert found is not None
        assert (found.term, found.node, found.count) == (term, winner, 1)
    names = {p.name for p in leases.iterdir()}
    assert names == {f"{t:08d}.{kind}" for t in range(1, 20) for kind in ("json", "hold", "state")}


def test_no_lease_and_a_damaged_one(tmp_path: Path, leases: Path) -> None:
    assert newest(tmp_path / "missing") is None
    assert last_term(leases) == 0
    leases.mkdir()
    (leases / "00000001.json").write_text(json.dumps(WHOLE | {"term": 1}))  # of a version without lease.json
    (leases / "00000002.json").write_text("{")
    found = newest(leases)
    assert found is not None
    assert (found.term, found.port) == (2, 0)  # its number counts; there is nobody to be called


def test_a_holder_learns_of_its_successor(leases: Path) -> None:
    clock = Clock()
    first = Leases(leases, Disk(), clock.monotonic).claim(make(1), SILENCE_S)
    assert first is not None
    assert first.holds()
    taken(leases, make(2, node=1))
    clock.now += 0.9 * _RENEW_S
    assert first.holds(), "it has not asked again"
    clock.now += 0.1 * _RENEW_S
    with pytest.raises(Succeeded):
        first.holds()


def test_a_holder_that_asks_learns_at_once(leases: Path) -> None:
    first = taken(leases, make(1))
    assert first.holds()
    taken(leases, make(2, node=1))
    with pytest.raises(Succeeded):
        first.holds(since=time.monotonic())


def test_what_a_holder_writes_after_its_end_is_not_written(tmp_path: Path, leases: Path) -> None:
    first = taken(leases, make(1))
    first.write(first.state, b"first")
    second = taken(leases, make(2, node=1))
    assert second.state.read_bytes() == b"first", "it goes on from there"
    for path in (first.state, tmp_path / "generation"):
        with pytest.raises(Succeeded):
            first.write(path, b"late")
    with pytest.raises(Succeeded):
        first.beat()
    assert first.state.read_bytes() == b"first"
    assert not (tmp_path / "generation").exists()
    second.write(tmp_path / "generation", b"5")
    assert newest(leases) == second.lease


def test_a_proof_is_renewed_in_time_and_signs_of_life_are_rarer(leases: Path) -> None:
    """About four operations a second, of which a network file system takes notice."""
    done: list[str] = []

    class Counted(Disk):
        @staticmethod
        def rename(source: Path, target: Path) -> None:
            done.append(target.name)
            os.rename(source, target)

    clock = Clock()
    hold = Leases(leases, Counted(), clock.monotonic).claim(make(1), SILENCE_S)
    assert hold is not None
    done.clear()
    for _ in range(3000):
        assert hold.holds()
        clock.now += 0.01
    proofs, beats = done.count("here") + done.count("there"), done.count("lease.json")
    assert 60 <= proofs <= 76
    assert 10 <= beats <= 13
    assert (proofs + 4 * beats) / 30 < 4.6  # a sign of life: open, write, close, rename


def test_a_server_that_answers_slowly_leaves_time_between_proofs(leases: Path) -> None:
    """And the proof counts from when it was asked for, as somebody may have come after that."""
    clock = Clock()

    class Slow(Disk):
        @staticmethod
        def rename(source: Path, target: Path) -> None:
            clock.now += 1.5
            os.rename(source, target)

    hold = Leases(leases, Slow(), clock.monotonic).claim(make(1), SILENCE_S)
    assert hold is not None
    assert hold.holds()
    asked = clock.now
    assert hold.holds()
    assert clock.now == asked, "it has not asked again"
    assert hold.proven_at <= asked - 1.5
    clock.now += _RENEW_S
    before = clock.now
    assert hold.holds()
    assert hold.proven_at == before


def test_a_holder_whose_folder_refuses_has_no_proof_for_a_while(
    leases: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = [False]

    class Broken(Disk):
        @staticmethod
        def rename(source: Path, target: Path) -> None:
            if broken[0]:
                raise OSError(errno.EIO, "Input/output error")
            os.rename(source, target)

    clock = Clock()
    hold = Leases(leases, Broken(), clock.monotonic).claim(make(1), SILENCE_S)
    assert hold is not None
    assert hold.holds()
    proven = hold.proven_at
    broken[0] = True
    clock.now = proven + SILENCE_S - 0.01
    assert not hold.holds(since=clock.now)
    assert hold.holds()
    clock.now = proven + SILENCE_S + 0.01
    assert not hold.holds()
    assert hold.proven_at == proven
    broken[0] = False
    clock.now += _RENEW_S
    assert hold.holds()
    assert hold.proven_at == clock.now
    assert capfd.readouterr().err.count("could not renew the lease of term 1") == 1


def test_a_full_disk_does_not_take_the_proof(leases: Path, capfd: pytest.CaptureFixture[str]) -> None:
    full = [False]

    class Full(Disk):
        @staticmethod
        def write(path: Path, content: bytes, *, new: bool = False, durable: bool = False) -> None:
            if full[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            Disk.write(path, content, new=new, durable=durable)

    clock = Clock()
    hold = Leases(leases, Full(), clock.monotonic).claim(make(1), SILENCE_S)
    assert hold is not None
    full[0] = True
    for _ in range(100):
        clock.now += 0.1
        assert hold.holds()
        assert hold.proven_at > clock.now - _RENEW_S - 0.1
    assert "No space left" in capfd.readouterr().err


def test_a_claim_whose_holder_never_began_is_ended_too(leases: Path) -> None:
    taken(leases, make(1)).write(leases / "00000001.state", b"one")
    (leases / "00000002.json").write_text(json.dumps(WHOLE))  # it died right after its claim
    late = Leases(leases)
    third = taken(leases, make(3, node=1))
    assert third.state.read_bytes() == b"one"
    # Or it only seemed dead: what it does next fails.
    assert late.claim(make(2), SILENCE_S) is None
    assert third.holds()


def test_a_claim_that_was_ours_already_is_ours(leases: Path) -> None:
    """The answer to the link was lost, or the term before could not be ended at once."""
    leases.mkdir()
    (leases / "00000002.json").write_text(json.dumps(WHOLE))
    assert claim(leases, make(2, node=1)) is None
    assert taken(leases, make(2)).holds()
    assert claim(leases, make(2)) is None, "a right begins once"


def test_a_right_that_was_ended_before_it_began_cannot_begin(leases: Path) -> None:
    """The folder is removed with the claim half done: to make it again must fail."""
    refuses = [True]

    class Full(Disk):
        @staticmethod
        def write(path: Path, content: bytes, *, new: bool = False, durable: bool = False) -> None:
            if refuses[0] and path.name == "here":
                raise OSError(errno.ENOSPC, "No space left on device")
            Disk.write(path, content, new=new, durable=durable)

    slow = Leases(leases, Full())
    with pytest.raises(OSError, match="No space"):
        slow.claim(make(1), SILENCE_S)
    assert (leases / "00000001.hold").is_dir()
    second = taken(leases, make(2, node=1))
    refuses[0] = False
    assert slow.claim(make(1), SILENCE_S) is None
    assert second.holds()


@pytest.mark.parametrize("step", range(12))
def test_death_during_takeover_leaves_a_lease_others_can_claim(leases: Path, step: int) -> None:
    first = taken(leases, make(1))
    first.write(first.state, b"one")

    class Died(BaseException):
        pass

    left = [step]

    class Dying(Disk):
        def __getattribute__(self, name: str) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Died
            return object.__getattribute__(self, name)

    with contextlib.suppress(Died):
        Leases(leases, Dying()).claim(make(2, node=1), SILENCE_S)
    mine = Leases(leases)
    hold = None
    for _ in range(3):
        found = mine.newest()
        assert found is not None
        hold = hold or mine.claim(make(found.term + 1, node=2), SILENCE_S)
    assert hold is not None
    assert hold.state.read_bytes() == b"one"
    with pytest.raises(Succeeded):
        first.holds()


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
def test_a_lease_of_wrong_values_counts_as_its_number(leases: Path, wrong: dict[str, Any]) -> None:
    leases.mkdir()
    (leases / "00000001.json").write_text(json.dumps(WHOLE | {"term": 1}))
    (leases / "00000002.json").write_text(json.dumps(WHOLE | wrong))
    found = newest(leases)
    assert found is not None
    assert (found.term, found.node, found.port) == (2, -1, 0)


@pytest.mark.parametrize("text", ["", "1", '"term"', "[]", "null", "[" * 100_000, "1" * 5000, "\ud800", "{}"])
def test_a_damaged_lease_file_still_counts_by_its_number(leases: Path, text: str) -> None:
    leases.mkdir()
    (leases / "00000001.json").write_text(json.dumps(WHOLE | {"term": 1}))
    (leases / "00000002.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    found = newest(leases)
    assert found is not None
    assert (found.term, found.port) == (2, 0)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_non_regular_lease_file_counts_and_does_not_block(leases: Path, kind: str) -> None:
    leases.mkdir()
    (leases / "00000001.json").write_text(json.dumps(WHOLE | {"term": 1}))
    path = leases / "00000002.json"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to("00000001.json")
    found = newest(leases)
    assert found is not None
    assert (found.term, found.port) == (2, 0)
    assert claim(leases, make(3))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"term": 9}', "null", json.dumps({})])
def test_a_damaged_pointer_is_none(leases: Path, text: str) -> None:
    hold = taken(leases, make(1, node=3))
    leases.with_name("lease.json").write_text(text)
    found = newest(leases)
    assert found is not None
    assert (found.term, found.node) == (1, 3)
    assert taken(leases, make(2)).holds()
    with pytest.raises(Succeeded):
        hold.holds()


def test_names_that_only_look_like_numbers_are_not_leases(leases: Path) -> None:
    leases.mkdir()
    (leases / "00000002.json").write_text(json.dumps(WHOLE))
    for name in ("²", "0000000²", "٠٠٠٠٠٠٠٩", "00_000_09", "+0000009", "-0000009", " 0000009"):
        (leases / f"{name}.json").write_text("{}")
    assert last_term(leases) == 2
    assert newest(leases) == make(2)


@pytest.mark.parametrize("name", ["here", "there", "draft"])
def test_a_link_in_a_hold_leads_nowhere(tmp_path: Path, leases: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    hold = taken(leases, make(1))
    path = leases / "00000001.hold" / name
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    if name == "draft":
        with pytest.raises(OSError, match="symbolic"):
            hold.beat()
    else:
        assert hold.holds()
    assert taken(leases, make(2))
    assert victim.read_text() == "mine"
