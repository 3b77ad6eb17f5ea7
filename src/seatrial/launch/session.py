"""A training run from job to outcome: prepare the data and the run folder, run the ranks, record how it ended."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from seatrial.base import atomic
from seatrial.base.errors import EXIT_FAILED, RunFailed, SeatrialError
from seatrial.base.private import private_folder
from seatrial.checkpoint.manifest import Damaged
from seatrial.checkpoint.place import Place, checkpoint_urls, open_place
from seatrial.data.prepare import (
    blend_of,
    check_stores,
    check_validation,
    data_cache,
    resolve_stores,
    resolve_validation,
    stores_identity,
)
from seatrial.job.optimizers import optimizer_named
from seatrial.launch import LocalLauncher, launcher_for
from seatrial.launch.base import Outcome, Scheduled
from seatrial.launch.follow import end_rest, read_state
from seatrial.launch.preflight import device_of
from seatrial.record import events
from seatrial.record.filesystem import check_filesystem, put_token
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import freeze
from seatrial.record.launches import (
    Launch,
    begin_event,
    checked_launch,
    end_event,
    record_end,
    record_handle,
    write_launch,
)
from seatrial.record.run import OpenedRun, add_to_plan, open_run

if TYPE_CHECKING:
    from seatrial.data.store import TokenStore
    from seatrial.job import Job
    from seatrial.launch.base import Attended, Launcher

_RECORDS_BYTES = 256 << 20
# How many renames silence_s must cover. Measured: 5 (0.6 s each, 3 s in all) worked, 3 (1 s each) did not, 6 did.
_SLOWEST_RENAMES = 6


@dataclass
class Session:
    """A run that is ready to start; this process holds the lock of its folder."""

    job: Job
    opened: OpenedRun
    stores: list[TokenStore]
    device: str
    device_reason: str
    validation: TokenStore | None = None

    @property
    def resume_step(self) -> int | None:
        """The step of the newest checkpoint, not yet verified; None for a fresh start."""
        return max((step for place in self._places() for step in place.steps()), default=None)

    @property
    def complete(self) -> bool:
        """Whether the last step's checkpoint exists and is intact."""
        for place in self._places():
            for step in place.steps():
                if step < self.job.train.steps:
                    break
                try:
                    place.verify(step)
                except Damaged:
                    continue  # the ranks will report it, quarantine it, and resume from the previous one
                return True
        return False

    def set_checkpoints_aside(self) -> None:
        """Quarantine checkpoints of the previous run outside its folder: with --fresh they must not be resumed from."""
        for place in self._places():
            for step in place.steps():
                aside = place.set_aside(step, "a run of this name was started over with --fresh")
                text = f"{place.where(step)} belongs to the previous run; quarantined as {aside}"
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
        """Where checkpoints are. Raises StorageError if one is unreachable: an older one elsewhere is no substitute."""
        urls = checkpoint_urls(self.job.checkpoint, self.job.name, self.opened.folder)
        return [open_place(url) for url in urls]

    def run(self, tick: Callable[[], None] | None = None, *, launcher: Attended | None = None) -> Outcome:
        """Train to the end, with `launcher` or else the job's own. No process it started is left when it returns."""
        folder, generation = self.opened.folder, self.opened.generation

        def record_event(kind: str, message: str, **more: object) -> None:
            now = max(generation, folder.last_generation())  # each recovery increments it
            try:
                events.append(folder, kind, message, generation=now, **more)  # type: ignore[arg-type]
            except OSError as error:
                # How the run ended must reach the user even if the disk is full.
                print(
                    f"warning: could not record {kind} in {folder.events}: {error.strerror}", file=sys.stderr
                )

        record_event(**begin_event(self.job.layout))
        chosen = launcher or cast("Attended", launcher_for(self.job))
        write_launch(
            folder, Launch(self.job.cluster.launcher, generation, time.time(), socket.gethostname(), False)
        )
        put_files(folder, chosen.render(self.job, folder, generation), generation)
        try:
            outcome = chosen.launch(self.job, folder, generation, tick=tick)
        except SeatrialError as error:
            record_event("run_failed", f"no agent was started: {error.message}", severity="error", data={})
            raise
        record_event(**end_event(outcome.exit_code, outcome.failure, self.job.train.steps))
        return outcome

    def submit(self, launcher: Scheduled) -> Launch:
        """Write the files to submit into the run folder and submit them; releases the run's lock. Raises RunFailed."""
        folder, generation = self.opened.folder, self.opened.generation
        put_files(folder, launcher.render(self.job, folder, generation), generation)
        events.append(folder, generation=generation, **begin_event(self.job.layout, "submitted"))
        folder.follow_up.unlink(missing_ok=True)
        launch = Launch(
            launcher.name, generation, time.time(), socket.gethostname(), True, submitted=generation
        )
        write_launch(folder, launch)
        rendered = folder.rendered(generation)
        # Blocked until the handle is recorded: the process that ends us must be able to find the submitted job.
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        try:
            try:
                handle = launcher.submit({path.name: path for path in rendered.iterdir()})
            except SeatrialError as error:  # it may have been submitted anyway: its agents must exit
                record_end(folder, launch, EXIT_FAILED, f"it was not submitted: {error.message}")
                raise
            recorded = record_handle(folder, launch, handle)
            self.opened.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return recorded


