"""Where a run's checkpoints are: the folder of the job, and its fallback."""

from __future__ import annotations

from collections.abc import Iterator

from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.place import Place, checkpoint_urls, open_place
from seatrial.job import Job
from seatrial.record.folder import RunFolder


class Places:
    """All places of one run, the one to save to first."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self.urls: list[str] = checkpoint_urls(job.checkpoint, job.name, folder)
        self._places: list[Place | None] = [None] * len(self.urls)

    def __len__(self) -> int:
        return len(self.urls)

    def place(self, index: int) -> Place:
        """Opened at the first use: an object store needs a client, which most ranks never do."""
        found = self._places[index]
        if found is None:
            found = self._places[index] = open_place(self.urls[index])
        return found

    def prepare(self) -> None:
        """Have all of them ready to be written to. Raises StorageError."""
        for index in range(len(self)):
            self.place(index).prepare()

    def name_of(self, index: int, step: int) -> str:
        """The address of one checkpoint, for people."""
        return self.place(index).where(step)

    def candidates(self) -> list[tuple[int, int]]:
        """(step, index of the place) of all complete checkpoints, newest first, in equal steps the first place first.

        Raises StorageError where one cannot be looked into: an older checkpoint is no substitute for one that is out of
        sight.
        """
        found = [(step, index) for index in range(len(self)) for step in self.place(index).steps()]
        return sorted(found, key=lambda entry: (-entry[0], entry[1]))

    def newest_step(self) -> int:
        """Of the newest complete checkpoint; 0 where there is none, or none can be seen."""
        try:
            return max((step for step, _ in self.candidates()), default=0)
        except (OSError, SeatrialError):
            return 0

    def remove_leftovers(self, before: int | None = None) -> list[str]:
        """What saves that died have left, see `Place.remove_leftovers`; the names of what was removed. Rank 0 calls it."""
        return [name for index in range(len(self)) for name in self.place(index).remove_leftovers(before)]

    def set_aside_after(self, step: int, why: str) -> Iterator[tuple[str, int, str | None]]:
        """Set aside every checkpoint of a later step: (name, step, what kept it from being set aside).

        Of a place that cannot be looked into its address, with `step`.
        """
        found = []
        for index, url in enumerate(self.urls):
            try:
                found += [(at, index) for at in self.place(index).steps() if at > step]
            except (OSError, SeatrialError) as error:
                yield url, step, str(error)
        for at, index in found:
            name = self.name_of(index, at)
            try:
                aside = self.place(index).set_aside(at, why)
            except (OSError, SeatrialError) as error:
                yield name, at, str(error)
            else:
                yield f"{name} ({aside})", at, None
