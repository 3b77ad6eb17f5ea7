"""A training run from its job to its end: the data and the folder first, then the ranks, then what came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from seatrial.base.private import private_folder
from seatrial.checkpoint.manifest import Damaged
from seatrial.checkpoint.place import Place, checkpoint_urls, open_place
from seatrial.data.prepare import blend_of, check_stores, data_cache, resolve_stores, stores_identity
from seatrial.hardware.devices import choose_device
from seatrial.launch import launcher_for
from seatrial.launch.base import Launcher, Outcome
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import freeze
from seatrial.record.run import OpenedRun, add_to_plan, open_run

if TYPE_CHECKING:
    from seatrial.data.store import TokenStore
    from seatrial.job import Job

Progress = Callable[[int, int, str], None]


@dataclass
class Voyage:
    """A run that is ready to start; this process holds its folder."""

    job: Job
    opened: OpenedRun
    stores: list[TokenStore]
    device: str
    device_reason: str

    @property
    def resume_step(self) -> int | None:
        """The step of the newest checkpoint, not yet verified; None for a fresh start."""
        return max((step for place in self._places() for step in place.steps()), default=None)

    @property
    def complete(self) -> bool:
        """Whether the last step's checkpoint is there already, and whole."""
        for place in self._places():
            for step in place.steps():
                if step < self.job.train.steps:
                    break
                try:
                    place.verify(step)
                except Damaged:
                    continue  # the ranks will say so, set it aside, and go on from the one before
                return True
        return False

    def set_checkpoints_aside(self) -> None:
        """Quarantine checkpoints of the previous run outside its folder: with --fresh they must not be resumed from."""
        for place in self._places():
            for step in place.steps():
                aside = place.set_aside(step, "a run of this name was started over with --fresh")
                text = f"{place.where(step)} is of the run before, and set aside as {aside}"
                self.opened.notes.append(text)
                events.append(
                    self.opened.folder,
                    "checkpoint_set_aside",
                    text,
                    severity="warning",
                    generation=self.opened.generation,
                    data={"step": step},
                )

    def _places(self) -> list[Place]:
        """Where checkpoints are. Raises StorageError where one cannot be seen: an older one elsewhere is no substitute."""
        urls = checkpoint_urls(self.job.checkpoint, self.job.name, self.opened.folder)
        return [open_place(url) for url in urls]

    def run(self, tick: Callable[[], None] | None = None, *, launcher: Launcher | None = None) -> Outcome:
        """Train to the end, with `launcher` or else the job's own. Nothing that was started is left when it returns."""
        folder, generation = self.opened.folder, self.opened.generation

        def tell(kind: str, message: str, **more: object) -> None:
            now = max(generation, folder.last_generation())  # each recovery is one more
            try:
                events.append(folder, kind, message, generation=now, **more)  # type: ignore[arg-type]
            except OSError as error:
                # How the run ended must reach the user even where the disk takes no more.
                print(
                    f"warning: could not record {kind} in {folder.events}: {error.strerror}", file=sys.stderr
                )

        layout = self.job.layout
        tell("run_started", f"{layout.world_size} ranks: {layout}", data={"layout": layout.as_dict()})
        outcome = (launcher or launcher_for(self.job)).launch(self.job, folder, generation, tick=tick)
        failure = outcome.failure
        if failure is not None:
            tell(
                "run_failed",
                failure.message,
                severity="error",
                node=failure.node,
                rank=failure.rank,
                data={
                    "node": failure.node,
                    "rank": failure.rank,
                    "cause": failure.cause,
                    "time": failure.time,
                    "log": str(failure.log),
                    "hint": failure.hint,
                    "tail": failure.tail,
                },
            )
        elif outcome.exit_code == EXIT_DONE:
            tell("run_finished", f"all {self.job.train.steps} steps are done")
        elif outcome.exit_code in (EXIT_FAILED, EXIT_BAD_INPUT):
            tell("run_failed", "it ended without a first failure", severity="error", data={})
        elif outcome.exit_code == EXIT_PREEMPTED:
            tell(
                "run_interrupted",
                "preempted: the same command goes on from the last saved state",
                severity="warning",
                data={"preempted": True},
            )
        else:
            tell(
                "run_interrupted",
                "stopped from outside; the same command resumes it",
                severity="warning",
                data={"preempted": False},
            )
        return outcome


def prepare_voyage(job: Job, root: Path, *, fresh: bool = False, progress: Progress | None = None) -> Voyage:
    """Everything that can be refused before a rank starts; then the folder is opened.

    Data that was not prepared beforehand is prepared now, once for all runs below `root`.
    """
    launcher_for(job).check(job)
    device, reason = choose_device(job.cluster)
    if job.train.compile:
        private_folder()  # compile cache of the ranks; fail here rather than in each rank
    notes: list[str] = []
    stores = resolve_stores(job.data, data_cache(root), Path.cwd(), progress, notes.append)
    check_stores(
        stores,
        blend_of(job.data),
        vocab_size=job.architecture.vocab_size,
        sequence_length=job.train.sequence_length,
        global_batch=job.train.global_batch,
        tokenizer_spec=job.data.tokenizer,
    )
    if fresh:  # before the old run is moved: unreachable checkpoints could not be quarantined later
        for url in checkpoint_urls(job.checkpoint, job.name, RunFolder(root / job.name)):
            open_place(url).steps()
    opened = open_run(job, root, fresh=fresh, data=stores_identity(stores))
    opened.notes += notes
    data = {
        "stores": [store.address for store in stores],
        "digests": [store.digest for store in stores],
        "tokens": sum(store.n_tokens for store in stores),
        "tokenizer": stores[0].tokenizer.name,
    }
    add_to_plan(opened.folder, "data", data)
    freeze(opened.folder)
    voyage = Voyage(job, opened, stores, device, reason)
    if fresh:
        voyage.set_checkpoints_aside()
    return voyage
