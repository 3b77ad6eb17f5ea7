"""Two checkpoints compared: bit by bit, whatever layouts wrote them."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import torch

import saving
from seatrial.base.box import Box, chunk
from seatrial.checkpoint.manifest import Damaged, Progress
from seatrial.checkpoint.write import Piece
from seatrial.drill.weights import compare

WHOLE = torch.arange(70, dtype=torch.float32).reshape(10, 7) + 1


def save(folder: Path, values: torch.Tensor = WHOLE, *, ranks: int = 2, random_state: int = 0) -> Path:
    """A checkpoint of one tensor, cut into rows over `ranks`, and a random state of each."""
    barrier = threading.Barrier(ranks)
    folder.mkdir()
    paths: list[Path] = []

    def one(rank: int) -> None:
        offset, size = chunk(10, ranks, rank)
        box = Box.whole((10, 7)).narrow(0, offset, size)
        state = torch.full((8,), random_state, dtype=torch.uint8)

        def agree(ok: bool) -> int:
            barrier.wait(10)
            return 0 if ok else 1

        manifest = saving.new_manifest(Progress(5, 50, 5, 1), layout={"shard": ranks})
        pieces = [
            Piece("model/a", values[box.slices()], box, (10, 7)),
            Piece(f"rng/cpu/{rank}", state, Box.whole((8,)), (8,)),
        ]
        paths.append(saving.save(folder, manifest, pieces, rank=rank, world_size=ranks, agree=agree))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return paths[0]


def test_the_same_bits_are_equal(tmp_path: Path) -> None:
    found = compare(save(tmp_path / "a"), save(tmp_path / "b"))
    assert found.equal
    assert found.tensors == 3


def test_equal_weights_ignore_layout_and_random_state(tmp_path: Path) -> None:
    found = compare(save(tmp_path / "a", ranks=3, random_state=1), save(tmp_path / "b"))
    assert found.equal
    assert found.tensors == 1


def test_one_changed_bit_is_found(tmp_path: Path) -> None:
    changed = WHOLE.clone()
    changed[9, 6] = torch.nextafter(changed[9, 6], torch.tensor(1e9))
    for ranks in (2, 3):
        found = compare(save(tmp_path / f"a{ranks}", changed, ranks=ranks), save(tmp_path / f"b{ranks}"))
        assert found.differing == ["model/a"]
        assert 0 < found.largest < 1e-7
        assert found.where == "model/a"


def test_zeroes_of_two_signs_differ(tmp_path: Path) -> None:
    zeros = torch.zeros_like(WHOLE)
    found = compare(save(tmp_path / "a", -zeros), save(tmp_path / "b", zeros))
    assert found.differing == ["model/a"]
    assert found.largest == 0.0


def test_nan_is_further_than_anything(tmp_path: Path) -> None:
    spoiled = WHOLE.clone()
    spoiled[0, 0] = float("nan")
    assert compare(save(tmp_path / "a", spoiled), save(tmp_path / "b")).largest == math.inf


def test_another_random_state_counts_in_the_same_layout(tmp_path: Path) -> None:
    found = compare(save(tmp_path / "a", random_state=1), save(tmp_path / "b"))
    assert found.differing == ["rng/cpu/0", "rng/cpu/1"]
    assert found.largest == math.inf, "no tolerance is for that"


def test_damage_is_no_difference_but_damage(tmp_path: Path) -> None:
    ours, theirs = save(tmp_path / "a"), save(tmp_path / "b")
    file = ours / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match="XXH3-128"):
        compare(ours, theirs)
