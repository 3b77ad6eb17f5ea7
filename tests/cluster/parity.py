"""The same training in many layouts, run by parity_ranks.py, and how far it may be from that of one process.

A right loss over wrong gradients is the classic fault of parallel training, so the gradients of the first step are put
together from all ranks' boxes and compared one by one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from conftest import run_cases, selected_cases

Case = dict[str, Any]

LOSS_ABSOLUTE = 1e-5
NORM_RELATIVE = 5e-5
GRADIENT_OF_LARGEST = 1e-5
# For `assert_trains_alike`, between two runs in bf16.
BF16 = {"loss": 0.02, "norm": 0.03, "worst": math.inf}

INTERLEAVED = {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved-1f1b"}
ZERO_BUBBLE = {"pipeline": 2, "stages_per_rank": 2, "schedule": "zero-bubble"}
FULL = {"tensor": 2, "pipeline": 2, "shard": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "fsdp2": {"shard": 2},
    "tp2-fsdp2": {"tensor": 2, "shard": 2},
    "pp2-fsdp2": {"pipeline": 2, "shard": 2},
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "tp2-pp2-fsdp2": FULL,
    "pp2-interleaved": INTERLEAVED,
    "tp2-pp2-fsdp2-interleaved": {**FULL, **INTERLEAVED},
    "pp2-zero-bubble": ZERO_BUBBLE,
    "pp4": {"pipeline": 4},
    "replicate2-fsdp2": {"replicate": 2, "shard": 2},
}
RECOMPUTE = {"activation_checkpointing": "full"}
OFFLOAD = {**RECOMPUTE, "offload_activations": True}
SELECTIVE = {"activation_checkpointing": "selective"}


@dataclass
class Ran:
    """What all ranks of one case saw."""

    case: Case
    ranks: list[dict[str, Any]]

    @property
    def history(self) -> list[tuple[float, float]]:
        """(loss, gradient norm) of each step, as the first rank tells it."""
        history: list[tuple[float, float]] = self.ranks[0]["history"]
        return history

    def assert_ranks_agree(self) -> None:
        """On each step's loss and gradient norm, to the last bit."""
        assert all(rank["history"] == self.history for rank in self.ranks), self.case["name"]

    def tensors(self, what: str) -> dict[str, Tensor]:
        """`gradients` or `weights` of one process, by name."""
        (rank,) = self.ranks
        return {name: values for name, _, values in rank[what]}

    def whole(self, what: str, reference: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, this layout's part, the reference's same part); asserts that the parts cover every parameter."""
        seen = {name: torch.zeros(values.shape, dtype=torch.bool) for name, values in reference.items()}
        for rank in self.ranks:
            for name, offsets, values in rank[what]:
                index = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
                seen[name][index] = True
                yield name, values, reference[name][index]
        missing = [name for name, covered in seen.items() if not covered.all()]
        assert not missing, f"no rank holds all of {missing}"


def run_layouts(
    request: pytest.FixtureRequest,
    cases: Mapping[str, Case],
    *,
    optional: Collection[str] = (),
    script: str = "parity_ranks.py",
    timeout_s: float = 600,
    **usual: Any,
) -> dict[str, Ran]:
    """Every case, run once; one in `optional` only if a selected test of the file has its `name`.

    `usual` is what a case has where it says nothing else: without it one process, an untied head, and "one" for `peer`,
    the case that must train alike.
    """
    unwanted = {*optional} - selected_cases(request)
    usual = {"layout": {}, "tied": False, "peer": "one", **usual}
    wanted = [{"name": name, **usual, **case} for name, case in cases.items() if name not in unwanted]
    out = request.getfixturevalue("tmp_path_factory").mktemp("layouts")
    done = run_cases(wanted, out, timeout_s, script)
    assert done.returncode == 0, done.stderr[-4000:]

    def of(case: Case) -> Ran:
        files = sorted(out.glob(f"{case['name']}.*.pt"))
        return Ran(case, [torch.load(file, weights_only=True) for file in files])

    return {case["name"]: of(case) for case in wanted}


class Difference(NamedTuple):
    loss: float  # largest absolute one over all steps and ranks
    norm: float  # of the gradient norm, relative
    worst: float  # of a tensor, as a part of its own largest entry
    whose: str


def errors(ran: Ran, one: Ran, what: str = "gradients") -> dict[str, float]:
    """How far each tensor is from that of one process, as a part of its own largest entry."""
    reference = one.tensors(what)
    found = dict.fromkeys(reference, 0.0)
    for name, ours, theirs in ran.whole(what, reference):
        assert ours.isfinite().all(), name
        assert theirs.isfinite().all(), name
        if ours.numel():
            error = float((ours - theirs).abs().max() / reference[name].abs().max())
            found[name] = max(found[name], error)
    return found


def compare(runs: dict[str, Ran], name: str, peer: str = "", what: str = "gradients") -> Difference:
    """A run with `peer`, or with the one that its case names, over the steps of the first."""
    ran, one = runs[name], runs[peer or runs[name].case["peer"]]
    theirs = one.history[: len(ran.history)]
    pairs = [pair for rank in ran.ranks for pair in zip(rank["history"], theirs, strict=True)]
    loss = max(abs(a - b) for (a, _), (b, _) in pairs)
    norm = max(abs(a - b) / b for (_, a), (_, b) in pairs)
    found = errors(ran, one, what)
    whose = max(found, key=found.__getitem__)
    return Difference(loss, norm, found[whose], whose)


def assert_trains_alike(
    runs: dict[str, Ran],
    name: str,
    *,
    loss: float = LOSS_ABSOLUTE,
    norm: float = NORM_RELATIVE,
    worst: float = GRADIENT_OF_LARGEST,
    what: str = "gradients",
) -> None:
    """As the case that its own names as `peer`, and alike in all ranks; see `Difference` for the limits."""
    found = compare(runs, name, what=what)
    told = f"{name}: loss {found.loss:.1e}, norm {found.norm:.1e}, {what} {found.worst:.1e} ({found.whose})"
    print(told)  # pytest -rP shows it
    assert found.loss < loss, told
    assert found.norm < norm, told
    assert found.worst < worst, told
    runs[name].assert_ranks_agree()


def assert_same_load(ran: Ran, one: Ran) -> None:
    """Every expert gets as many positions in each step, over all ranks, and every rank knows the load."""
    assert torch.equal(routed(ran), routed(one))
    assert all(rank["load"] == one.ranks[0]["load"] for rank in ran.ranks)


def routed(ran: Ran) -> Tensor:
    """Positions sent to each expert of each layer in each step, [steps, L, X]."""
    return torch.stack([torch.stack(rank["routed"]) for rank in ran.ranks]).sum(0)


def assert_same_bits(ran: Ran, other: Ran, *what: str) -> None:
    """Each rank's history, up to the last step of `ran`, and what it has of `what`."""
    for ours, theirs in zip(ran.ranks, other.ranks, strict=True):
        assert ours["history"] == theirs["history"][: ran.case["steps"]]
        for key in what:
            for (name, _, a), (_, _, b) in zip(ours[key], theirs[key], strict=True):
                assert torch.equal(a, b), name
