"""Writing a safetensors file tensor by tensor: one of them in host memory at a time, hashed on the way.

`safetensors.torch.save_file` needs all tensors on the CPU at once, and its result read again to be hashed. The format is
an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes (huggingface/safetensors, README).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class FilePlan:
    """Where each tensor of a file stands, and the bytes before the first of them."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """`tensors`: names and values in their order in the file; the values are not kept."""
        entries: dict[str, object] = {}
        self.offsets: list[int] = []  # of each tensor, from the end of the header on
        self.data_bytes = 0
        for name, tensor in tensors:
            begin = self.data_bytes
            self.data_bytes += tensor.numel() * tensor.element_size()
            self.offsets.append(begin)
            entries[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, self.data_bytes],
            }
        self._entries = json.dumps(entries, separators=(",", ":"))[1:]  # without the opening bracket

    def head(self, metadata: Mapping[str, str] | None = None) -> bytes:
        """The length and the header. `metadata` stands first in the header, so that it can be read alone."""
        text = "{" + self._entries
        if metadata is not None:
            more = "," if len(self._entries) > 1 else ""
            own = json.dumps(metadata, separators=(",", ":"))
            text = f'{{"__metadata__":{own}{more}{self._entries}'
        data = text.encode()
        data += b" " * (-len(data) % 8)  # so that the tensors begin at a multiple of 8
        return len(data).to_bytes(8, "little") + data


def write_safetensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> tuple[int, str]:
    """Write `tensors` to `path` and make it durable; (bytes, SHA-256 of the bytes as they were in memory)."""
    head = FilePlan(tensors).head()
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def put(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        put(head)
        for _, tensor in tensors:
            if tensor.numel():
                put(raw_bytes(tensor.detach().cpu().contiguous()))
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; it must not be empty."""
    assert tensor.is_contiguous()
    view: memoryview = tensor.detach().flatten().view(torch.uint8).numpy().data
    return view
