"""Hugging Face folders as a weight source: safetensors in one file, or in several with an index."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from seatrial.base.box import Box
from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import read_json
from seatrial.job.architecture import Architecture
from seatrial.job.families import family_named
from seatrial.model.expert_files import file_shapes, read_joined, single_name

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_FILE = re.compile(r"(?!\.\.?$)[^/\x00-\x1f\x7f\ud800-\udfff]+")  # a plain file name that is valid text
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class HuggingFaceWeights:
    """The weights of a Hugging Face folder, in one safetensors file or in several with an index.

    Construction reads only the headers, `read` only the requested box. Raises InputError with every file that is
    missing, truncated or contradicts the index.
    """

    def __init__(self, folder: Path, tensor_name: Callable[[str], str] = str) -> None:
        """`tensor_name`: parameter -> its name in the files, if they use other names."""
        self.folder = folder
        self._stored = tensor_name
        self._embedding, self._head = tensor_name(EMBEDDING), tensor_name(HEAD)
        self._files: dict[str, Any] = {}  # name in the files -> the open file that contains it
        problems = self._open()
        if problems:
            raise InputError(problems)

    def _open(self) -> list[Diagnostic]:
        index = self._index()
        wanted: dict[str, list[str]] = {} if index is not None else {WEIGHTS: []}
        for name, file in (index or {}).items():
            wanted.setdefault(file, []).append(name)
        problems = []
        for file, names in sorted(wanted.items()):
            path = self.folder / file
            try:
                opened: Any = safe_open(path, framework="pt")
            except FileNotFoundError:
                problems.append(
                    Diagnostic(
                        f"{INDEX} names {file}, which is missing", str(path), hint="copy the folder again"
                    )
                )
            except (SafetensorError, OSError) as error:
                problems.append(_damaged(path, error))
            else:
                present = list(opened.keys())
                absent = sorted(set(names) - set(present))
                if absent:
                    problems.append(
                        Diagnostic(
                            f"lacks {_some(absent)}, which {INDEX} assigns to this file",
                            str(path),
                            hint="index and weights are of different models: copy the folder again",
                        )
                    )
                self._files.update(dict.fromkeys(present if index is None else names, opened))
        return problems

    def _index(self) -> dict[str, str] | None:
        """Parameter -> file, or None where one file contains all."""
        folder = self.folder
        if not folder.is_dir():
            raise InputError(
                Diagnostic(
                    "is a file, not a folder" if folder.exists() else "no such folder",
                    str(folder),
                    hint="give a local folder with config.json and *.safetensors; a name on the Hub is not looked "
                    f"up: `hf download NAME --local-dir {folder}` fetches it",
                )
            )
        if (folder / WEIGHTS).is_file():
            return None
        path = folder / INDEX
        if not path.is_file():
            hint = f"it needs {WEIGHTS}, or {INDEX} and the files that it names"
            if any(folder.glob("*.bin")):
                hint = (
                    "it has pickled weights (*.bin), which are not loaded because a pickle can run any code: load "
                    "them with transformers and save them again with `save_pretrained`"
                )
            raise InputError(
                Diagnostic("there are no safetensors weights in this folder", str(folder), hint=hint)
            )
        try:
            weight_map = read_json(path, links=True)["weight_map"]
            index = {str(name): str(file) for name, file in weight_map.items()}
        except OSError as error:
            raise InputError(Diagnostic(f"cannot be read: {error.strerror}", str(path))) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                Diagnostic(
                    f'not an index of weights ("weight_map": parameter -> file): {error!r}',
                    str(path),
                    hint="copy the folder again",
                )
            ) from error
        outside = sorted({file for file in index.values() if not _FILE.fullmatch(file)})
        if outside:
            raise InputError(Diagnostic(f"does not name files in the folder: {_some(outside)}", str(path)))
        return index

    def names(self) -> list[str]:
        """Every parameter in the files, sorted."""
        return sorted(self._files)

    def _slice(self, name: str) -> Any:
        # Some writers keep a tied pair under the head's name alone (safetensors.torch.save_model does).
        name = single_name(name, 0)  # the first expert's stands for all
        stored = self._stored(name)
        if name == EMBEDDING and stored not in self._files:
            stored = self._head
        if stored not in self._files:
            raise InputError(Diagnostic(f"has no parameter {stored}", str(self.folder)))
        return self._files[stored].get_slice(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the file. Raises InputError if it is not a floating-point format (quantised weights)."""
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise InputError(Diagnostic(_quantised(name, stored), str(self.folder)))
        return _DTYPES[stored]

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """The values of `box` of parameter `name`; other parts of the file are not read."""
        return read_joined(self._read, name, box, dtype)

    def _read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        self.dtype(name)  # refuses quantised weights
        part, shape = self._slice(name), self.shape(name)
        if Box.whole(shape).intersect(box) != box and box.numel:
            raise ValueError(f"{box} is not inside {name}, whose shape is {shape}")
        if not box.numel:
            return torch.empty(box.sizes, dtype=dtype)
        values: Tensor = part[box.slices()]
        return values.to(dtype).contiguous()

    def check(self, arch: Architecture) -> None:
        """Raise InputError with every mismatch between the files and `arch`."""
        problems: list[tuple[str, str]] = []  # (name in the files, what is wrong)
        present, tied = set(self._files), arch.tie_word_embeddings
        shapes = file_shapes(arch)
        expected = {self._stored(name): name for name in shapes}
        for name, parameter in expected.items():
            if name not in present and not (tied and parameter == EMBEDDING and self._head in present):
                problems.append((name, "is missing"))
                continue
            part, shape = self._slice(parameter), shapes[parameter]
            if tuple(part.get_shape()) != shape:
                problems.append((name, f"has shape {list(part.get_shape())}, the model needs {list(shape)}"))
            if part.get_dtype() not in _DTYPES:
                problems.append(
                    (name, f"is stored as {part.get_dtype()}: quantised weights cannot be trained")
                )
        for name in sorted(present - set(expected)):
            if family_named(arch.family).layers_beyond and _layer(name) >= arch.num_hidden_layers:
                continue
            if name == self._head and tied:
                if self._embedding in present and not self._same(HEAD, EMBEDDING):
                    problems.append((name, f"differs from {self._embedding}, but the model ties them"))
            elif not name.endswith("rotary_emb.inv_freq"):  # old Llama files; computed, not learned
                problems.append((name, "is not a parameter of this model"))
        if problems:
            hint = self._hint(arch)
            raise InputError([Diagnostic(text, str(self.folder), hint=hint) for text in _by_layer(problems)])

    def _same(self, one: str, other: str) -> bool:
        a, b = self._slice(one), self._slice(other)
        if a.get_shape() != b.get_shape() or a.get_dtype() != b.get_dtype():
            return False
        rows = 8192  # a part at a time: the two may be gigabytes
        return all(torch.equal(a[i : i + rows], b[i : i + rows]) for i in range(0, a.get_shape()[0], rows))

    def _hint(self, arch: Architecture) -> str:
        present = set(self._files)
        whole = self._stored("model.norm.weight").split(".")[0] + "."
        if present and not any(name.startswith(whole) for name in present):
            return "these are the names of a base model without its head: save the whole *ForCausalLM"
        if not arch.tie_word_embeddings and self._head not in present and self._embedding in present:
            return f"weights without {self._head} belong to a model with tie_word_embeddings = true"
        return (
            "the weights are not of the model in the job's [model]: compare it with the folder's config.json"
        )


