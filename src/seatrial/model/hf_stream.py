"""Writes a safetensors file of any size in bounded memory, block by block as values are read from their source.

The format: 8 bytes length, a JSON header of that length, the tensors' bytes one after the other.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from seatrial.base.box import Box
from seatrial.model.expert_files import read_single
from seatrial.model.source import WeightSource

BLOCK_BYTES = 1 << 26
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_ALIGNMENT = 8


def write_safetensors(
    path: Path,
    source: WeightSource,
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Write the tensors `names` of `source`, under the names they are mapped to, as the new file `path`, durably.

    `names` and `shapes` are as in `file_shapes`.

    Holds one block of `BLOCK_BYTES` in memory (or one row of a parameter, if that is larger) in addition to what the
    source needs. Raises OSError, and any error of the source.
    """
    header: dict[str, object] = {
        "__metadata__": {"format": "pt"}
    }  # transformers refuses files without format "pt"
    end = 0
    # Wide dtypes first: then every tensor is aligned to its element size.
    order = sorted(names, key=lambda name: -dtypes[name].itemsize)
    for name in order:
        begin, end = end, end + Box.whole(shapes[name]).numel * dtypes[name].itemsize
        header[names[name]] = {
            "dtype": _NAMES[dtypes[name]],
            "shape": list(shapes[name]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "xb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for box in _blocks(shapes[name], BLOCK_BYTES // dtypes[name].itemsize):
                f.write(_bytes_of(read_single(source, name, box, dtypes[name])))
        f.flush()
        os.fsync(f.fileno())


def _blocks(shape: tuple[int, ...], values: int) -> Iterator[Box]:
    """Split a tensor into boxes of whole rows, of at most `values` elements each or of one row, in order."""
    if not shape:
        yield Box.whole(shape)
        return
    rows = max(1, values // max(1, Box.whole(shape[1:]).numel))
    for first in range(0, shape[0], rows):
        zeros = (0,) * (len(shape) - 1)
        yield Box((first, *zeros), (min(rows, shape[0] - first), *shape[1:]))


def _bytes_of(values: Tensor) -> memoryview:
    # Viewed as bytes: numpy has no bfloat16.
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data
