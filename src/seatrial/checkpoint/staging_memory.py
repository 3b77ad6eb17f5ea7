"""Memory that a rank copies its state into and another process reads: a memfd, pinned if there is a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from seatrial.base.complain import complain
from seatrial.checkpoint.stream import FilePlan
from seatrial.checkpoint.write import Piece
from seatrial.hardware import accelerator

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_POPULATED_AT_ONCE = 1 << 24  # bytes: bounds how long another thread's memory allocation waits
_GRAIN = 1 << 21  # the size is a multiple of this many bytes: a few more tensors need no new memory
_libc = ctypes.CDLL(None, use_errno=True)


class StagingMemory:
    """Grows as needed, and is kept between copies: touching new memory for the first time is slow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fd: int | None = None
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)  # all of it
        self._pinned = False
        self._copied: torch.Event | None = None
        self._populating: _Populating | None = None

    @property
    def fd(self) -> int:
        """Descriptor of the memory file."""
        if self._fd is None:
            self._fd = os.memfd_create("seatrial-staging")
        return self._fd

    def prepare(self, size: int) -> None:
        """Begin to provide `size` bytes ahead of use. Raises OSError."""
        self._provide(size)

    @torch.no_grad()
    def fill(self, head: bytes, pieces: Sequence[Piece], plan: FilePlan, index: bytes) -> None:
        """Replace the content: `head`, the tensors of `pieces` at `plan`'s offsets, `index`. Raises OSError."""
        self.copied()  # the previous copy, if nothing has waited for it
        data = len(head)
        end = data + plan.data_bytes
        self._provide(end + len(index))
        self._populated()
        memory = self._map
        assert memory is not None
        memory[:data] = head
        memory[end : end + len(index)] = index
        for piece, offset in zip(pieces, plan.offsets, strict=True):
            place = self._bytes[data + offset :][: piece.tensor.nbytes]
            _seen_as(place, piece.tensor).copy_(piece.tensor, non_blocking=True)
        if accelerator.is_accelerator(self._device):
            self._copied = accelerator.record()

    def copied(self) -> None:
        """Wait until the copy has finished."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def leave(self) -> None:
        """Give up the file, which another process may have open, and use a new one next time."""
        self._release()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Release all of it."""
        self.leave()

    def _provide(self, size: int) -> None:
        if self._map is not None and len(self._map) >= size:
            return
        self._release()
        size = -(-size // _GRAIN) * _GRAIN
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._populating = _Populating(self._bytes.data_ptr(), size, self._device)
        self._populating.start()

    def _release(self) -> None:
        if self._map is None:
            return
        self.copied()
        with contextlib.suppress(OSError):
            self._populated()
        if self._pinned:
            accelerator.unpin(self._bytes.data_ptr())
            self._pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._map.close()
        self._map = None

    def _populated(self) -> None:
        """Wait until all memory is populated. Raises OSError if there is not enough."""
        populating, self._populating = self._populating, None
        if populating is not None:
            populating.join()
            self._pinned = populating.pinned
            if populating.errno:
                self._release()
                raise OSError(
                    populating.errno, f"no memory for a copy of the state: {os.strerror(populating.errno)}"
                )


def _seen_as(place: Tensor, like: Tensor) -> Tensor:
    return place.view(like.dtype).view(like.shape)


class _Populating(threading.Thread):
    """Populates and pins new memory in parallel with training: that is slow.

    Populates this process's page table: page by page at the first touch is several times slower. If there is a
    GPU, pins the memory, so that the device copies into it by DMA.
    """

    def __init__(self, address: int, size: int, device: torch.device) -> None:
        super().__init__(name="staging", daemon=True)
        self.errno = 0
        self.pinned = False
        self._address, self._size, self._device = address, size, device

    def run(self) -> None:
        self._populate()
        if accelerator.is_accelerator(self._device) and not self.errno:
            error = accelerator.pin(self._address, self._size, self._device)
            self.pinned = error == 0
            if not self.pinned:
                complain(
                    f"memory for checkpoints could not be pinned (CUDA error {error}): copying is slower"
                )

    def _populate(self) -> None:
        for begin in range(0, self._size, _POPULATED_AT_ONCE):
            at, length = self._address + begin, min(_POPULATED_AT_ONCE, self._size - begin)
            if _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), _POPULATE_WRITE) != 0:
                error = ctypes.get_errno()
                # An older kernel does not support it: then the first copy touches every page.
                self.errno = 0 if error == errno.EINVAL else error
                return
