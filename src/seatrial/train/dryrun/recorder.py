"""Records every operation that torch dispatches in a step: storages, FLOPs and communication."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from seatrial.base.errors import InternalError
from seatrial.parallel import overlap_ops, ring
from seatrial.train.dryrun.timeline import Timeline

_aten, _c10d, _fsdp = torch.ops.aten, torch.ops.c10d, torch.ops.fsdp

WEIGHTS, GRADIENTS = "gathered weights", "gradients"

# Operation -> (kind, argument that gives the size: of two, the one with all ranks' data).
_COLLECTIVES: dict[Any, tuple[str, str]] = {
    _c10d.allreduce_: ("all-reduce", "tensors"),
    _c10d._allgather_base_: ("all-gather", "output_tensor"),
    _c10d._reduce_scatter_base_: ("reduce-scatter", "input_tensor"),
    _c10d.alltoall_base_: ("all-to-all", "input"),
    _c10d.broadcast_: ("broadcast", "tensors"),
    _c10d.send: ("send", "tensors"),
    _c10d.recv_: ("receive", "tensors"),
    _c10d.recv_any_source_: ("receive", "tensors"),
}
# Our own operators, which hide what they launch and compute.
IMPLEMENTATIONS = overlap_ops.IMPLEMENTATIONS | ring.IMPLEMENTATIONS
_DATA = ("shard", "expert_shard", "replicate")  # dimensions whose collectives are sharded data parallel's
_FORWARD_ATTENTION = {
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
}
_BACKWARD_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
}
_MATMUL = {
    *(_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm),
    *(_aten.addmm_, _aten._grouped_mm, _aten._scaled_mm),
}


@dataclass
class Counts:
    """The FLOPs and the communication of a step."""

    # (forward, backward or update; matmul, attention or other) -> FLOPs. Attention counts the whole score matrix,
    # and its backward pass five products, since the kernel computes the scores again: 10 B N T^2 H after 4 B N T^2 H.
    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    # (kind, dimension, dtype, bytes of one) -> calls. Bytes are those of the whole tensor: of an all-gather the output,
    # of a reduce-scatter the input, of an all-to-all what this rank sends, else the message.
    collectives: Counter[tuple[str, str, str, int]] = field(default_factory=Counter)


class Recorder(TorchDispatchMode):
    """A dispatch mode that observes operations on fake or real tensors.

    `dimensions`: name of a process group -> dimension of the layout.
    """

    def __init__(self, timeline: Timeline, dimensions: Mapping[str, str]) -> None:
        super().__init__()
        self.timeline = timeline
        self.counts = Counts()
        self.phase = "forward"
        self._dimensions = dimensions
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._next = 0
        self._resize: Callable[..., Any] | None = None

    def restart(self) -> None:
        """Begin another step: reset the counts, but keep live storages."""
        self.timeline.restart()
        self.counts = Counts()
        self.phase = "forward"

    # -- storages

    def add(self, tensors: Sequence[Tensor], kind: str | None = None) -> None:
        """Track the storages of `tensors` from now on, and assign their kind."""
        for tensor in tensors:
            number = self._number(tensor)
            if kind is not None:
                self.timeline.set_kind(number, kind)

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None:
            return known[0]
        number, self._next = self._next, self._next + 1
        timeline, table = self.timeline, self._known

        def gone(_: object) -> None:
            del table[key]
            timeline.resize(number, 0)

        table[key] = (number, weakref.ref(storage, gone))
        timeline.resize(number, storage.nbytes())
        return number

    def __enter__(self) -> Recorder:
        # FSDP frees gathered weights by resizing their storage to 0, which is not a dispatched operation.
        original = torch.UntypedStorage.resize_
        table, timeline = self._known, self.timeline

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            known = table.get(storage._cdata)
            if known is not None:
                timeline.set_kind(known[0], WEIGHTS)
                timeline.resize(known[0], storage.nbytes())
            return result

        self._resize = original
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it computes on its local tensors, whose operations are dispatched here
        packet = func.overloadpacket
        if packet in _MATMUL:
            self.timeline.split()
        if packet in _COLLECTIVES:
            self._collective(func, *_COLLECTIVES[packet], args, kwargs)
        elif func.namespace in ("c10d", "_c10d_functional"):
            raise InternalError(f"a step uses {packet}, whose bytes the dry run does not know")
        inside = IMPLEMENTATIONS.get(func)
        if inside is not None:
            # What it launches and computes counts. Fake tensors would hide it.
            super().__enter__()
            try:
                return inside(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":  # host memory, see `kernels`
                self._number(leaf)
        self._mark_gradients(packet, args, kwargs)
        self._count_flops(packet, args, kwargs, result)
        return result

    def _collective(
        self, func: Any, kind: str, sized_by: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        group = ProcessGroup.unbox(given["process_group"])
        name = group.group_name
        if name not in self._dimensions:
            raise InternalError(
                f"a step uses the process group {name}, which is not a dimension of the layout"
            )
        dimension = self._dimensions[name]
        tensors = [t for t in tree_leaves(given[sized_by]) if isinstance(t, Tensor)]
        dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors}
        n_bytes = sum(t.nbytes for t in tensors)
        self.counts.collectives[kind, dimension, "+".join(sorted(dtypes)), n_bytes] += 1
        if dimension in _DATA:
            self.timeline.split()
            if kind == "all-gather":
                self.add(tensors, WEIGHTS)

    def _mark_gradients(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark as gradients the tensors that FSDP reduces, and the buffer it copies them into."""
        if packet is _fsdp.chunk_cat:
            self.add([t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)], GRADIENTS)

    def _count_flops(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if packet in _FORWARD_ATTENTION:
            self.counts.flops[self.phase, "attention"] += 2 * _attention_product(args[0], args[1])
        elif packet in _BACKWARD_ATTENTION:
            self.counts.flops[self.phase, "attention"] += 5 * _attention_product(args[1], args[2])
        elif packet is _aten._flash_attention_forward:
            self.counts.flops[self.phase, "attention"] += 2 * _packed_product(args[0], longest=args[6])
        elif packet is _aten._flash_attention_backward:
            self.counts.flops[self.phase, "attention"] += 5 * _packed_product(args[1], longest=args[9])
        elif packet is _aten.addmm_:
            # Of the head's loss, part by part; torch counts the one that is not in place.
            self.counts.flops[self.phase, "matmul"] += 2 * args[1].numel() * args[2].shape[-1]
        elif packet is _aten._grouped_mm:  # rows x matrices, or for the weights' gradient columns x rows
            self.counts.flops[self.phase, "matmul"] += 2 * args[0].numel() * args[1].shape[-1]
        elif packet in flop_registry:
            kind = "matmul" if packet in _MATMUL else "other"
            self.counts.flops[self.phase, kind] += flop_registry[packet](*args, **kwargs, out_val=result)


def _attention_product(query_BNTH: Tensor, key_BKSH: Tensor) -> int:
    """FLOPs of one product over all scores: 2 B N T S H."""
    B, N, T, H = query_BNTH.shape
    return 2 * B * N * T * key_BKSH.shape[2] * H


def _packed_product(query_SNH: Tensor, longest: int) -> int:
    """The same of sequences one after the other, all as long as the longest."""
    return 2 * query_SNH.numel() * longest


def dimensions(mesh: Any) -> dict[str, str]:
    """Name of each process group of this rank -> its dimension of the layout (`mesh`: `parallel.mesh.Mesh`)."""
    names = {}
    # Later names replace earlier ones: `stage` and `ends` may be one of the other groups.
    for dimension in ("stage", "ends", "tensor", "expert", "context", "pipeline", *_DATA):
        group = getattr(mesh, dimension)
        if group is not None:
            names[group.group_name] = dimension
    world = dist.group.WORLD
    assert world is not None
    return {world.group_name: "world"} | names
