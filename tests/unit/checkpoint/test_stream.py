"""Our streamed file against the library that defines the format."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from seatrial.checkpoint.stream import DTYPES, FilePlan, raw_bytes


def write_safetensors(path: Path, tensors: list[tuple[str, Tensor]]) -> None:
    plan = FilePlan(tensors)
    head = plan.head()
    data = bytearray(len(head) + plan.data_bytes)
    data[: len(head)] = head
    for (_, tensor), offset in zip(tensors, plan.offsets, strict=True):
        if tensor.numel():
            begin = len(head) + offset
            data[begin : begin + tensor.nbytes] = raw_bytes(tensor.contiguous())
    path.write_bytes(data)


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [
        (f"kind/{dtype}", torch.randint(0, 100, (5, 3), generator=generator).to(dtype)) for dtype in DTYPES
    ]
    tensors += [
        ("odd", torch.arange(7, dtype=torch.uint8)),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.empty(0, 4)),
        ("turned", torch.randn(4, 6).t()),
        ("strided", torch.randn(8, 6)[::2, 1:5]),
    ]
    path = tmp_path / "a.safetensors"
    write_safetensors(path, tensors)
    read = safetensors.torch.load_file(path)
    assert set(read) == {name for name, _ in tensors}
    for name, tensor in tensors:
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_nothing_to_write(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [])
    assert safetensors.torch.load_file(path) == {}


def test_a_type_that_cannot_be_stored(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write_safetensors(tmp_path / "a", [("x", torch.zeros(2, dtype=torch.complex64))])
