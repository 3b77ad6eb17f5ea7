"""The checkpoint places of a run: the job's folder, and its fallback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.place import Place, checkpoint_urls, open_place
from seatrial.job import Job
from seatrial.record.events import Event, read_events
from seatrial.record.folder import RunFolder
from seatrial.train.checkpointing.call_with_timeout import GivenUp, call_with_timeout

_LIST_TIMEOUT_S = 3.0  # a recovery waits that long for a storage that does not answer
_QUARANTINE_TIMEOUT_S = 10.0  # all other ranks wait meanwhile: shorter than the hang timeout


class Places:
    """All checkpoint places of one run, the primary one first."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._folder = folder
        self.urls: list[str] = checkpoint_urls(job.checkpoint, job.name, folder)
        self._places: list[Place | None] = [None] * len(self.urls)

    def __len__(self) -> int:
        return len(self.urls)

    def place(self, index: int) -> Place:
        """The place at `index`, opened on first use: most ranks never need an object store's client."""
        found = self._places[index]
        if found is None:
            found = self._places[index] = open_place(self.urls[index])
        return found

    def prepare(self) -> None:
        """Prepare all places for writing. Raises StorageError."""
        for index in range(len(self)):
            self.place(index).prepare()

    def name_of(self, index: int, step: int) -> str:
        """The address of one checkpoint, for display."""
        return self.place(index).where(step)

    def candidates(self) -> list[tuple[int, int]]:
        """(step, index of the place) of all complete checkpoints, newest first, at equal steps the first place first.

        Raises StorageError if a place cannot be listed: it may have the newest checkpoint.
        """
        found = [(step, index) for index in range(len(self)) for step in self.place(index).steps()]
        return sorted(found, key=lambda entry: (-entry[0], entry[1]))

    def find_newest(self) -> int:
        """Step of the newest complete checkpoint, or 0. OSError or StorageError if it cannot be listed in time."""
        newest = 0
        for index, url in enumerate(self.urls):

            def steps(_: GivenUp, index: int = index) -> list[int]:
                return self.place(index).steps()

            newest = max([newest, *call_with_timeout(_LIST_TIMEOUT_S, url, steps)])
        return newest

    def newest_step(self) -> int:
        """Like `find_newest`; if that fails, the newest step that the run's events report as saved."""
        try:
            return self.find_newest()
        except (OSError, SeatrialError):
            return last_saved(self._folder)

    def remove_leftovers(self, before: int | None = None) -> list[str]:
        """Remove the partial files of crashed saves, see `Place.remove_leftovers`; returns their names. Only rank 0."""
        return [name for index in range(len(self)) for name in self.place(index).remove_leftovers(before)]

    def set_aside_after(self, step: int, why: str) -> Iterator[tuple[str, int, str | None]]:
        """Quarantine every checkpoint of a later step: yields (name, step, error or None).

        For a place that cannot be listed, or does not answer, yields its address, with `step` and the error.
        """
        for index, url in enumerate(self.urls):

            def set_aside(given_up: GivenUp, index: int = index) -> list[tuple[str, int, str | None]]:
                return list(self._set_aside_in(index, step, why, given_up))

            try:
                yield from call_with_timeout(_QUARANTINE_TIMEOUT_S, url, set_aside)
            except (OSError, SeatrialError) as error:
                yield url, step, str(error)

    def _set_aside_in(
        self, index: int, step: int, why: str, given_up: GivenUp
    ) -> Iterator[tuple[str, int, str | None]]:
        for at in self.place(index).steps():
            if at <= step or given_up():  # given up: a new checkpoint of that step may exist by now
                continue
            name = self.name_of(index, at)
            try:
                aside = self.place(index).set_aside(at, why)
            except (OSError, SeatrialError) as error:
                yield name, at, str(error)
            else:
                yield f"{name} ({aside})", at, None


def last_saved(folder: RunFolder) -> int:
    """The last step that the run's events report as saved, and not as quarantined by the run itself; 0 if none."""
    steps: set[int] = set()
    for event in _by_generation(read_events(folder)[0]):
        step = (event.data or {}).get("step")
        if isinstance(step, int) and event.kind == "checkpoint_saved":
            steps.add(step)
        elif isinstance(step, int) and event.kind == "checkpoint_set_aside":
            steps.discard(step)
    return max(steps, default=0)


def _by_generation(saved: Sequence[Event]) -> list[Event]:
    """Sort events into the order in which they happened: a partitioned node delivers its events late."""
    return sorted(saved, key=lambda event: event.generation)


class Distrusted:
    """Checkpoints that should have been quarantined but could not be, by the run's events: none may be resumed from."""

    def __init__(self, saved: Sequence[Event]) -> None:
        self._after: dict[
            str, int
        ] = {}  # a checkpoint's name -> its step; or a place's address: all its later steps
        self._since: dict[str, int] = {}  # name -> step of checkpoints saved afterwards
        for event in _by_generation(saved):
            data = event.data or {}
            name, step = data.get("distrusted"), data.get("step")
            if name is not None and isinstance(step, int):
                self._after[name] = step
                self._since = {n: at for n, at in self._since.items() if n != name and at <= step}
            elif event.kind == "checkpoint_saved" and isinstance(step, int):
                self._since[str(data.get("folder"))] = step

    def has(self, url: str, name: str, step: int) -> bool:
        """Whether the checkpoint `name` of `step` in the place at `url` is distrusted."""
        if name in self._since:
            return False
        return name in self._after or step > self._after.get(url, step)
