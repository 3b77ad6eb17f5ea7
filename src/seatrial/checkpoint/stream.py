"""The layout of a safetensors file, known before its data: tensors can be copied straight to their places.

The format is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes
(huggingface/safetensors, README).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

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
    """The offset of each tensor of a file, and the bytes before the first of them."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """`tensors`: names and values in their order in the file; the values are not kept."""
        entries: dict[str, object] = {}
        self.offsets: list[int] = []  # of each tensor, from the end of the header
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
        """The length and the header. `metadata` comes first in the header, so that it can be read alone."""
        text = "{" + self._entries
        if metadata is not None:
            more = "," if len(self._entries) > 1 else ""
            own = json.dumps(metadata, separators=(",", ":"))
            text = f'{{"__metadata__":{own}{more}{self._entries}'
        data = text.encode()
        data += b" " * (-len(data) % 8)  # aligns the tensors to 8 bytes
        return len(data).to_bytes(8, "little") + data


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must not be empty."""
    assert tensor.is_contiguous()
    view: memoryview = tensor.detach().flatten().view(torch.uint8).numpy().data
    return view
