"""Writing Hugging Face folders (config.json and safetensors) that transformers' `from_pretrained` reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from seatrial.base.atomic import fsync_folder, write_json, write_text
from seatrial.base.box import Box
from seatrial.base.errors import Diagnostic, InputError, RunFailed
from seatrial.base.units import memory
from seatrial.job.architecture import Architecture
from seatrial.job.families import family_named
from seatrial.job.huggingface import config_from_architecture
from seatrial.job.parameters import is_router_bias
from seatrial.model.expert_files import file_shapes, joined_name
from seatrial.model.hf import EMBEDDING, INDEX, WEIGHTS
from seatrial.model.hf_stream import write_safetensors
from seatrial.model.source import WeightSource

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A tokenizer's companion files, in addition to tokenizer.json.
_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


@dataclass(frozen=True)
class Written:
    """What `write_huggingface` wrote: file names of the weights, their size, and the dtype in config.json."""

    files: list[str]
    bytes: int
    dtype: str


def write_huggingface(
    source: WeightSource,
    arch: Architecture,
    out: Path,
    *,
    dtype: torch.dtype | str = "stored",
    max_shard_bytes: int = 5_000_000_000,
    tokenizer: Path | None = None,
    notes: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write `source` as the folder `out` that `from_pretrained` reads, atomically.

    `dtype` is a torch dtype, its name, or "stored" for what the source's `dtype(name)` returns: float32 if it has no
    such method, or returns float64. A file has at most `max_shard_bytes`, or one parameter; parameters are written
    block by block, so that memory is bounded. `tokenizer` is a tokenizer.json, copied with its companion files. `notes`
    are further files, name -> text. `progress` is called with (bytes done, bytes in total). Files are written to
    `OUT.tmp-PID` and renamed. Raises InputError for an `out` that holds files, an unwritable place, a missing tokenizer
    or too small a disk, RunFailed where writing fails later.
    """
    shapes = file_shapes(arch)
    family = family_named(arch.family)
    # A router's bias stays in fp32, as transformers keeps it: rounded, it would choose other experts.
    dtypes = {
        name: torch.float32 if is_router_bias(name) else stored_dtype(dtype, source, joined_name(name))
        for name in shapes
    }
    sizes = {n: Box.whole(shape).numel * dtypes[n].itemsize for n, shape in shapes.items()}
    total = sum(sizes.values())
    shards = plan_shards(sizes, max_shard_bytes)
    files = [_shard_name(i, len(shards)) for i in range(len(shards))]
    dtype_name = str(dtypes[EMBEDDING]).removeprefix("torch.")
    with new_folder(out, total, tokenizer, notes) as temporary:
        write_json(temporary / "config.json", config_from_architecture(arch, dtype_name))
        done = 0
        for file, names in zip(files, shards, strict=True):
            stored = {n: family.tensor_name(n) for n in names}
            write_safetensors(temporary / file, source, stored, shapes, dtypes)
            done += sum(sizes[n] for n in names)
            if progress is not None:
                progress(done, total)
        if len(files) > 1:
            weight_map = {
                family.tensor_name(n): file for file, names in zip(files, shards, strict=True) for n in names
            }
            metadata = {"total_parameters": arch.parameters(), "total_size": total}
            write_json(
                temporary / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            )
    return Written(files, total, dtype_name)


@contextmanager
def new_folder(
    out: Path, total: int, tokenizer: Path | None = None, notes: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """A temporary folder, which becomes `out` at the end of the block, with tokenizer and notes; see `write_huggingface`.

    `total`: bytes that the block writes.
    """
    temporary = _prepare(out, total, tokenizer)
    try:
        yield temporary
        for path in _tokenizer_files(tokenizer):
            shutil.copyfile(path, temporary / path.name)
        for name, text in (notes or {}).items():
            write_text(temporary / name, text)
        fsync_folder(temporary)
        os.rename(temporary, out)  # replaces an empty folder, and nothing else
        fsync_folder(out.parent)
    except OSError as error:
        raise RunFailed(
            f"writing {out} failed: {error}", hint="free space or check the file system, then export again"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def plan_shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Split the parameters, in order, into shards of at most `limit` bytes or of one parameter."""
    if limit < 1:
        raise ValueError(f"a shard needs at least one byte, not {limit}")
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _shard_name(index: int, count: int) -> str:
    return WEIGHTS if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def stored_dtype(dtype: torch.dtype | str, source: WeightSource, name: str) -> torch.dtype:
    """The dtype in which parameter `name` of `source` is written; `dtype` as in `write_huggingface`."""
    if dtype == "stored":
        dtype_of: Callable[[str], torch.dtype] | None = getattr(source, "dtype", None)
        stored = torch.float32 if dtype_of is None else dtype_of(name)
        dtype = torch.float32 if stored == torch.float64 else stored
    known = _DTYPES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise ValueError(f"weights cannot be written as {dtype}, only as {', '.join(_DTYPES)}")
    return known


def _prepare(out: Path, total: int, tokenizer: Path | None) -> Path:
    """Check `out`, the tokenizer and free space before writing; return the new temporary folder."""
    problems = []
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            hint = "nothing is overwritten: name another folder, or remove this one"
            problems.append(Diagnostic("exists already and is not empty", str(out), hint=hint))
        if tokenizer is not None and not tokenizer.is_file():
            problems.append(Diagnostic("there is no such tokenizer file", str(tokenizer)))
        if problems:
            raise InputError(problems)
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < total:
            raise InputError(
                Diagnostic(
                    f"the weights take {memory(total)}, the disk has {memory(free)} free",
                    str(out),
                    hint="name a folder on another disk, or export as bfloat16",
                )
            )
        temporary = out.with_name(f"{out.name}.tmp-{os.getpid()}")
        temporary.mkdir()
    except OSError as error:
        raise InputError(
            Diagnostic(
                f"cannot be written: {error.strerror}", str(out), hint="name a folder you may write to"
            )
        ) from error
    return temporary


def _tokenizer_files(tokenizer: Path | None) -> Iterable[Path]:
    if tokenizer is None:
        return []
    return [tokenizer, *(p for f in _TOKENIZER_FILES if (p := tokenizer.with_name(f)).is_file())]