def _layer(name: str) -> int:
    """The number of the layer that a tensor belongs to; -1: none."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def _damaged(path: Path, error: Exception) -> Diagnostic:
    try:
        with open(path, "rb") as f:
            pointer = f.read(64).startswith(b"version https://git-lfs")
    except OSError as unreadable:
        return Diagnostic(
            f"cannot be read: {unreadable.strerror}", str(path), hint="check what it is, and its permissions"
        )
    if pointer:
        return Diagnostic(
            "is a Git LFS pointer, not the weights",
            str(path),
            hint="`git lfs pull` in that folder fetches them",
        )
    return Diagnostic(
        f"is truncated or damaged ({path.stat().st_size} bytes): {error}",
        str(path),
        hint="copy or download it again",
    )


def _quantised(name: str, stored: str) -> str:
    return f"{name} is stored as {stored}: quantised weights cannot be trained"


def _some(items: list[str], most: int = 3) -> str:
    text = ", ".join(items[:most])
    return text if len(items) <= most else f"{text} and {len(items) - most} more"


def _by_layer(problems: list[tuple[str, str]]) -> list[str]:
    """Merge problems that are the same in many layers into one line."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name, what in problems:
        match = re.fullmatch(r"(.+?)\.(\d+)\.(.+)", name)
        key = (name, what) if match is None else (f"{match[1]}.*.{match[3]}", what)
        layers.setdefault(key, []).extend([] if match is None else [int(match[2])])
    lines = []
    for (name, what), numbers in layers.items():
        if len(numbers) == 1:
            name = name.replace("*", str(numbers[0]))
        elif numbers:
            run = len(numbers) == numbers[-1] - numbers[0] + 1
            name += f" (layers {f'{numbers[0]}-{numbers[-1]}' if run else ', '.join(map(str, numbers))})"
        lines.append(f"{name} {what}")
    return lines
