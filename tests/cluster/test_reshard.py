"""A checkpoint of one layout in any other, and back: parameters and optimizer state equal to the last bit.

Ranks are real process groups on gloo. What is compared is what the ranks hold in memory after loading, put together from
their boxes, and what a reader finds in the checkpoints that they save of it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_ranks import arch_of
from torch import Tensor

from conftest import run_cases
from seatrial.base.box import Box
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.job.optimizers import optimizer_named
from seatrial.job.parameters import is_router_bias
from seatrial.model.decoder import whole_shapes

pytestmark = pytest.mark.cluster

FIRST = {"tensor": 2, "pipeline": 2, "shard": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "fsdp4": {"shard": 4},
    "tp4": {"tensor": 4},
    "pp2": {"pipeline": 2},
    "one": {},
    "cp2-fsdp2": {"shard": 4, "context": 2},
    "replicate2-fsdp2": {"replicate": 2, "shard": 2},
    "pp2-interleaved": {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved-1f1b"},
}
TRAINED, MORE = 3, 2
# Not the number of updates: a step that was left out makes none.
STEP = 5
# What the others continue from has the same bits: test_back_in_the_first_layout.
CONTINUED = "pp2-interleaved"


def cases(folder: Path, model: dict[str, Any], continued: Collection[str]) -> list[dict[str, Any]]:
    def case(name: str, layout: dict[str, Any], load: Any, train: int, save: Any) -> dict[str, Any]:
        return {"name": name, "layout": layout, **model, "load": load, "train": train, "save": save}

    first = [str(folder / "first"), STEP]
    # What the same ranks make of it without a checkpoint between is what comes of it after any detour.
    # Experts are divided among ranks in the first layout and in one of the others.
    expert = {"expert": 2} if model.get("family", "").endswith("_moe") else {}
    begin = FIRST | expert
    others = OTHERS | {"fsdp4": OTHERS["fsdp4"] | expert}
    found = [case("whole", begin, None, TRAINED + MORE, None), case("first", begin, None, TRAINED, first)]
    for name, layout in others.items():
        there = [str(folder / name), STEP]
        back = [str(folder / f"{name}-back"), STEP]
        found.append(case(name, layout, first, 0, there))
        found.append(case(f"{name}-back", begin, there, 0, back))
        if name in continued:
            found.append(case(f"{name}-on", begin, back, MORE, None))
    return found


class Moved:
    """What the ranks of all cases held."""

    def __init__(self, folder: Path, model: dict[str, Any], continued: Collection[str]) -> None:
        self.folder, self.arch = folder, arch_of(model)
        known = optimizer_named(model.get("optimizer", {}).get("name", "adamw"))
        self.shapes = {
            f"{kind}/{n}": s
            for n, s in whole_shapes(self.arch).items()
            for kind in ("model", *(() if is_router_bias(n) else known.states_of(n, s)))
        }
        done = run_cases(cases(folder, model, continued), folder, timeout_s=400, script="reshard_ranks.py")
        assert done.returncode == 0, done.stderr[-4000:]

    def ranks(self, name: str) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob(f"{name}.[0-9]*.pt"), key=lambda p: int(p.name.split(".")[1]))
        return [torch.load(file, weights_only=True) for file in files]

    def held(self, name: str) -> dict[str, Tensor]:
        """Every tensor as the ranks hold it in memory. Boxes that several hold must be alike in all of them."""
        whole = {key: torch.full(s, torch.nan) for key, s in self.shapes.items()}
        ranks = self.ranks(name)
        for rank in ranks:
            for kind, n, offsets, values in rank["tensors"]:
                region = whole[f"{kind}/{n}"][Box(tuple(offsets), tuple(values.shape)).slices()]
                known = ~region.isnan()
                assert torch.equal(region[known], values[known]), f"{kind}/{n} differs between ranks"
                region.copy_(values)
        assert not any(values.isnan().any() for values in whole.values())
        assert {count for rank in ranks for count in rank["updates"]} == {float(TRAINED)}
        return whole

    def saved(self, name: str) -> dict[str, Tensor]:
        """Every tensor as its checkpoint has it."""
        checkpoint = CheckpointWeights(self.folder / name / f"step-{STEP:08d}")
        found = {
            key: checkpoint.read_kind(*key.partition("/")[::2], Box.whole(shape), torch.float32)
            for key, shape in self.shapes.items()
        }
        found["updates"] = checkpoint.read_kind("optimizer", "updates", Box.whole((1,)), torch.float32)
        assert set(checkpoint.manifest.tensors) - {
            key for key in checkpoint.manifest.tensors if "rng/" in key
        } == ({*found} - {"updates"} | {"optimizer/updates"})
        checkpoint.close()
        return found


# A head of its own is one more parameter, which test_parity and test_round_trip have too; a tied one is held by two stages.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"tied": False}, marks=pytest.mark.long, id="untied"),
        pytest.param({"tied": True}, id="tied"),
        pytest.param({"tied": False, "family": "qwen3_moe"}, marks=pytest.mark.long, id="experts"),
        pytest.param(
            {"tied": False, "family": "glm4_moe", "optimizer": {"name": "muon"}},
            marks=pytest.mark.long,
            id="shared-experts-muon",
        ),
    ],
)
def moved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Moved:
    continued = {
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", "") == test_training_continues_unchanged_after_a_reshard.__name__
    }
    model = {"kv_heads": 4, **request.param}  # enough for four ranks of tensor parallel
    return Moved(tmp_path_factory.mktemp("reshard"), model, continued)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(found[key].view(torch.int32), values.view(torch.int32)), key


def test_there_is_something_to_lose(moved: Moved) -> None:
    """All of the state has been trained, and no two tensors of it are alike."""
    first = moved.held("first")
    for key, values in first.items():
        assert values.abs().sum() > 0, key
    by_content = {values.numpy().tobytes() for values in first.values()}
    assert len(by_content) == len(first)


@pytest.mark.parametrize("name", OTHERS)
def test_another_layout_holds_the_same_bits(moved: Moved, name: str) -> None:
    assert_same_bits(moved.held(name), moved.held("first"))
    assert_same_bits(moved.saved(name), moved.saved("first"))


@pytest.mark.parametrize("name", OTHERS)
def test_back_in_the_first_layout(moved: Moved, name: str) -> None:
    assert_same_bits(moved.held(f"{name}-back"), moved.held("first"))
    assert_same_bits(moved.saved(f"{name}-back"), moved.saved("first"))
    for rank, (before, after) in enumerate(
        zip(moved.ranks("first"), moved.ranks(f"{name}-back"), strict=True)
    ):
        assert [t[:3] for t in before["tensors"]] == [t[:3] for t in after["tensors"]], rank


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == CONTINUED else pytest.mark.long) for n in OTHERS]
)
def test_training_continues_unchanged_after_a_reshard(moved: Moved, name: str) -> None:
    """After the way there and back, the next steps have the bits that they would have had."""
    for rank, (on, whole) in enumerate(zip(moved.ranks(f"{name}-on"), moved.ranks("whole"), strict=True)):
        assert on["losses"] == whole["losses"][TRAINED:], rank
        assert on["updates"] == {float(TRAINED + MORE)}
        for ours, theirs in zip(on["tensors"], whole["tensors"], strict=True):
            assert ours[:3] == theirs[:3]
            assert torch.equal(ours[3], theirs[3]), (rank, *ours[:2])
