"""Where a run's checkpoints are: the folder of the job, and its fallback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.place import Place, checkpoint_urls, open_place
from seatrial.job import Job
from seatrial.record.events import Event, read_events
from seatrial.record.folder import RunFolder
from seatrial.train.patience import GivenUp, within

_LOOK_S = 3.0  # for a folder to be listed, or a store to answer; a recovery may wait that long for nothing
_ASIDE_S = 10.0  # all other ranks wait meanwhile, for less time than makes a hang of it


class Places:
    """All places of one run, the one to save to first."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._folder = folder
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

    def look(self) -> int:
        """Of the newest complete checkpoint; 0 where there is none. OSError or StorageError if it cannot be seen soon."""
        newest = 0
        for index, url in enumerate(self.urls):

            def steps(_: GivenUp, index: int = index) -> list[int]:
                return self.place(index).steps()

            newest = max([newest, *within(_LOOK_S, url, steps)])
        return newest

    def newest_step(self) -> int:
        """The same; where it cannot be seen soon, of the newest that the run's events call saved."""
        try:
            return self.look()
        except (OSError, SeatrialError):
            return last_saved(self._folder)

    def remove_leftovers(self, before: int | None = None) -> list[str]:
        """What saves that died have left, see `Place.remove_leftovers`; the names of what was removed. Rank 0 calls it."""
        return [name for index in range(len(self)) for name in self.place(index).remove_leftovers(before)]

    def set_aside_after(self, step: int, why: str) -> Iterator[tuple[str, int, str | None]]:
        """Set aside every checkpoint of a later step: (name, step, what kept it from being set aside).

        Of a place that cannot be looked into, or does not answer, its address, with `step`.
        """
        for index, url in enumerate(self.urls):

            def set_aside(given_up: GivenUp, index: int = index) -> list[tuple[str, int, str | None]]:
                return list(self._set_aside_in(index, step, why, given_up))

            try:
                yield from within(_ASIDE_S, url, set_aside)
            except (OSError, SeatrialError) as error:
                yield url, step, str(error)

    def _set_aside_in(
        self, index: int, step: int, why: str, given_up: GivenUp
    ) -> Iterator[tuple[str, int, str | None]]:
        for at in self.place(index).steps():
            if at <= step or given_up():  # by the time that it answers there may be others of that step
                continue
            name = self.name_of(index, at)
            try:
                aside = self.place(index).set_aside(at, why)
            except (OSError, SeatrialError) as error:
                yield name, at, str(error)
            else:
                yield f"{name} ({aside})", at, None


def last_saved(folder: RunFolder) -> int:
    """The last step that the run's events call saved, and that the run did not take back itself; 0 if none."""
    steps: set[int] = set()
    for event in read_events(folder)[0]:
        step = (event.data or {}).get("step")
        if isinstance(step, int) and event.kind == "checkpoint_saved":
            steps.add(step)
        elif isinstance(step, int) and event.kind == "checkpoint_set_aside":
            steps.discard(step)
    return max(steps, default=0)


class Distrusted:
    """What could not be set aside when it should have been, as the run's events tell it: nobody may go on from it."""

    def __init__(self, told: Sequence[Event]) -> None:
        self._after: dict[
            str, int
        ] = {}  # a checkpoint's name; or a place's address: all of later steps than this
        self._since: dict[str, int] = {}  # name -> step of what was saved afterwards
        for event in told:
            data = event.data or {}
            name, step = data.get("distrusted"), data.get("step")
            if name is not None and isinstance(step, int):
                self._after[name] = step
                self._since = {n: at for n, at in self._since.items() if n != name and at <= step}
            elif event.kind == "checkpoint_saved" and isinstance(step, int):
                self._since[str(data.get("folder"))] = step

    def has(self, url: str, name: str, step: int) -> bool:
        """Whether the checkpoint `name` of `step` in the place at `url` is among them."""
        if name in self._since:
            return False
        return name in self._after or step > self._after.get(url, step)
