"""Compressed files: detected by content, read as a stream of the decompressed content."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import zstandard

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Packing = Literal["gzip", "bzip2", "xz", "zstd"]

PACKINGS: dict[str, Packing] = {
    ".gz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".zst": "zstd",
    ".zstd": "zstd",
}
_MAGIC: dict[Packing, tuple[bytes, ...]] = {
    "gzip": (b"\x1f\x8b\x08",),
    # "BZh" and a digit may be text; the magic number of a block (pi) or of the stream's end (sqrt pi) follows.
    "bzip2": tuple(
        b"BZh%d%s" % (n, b) for n in range(1, 10) for b in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
    ),
    "xz": (b"\xfd7zXZ\0",),
    # A data frame, or a skippable frame (RFC 8878, 3.1).
    "zstd": (b"\x28\xb5\x2f\xfd", *(b"%c\x2a\x4d\x18" % n for n in range(0x50, 0x60))),
}

# Compressed bytes per call. gzip and zstd expand them completely in memory: to 4 and 128 MiB for zeros.
_AT_ONCE = 1 << 12
# The other two accept an output limit: bzip2 expands 40 bytes to 45 MB.
_MADE_AT_ONCE: dict[Packing, tuple[int, ...]] = {"bzip2": (1 << 20,), "xz": (1 << 20,)}
_XZ_MEMORY = 1 << 28  # memory limit: xz -9 needs 65 MiB. zstd's own limit is 128 MiB
# Text compresses 3 to 20 times. A much higher ratio is not training text, and would fill the disk.
_FREE_BYTES, _MOST_TIMES = 1 << 26, 200


# The decoders have eof, unused_data and decompress(), as in the standard library.
_DECODERS: dict[Packing, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY),
    "zstd": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


def packing_of(head: bytes, named: Packing | None = None) -> Packing | None:
    """The compression of a file that begins with `head` (16 bytes, or the whole file); None if not compressed.

    `named`, from its suffix, decides if the file is shorter than the magic number.
    """
    for packing, magic in _MAGIC.items():
        if head.startswith(magic):
            return packing
    if named is not None and any(magic.startswith(head) for magic in _MAGIC[named]):
        return named
    return None


def unpack(path: Path, packing: Packing) -> BinaryIO:
    """Open the decompressed content of the file at `path` for sequential reading. Its `raw` is an `Unpacked`."""
    return io.BufferedReader(Unpacked(path, packing), 1 << 16)


class Unpacked(io.RawIOBase):
    """The decompressed content of a file, in bounded memory.

    Concatenated streams are one content. OSError if the file is damaged, truncated, or expands beyond the limit for
    text.
    """

    def __init__(self, path: Path, packing: Packing) -> None:
        self._packing = packing
        self._decoder = _DECODERS[packing]()
        self._ready = memoryview(b"")
        self._rest = b""  # bytes of the file after the end of a stream
        self._made = 0
        self._file = open(path, "rb")  # noqa: SIM115  closed by close()
        self._most = max(_FREE_BYTES, _MOST_TIMES * path.stat().st_size)

    @property
    def position(self) -> int:
        """Bytes read from the file."""
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        while not self._ready:
            if not self._advance():
                return 0
        n = min(len(view), len(self._ready))
        view[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n

    def _advance(self) -> bool:
        """Decompress the next block; False at the end of the file."""
        data = b""
        if self._decoder.eof or getattr(self._decoder, "needs_input", True):
            data = self._rest or self._file.read(_AT_ONCE)
            self._rest = b""
            if not data:
                if not self._decoder.eof:
                    raise OSError(None, f"truncated: its {self._packing} data ends early")
                return False
        if self._decoder.eof:
            data = data.lstrip(b"\0")
            if not data:
                return True
            self._decoder = _DECODERS[self._packing]()
        try:
            made: bytes = self._decoder.decompress(data, *_MADE_AT_ONCE.get(self._packing, ()))
        except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as e:
            raise OSError(None, f"damaged {self._packing} data before byte {self.position}: {e}") from e
        if self._decoder.eof:
            self._rest = self._decoder.unused_data
        self._made += len(made)
        if self._made > self._most:
            raise OSError(
                None,
                f"its {self._packing} data has more than {self._most:,} bytes, over {_MOST_TIMES} times the file's: "
                "it is treated as a decompression bomb (unpack it yourself if it is not)",
            )
        self._ready = memoryview(made)
        return True
