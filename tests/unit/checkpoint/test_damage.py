"""Ten thousand random damages to a checkpoint: whoever loads it afterwards gets what was saved, or an error."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add, rows, small_chunks, state
from torch import Tensor

from seatrial.base.box import Box
from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.local_place import LocalPlace
from seatrial.checkpoint.manifest import Damaged, OtherVersion, _hash

pytestmark = pytest.mark.cluster  # takes its time

STEP, RANKS, DAMAGES = 500, 2, 10_000
Files = dict[str, bytes]  # of one checkpoint, by name
Damage = Callable[[random.Random, Files, Files], None]  # changes the first; the second is of another step


def _file(generator: random.Random, files: Files) -> str:
    return generator.choice([name for name in files if name.startswith("rank-")])


# -- what can happen to data


def _bit_flip(generator: random.Random, files: Files, _other: Files) -> None:
    name = _file(generator, files)
    data = bytearray(files[name])
    for _ in range(generator.choice((1, 1, 1, 2, 8))):
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    files[name] = bytes(data)


def _overwritten(generator: random.Random, files: Files, _other: Files) -> None:
    name = _file(generator, files)
    data = bytearray(files[name])
    begin = generator.randrange(len(data))
    end = min(len(data), begin + generator.randrange(1, 600))
    data[begin:end] = bytes(end - begin) if generator.random() < 0.5 else generator.randbytes(end - begin)
    files[name] = bytes(data)


def _truncated(generator: random.Random, files: Files, _other: Files) -> None:
    name = _file(generator, files)
    files[name] = files[name][: generator.randrange(len(files[name]))]


def _cut_out(generator: random.Random, files: Files, _other: Files) -> None:
    """Bytes are missing in the middle, or stand there twice; in half of the cases the size is as it was."""
    name = _file(generator, files)
    data = files[name]
    at, n = generator.randrange(len(data)), generator.randrange(1, 300)
    changed = (
        data[:at] + data[at + n :] if generator.random() < 0.5 else data[:at] + data[at : at + n] + data[at:]
    )
    if generator.random() < 0.5:
        changed = changed[: len(data)].ljust(len(data), b"\0")
    files[name] = changed


def _appended(generator: random.Random, files: Files, _other: Files) -> None:
    files[_file(generator, files)] += generator.randbytes(generator.randrange(1, 50))


def _missing(generator: random.Random, files: Files, _other: Files) -> None:
    del files[generator.choice(list(files))]


def _swapped(_generator: random.Random, files: Files, _other: Files) -> None:
    a, b = (name for name in files if name.startswith("rank-"))
    files[a], files[b] = files[b], files[a]


def _doubled(generator: random.Random, files: Files, _other: Files) -> None:
    """One rank's file stands in the place of the other's too; or a copy of it under a name of its own."""
    name = _file(generator, files)
    target = generator.choice([n for n in files if n != name] + ["rank-00009.safetensors", "copy"])
    if target.startswith("rank-") or target == "copy":
        files[target] = files[name]


def _swapped_chunks(generator: random.Random, files: Files, _other: Files) -> None:
    a, b = _file(generator, files), _file(generator, files)
    one, two = bytearray(files[a]), bytearray(files[b])
    if a == b:
        two = one
    i, j = (generator.randrange(len(files[n]) // 256) * 256 for n in (a, b))
    one[i : i + 256], two[j : j + 256] = two[j : j + 256], one[i : i + 256]
    files[a], files[b] = bytes(one), bytes(two)


def _of_another_step(generator: random.Random, files: Files, other: Files) -> None:
    name = generator.choice(list(files))
    files[name] = other[name]


# -- what can happen to the manifest


def _manifest_bytes(generator: random.Random, files: Files, _other: Files) -> None:
    data = bytearray(files["manifest.json"])
    at = generator.randrange(len(data))
    match generator.randrange(5):
        case 0:
            data[at] ^= 1 << generator.randrange(8)
        case 1:
            del data[at:]
        case 2:
            del data[at : at + generator.randrange(1, 40)]
        case 3:
            data[at:at] = generator.randbytes(generator.randrange(1, 9))
        case _:
            digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
            data[generator.choice(digits)] = 48 + generator.randrange(10)
    files["manifest.json"] = bytes(data)


def _manifest_value(generator: random.Random, files: Files, _other: Files) -> None:
    """One value is another one, in correct JSON; its own hash is left as it was."""
    body = json.loads(files["manifest.json"])
    _change_a_value(generator, body)
    files["manifest.json"] = json.dumps(body).encode()


def _manifest_rewritten(generator: random.Random, files: Files, _other: Files) -> None:
    """The same by somebody who writes a fitting hash: what the files say themselves is left to find it."""
    body = json.loads(files["manifest.json"])
    del body["sha256"]
    if generator.random() < 0.5:
        _change_a_value(generator, body["tensors" if generator.random() < 0.7 else "files"])
    else:
        key = generator.choice([k for k, e in body["tensors"].items() if len(e["parts"]) > 1])
        one, two = generator.sample(body["tensors"][key]["parts"], 2)
        for i in generator.choice(((0,), (1,), (2,), (1, 2), (0, 1, 2))):
            one[i], two[i] = two[i], one[i]
    body["sha256"] = _hash(body)
    files["manifest.json"] = json.dumps(body).encode()


def _change_a_value(generator: random.Random, body: Any) -> None:
    while True:
        keys = list(body) if isinstance(body, dict) else list(range(len(body)))
        key = generator.choice(keys)
        value = body[key]
        if isinstance(value, dict | list) and value and generator.random() < 0.95:
            body = value
            continue
        match value:
            case bool():
                body[key] = not value
            case int() | float():
                body[key] = generator.choice((value + 1, value - 1, value * 2, 0, -1, None, str(value)))
            case str():
                body[key] = generator.choice((value + "x", value[1:], value[::-1], "", 5))
            case _:
                body[key] = generator.choice((None, [], {}, 3))
        return


DAMAGE: list[Damage] = [
    *[_bit_flip] * 6,
    *[_overwritten] * 3,
    *[_truncated] * 2,
    *[_cut_out] * 2,
    _appended,
    _missing,
    _swapped,
    _doubled,
    *[_swapped_chunks] * 2,
    _of_another_step,
    *[_manifest_bytes] * 3,
    *[_manifest_value] * 2,
    *[_manifest_rewritten] * 3,
]


def load(place: LocalPlace) -> dict[str, Tensor]:
    """All that a run would take from the checkpoint."""
    weights = place.open(STEP)
    try:
        loaded: dict[str, Tensor] = {}
        for key, whole in state().items():
            kind, _, name = key.partition("/")
            loaded[key] = weights.read_kind(kind, name, Box.whole(whole.shape), whole.dtype)
        for rank in range(RANKS):
            noise = weights.tensor(rank, f"rng/cpu/{rank}")
            if noise is not None:
                loaded[f"rng/cpu/{rank}"] = noise
        return loaded
    finally:
        weights.close()


def wrong(loaded: dict[str, Tensor], saved: dict[str, Tensor]) -> list[str]:
    """What is not bit for bit as it was saved."""
    return [
        key
        for key, value in saved.items()
        if key not in loaded
        or loaded[key].dtype != value.dtype
        or loaded[key].shape != value.shape
        or not torch.equal(loaded[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    ]


@pytest.mark.ci
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.long), 2])
def test_none_of_ten_thousand_damages_is_loaded(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(threads)))
    place = LocalPlace(tmp_path)
    whole = state()
    add(place, STEP, [rows(whole, rank, RANKS) for rank in range(RANKS)])
    add(place, STEP + 1, [rows(state(1), rank, RANKS) for rank in range(RANKS)])
    folder = tmp_path / f"step-{STEP:08d}"
    pristine = {p.name: p.read_bytes() for p in folder.iterdir()}
    other = {p.name: p.read_bytes() for p in (tmp_path / f"step-{STEP + 1:08d}").iterdir()}
    saved = load(place)
    assert wrong(whole, {key: saved[key] for key in whole}) == []
    generator = random.Random(threads)
    seen: Counter[str] = Counter()
    now = dict(pristine)
    for number in range(DAMAGES * 4 // 5 if threads == 1 else DAMAGES // 5):
        damage = generator.choice(DAMAGE)
        files = dict(pristine)
        damage(generator, files, other)
        _put(folder, now, files)
        now = files
        changed = files != pristine
        try:
            found = wrong(load(place), saved)
        except (Damaged, OtherVersion):
            what = "caught"
        else:
            # What was changed is not loaded: a second copy, a value that nobody reads.
            assert found == [], (number, damage.__name__, found)
            what = "harmless"
        assert changed or what == "harmless", (number, damage.__name__)
        seen[f"{damage.__name__} {what if changed else 'unchanged'}"] += 1
    caught = sum(n for what, n in seen.items() if what.endswith("caught"))
    assert caught > 0.8 * sum(seen.values()), seen
    for damage in set(DAMAGE):
        assert seen[f"{damage.__name__} caught"] > 5, seen
    for name in ("_bit_flip", "_truncated", "_appended", "_swapped"):
        assert not seen[f"{name} harmless"], seen


def _put(folder: Path, before: Files, files: Files) -> None:
    """Make the folder's content `files`, where it was `before`."""
    for name in before.keys() - files.keys():
        (folder / name).unlink()
    for name, data in files.items():
        if before.get(name) is not data:
            (folder / name).write_bytes(data)


def test_damaged_checkpoint_is_quarantined_and_previous_loaded(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    for step in (STEP - 1, STEP):
        add(place, step, [rows(state(step), rank, RANKS) for rank in range(RANKS)])
    path = tmp_path / f"step-{STEP:08d}" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    tried = []
    while True:
        step = place.steps()[0]
        try:
            weights = place.open(step)
            found = weights.read("w", Box.whole((10, 7)), torch.float32)
            weights.close()
            break
        except SeatrialError as error:
            tried.append(error.message)
            place.set_aside(step, error.message)
    assert len(tried) == 1
    assert "rank-00001.safetensors (rank 1) has XXH3-128" in tried[0]
    assert torch.equal(found, state(STEP - 1)["model/w"])
    assert place.set_aside_names() == [f"step-{STEP:08d}.damaged"]
    assert tried[0] in (tmp_path / f"step-{STEP:08d}.damaged" / "set-aside.txt").read_text()
    shutil.rmtree(tmp_path / f"step-{STEP:08d}.damaged")
