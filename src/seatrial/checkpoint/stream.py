"""Writing a safetensors file tensor by tensor: one of them in host memory at a time, hashed on the way.

`safetensors.torch.save_file` needs all tensors on the CPU at once, and its result read again to be hashed. The format is
an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes (huggingface/safetensors, README).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
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


def write_safetensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> tuple[int, str]:
    """Write `tensors` to `path` and make it durable; (bytes, SHA-256 of the bytes as they were in memory)."""
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def put(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for _, tensor in tensors:
            if tensor.numel():
                flat = tensor.detach().cpu().contiguous().flatten()
                put(flat.view(torch.uint8).numpy().data)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()
