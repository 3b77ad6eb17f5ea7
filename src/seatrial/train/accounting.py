"""Records this rank's time in each stage of each step; always on."""

from __future__ import annotations

from seatrial.base.complain import complain
from seatrial.hardware import accelerator
from seatrial.hardware.tcp import connections
from seatrial.parallel.blocked import Blocked
from seatrial.parallel.build import ParallelModel
from seatrial.record.collectives import CollectivesWriter
from seatrial.record.connections import write_connections
from seatrial.record.folder import RunFolder
from seatrial.record.stages import EXPERT, REPLICATE, SHARD, STAGES, TENSOR, StageWriter


class Accounting:
    """The stages of this rank's steps, from `model.clock` into the run folder.

    A step's record spans from the end of the previous step to its own, so a save after step n counts in step n+1. A
    file that cannot be written ends the recording, not the training.
    """

    def __init__(self, folder: RunFolder, generation: int, model: ParallelModel) -> None:
        self._folder, self._generation = folder, generation
        self._mesh, self._clock = model.mesh, model.clock
        self._not_separated = not_separated(model)
        self._blocked = Blocked(model.clock, model.mesh)
        self._writer: StageWriter | None = None
        self._collectives: CollectivesWriter | None = None

    def begin(self, first_step: int) -> None:
        """Start recording, at the start of `first_step`."""
        try:
            self._writer = StageWriter(
                self._folder,
                self._generation,
                self._mesh.rank,
                ranks=self._mesh.layout.world_size,
                clock=self._mesh.device.type,
                first_step=first_step,
                not_separated=self._not_separated,
                gpu=accelerator.pci_address(self._mesh.device),
            )
            sizes = self._mesh.layout.as_dict()
            self._collectives = CollectivesWriter(self._folder, self._generation, self._mesh.rank, sizes)
        except OSError as error:
            self._failed(error)
            return
        self._blocked.install()
        self._clock.start()

    def lap(self, step: int) -> None:
        """Record the end of `step`."""
        self._clock.lap(step)
        self._write()
        if self._collectives is not None:
            counted = self._blocked.counted()
            # Their bytes depend on which experts the router chooses: there would be a line for every step.
            counted.pop(STAGES[EXPERT], None)
            if STAGES[TENSOR] in self._not_separated:
                counted.pop(STAGES[TENSOR], None)  # compiled code hides some of them
            try:
                self._collectives.add(step, counted)
            except OSError as error:
                self._failed(error)

    def close(self) -> None:
        """Stop recording; write pending records."""
        self._blocked.remove()
        self._clock.stop()
        self._write()
        writer, self._writer = self._writer, None
        self._close_collectives()
        if writer is not None:
            try:
                writer.close()
                # While the process groups still have their connections.
                write_connections(self._folder, self._generation, self._mesh.rank, connections())
            except OSError as error:
                self._failed(error)

    def _write(self) -> None:
        if self._writer is None:
            return
        try:
            for step, seconds in self._clock.laps():
                self._writer.add(step, seconds)
        except OSError as error:
            self._failed(error)

    def _close_collectives(self) -> None:
        collectives, self._collectives = self._collectives, None
        if collectives is not None:
            try:
                collectives.close()  # a network file system may report a failed write only now
            except OSError as error:
                complain(f"the collectives of the last steps may not be recorded: {error}")

    def _failed(self, error: OSError) -> None:
        self._blocked.remove()
        self._clock.stop()
        self._close_collectives()
        complain(f"step times by stage are no longer recorded: {error}")


def not_separated(model: ParallelModel) -> dict[str, str]:
    """Stages that cannot be separated with these settings -> where their time is counted."""
    settings, layout = model.settings, model.mesh.layout
    merged = {}
    if settings.compile and layout.tensor > 1 and not settings.async_tensor:
        merged[STAGES[TENSOR]] = "inside compiled blocks it counts as forward and backward"
    if model.clock.on_accelerator and layout.shard > 1 and layout.replicate > 1:
        merged[STAGES[REPLICATE]] = f"waiting for sums over replicas counts as {STAGES[SHARD]}"
    return merged
