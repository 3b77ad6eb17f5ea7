"""The coordinator's lease: a term is claimed once, and its holder first fences all earlier holders.

The run folder may be on a network file system, whose clients answer look-ups from caches that are up to a minute old.
So no decision rests on a listing, a time stamp, or a name that was not found, only on operations the server completed:
1. `leases/00000007.json` is created by link(2) and stays. Term 7 has one holder; 8 is claimed only after seeing 7.
2. The holder's right is a folder, `leases/00000007.hold`, which it creates once. It proves that it still holds it by
   renaming a file in it back and forth. It writes lease.json, generation and its state by renaming them out of it.
3. The holder of a later term coordinates only after it has put a file in place of that folder (or before the folder
   could be created), for each term from the one that lease.json names. From then on every rename of term 7 fails. So
   rights never overlap in time, and lease.json never goes back. Only then is `leases/00000007.state` looked up, so
   that no cache has a stale one; it is copied to the new term before lease.json names that term.
4. A coordinator starts and ends nothing without a new proof, and its answer to a heartbeat contains how old its last
   proof was when that arrived. An agent may run ranks until `silence_s` after that proof: a successor waits for that.
5. A stale lease.json names an earlier term. Then the claim of the next term fails, which leads to the newer holder:
   this only takes longer. Claims and hold folders are identified by their term alone, so a damaged one counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from seatrial.base.complain import complain
from seatrial.base.files import NotAFile, read_bytes
from seatrial.record.alive import Beat, parse_beat

Lease = Beat  # a term and its holder, as claimed, or as of a later renewal

_RENEW_S = 0.4  # between two proofs
_BEAT_S = 2.4  # between two writes of lease.json; with the proofs about four operations a second
_NAME = re.compile(r"([0-9]{8,})\.json")
_HERE, _THERE, _DRAFT = "here", "there", "draft"  # the names in a hold folder
_TRIES = 3
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)


class Succeeded(Exception):
    """A later term has begun, so the write was not done."""


class Disk:
    """The file operations used by leases. Tests replace them with those of a network file system with caches."""

    read = staticmethod(read_bytes)
    link = staticmethod(os.link)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    names = staticmethod(os.listdir)

    @staticmethod
    def write(path: Path, content: bytes, *, new: bool = False, durable: bool = False) -> None:
        """Write a file; with `new`, FileExistsError if there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_EXCL if new else os.O_TRUNC)
        with open(os.open(path, flags, 0o644), "wb", buffering=0) as file:
            file.write(content)
            if durable:
                os.fsync(file.fileno())


_DISK = Disk()


class Hold:
    """The right of one term to coordinate, as its holder uses it."""

    def __init__(self, leases: Leases, lease: Lease, silence_s: float) -> None:
        """`silence_s`: others consider the holder dead after this long without a renewal."""
        self.lease = lease
        self._disk, self._folder, self._pointer = leases.disk, leases.hold(lease.term), leases.pointer
        self.state = leases.state(lease.term)
        """The state that the holder of the next term continues from."""
        self._at, self._to = _HERE, _THERE
        self._clock, self._silence_s = leases.clock, silence_s
        self._renew_s, self._beat_s = min(_RENEW_S, silence_s / 4), min(_BEAT_S, 0.8 * silence_s)
        self.renew_at = self._beat_at = 0.0
        self.proven_at = -math.inf
        """The server confirmed at this time or later that the lease was ours."""
        self._complained = False

    def holds(self, *, since: float | None = None) -> bool:
        """Whether the lease has been proven since that time, by default within `silence_s`; asks the server if there
        is no such proof, or if one is due. Raises Succeeded once there is a later term."""
        now = self._clock()
        asked = since is not None and self.proven_at < since
        if asked or now >= self.renew_at or now >= self._beat_at:
            try:
                self._prove()
                self._proven(now)
                if now >= self._beat_at:
                    self._beat_at = self._clock() + self._beat_s
                    self.beat()
            except OSError as error:
                # A full disk after the proof: continue. A server that does not answer: no proof until it does.
                if not self._complained:
                    complain(f"could not renew the lease of term {self.lease.term}: {error}")
                self._complained = True
                self.renew_at = self._clock() + self._renew_s
        return self.proven_at >= (self._clock() - self._silence_s if since is None else since)

    def _proven(self, asked_at: float) -> None:
        """Record a proof. The next is due some time after the answer, so that a slow server leaves time for agents."""
        self.proven_at, self.renew_at = asked_at, self._clock() + self._renew_s

    def _prove(self) -> None:
        """Prove the lease by a successful rename. Raises Succeeded, or OSError if the server does not answer."""
        for _ in range(2):  # in both directions: the first may have been done, and only its answer lost
            try:
                self._disk.rename(self._folder / self._at, self._folder / self._to)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
            else:
                return
            finally:
                self._at, self._to = self._to, self._at
        raise Succeeded

    def beat(self) -> None:
        """Renew the lease in lease.json. Raises as `write`."""
        self.lease = dataclasses.replace(self.lease, count=self.lease.count + 1, time=time.time())
        self.write(self._pointer, json.dumps(dataclasses.asdict(self.lease)).encode())

    def write(self, path: Path, content: bytes) -> None:
        """Replace `path` atomically, not durably; success is a proof. Raises Succeeded if our right ended, OSError."""
        asked_at = self._clock()
        try:
            self._disk.write(self._folder / _DRAFT, content)
            self._disk.rename(self._folder / _DRAFT, path)
        except OSError as error:
            if error.errno in _GONE:
                raise Succeeded from None
            raise
        self._proven(asked_at)


