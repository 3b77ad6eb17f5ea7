"""Which checkpoints go. Only verified ones count, so the last good one is never among those that go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.manifest import Damaged
from seatrial.checkpoint.verified import Stopped

Stop = Callable[[], bool]


class Retained(Protocol):
    """What retention needs of a place."""

    def steps(self) -> list[int]: ...
    def is_verified(self, step: int) -> bool: ...
    def confirm(self, step: int, stop: Stop | None = None) -> None: ...
    def remove(self, step: int) -> str: ...


@dataclass
class Retired:
    """What retention did."""

    removed: list[str] = field(default_factory=list)  # names
    problems: list[str] = field(default_factory=list)  # what it found damaged, or could not verify or remove


def retire(place: Retained, keep: int, keep_every: int, *, stop: Stop | None = None) -> Retired:
    """Remove what is older than the `keep` newest verified checkpoints, but for steps that `keep_every` divides (0: none).

    Where something is to go and those that stay are not all verified yet, they are read first; one that is damaged does
    not count, and stays for whoever looks into it. `stop` gives true where something more urgent waits: what is left
    to do is done by the next call. Only one process may call it. Raises OSError or StorageError where nothing can be seen.
    """
    done = Retired()
    steps = place.steps()
    keep = max(1, keep)
    counted = 0
    for step in steps if len(steps) > keep else []:
        if stop is not None and stop():
            break
        try:
            if counted < keep:
                counted += _counts(place, step, done, stop)
            elif not keep_every or step % keep_every:
                done.removed.append(place.remove(step))
        except Stopped:
            break
        except (OSError, SeatrialError) as error:
            done.problems.append(str(error))
    return done


def _counts(place: Retained, step: int, done: Retired, stop: Stop | None) -> bool:
    try:
        if not place.is_verified(step):
            place.confirm(step, stop)
    except Damaged as error:
        done.problems.append(error.message)
        return False
    return True
