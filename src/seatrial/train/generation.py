"""One generation of a worker: join, agree on the state to resume from, train, and keep the state.

A worker that lost its peers still holds the state of its last step: in the next generation it resumes from it, without
reading a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from seatrial.base.errors import InputError, RunFailed, SeatrialError
from seatrial.checkpoint import memory
from seatrial.checkpoint.manifest import Damaged
from seatrial.data.loader import BatchLoader
from seatrial.data.store import TokenStore
from seatrial.job import Job
from seatrial.job.layout import Layout
from seatrial.job.shapes import at_shape
from seatrial.parallel.build import ParallelModel
from seatrial.parallel.mesh import Mesh
from seatrial.parallel.store import serve_store
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import Digests, job_of, read_unchanged
from seatrial.record.messages import Ending, RankSpec
from seatrial.record.recent import recent_ledger
from seatrial.train.checkpointing.places import Places
from seatrial.train.checkpointing.snapshot import Snapshots, restore_from_memory
from seatrial.train.loop import Loop
from seatrial.train.optimizer import ShardedOptimizer
from seatrial.train.rank import (
    RankEnvironment,
    build,
    build_first,
    init_distributed,
    load,
    make_loader,
    make_validation,
    timeout_of,
)
from seatrial.train.recorder import LOOK_BACK, SummedStep
from seatrial.train.records import Records, through_agent
from seatrial.train.recovery.carried import Carried, broadcast_state, carry, restore_carried
from seatrial.train.recovery.recover import (
    NO_SNAPSHOT,
    NO_STEP,
    Offer,
    Source,
    Unfilled,
    broadcast_from,
    decide,
    from_memory,
    gather_offers,
    newest_on_disk,
)
from seatrial.train.recovery.resume import Resume
from seatrial.train.sample import write_sample
from seatrial.train.supervision.peers import teardown, wait_for_store
from seatrial.train.supervision.supervisor_client import SupervisorClient
from seatrial.train.validation import ValidationSet


@dataclass(frozen=True)
class GenerationSpec:
    """One generation, as the agent describes it to a worker."""

    generation: int
    environment: RankEnvironment
    layout: Layout
    snapshots: list[dict[str, Any]]
    log: Path
    inputs: Digests  # expected digests of the job and the plan
    again: bool = True  # it follows a generation of the same launch

    @classmethod
    def from_message(cls, message: RankSpec) -> GenerationSpec:
        """Parse the agent's message, and set torchrun's environment variables from it."""
        environment = RankEnvironment(
            rank=message.rank,
            local_rank=message.local_rank,
            world_size=message.world_size,
            node=message.node,
            device=os.environ["SEATRIAL_DEVICE"],
        )
        os.environ.update(
            RANK=str(environment.rank),
            WORLD_SIZE=str(environment.world_size),
            GROUP_RANK=str(message.slot),
            GROUP_WORLD_SIZE=str(message.slots),
            MASTER_ADDR=message.master_addr,
            MASTER_PORT=str(message.master_port),
        )
        return cls(
            message.generation,
            environment,
            Layout(**{f.name: message.layout[f.name] for f in fields(Layout)}),
            message.snapshots,
            Path(message.log),
            message.inputs,
            message.again,
        )


@dataclass
class _Kept:
    """The state that a worker keeps after losing its peers."""

    loop: Loop
    tensors: Carried
    layout: Layout
    rank: int


class TrainWorker:
    """The generations of one process."""

    def __init__(self, folder: RunFolder, supervisor_client: SupervisorClient, inputs: Digests) -> None:
        """Raises InputError if the job does not match `inputs`."""
        self.folder = folder
        self.supervisor_client = supervisor_client
        self._job: Job = job_of(folder, inputs)
        fds = os.environ.get("SEATRIAL_SNAPSHOT_FDS")
        self._fds: tuple[int, int] | None = None
        if fds:
            first, second = fds.split(",")
            self._fds = (int(first), int(second))
        self._loader: BatchLoader | None = None
        self._validation: ValidationSet | None = None
        self._loop: Loop | None = None
        self._snapshots: Snapshots | None = None
        self._generation_spec: GenerationSpec | None = None
        self._kept: _Kept | None = None
        self.step = 0  # the last step of the last generation that ended normally

    @property
    def can_park(self) -> bool:
        """Whether this process can be reused for the next generation; a CUDA context with broken communicators cannot."""
        return self._generation_spec is not None and self._generation_spec.environment.device == "cpu"

    def run(self, generation_spec: GenerationSpec) -> Ending:
        """Train as `generation_spec` says until the run is done or all ranks leave early. Raises any error."""
        self._generation_spec = generation_spec
        job = at_shape(self._job, generation_spec.layout)
        mesh = init_distributed(job, generation_spec.environment, self._store(job, generation_spec))
        records = through_agent(self.supervisor_client, generation_spec.generation, mesh.rank)
        if self._loader is None:
            plan = json.loads(read_unchanged(self.folder.plan_json, generation_spec.inputs))
            self._loader = make_loader(job, self.folder, plan)
            _check_stores(self._loader.stores, plan["data"]["digests"])
            self._validation = make_validation(job, self.folder, plan, self._loader)
            if self._validation is not None:
                _check_stores(self._validation.loader.stores, [plan["data"]["validation"]["digest"]])
        loop, source = self._prepare(job, generation_spec, records, mesh, self._loader)
        self._loop, self._kept = loop, None
        self._announce(records, generation_spec, source)
        how = loop.run(source.step + 1)
        self.step = loop.known.step if loop.known is not None else source.step
        self._loop = None
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots = None
        dist.barrier()
        if how == "done":
            dist.destroy_process_group()
            if mesh.rank == 0:
                del loop  # the sample needs the memory
                write_sample(job, self.folder, records, mesh.device)
        else:
            del loop, mesh
            teardown()
        return how

    def _store(self, job: Job, generation_spec: GenerationSpec) -> Store:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timeout_of(job)
        if generation_spec.environment.rank > 0:
            timeout_s = timeout.total_seconds()
            wait_for_store(address, port, timeout_s=timeout_s, stop=lambda: self.supervisor_client.abandoned)
            return TCPStore(address, port, None, is_master=False, timeout=timeout)
        try:
            return serve_store(address, port, timeout)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and job.cluster.port is None:
                # The port was free when chosen, and not by the user: the next generation uses another.
                raise ConnectionError(f"the store's port was taken by another process: {error}") from error
            raise InputError(
                f"rank 0 cannot listen on port {port} of {address}: {error.strerror}",
                hint="leave cluster.port out to use a free port",
            ) from error

    def keep(self) -> int:
        """After losing peers: keep this rank's state and leave all groups; the last finished step, or -1."""
        loop, generation_spec = self._loop, self._generation_spec
        self._loop = None
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots = None
        if loop is not None and generation_spec is not None and loop.applied is not None:
            tensors = carry(loop.model, loop.optimizer)
            self._kept = _Kept(loop, tensors, generation_spec.layout, generation_spec.environment.rank)
        del loop
        teardown()
        kept = self._kept
        return NO_STEP if kept is None or kept.loop.applied is None else kept.loop.applied

    # -- the start of a generation

    def _prepare(
        self, job: Job, generation_spec: GenerationSpec, records: Records, mesh: Mesh, loader: BatchLoader
    ) -> tuple[Loop, Source]:
        kept = self._kept
        if kept is not None and (kept.layout, kept.rank) != (
            generation_spec.layout,
            generation_spec.environment.rank,
        ):
            kept = self._kept = None
        offers = gather_offers(mesh, self._offer(generation_spec, kept))
        nearest = decide(offers, generation_spec.layout, 0)
        newest = newest_on_disk(
            mesh, nearest, Places(job, self.folder).find_newest, partial(_unseen, records, nearest)
        )
        source = decide(offers, generation_spec.layout, newest)
        if source.kind not in ("disk", "fresh"):
            return self._from_processes_or_memory(
                job, generation_spec, records, mesh, loader, kept, offers, source
            ), source
        resume = Resume(job, self.folder, records, mesh)
        # If the newest checkpoint is damaged and only an older one remains, the state in memory may be newer.
        found = load(
            job,
            mesh,
            resume,
            loader,
            lambda step: decide(offers, generation_spec.layout, step).kind == "disk",
        )
        source = decide(offers, generation_spec.layout, resume.step)
        if found is not None:
            model, optimizer, _ = found
        elif source.kind != "fresh":
            return self._from_processes_or_memory(
                job, generation_spec, records, mesh, loader, kept, offers, source
            ), source
        else:
            model, optimizer = build_first(job, mesh, resume, loader)
        return self._make_loop(job, generation_spec, records, model, optimizer, loader, source), source

    def _offer(self, generation_spec: GenerationSpec, kept: _Kept | None) -> Offer:
        ids = [NO_SNAPSHOT, NO_SNAPSHOT]
        if self._fds is not None:
            for entry in memory.verified(self._fds, generation_spec.snapshots):
                ids[entry["slot"]] = (entry["generation"], entry["step"])
        held = (ids[0], ids[1])
        if kept is None or kept.loop.applied is None:
            return Offer(memory=held)
        ready = kept.loop.ready
        return Offer(kept.loop.applied, NO_STEP if ready is None else ready, held)

    def _from_processes_or_memory(
        self,
        job: Job,
        generation_spec: GenerationSpec,
        records: Records,
        mesh: Mesh,
        loader: BatchLoader,
        kept: _Kept | None,
        offers: list[Offer],
        source: Source,
    ) -> Loop:
        if mesh.rank == 0:
            cleaning = partial(_remove_leftovers, Places(job, self.folder), generation_spec.generation)
            threading.Thread(target=cleaning, name="leftovers", daemon=True).start()
        model, optimizer = build(job, mesh, Unfilled(), masked=loader.masked)
        loop = self._make_loop(job, generation_spec, records, model, optimizer, loader, source)
        if source.kind == "memory":
            assert self._fds is not None
            chosen = (source.generation, source.step)
            entry = next(e for e in generation_spec.snapshots if (e["generation"], e["step"]) == chosen)
            try:
                restore_from_memory(self._fds[entry["slot"]], entry, model, optimizer, checked=True)
            except Damaged as error:  # changed between two reads of the same memory
                raise RunFailed(f"the snapshot of step {source.step} has changed: {error.message}") from None
            return loop
        self._finish_step(mesh, loop, kept, offers, source.step)
        root = source.root(offers, generation_spec.layout, mesh.rank)
        if root is None:
            assert kept is not None
            restore_carried(kept.tensors, model, optimizer)
        if source.kind == "replica" and mesh.replicate is not None:
            replicas = dist.get_process_group_ranks(mesh.replicate)
            senders = {source.root(offers, generation_spec.layout, r) for r in replicas}
            for sender in senders - {None}:  # at most one: the first live replica
                assert sender is not None
                broadcast_state(model, optimizer, mesh.replicate, replicas.index(sender))
        self._record(mesh, loop, kept, offers, source.step)
        return loop

    def _finish_step(
        self, mesh: Mesh, loop: Loop, kept: _Kept | None, offers: list[Offer], step: int
    ) -> None:
        """Apply the update of `step` in ranks that have its gradients but did not receive the summed vector."""
        behind = [r for r, o in enumerate(offers) if o.applied == step - 1 and o.ready == step]
        if not behind:
            return
        known = SummedStep.from_row(self._broadcast_known(mesh, loop, kept, offers, step))
        if mesh.rank not in behind:
            return
        assert kept is not None
        assert known.step == step, f"the sum is of step {known.step}, not of step {step}"
        if known.skipped:  # the others skipped it, perhaps because of this rank's gradients
            kept.loop.optimizer.set_step(step)
            kept.loop.applied, kept.loop.ready = step, None
        else:
            kept.loop.apply_ready(known.norm_squared)
        kept.loop.known = known  # if this generation fails too, this rank may have to broadcast it

    def _record(self, mesh: Mesh, loop: Loop, kept: _Kept | None, offers: list[Offer], step: int) -> None:
        """Write the last step's record if the writing rank died before it did."""
        row = self._broadcast_known(mesh, loop, kept, offers, step)
        if mesh.rank == 0 and step > 0:
            loop.record_known(row, step)

    def _broadcast_known(
        self, mesh: Mesh, loop: Loop, kept: _Kept | None, offers: list[Offer], step: int
    ) -> list[float]:
        """Broadcast the row of a rank that has applied `step`; all ranks call it."""
        source = next(r for r, o in enumerate(offers) if o.applied == step)
        known = kept.loop.known if kept is not None else None
        own = known.as_row() if known is not None and mesh.rank == source else [0.0] * loop.known_width
        return broadcast_from(mesh, source, own)

    def _make_loop(
        self,
        job: Job,
        generation_spec: GenerationSpec,
        records: Records,
        model: ParallelModel,
        optimizer: ShardedOptimizer,
        loader: BatchLoader,
        source: Source,
    ) -> Loop:
        every = job.resilience.snapshot_every_steps
        if self._fds is not None and job.resilience.copies:
            self._snapshots = Snapshots(
                self._fds,
                model,
                optimizer,
                records=records,
                every=every,
                report=self.supervisor_client.send,
                # Later snapshots are from an abandoned trajectory: no rank may roll back to them.
                held=[entry for entry in generation_spec.snapshots if entry["step"] <= source.step],
            )
        return Loop(
            job,
            self.folder,
            records,
            model,
            optimizer,
            loader,
            supervisor=self.supervisor_client,
            snapshots=self._snapshots,
            rollback=partial(self._roll_back, model, optimizer) if self._snapshots is not None else None,
            validation=self._validation,
        )

    def _roll_back(self, model: ParallelModel, optimizer: ShardedOptimizer) -> int | None:
        """Within a generation, restore the newest snapshot that all ranks have; its step, or None if there is none."""
        assert self._snapshots is not None
        assert self._fds is not None
        entries = memory.verified(self._fds, self._snapshots.settle())
        ids = [NO_SNAPSHOT, NO_SNAPSHOT]
        for entry in entries:
            ids[entry["slot"]] = (entry["generation"], entry["step"])
        source = from_memory(gather_offers(model.mesh, Offer(memory=(ids[0], ids[1]))))
        if source is None:
            return None
        chosen = (source.generation, source.step)
        found = next(e for e in entries if (e["generation"], e["step"]) == chosen)
        self._snapshots.forget_after(source.step)
        return restore_from_memory(self._fds[found["slot"]], found, model, optimizer, checked=True)

    def _announce(self, records: Records, generation_spec: GenerationSpec, source: Source) -> None:
        """Record from which state training resumes after a failure, or with another layout."""
        if records.rank != 0:
            return
        if generation_spec.again:
            done = max((r.step for r in recent_ledger(self.folder, LOOK_BACK)), default=0)
            records.event(
                "recovered",
                f"resuming after step {source.step} ({_WORDS[source.kind]}), "
                f"{max(0, done - source.step)} steps to redo",
                data={"step": source.step, "source": source.kind, "redone": max(0, done - source.step)},
            )
        records.settle()  # without it the ledger's lines would contradict the events


def _unseen(records: Records, source: Source, problem: str) -> None:
    message = f"checkpoints cannot be listed ({problem}): resuming after step {source.step} from memory"
    records.event("checkpoints_unseen", message, severity="warning", data={"step": source.step})


def _check_stores(stores: Sequence[TokenStore], digests: Sequence[str]) -> None:
    """Raise InputError if a store is not the one that the launch started with."""
    for store, digest in zip(stores, digests, strict=True):
        if store.digest != digest:
            raise InputError(
                f"{store.place} was recreated during the run: it has other data",
                hint="restore the old store; or stop the run, and start a new one on the new data",
            )


def _remove_leftovers(places: Places, generation: int) -> None:
    """Remove the partial files of earlier generations' saves, each as large as a checkpoint, while training runs."""
    with contextlib.suppress(OSError, SeatrialError):  # reported by the next start that reads checkpoints
        places.remove_leftovers(before=generation)


_WORDS = {
    "carried": "all ranks still had it",
    "replica": "from a live replica",
    "memory": "from snapshots in memory",
    "disk": "from a checkpoint",
    "fresh": "from the start: no state was left",
}
