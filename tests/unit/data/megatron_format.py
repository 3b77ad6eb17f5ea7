"""Megatron's indexed dataset, read and written with the standard library alone: the other side for test_megatron.py.

Written from the format's public description (Megatron-LM, megatron/core/datasets/readme.md, and the documented dtype
codes); it shares no code with `seatrial.data.megatron`, so a mistake there is not repeated here.
"""

from __future__ import annotations

import array
import struct
import sys
from pathlib import Path

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}  # dtype code -> letter of `array`
assert sys.byteorder == "little"


def read(prefix: Path) -> tuple[int, list[list[list[int]]]]:
    """(dtype code, documents, each a list of sequences, each a list of token ids)."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, bounds = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    at = 34
    lengths = struct.unpack_from(f"<{sequences}i", index, at)
    at += 4 * sequences
    pointers = struct.unpack_from(f"<{sequences}q", index, at)
    at += 8 * sequences
    documents = struct.unpack_from(f"<{bounds}q", index, at)
    assert at + 8 * bounds == len(index)
    data = Path(f"{prefix}.bin").read_bytes()

    def sequence(i: int) -> list[int]:
        tokens = array.array(CODES[code])
        tokens.frombytes(data[pointers[i] : pointers[i] + lengths[i] * tokens.itemsize])
        return tokens.tolist()

    assert documents[0] == 0
    assert documents[-1] == sequences
    found = []
    for i in range(bounds - 1):
        found.append([sequence(j) for j in range(documents[i], documents[i + 1])])
    return code, found


def write(prefix: Path, documents: list[list[list[int]]], code: int, *, backwards: bool = False) -> None:
    """The pair of files; `backwards` puts the sequences into the .bin in the opposite order."""
    flat = [sequence for document in documents for sequence in document]
    encoded = [array.array(CODES[code], sequence).tobytes() for sequence in flat]
    pointers, at = [0] * len(flat), 0
    chunks = []
    for i in reversed(range(len(flat))) if backwards else range(len(flat)):
        pointers[i] = at
        at += len(encoded[i])
        chunks.append(encoded[i])
    Path(f"{prefix}.bin").write_bytes(b"".join(chunks))
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(flat), len(bounds))
        + struct.pack(f"<{len(flat)}i", *map(len, flat))
        + struct.pack(f"<{len(flat)}q", *pointers)
        + struct.pack(f"<{len(bounds)}q", *bounds)
    )
