"""A worker's part in one generation after the other: join, agree from where to go on, train, and keep what it has.

A worker that lost its peers holds the state of its last step. It can be given a rank of the next generation and go on
from there, without reading anything.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from seatrial.base.errors import InputError, RunFailed, SeatrialError
from seatrial.checkpoint import memory
from seatrial.checkpoint.manifest import Damaged
from seatrial.data.loader import BatchLoader
from seatrial.data.store import TokenStore
from seatrial.job import Job
from seatrial.job.layout import Layout
from seatrial.job.shapes import at_shape
from seatrial.parallel.build import ParallelModel
from seatrial.parallel.mesh import Mesh, build_mesh
from seatrial.parallel.store import serve_store
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import Digests, job_of, read_unchanged
from seatrial.record.recent import recent_ledger
from seatrial.train.attendant import Attendant
from seatrial.train.carried import Carried, carry, restore_carried, share_state
from seatrial.train.companion import Ending
from seatrial.train.loop import Loop
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.peers import teardown, wait_for_store
from seatrial.train.places import Places
from seatrial.train.rank import TIMEOUT, Place, build, first_weights, join, load, make_loader
from seatrial.train.recorder import Known
from seatrial.train.recover import (
    NEVER,
    NOTHING,
    Offer,
    Source,
    Unfilled,
    decide,
    exchange,
    from_memory,
    newest_on_disk,
    share_from,
)
from seatrial.train.resume import Resume
from seatrial.train.sample import write_sample
from seatrial.train.snapshot import Snapshots, restore_from_memory

_LOOK_BACK = 64  # ledger lines among which the last step stands: a rollback writes some twice


@dataclass(frozen=True)
class Leg:
    """One generation as a worker is told of it."""

    generation: int
    place: Place
    layout: Layout
    snapshots: list[dict[str, Any]]
    log: Path
    inputs: Digests  # digests of the job and the plan that this rank must have read
    again: bool = True  # it follows a generation of the same launch

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Leg:
        """What the agent sent."""
        place = Place(
            rank=message["rank"],
            local_rank=message["local_rank"],
            world_size=message["world_size"],
            node=message["node"],
            device=os.environ["SEATRIAL_DEVICE"],
        )
        os.environ.update(
            RANK=str(place.rank),
            WORLD_SIZE=str(place.world_size),
            GROUP_RANK=str(message["slot"]),
            GROUP_WORLD_SIZE=str(message["slots"]),
            MASTER_ADDR=message["master_addr"],
            MASTER_PORT=str(message["master_port"]),
        )
        return cls(
            message["generation"],
            place,
            Layout(**{f.name: message["layout"][f.name] for f in fields(Layout)}),
            message["snapshots"],
            Path(message["log"]),
            message["inputs"],
            message["again"],
        )


@dataclass
class _Kept:
    """What a worker holds after its peers went away."""

    loop: Loop
    tensors: Carried
    layout: Layout
    rank: int


class Worker:
    """The legs of one process."""

    def __init__(self, folder: RunFolder, attendant: Attendant, inputs: Digests) -> None:
        """Raises InputError if the job does not match `inputs`."""
        self.folder = folder
        self.attendant = attendant
        self._job: Job = job_of(folder, inputs)
        fds = os.environ.get("SEATRIAL_SNAPSHOT_FDS")
        self._fds: tuple[int, int] | None = None
        if fds:
            first, second = fds.split(",")
            self._fds = (int(first), int(second))
        self._loader: BatchLoader | None = None
        self._loop: Loop | None = None
        self._snapshots: Snapshots | None = None
        self._leg: Leg | None = None
        self._kept: _Kept | None = None
        self.step = 0  # the last of the last leg that ended in order

    @property
    def can_park(self) -> bool:
        """Whether this process may outlive its generation; a CUDA context with broken communicators may not."""
        return self._leg is not None and self._leg.place.device == "cpu"

    def run(self, leg: Leg) -> Ending:
        """Train as `leg` says until the run is done or all leave. Raises whatever goes wrong."""
        self._leg = leg
        job = at_shape(self._job, leg.layout)
        device = self._join(job, leg)
        mesh = build_mesh(leg.layout, device, TIMEOUT)
        torch.manual_seed(job.train.seed + mesh.rank)
        if self._loader is None:
            plan = json.loads(read_unchanged(self.folder.plan_json, leg.inputs))
            self._loader = make_loader(job, self.folder, plan)
            _check_stores(self._loader.stores, plan)
        loop, source = self._prepare(job, leg, mesh, self._loader)
        self._loop, self._kept = loop, None
        self._announce(mesh, leg, source)
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
                write_sample(job, self.folder, leg.generation, device)
        else:
            del loop, mesh
            teardown()
        return how

    def _join(self, job: Job, leg: Leg) -> torch.device:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if leg.place.rank > 0:
            timeout_s = TIMEOUT.total_seconds()
            wait_for_store(address, port, timeout_s=timeout_s, stop=lambda: self.attendant.abandoned)
            return join(leg.place, TCPStore(address, port, None, is_master=False, timeout=TIMEOUT))
        try:
            store = serve_store(address, port, TIMEOUT)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and job.cluster.port is None:
                # The port was free a moment ago and was not chosen by the user; the next generation takes another.
                raise ConnectionError(f"the store's port was taken by another process: {error}") from error
            raise InputError(
                f"rank 0 cannot listen on port {port} of {address}: {error.strerror}",
                hint="leave cluster.port out, and a free port is taken",
            ) from error
        return join(leg.place, store)

    def keep(self) -> int:
        """After peers went away: hold on to this rank's state and leave all groups; the last finished step, or -1."""
        loop, leg = self._loop, self._leg
        self._loop = None
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots = None
        if loop is not None and leg is not None and loop.applied is not None:
            tensors = carry(loop.model, loop.optimizer)
            self._kept = _Kept(loop, tensors, leg.layout, leg.place.rank)
        del loop
        teardown()
        kept = self._kept
        return NOTHING if kept is None or kept.loop.applied is None else kept.loop.applied

    # -- the start of a leg

    def _prepare(self, job: Job, leg: Leg, mesh: Mesh, loader: BatchLoader) -> tuple[Loop, Source]:
        kept = self._kept
        if kept is not None and (kept.layout, kept.rank) != (leg.layout, leg.place.rank):
            kept = self._kept = None
        offers = exchange(mesh, self._offer(leg, kept))
        nearest = decide(offers, leg.layout, 0)
        newest = newest_on_disk(
            mesh, nearest, Places(job, self.folder).look, partial(self._unseen, leg, nearest)
        )
        source = decide(offers, leg.layout, newest)
        if source.kind not in ("disk", "fresh"):
            return self._from_processes_or_memory(job, leg, mesh, loader, kept, offers, source), source
        resume = Resume(job, self.folder, leg.generation, mesh)
        # Where the newest is damaged and an older one is left, what is in memory may be newer.
        found = load(job, mesh, resume, loader, lambda step: decide(offers, leg.layout, step).kind == "disk")
        source = decide(offers, leg.layout, resume.step)
        if found is not None:
            model, optimizer, _ = found
        elif source.kind != "fresh":
            return self._from_processes_or_memory(job, leg, mesh, loader, kept, offers, source), source
        else:
            resume.refuse_fresh_start()
            model, optimizer = build(job, mesh, first_weights(job))
        return self._make_loop(job, leg, model, optimizer, loader, source), source

    def _offer(self, leg: Leg, kept: _Kept | None) -> Offer:
        moments = [NEVER, NEVER]
        if self._fds is not None:
            for entry in memory.verified(self._fds, leg.snapshots):
                moments[entry["slot"]] = (entry["generation"], entry["step"])
        held = (moments[0], moments[1])
        if kept is None or kept.loop.applied is None:
            return Offer(memory=held)
        ready = kept.loop.ready
        return Offer(kept.loop.applied, NOTHING if ready is None else ready, held)

    def _from_processes_or_memory(
        self,
        job: Job,
        leg: Leg,
        mesh: Mesh,
        loader: BatchLoader,
        kept: _Kept | None,
        offers: list[Offer],
        source: Source,
    ) -> Loop:
        if mesh.rank == 0:
            cleaning = partial(_remove_leftovers, Places(job, self.folder), leg.generation)
            threading.Thread(target=cleaning, name="leftovers", daemon=True).start()
        model, optimizer = build(job, mesh, Unfilled())
        loop = self._make_loop(job, leg, model, optimizer, loader, source)
        if source.kind == "memory":
            assert self._fds is not None
            wanted = (source.generation, source.step)
            entry = next(e for e in leg.snapshots if (e["generation"], e["step"]) == wanted)
            try:
                restore_from_memory(self._fds[entry["slot"]], entry, model, optimizer, checked=True)
            except Damaged as error:  # between two readings of the same memory
                raise RunFailed(f"the snapshot of step {source.step} has changed: {error.message}") from None
            return loop
        self._finish_step(mesh, loop, kept, offers, source.step)
        root = source.root(offers, leg.layout, mesh.rank)
        if root is None:
            assert kept is not None
            restore_carried(kept.tensors, model, optimizer)
        if source.kind == "replica" and mesh.replicate is not None:
            replicas = dist.get_process_group_ranks(mesh.replicate)
            givers = {source.root(offers, leg.layout, r) for r in replicas}
            for giver in givers - {None}:  # one at most: they all take from the first that lives
                assert giver is not None
                share_state(model, optimizer, mesh.replicate, replicas.index(giver))
        self._record(mesh, loop, kept, offers, source.step)
        return loop

    def _finish_step(
        self, mesh: Mesh, loop: Loop, kept: _Kept | None, offers: list[Offer], step: int
    ) -> None:
        """Who had the gradients of `step` but did not hear their sum makes the same update now."""
        behind = [r for r, o in enumerate(offers) if o.applied == step - 1 and o.ready == step]
        if not behind:
            return
        known = Known.from_row(self._share_known(mesh, loop, kept, offers, step))
        if mesh.rank not in behind:
            return
        assert kept is not None
        assert known.step == step, f"the sum of step {known.step} is no sum of step {step}"
        if known.skipped:  # the others have left it out, for what this rank's gradients may be part of
            kept.loop.optimizer.set_step(step)
            kept.loop.applied, kept.loop.ready = step, None
        else:
            kept.loop.apply_ready(known.norm_squared)
        kept.loop.known = known  # if this generation fails too, this rank may be the one that knows

    def _record(self, mesh: Mesh, loop: Loop, kept: _Kept | None, offers: list[Offer], step: int) -> None:
        """The last step's record, where the rank that writes it had died before it could."""
        row = self._share_known(mesh, loop, kept, offers, step)
        if mesh.rank == 0 and step > 0:
            loop.record_known(row, step)

    def _share_known(
        self, mesh: Mesh, loop: Loop, kept: _Kept | None, offers: list[Offer], step: int
    ) -> list[float]:
        """The row of a rank that has done `step`, in every rank; all call it."""
        knows = next(r for r, o in enumerate(offers) if o.applied == step)
        known = kept.loop.known if kept is not None else None
        own = known.as_row() if known is not None and mesh.rank == knows else [0.0] * loop.known_width
        return share_from(mesh, knows, own)

    def _make_loop(
        self,
        job: Job,
        leg: Leg,
        model: ParallelModel,
        optimizer: ShardedAdamW,
        loader: BatchLoader,
        source: Source,
    ) -> Loop:
        every = job.resilience.snapshot_every_steps
        if self._fds is not None and job.resilience.copies:
            self._snapshots = Snapshots(
                self._fds,
                model,
                optimizer,
                folder=self.folder,
                generation=leg.generation,
                every=every,
                tell=self.attendant.tell,
                # Nobody may go back to what lies ahead: it is of a course that was left.
                held=[entry for entry in leg.snapshots if entry["step"] <= source.step],
            )
        return Loop(
            job,
            self.folder,
            leg.generation,
            model,
            optimizer,
            loader,
            companion=self.attendant,
            snapshots=self._snapshots,
            rollback=partial(self._roll_back, model, optimizer) if self._snapshots is not None else None,
        )

    def _roll_back(self, model: ParallelModel, optimizer: ShardedAdamW) -> int | None:
        """To the newest snapshot that all ranks have, in the midst of a leg; None where there is none."""
        assert self._snapshots is not None
        assert self._fds is not None
        entries = memory.verified(self._fds, self._snapshots.settle())
        moments = [NEVER, NEVER]
        for entry in entries:
            moments[entry["slot"]] = (entry["generation"], entry["step"])
        source = from_memory(exchange(model.mesh, Offer(memory=(moments[0], moments[1]))))
        if source is None:
            return None
        wanted = (source.generation, source.step)
        found = next(e for e in entries if (e["generation"], e["step"]) == wanted)
        self._snapshots.forget_after(source.step)
        return restore_from_memory(self._fds[found["slot"]], found, model, optimizer, checked=True)

    def _unseen(self, leg: Leg, source: Source, problem: str) -> None:
        message = f"what checkpoints there are is not known ({problem}): going on after step {source.step} from memory"
        with contextlib.suppress(OSError):
            events.append(
                self.folder,
                "checkpoints_unseen",
                message,
                severity="warning",
                generation=leg.generation,
                rank=0,
                data={"step": source.step},
            )

    def _announce(self, mesh: Mesh, leg: Leg, source: Source) -> None:
        """For the user: from where it goes on after a failure, or with another layout."""
        if mesh.rank != 0 or not leg.again:
            return
        done = max((r.step for r in recent_ledger(self.folder, _LOOK_BACK)), default=0)
        events.append(
            self.folder,
            "recovered",
            f"going on after step {source.step} ({_WORDS[source.kind]}), "
            f"{max(0, done - source.step)} steps to be done again",
            generation=leg.generation,
            rank=0,
            data={"step": source.step, "source": source.kind, "redone": max(0, done - source.step)},
        )


def _check_stores(stores: Sequence[TokenStore], plan: Mapping[str, Any]) -> None:
    """InputError if a store is not the one that the launch started with."""
    for store, digest in zip(stores, plan["data"]["digests"], strict=True):
        if store.digest != digest:
            raise InputError(
                f"{store.place} was made anew while the run was under way: it holds other data",
                hint="put the old store back; or stop the run, and start another one on the new data",
            )


def _remove_leftovers(places: Places, generation: int) -> None:
    """The rest of a save that the generation before had begun: each is as large as a checkpoint. Beside training."""
    with contextlib.suppress(
        OSError, SeatrialError
    ):  # a start that reads the checkpoints will say what is wrong
        places.remove_leftovers(before=generation)


_WORDS = {
    "carried": "all ranks still had it",
    "replica": "from a living replica",
    "memory": "from the snapshots in memory",
    "disk": "from a checkpoint",
    "fresh": "from the beginning: nothing was left of it",
}
