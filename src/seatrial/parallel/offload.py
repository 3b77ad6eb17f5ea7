"""Activation offload: what a recomputed decoder layer keeps, its input, is in host memory until its backward pass.

Copies run in a stream of their own: an input leaves while its layer computes, and comes back during the backward pass of
the recomputed layer after it. Two inputs stay on the device: that of a stage's last recomputed layer, whose backward pass
comes first, so that nothing would hide the copy; and what a stage receives, which torch's pipeline keeps anyway.

The host itself never reads that memory, and waits for nothing. The compute stream waits for a copy before memory on the
device is freed or read; a copy waits for what the compute stream has queued before it; copies follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from seatrial.hardware import accelerator
from seatrial.model.decoder import Block


@dataclass(eq=False)
class _Input:
    """The input of one layer in one microbatch, from its forward to its backward pass."""

    before: _Input | None  # that of the last recomputed layer before it, in the same microbatch
    device: Tensor | None = None
    arrived: torch.Event | None = None  # in the stream of copies, after `device` is filled from `host`
    host: Tensor | None = None
    spare: list[Tensor] | None = None  # takes `host` back

    def __del__(self) -> None:
        if self.host is not None and self.spare is not None:
            self.spare.append(self.host)


class Transfers:
    """The host memory and the copies of one rank. On a CPU copies are complete when they return."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = accelerator.new_stream(device) if accelerator.is_accelerator(device) else None
        self._spare: list[Tensor] = []  # all of one shape: a microbatch's hidden states
        # What is being copied from and to: freed only after the compute stream has waited, also where a step is abandoned.
        self._leaving: tuple[Tensor, torch.Event | None] | None = None
        self._arriving: tuple[Tensor, torch.Event | None] | None = None

    def send(self, kept: _Input, x_BTD: Tensor) -> None:
        """Begin to copy `x_BTD` to host memory."""
        self.finish_sending()
        kept.spare = self._spare
        kept.host = (
            self._spare.pop()
            if self._spare
            else accelerator.host_memory(x_BTD.shape, x_BTD.dtype, self._device)
        )
        self._leaving = x_BTD, self._copy(kept.host, x_BTD)

    def finish_sending(self) -> None:
        """Let the compute stream wait for the last copy to the host, and free its source."""
        if self._leaving is not None:
            _wait(self._leaving[1])
            self._leaving = None

    def receive(self, kept: _Input) -> Tensor:
        """The input, for the compute stream; the one before it begins to come back."""
        self._fetch(kept)
        x_BTD = kept.device
        assert x_BTD is not None
        _wait(kept.arrived)
        if kept.host is not None:
            kept.device = kept.arrived = None
        if kept.before is not None:
            self._fetch(kept.before)
        else:
            self._arriving = None
        return x_BTD

    def _fetch(self, kept: _Input) -> None:
        if kept.device is not None or kept.host is None:
            return
        if self._arriving is not None:
            _wait(self._arriving[1])
        kept.device = torch.empty_like(kept.host, device=self._device)
        kept.arrived = self._copy(kept.device, kept.host)
        self._arriving = kept.device, kept.arrived

    def _copy(self, target: Tensor, source: Tensor) -> torch.Event | None:
        if self._stream is None:
            target.copy_(source)
            return None
        before = accelerator.record()
        with self._stream:
            before.wait()
            target.copy_(source, non_blocking=True)
            return accelerator.record()


class ActivationOffload:
    """Keeps the inputs of the recomputed `blocks` of one stage through `transfers`.

    `receives`: the first one's input is another stage's output.
    """

    def __init__(self, blocks: Sequence[Block], transfers: Transfers, *, receives: bool) -> None:
        self._last = [block for block in blocks if block.recompute][-1]
        self._first, self._receives = blocks[0], receives
        self._transfers = transfers
        self._before: _Input | None = None  # in the forward pass that is under way

    def __call__(self, block: Block, x_BTD: Tensor) -> AbstractContextManager[None]:
        """The context of the call of `block`, one after the other, with this input."""
        self._transfers.finish_sending()
        if block is self._first:
            self._before = None
        if not block.recompute:
            return nullcontext()
        # Checkpointing saves the inputs of the layer by the hooks around it. Besides the hidden states these are tables and
        # masks, which all layers share; a compiled layer's may be its weights.
        storage = x_BTD.untyped_storage()._cdata
        return saved_tensors_hooks(partial(self._pack, block, storage), self._unpack)

    def _pack(self, block: Block, storage: int, saved: Tensor) -> Tensor | _Input:
        if saved.untyped_storage()._cdata != storage:
            return saved
        kept = _Input(self._before)
        if block is self._last or (block is self._first and self._receives):
            kept.device = saved.detach()
        else:
            self._transfers.send(kept, saved.detach())
        # After the last one nothing here keeps memory.
        self._before = None if block is self._last else kept
        return kept

    def _unpack(self, packed: Tensor | _Input) -> Tensor:
        return self._transfers.receive(packed) if isinstance(packed, _Input) else packed


def _wait(event: torch.Event | None) -> None:
    """Let the compute stream wait."""
    if event is not None:
        event.wait()
