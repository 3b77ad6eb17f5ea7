"""Which checkpoints to remove. Only verified ones count towards those kept, so the last good one is never removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.manifest import Damaged
from seatrial.checkpoint.verified import Stop, Stopped

if TYPE_CHECKING:
    from seatrial.checkpoint.place import Place


@dataclass
class Retired:
    """The result of retention."""

    removed: list[str] = field(default_factory=list)  # names
    problems: list[str] = field(default_factory=list)  # damaged checkpoints, and failures to verify or remove


def retire(
    place: Place, keep: int, keep_every: int, *, sure: int | None = None, stop: Stop | None = None
) -> Retired:
    """Remove checkpoints older than the `keep` newest verified ones, except those that `stand_for` a step.

    `sure`: a rollback may still go behind any later step, and quarantine its checkpoints, so the newest verified one at
    or before that step stays too. Before anything is removed, those that stay are read if they are not verified yet; a
    damaged one does not count, and stays for analysis. `stop` returns true when something more urgent waits: the next
    call does the rest. Only one process may call it. Raises OSError or StorageError if the place cannot be listed.
    """
    done = Retired()
    steps = place.steps()
    keep, marks = max(1, keep), stand_for(steps, keep_every)
    counted, safe = 0, sure is None
    for step in steps if len(steps) > keep else []:
        if stop is not None and stop():
            break
        try:
            behind = sure is not None and step <= sure
            if counted < keep or (behind and not safe):
                if _counts(place, step, done, stop):
                    counted, safe = counted + 1, safe or behind
            elif step not in marks:
                done.removed.append(place.remove(step))
        except Stopped:
            break
        except (OSError, SeatrialError) as error:
            done.problems.append(str(error))
    return done


def stand_for(steps: Sequence[int], every: int) -> set[int]:
    """Which of `steps` stand for the multiples of `every` (0: none): each multiple itself, or the first one after it.

    A save that is due while another is being written begins some steps later, and is kept in place of the due one.
    """
    first: dict[int, int] = {}
    for step in sorted(steps) if every else ():
        first.setdefault(step // every, step)
    first.pop(0, None)
    return set(first.values())


def _counts(place: Place, step: int, done: Retired, stop: Stop | None) -> bool:
    try:
        if not place.is_verified(step):
            place.verify(step, stop=stop)
            place.mark_verified(step)
    except Damaged as error:
        done.problems.append(error.message)
        return False
    return True