def put_files(folder: RunFolder, files: Mapping[str, str], generation: int) -> None:
    """Keep the files that a launcher rendered in the run folder. Raises OSError."""
    rendered = folder.rendered(generation)
    rendered.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        atomic.write_text(rendered / name, text)


def prepare_session(
    job: Job,
    root: Path,
    *,
    fresh: bool = False,
    launcher: Launcher | None = None,
) -> Session:
    """Check everything that can be refused before a rank starts, then open the run folder.

    Data that was not prepared beforehand is prepared now, once for all runs below `root`. `launcher`: what will start it,
    by default the job's own.
    """
    (launcher or launcher_for(job)).check(job)
    device, reason = device_of(job)
    if job.compiles(device) and job.cluster.launcher == "local":
        private_folder()  # compile cache of the ranks; fail here rather than in each rank
    notes: list[str] = []
    stores = resolve_stores(job.data, data_cache(root), Path.cwd(), None, notes.append)
    check_stores(
        stores,
        blend_of(job.data),
        vocab_size=job.architecture.vocab_size,
        sequence_length=job.train.sequence_length,
        global_batch=job.train.global_batch,
        tokenizer_spec=job.data.tokenizer,
    )
    validation = resolve_validation(job.data, data_cache(root), Path.cwd(), None, notes.append)
    if validation is not None:
        check_validation(
            validation,
            stores,
            vocab_size=job.architecture.vocab_size,
            sequence_length=job.train.sequence_length,
            samples=job.train.validate_samples,
            tokenizer_spec=job.data.tokenizer,
        )
    if fresh:  # before the old run is moved: unreachable checkpoints could not be quarantined later
        for url in checkpoint_urls(job.checkpoint, job.name, RunFolder(root / job.name)):
            open_place(url).steps()
    opened = open_run(job, root, fresh=fresh, data=stores_identity(stores), check=_refuse_scheduled)
    if job.cluster.launcher != LocalLauncher.name:
        try:
            slowest_s = check_filesystem(opened.folder.path, _needed_bytes(job))
            if job.resilience.silence_s < _SLOWEST_RENAMES * slowest_s:
                opened.notes.append(
                    f"a rename in {opened.folder.path} took {slowest_s:.1f} s: the coordinator does several in sequence, and "
                    "its nodes would consider it dead; set resilience.silence_s to at least "
                    f"{_SLOWEST_RENAMES * slowest_s:.0f}"
                )
            put_token(opened.folder, opened.generation)
        except BaseException:
            opened.close()
            raise
    opened.notes += notes
    data = {
        "stores": [store.address for store in stores],
        "digests": [store.digest for store in stores],
        "tokens": sum(store.n_tokens for store in stores),
        "tokenizer": stores[0].tokenizer.name,
    }
    if validation is not None:
        data["validation"] = {"store": validation.address, "digest": validation.digest}
    add_to_plan(opened.folder, "data", data)
    freeze(opened.folder)
    session = Session(job, opened, stores, device, reason, validation)
    if fresh:
        session.set_checkpoints_aside()
    return session


def _needed_bytes(job: Job) -> int:
    """Minimum space a start needs on the run folder's file system: records, and one checkpoint if stored there."""
    here = job.checkpoint.folder is None
    arch = job.architecture
    saved = 4 * arch.parameters()  # fp32 weights and the optimizer's state
    saved += optimizer_named(job.optimizer.name).bytes_of(arch)
    return _RECORDS_BYTES + here * saved


def _refuse_scheduled(folder: RunFolder) -> None:
    """Raise RunFailed if a scheduler is running this run or has it queued: no process holds its lock then.

    Raises InputError if that cannot be determined.
    """
    launch = checked_launch(folder)
    if launch is None or not launch.scheduled or launch.handle is None:
        return
    found = read_state(folder)
    if not found.over:
        words = (
            found.status.words
            if found.next is None
            else f"{found.status.words}; next job: {found.next.words}"
        )
        raise RunFailed(
            f"{folder.path} is run by {launch.launcher} as {launch.handle} ({words})",
            hint=f"`seatrial attach {folder.path}` follows it, `seatrial stop {folder.path}` ends it",
        )
    end_rest(found)  # its agents would otherwise join the start that begins now
