"""Leases with one mistake each, most of which do no harm on a local disk. The histories must find every one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from seatrial.control.net.lease import _NAME, Hold, Lease, Leases, Succeeded


class ListingHold(Hold):
    """Its proof is that no newer term is listed, its sign of life a time stamp."""

    def __init__(self, leases: Leases, lease: Lease, silence_s: float) -> None:
        super().__init__(leases, lease, silence_s)
        self.leases: Any = leases

    def _prove(self) -> None:
        if self.leases.listed() > self.lease.term:
            raise Succeeded

    def beat(self) -> None:
        self.leases.disk.touch(self.leases._claim(self.lease.term))

    def write(self, path: Path, content: bytes) -> None:
        draft = path.with_name(f".{path.name}-{self.lease.term}")
        try:
            self._disk.write(draft, content)
            self._disk.rename(draft, path)
        except FileNotFoundError:
            raise Succeeded from None


class DecidesByListings(Leases):
    """As this project once did: names that are listed, and time stamps."""

    def listed(self) -> int:
        with contextlib.suppress(OSError):
            names = map(_NAME.fullmatch, self.disk.names(self._folder))
            return max((int(name[1]) for name in names if name), default=0)
        return 0

    def newest(self) -> Lease | None:
        term = self.listed()
        if term == 0:
            return None
        disk: Any = self.disk
        return dataclasses.replace(self._claim_of(term), count=int(disk.modified(self._claim(term)) * 1000))

    def claim(self, lease: Lease, silence_s: float) -> Hold | None:
        with contextlib.suppress(FileExistsError):
            self.disk.mkdir(self._folder)
        draft = self._folder / f".claim-{lease.node}-{lease.term}"
        self.disk.write(draft, json.dumps(dataclasses.asdict(lease)).encode())
        try:
            self.disk.link(draft, self._claim(lease.term))
        except FileExistsError:
            return None
        hold = ListingHold(self, lease, silence_s)
        self._begun = 1
        with contextlib.suppress(Succeeded):
            hold.write(hold.state, self._last_state(lease.term))
            return hold
        return None


class EndsNobody(Leases):
    """Takes a claim for enough: the holder before will see it."""

    def _end(self, term: int) -> bool:
        return True


class EndsOnlyTheLast(Leases):
    """Forgets that the one before may have died before it could end its own predecessor."""

    def claim(self, lease: Lease, silence_s: float) -> Hold | None:
        self._begun = max(1, lease.term - 1)
        return super().claim(lease, silence_s)


class TrustsAMissingName(Leases):
    """A hold that is not found has ended."""

    def _end(self, term: int) -> bool:
        try:
            self.disk.rmdir(self.hold(term))
        except FileNotFoundError:
            return True
        except OSError:
            return super()._end(term)
        return super()._end(term)


class LooksUpTheStateFirst(Leases):
    """Reads what the holder before has decided before that can decide no more."""

    early: bytes = b""

    def claim(self, lease: Lease, silence_s: float) -> Hold | None:
        self.early = super()._last_state(lease.term)
        return super().claim(lease, silence_s)

    def _last_state(self, term: int) -> bytes:
        return self.early


class ElsewhereHold(Hold):
    """Writes from another folder than its own."""

    def write(self, path: Path, content: bytes) -> None:
        draft = self._folder.with_name(f".{path.name}-{self.lease.term}")
        try:
            self._disk.write(draft, content)
            self._disk.rename(draft, path)
        except FileNotFoundError:  # done already, and the answer was lost
            raise Succeeded from None


class TrustingHold(Hold):
    """Asks once, and believes it for good."""

    def holds(self, *, since: float | None = None) -> bool:
        if self.renew_at == 0.0:
            return super().holds()
        self.proven_at = self._clock()
        return True


class _Making(Leases):
    made: type[Hold] = Hold

    def claim(self, lease: Lease, silence_s: float) -> Hold | None:
        hold = super().claim(lease, silence_s)
        if hold is not None:
            hold.__class__ = self.made
        return hold


class WritesFromElsewhere(_Making):
    made = ElsewhereHold


class AsksOnlyOnce(_Making):
    made = TrustingHold


BROKEN = [
    DecidesByListings,
    EndsNobody,
    EndsOnlyTheLast,
    TrustsAMissingName,
    LooksUpTheStateFirst,
    WritesFromElsewhere,
    AsksOnlyOnce,
]
