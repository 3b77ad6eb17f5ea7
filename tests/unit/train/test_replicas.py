"""Silent data corruption: checksums, blame, and four real ranks that must decide alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_cases import build
from torch.utils._python_dispatch import TorchDispatchMode

from seatrial.job.layout import Layout
from seatrial.train.health import replicas
from seatrial.train.health.replicas import AtRest, compare, groups
from seatrial.train.step import CHANGED, CHANGED_COPIED

CPU = torch.device("cpu")


class Sums(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func._overloadpacket is torch.ops.aten.sum
        return func(*args, **(kwargs or {}))


def both(values: torch.Tensor) -> tuple[int, int]:
    words = replicas._words(values)
    return int(replicas._sum(words, CPU)), int(replicas._weighted_sum(words, CPU))


@settings(max_examples=60, deadline=None)
@given(
    n=st.sampled_from([1, 2, 3, 7, 8192, 8193, 20001]),
    offset=st.integers(0, 3),
    where=st.integers(0, 10**6),
    bit=st.integers(0, 31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_one_flipped_bit_changes_the_checksum(
    n: int, offset: int, where: int, bit: int, dtype: torch.dtype
) -> None:
    values = torch.arange(1, n + offset + 1).to(dtype)[offset:]
    before = both(values)
    assert both(values) == before
    narrow = values.view(torch.int32 if dtype == torch.float32 else torch.int16)
    narrow[where % n] ^= 1 << (bit % (8 * values.element_size() - 1))
    assert both(values)[0] != before[0]


def test_weighted_sum_by_hand() -> None:
    words = torch.randint(-(2**62), 2**62, (3 * replicas._ROW + 17,))
    wanted = (words * (2 * torch.arange(words.numel()) + 1)).sum()
    assert int(replicas._weighted_sum([words], CPU)) == int(wanted)


@settings(max_examples=30, deadline=None)
@given(a=st.integers(0, 9999), b=st.integers(0, 9999))
def test_second_checksum_detects_what_cancels_in_the_first(a: int, b: int) -> None:
    values = torch.arange(10_000, dtype=torch.float32)
    before = both(values)
    values[[a, b]] = values[[b, a]]
    assert (both(values)[1] != before[1]) == (a // 2 != b // 2 or both(values)[0] != before[0])


def test_at_rest() -> None:
    model, optimizer = build()
    at_rest = AtRest(model, optimizer)
    assert at_rest.changed() is None
    at_rest.keep()
    assert int(at_rest.changed()) == 0  # type: ignore[arg-type]
    for values in [s.local for s in model.shards] + [moment for _, _, moment in optimizer.state()]:
        at_rest.keep()
        values.view(-1)[0] += 1
        assert int(at_rest.changed()) == CHANGED  # type: ignore[arg-type]
        at_rest.copied()
        values.view(-1)[0] -= 1
        # It is as it was, but the copy is not.
        assert int(at_rest.changed()) == CHANGED_COPIED  # type: ignore[arg-type]


def test_few_kernels_read_the_state() -> None:
    model, optimizer = build()
    at_rest = AtRest(model, optimizer)
    with Sums() as read:
        at_rest.keep()
    large = sum(s.local.nbytes > replicas._SMALL for s in model.shards)
    assert len(optimizer.state()) > 20
    assert (
        read.calls <= large + 4
    )  # the optimizer's buffer, small weights by width of their words, and all sums


# -- whom it points at


def sums(layout: Layout, damaged: dict[int, set[int]]) -> list[list[tuple[int, int]]]:
    """Sums where rank r differs in the kinds `damaged`[r]."""
    return [
        [(1 + r, 7) if kind in damaged.get(r, ()) else (0, 7) for kind in range(3)]
        for r in range(layout.world_size)
    ]


FOUR = Layout(replicate=4)
TWO = Layout(replicate=2, tensor=2)
ENDS = Layout(pipeline=4, tensor=2)


@pytest.mark.parametrize(
    ("layout", "damaged", "blamed"),
    [
        (FOUR, {}, None),
        (FOUR, {2: {0}}, [2]),
        (FOUR, {1: {0}, 2: {0}}, [0, 1, 2, 3]),  # no majority
        (Layout(replicate=5), {1: {0}, 2: {0}}, [1, 2]),
        (TWO, {1: {0}}, [1, 3]),
        (TWO, {1: {0, 1}}, [1]),  # its norms disagree with another rank than its other weights
        (Layout(tensor=4), {3: {1}}, [3]),
        (ENDS, {6: {2}}, [0, 6]),
        (ENDS, {2: {2}}, None),  # holds no embedding
        (ENDS, {2: {0}}, None),  # holds what nobody else does
        (Layout(replicate=3, shard=2), {1: {0}, 2: {0}}, [1, 2]),
    ],
)
def test_blame(layout: Layout, damaged: dict[int, set[int]], blamed: list[int] | None) -> None:
    found = compare(groups(layout, tied=True), sums(layout, damaged))
    assert (found.blamed if found is not None else None) == blamed


def test_groups() -> None:
    layout = Layout(pipeline=2, replicate=2, tensor=2)
    assert groups(layout, tied=True) == {
        0: [[0, 2], [1, 3], [4, 6], [5, 7]],
        1: [[0, 1], [2, 3], [4, 5], [6, 7]],
        2: [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    assert groups(Layout(shard=8), tied=False) == {0: [], 1: [], 2: []}


# -- four ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("guard_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.cluster
@pytest.mark.parametrize("layout", ["replicas", "pipeline"])
@pytest.mark.parametrize("fault", ["none", "nan on 2"])
def test_a_transient_nan_leaves_no_trace(
    seen: list[dict[str, dict[str, Any]]], layout: str, fault: str
) -> None:
    for rank in seen:
        assert rank[f"{layout}: {fault}"]["how"] == "done"
        assert rank[f"{layout}: {fault}"]["state"] == rank[f"{layout}: unwatched"]["state"]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("layout", "fault", "blamed", "step"),
    [
        ("replicas", "flip on 2", [2], 3),
        ("pipeline", "flip on 2", [2], 3),
        ("replicas", "norm of 1", [1], 4),
        ("pipeline", "norm of 1", [0, 1], 4),
        ("replicas", "matrix of 1", [1, 3], 4),
        ("replicas", "embedding of 1", [1, 3], 4),
        ("pipeline", "embedding of 1", [1, 3], 4),
    ],
)
def test_all_ranks_raise_alike(
    seen: list[dict[str, dict[str, Any]]], layout: str, fault: str, blamed: list[int], step: int
) -> None:
    for rank in seen:
        own = rank[f"{layout}: {fault}"]
        assert (own["how"], own["blamed"], own["good"], own["step"]) == ("corrupt", blamed, 2, step)
        assert own["applied"] is None
        assert own["findings"] == ([["corruption", step, blamed]] if rank is seen[0] else [])


@pytest.mark.cluster
def test_ranks_blamed_for_nonfinite_values(seen: list[dict[str, dict[str, Any]]]) -> None:
    assert seen[0]["replicas: nan on 2"]["findings"] == [["nonfinite", 3, [2]]]


@pytest.mark.cluster
@pytest.mark.parametrize("layout", ["replicas", "pipeline"])
def test_a_leave_request_to_one_rank_reaches_all(seen: list[dict[str, dict[str, Any]]], layout: str) -> None:
    for rank in seen:
        own = rank[f"{layout}: leave"]
        assert (own["how"], own["passes"], own["applied"]) == ("yielded", [1, 2, 3], 3)
