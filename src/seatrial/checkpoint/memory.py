"""A rank's whole state in memory: a checkpoint file's bytes in an anonymous file (memfd), and their description.

    bytes 0-7   length of the header; 0 while the content is being replaced
    header      JSON; `__metadata__` comes first: the content's rank, step, generation and layout
    data        every tensor that the rank holds, including those that other ranks hold too: enough to resume alone

Several processes have the same files open (agent, fork server, rank) and share their position: all access is by offset.
Without torch, for the agents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from seatrial.checkpoint.hashing import NAME, new_hash
from seatrial.checkpoint.manifest import Damaged

_READ_BYTES = 1 << 20  # read at a time: fits into a core's cache
# Written at a time. A thread that writes in parallel with a training thread waits up to 5 ms for the GIL after each
# part: small parts would make it slow.
_WRITE_BYTES = 1 << 24
_LENGTH = 8
_KEYS = ("pipeline", "replicate", "shard", "tensor", "stages_per_rank", "schedule")


def layout_key(layout: Mapping[str, Any]) -> str:
    """A layout's plain values as one string: what a rank holds depends on its rank and on this."""
    # Without expert parallel nothing is said of it: the key is that of older versions.
    keys = (*_KEYS, "expert") if layout.get("expert", 1) > 1 else _KEYS
    return ",".join(f"{key}={layout[key]}" for key in keys)


@dataclass(frozen=True)
class Snapshot:
    """The description of one memory file's content."""

    rank: int
    step: int  # finished
    generation: int  # generation that trained it
    layout: str  # `layout_key`
    bytes: int
    hash: str  # XXH3-128 of all of it
    index: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # {"pieces": [...]}

    @property
    def age(self) -> tuple[int, int]:
        """Sort key, larger is newer. A later generation wins even at an earlier step: it left the other trajectory."""
        return self.generation, self.step

    def to_message(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    def summary(self) -> dict[str, Any]:
        """Like `to_message`, without the long index."""
        return {key: value for key, value in asdict(self).items() if key != "index"}

    @classmethod
    def from_message(cls, values: Mapping[str, Any]) -> Snapshot:
        """The inverse of `to_message` and `summary`; extra keys are ignored. ValueError on anything else."""
        try:
            numbers = [values[key] for key in ("rank", "step", "generation", "bytes")]
            texts = [values[key] for key in ("layout", "hash")]
            index = values.get("index") or {}
        except KeyError as error:
            raise ValueError(f"a snapshot without {error}") from None
        if any(type(n) is not int or n < 0 for n in numbers) or not all(isinstance(t, str) for t in texts):
            raise ValueError(f"not a snapshot: {numbers} {texts}")
        if not isinstance(index, dict):
            raise ValueError("a snapshot whose index is not an object")
        return cls(numbers[0], numbers[1], numbers[2], texts[0], numbers[3], texts[1], index)


def metadata(*, rank: int, step: int, generation: int, layout: str) -> dict[str, str]:
    """The header's description of the content."""
    return {"rank": str(rank), "step": str(step), "generation": str(generation), "layout": layout}


class Filling:
    """Replaces the content of a memory file. Until `finish` the file does not pass for a snapshot."""

    def __init__(self, fd: int, size: int) -> None:
        """`size`: bytes of the new content. Raises OSError, also if there is not enough memory."""
        self._fd = fd
        self._size = size
        self._at = 0
        self._first = b""
        self._digest = new_hash()
        if os.fstat(fd).st_size >= _LENGTH:
            _write(fd, bytes(_LENGTH), 0)
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)

    def add(self, data: bytes | memoryview) -> None:
        """Append the next bytes."""
        view = memoryview(data)
        for begin in range(0, len(view), _WRITE_BYTES):
            part = view[begin : begin + _WRITE_BYTES]
            self._digest.update(part)
            held_back = max(0, min(_LENGTH - self._at, len(part)))
            self._first += bytes(part[:held_back])
            _write(self._fd, part[held_back:], self._at + held_back)
            self._at += len(part)

    def finish(self, expected: str | None = None) -> str:
        """Make the content valid; its hash. If that is not `expected`: Damaged, and the file stays invalid."""
        digest = str(self._digest.hexdigest())
        if self._at != self._size:
            raise Damaged(f"{self._at} of {self._size} bytes arrived")
        if expected is not None and digest != expected:
            raise Damaged(f"the received data has {NAME} {digest}, not {expected}")
        _write(self._fd, self._first, 0)
        return digest


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


def holds(fd: int, snapshot: Snapshot) -> bool:
    """Whether the file seems to hold `snapshot`: compares its size and the header's metadata, not the data.

    Cheap, for frequent checks; it detects a replacement that has begun, or that completed unreported.
    """
    if os.fstat(fd).st_size != snapshot.bytes or snapshot.bytes <= _LENGTH:
        return False
    own = metadata(
        rank=snapshot.rank, step=snapshot.step, generation=snapshot.generation, layout=snapshot.layout
    )
    wanted = f'{{"__metadata__":{json.dumps(own, separators=(",", ":"))}'.encode()
    start = os.pread(fd, _LENGTH + len(wanted), 0)
    return any(start[:_LENGTH]) and start[_LENGTH:] == wanted


def chunks(fd: int, size: int) -> Iterator[memoryview]:
    """The first `size` bytes, in pieces; each is overwritten by the next. Damaged if the file is shorter."""
    buffer = memoryview(bytearray(min(_READ_BYTES, max(1, size))))
    at = 0
    while at < size:
        n = os.preadv(fd, [buffer[: size - at]], at)
        if n == 0:
            raise Damaged(f"the memory file has {at} bytes, not {size}")
        yield buffer[:n]
        at += n


def verify(fd: int, entry: Mapping[str, Any]) -> None:
    """Compare a memory file with "bytes" and "hash" of `entry`; Damaged names the difference."""
    size = os.fstat(fd).st_size
    if size != entry["bytes"]:
        raise Damaged(f"the snapshot of step {entry['step']} has {size} bytes, not {entry['bytes']}")
    digest = new_hash()
    for part in chunks(fd, size):
        digest.update(part)
    if digest.hexdigest() != entry["hash"]:
        raise Damaged(
            f"the snapshot of step {entry['step']} has {NAME} {digest.hexdigest()}, not {entry['hash']}"
        )


def verified(fds: Sequence[int], entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entries of a generation spec's "snapshots" that the files of `fds` match, newest first. Reads all of them."""
    good = []
    for entry in entries:
        try:
            verify(fds[entry["slot"]], entry)
        except Damaged:
            continue
        good.append(entry)
    return sorted(good, key=lambda e: (e["generation"], e["step"]), reverse=True)


def read_header(fd: int) -> tuple[dict[str, str], dict[str, Any], int]:
    """(metadata, tensors by name, offset of the data). Damaged if it is not a valid header."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, _LENGTH, 0), "little")
    if not 0 < length <= size - _LENGTH:
        raise Damaged("the memory file has no header")
    try:
        tensors = json.loads(os.pread(fd, length, _LENGTH))
        own = tensors.pop("__metadata__")
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"the memory file's header cannot be read: {error!r}") from None
    return own, tensors, _LENGTH + length