class Leases:
    """The leases of one run, as one process knows them; it never returns to an older term than it knows."""

    def __init__(self, folder: Path, disk: Disk = _DISK, clock: Callable[[], float] = time.monotonic) -> None:
        self.disk, self._folder, self.clock = disk, folder, clock
        self.pointer = folder.with_name("lease.json")
        self._newest: Lease | None = None
        self._at_least = 0  # this term was claimed
        self._begun = 1  # all terms before this one have ended

    def hold(self, term: int) -> Path:
        return self._folder / f"{term:08d}.hold"

    def state(self, term: int) -> Path:
        return self._folder / f"{term:08d}.state"

    def newest(self) -> Lease | None:
        """The lease of the highest known term; None if there was none. A damaged claim counts by its number.

        Raises OSError if the file system cannot read it, which proves nothing about its holder.
        """
        beat = self._read(self.pointer)
        if beat is not None:
            self._begun = max(self._begun, beat.term)
            self.learn(beat)
        elif self._newest is None:
            # No coordinator yet, or one of a version without lease.json, or a stale cache. Listed names exist; there
            # may be more.
            with contextlib.suppress(OSError):
                names = map(_NAME.fullmatch, self.disk.names(self._folder))
                self._at_least = max([self._at_least, *(int(name[1]) for name in names if name)])
        if self._at_least > (0 if self._newest is None else self._newest.term):
            self.learn(self._claim_of(self._at_least))
        return self._newest

    def learn(self, lease: Lease) -> None:
        """Record that this lease exists, or existed."""
        if self._newest is None or (lease.term, lease.count) > (self._newest.term, self._newest.count):
            self._newest = lease
            self._at_least = max(self._at_least, lease.term)

    def claim(self, lease: Lease, silence_s: float) -> Hold | None:
        """Claim the term of `lease`, the next after the newest. None if another holder has it, or could not be fenced
        yet: then call `newest` again. Raises OSError if the folder refuses the claim."""
        with contextlib.suppress(FileExistsError):
            # Not its parents: a removed run folder must not be recreated in part.
            self.disk.mkdir(self._folder)
        draft = self._folder / f".claim-{socket.gethostname()}-{os.getpid()}-{lease.node}-{lease.term}"
        self.disk.write(draft, json.dumps(dataclasses.asdict(lease)).encode(), durable=True)
        try:
            self.disk.link(draft, self._claim(lease.term))
        except FileExistsError:
            if not self._is_ours(lease):
                self._at_least = max(self._at_least, lease.term)
                return None
        finally:
            with contextlib.suppress(OSError):
                self.disk.unlink(draft)
        if not all(self._end(term) for term in range(self._begun, lease.term)):
            return None
        hold = Hold(self, lease, silence_s)
        try:
            self.disk.mkdir(self.hold(lease.term))
            self.disk.write(self.hold(lease.term) / _HERE, b"")
            hold.write(hold.state, self._last_state(lease.term))
            hold.beat()
        except (OSError, Succeeded) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EEXIST, *_GONE):
                raise
            self._at_least = max(self._at_least, lease.term)
            return None  # a later holder has ended our right before it began
        self.learn(hold.lease)
        return hold

    def _is_ours(self, lease: Lease) -> bool:
        """Whether we have already claimed it: the answer was lost, or we could not end an earlier term."""
        try:
            there = self._claim_of(lease.term)
        except FileNotFoundError:
            return False  # a stale cache: the link was refused because the claim exists
        return (there.node, there.address, there.port) == (lease.node, lease.address, lease.port)

    def _end(self, term: int) -> bool:
        """Fence `term`: end its right forever. False if that must be retried."""
        hold = self.hold(term)
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                self.disk.write(hold, b"", new=True)
                return True
            try:
                for name in (_HERE, _THERE, _DRAFT):
                    with contextlib.suppress(FileNotFoundError):
                        self.disk.unlink(hold / name)
                self.disk.rmdir(hold)
            except NotADirectoryError:
                return True
            except OSError as error:  # its holder was faster, or a cache is stale
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, *_GONE):
                    raise
        return False

    def _last_state(self, term: int) -> bytes:
        """The state of the last term before `term` that had one; empty if none had."""
        for before in range(term - 1, self._begun - 1, -1):
            try:
                return self.disk.read(self.state(before))
            except FileNotFoundError:
                continue
            except NotAFile as error:
                complain(f"{self.state(before)} is not used: {error}")
        return b""

    def _claim(self, term: int) -> Path:
        return self._folder / f"{term:08d}.json"

    def _claim_of(self, term: int) -> Lease:
        """The claim of `term`. Raises FileNotFoundError if a cache is stale or it was removed; OSError."""
        found = self._read(self._claim(term), must=True)
        return found if found is not None and found.term == term else Lease(term, -1, "", 0, time.time())

    def _read(self, path: Path, *, must: bool = False) -> Lease | None:
        try:
            return parse_beat(self.disk.read(path))
        except NotAFile:
            return None
        except FileNotFoundError:
            if must:
                raise
            return None


def last_term(folder: Path) -> int:
    """The highest term recorded in the folder; 0 if there is none, or it cannot be read."""
    with contextlib.suppress(OSError):
        newest = Leases(folder).newest()
        return 0 if newest is None else newest.term
    return 0
