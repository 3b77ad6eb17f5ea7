"""Blends: exact proportions at every prefix, the same order from wherever one begins."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.data import blend as blend_module
from seatrial.data.blend import Blend, source_seed

ordinary = st.lists(st.integers(1, 60), min_size=1, max_size=8)
uneven = st.lists(st.floats(0.002, 1.0), min_size=1, max_size=8)
weights = st.one_of(ordinary, uneven)


def by_the_rule(blend: Blend, n: int) -> list[tuple[int, int]]:
    """The first `n` positions as the rule is written, with fractions, from 0 on: slow and plain."""
    taken = [0] * blend.n_sources
    found = []
    for position in range(n):
        begun = [
            (-(-(taken[i] + 1) // share), i)  # ceil of (j / share) for the next sample j of source i
            for i, share in enumerate(blend.shares)
            if taken[i] / share // 1 <= position
        ]
        _, source = min(begun)
        found.append((source, taken[source]))
        taken[source] += 1
    return found


def assert_exact(counts: list[int], position: int, blend: Blend) -> None:
    assert sum(counts) == position
    assert all(abs(n - share * position) < 1 for n, share in zip(counts, blend.shares, strict=True))


@pytest.mark.cluster  # slow
@settings(max_examples=40)
@given(weights)
def test_the_rule_and_its_promise(given_: list[float]) -> None:
    blend = Blend(given_)
    counts = [0] * blend.n_sources
    for position, (source, index) in enumerate(by_the_rule(blend, 700)):
        assert blend.locate(position) == (source, index)
        assert index == counts[source]
        counts[source] += 1
        assert_exact(counts, position + 1, blend)


@settings(max_examples=40)
@given(weights, st.integers(0, 2**61), st.integers(1, 600))
def test_far_away_as_exact_and_without_a_gap(given_: list[float], position: int, n: int) -> None:
    blend = Blend(given_)
    before, after = blend.counts(position), Blend(given_).counts(position + n)
    assert_exact(before, position, blend)
    assert_exact(after, position + n, blend)
    sources, indices = blend.locate_many(np.arange(position, position + n))
    for source, (first, last) in enumerate(zip(before, after, strict=True)):
        assert indices[sources == source].tolist() == list(range(first, last))
    # A prefix inside as well, and one position at a time.
    middle = position + n // 2
    assert_exact(blend.counts(middle), middle, blend)
    assert blend.locate(middle) == (sources[n // 2], indices[n // 2])


@settings(max_examples=30)
@given(uneven, st.integers(0, 10**12))
def test_a_seek_finds_what_came_on_the_way(given_: list[float], begin: int) -> None:
    """Two that come from different places: one blocks before, so that its first counts are guessed elsewhere."""
    here, on_the_way = Blend(given_), Blend(given_)
    positions = np.arange(begin, begin + 5)
    far = np.arange(max(0, begin - 5000), begin + 5)
    sources, indices = on_the_way.locate_many(far)
    found = here.locate_many(positions)
    assert found[0].tolist() == sources[-5:].tolist()
    assert found[1].tolist() == indices[-5:].tolist()


def test_whole_tables_and_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given_ = [0.61, 0.25, 0.1, 0.04]
    whole = Blend(given_).locate_many(np.arange(3000))
    monkeypatch.setattr(blend_module, "_WHOLE_PERIOD", 1)
    monkeypatch.setattr(blend_module, "_BLOCK", 7)
    monkeypatch.setattr(blend_module, "_BLOCKS_KEPT", 2)
    blocks = Blend(given_)
    assert blocks.period == 100
    rng = np.random.default_rng(0)
    for position in rng.integers(0, 3000, 300).tolist():
        assert blocks.locate(position) == (whole[0][position], whole[1][position])
    assert len(blocks._blocks) == 2


def test_weights_are_what_they_are_written_as() -> None:
    assert Blend([0.7, 0.2, 0.1]).shares == [Fraction(7, 10), Fraction(1, 5), Fraction(1, 10)]
    assert Blend([7, 2, 1]).locate_many(np.arange(50))[0].tolist() == (
        Blend([0.7, 0.2, 0.1]).locate_many(np.arange(50))[0].tolist()
    )
    assert Blend([3.5]).locate(12345) == (0, 12345)


def test_sizes_of_corpora_as_weights() -> None:
    """Numbers of twelve digits: the period is far too long for a table, and nothing drifts."""
    blend = Blend([1_403_229_118_003, 27_180_114_417, 9_331_880_259])
    assert blend.period > 10**12
    for position in (10**15, 10**18, 2**62):
        assert_exact(blend.counts(position), position, blend)


def test_the_blend_of_today_is_the_blend_of_tomorrow() -> None:
    # A change here makes every checkpoint resume on other data.
    text = "".join(str(Blend([0.5, 0.3, 0.2]).locate(p)[0]) for p in range(20))
    assert text == "01020101020102010102"
    blend = Blend([0.123, 0.456789, 0.42])
    assert [blend.locate(p) for p in (10**9, 10**12 + 1, 10**15 + 7)] == [
        (1, 456885403),
        (2, 420088638703),
        (2, 420088638702769),
    ]


def test_memory_is_bounded() -> None:
    blend = Blend([0.123456789, 0.876543211])
    for block in range(300):
        blend.locate(block * 10**6)
    assert len(blend._blocks) <= blend_module._BLOCKS_KEPT


def test_shape_and_type() -> None:
    sources, indices = Blend([1, 1]).locate_many(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert (sources.shape, sources.dtype, indices.dtype) == ((2, 3), np.int64, np.int64)
    assert [a.tolist() for a in Blend([1, 1]).locate_many(np.empty(0, dtype=np.int64))] == [[], []]


@pytest.mark.parametrize("given_", [[], [0.0, 1.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_no_such_weights(given_: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be positive numbers"):
        Blend(given_)


def test_no_such_position() -> None:
    blend = Blend([1, 2])
    for call in (blend.locate, blend.counts):
        with pytest.raises(ValueError, match="no sample at -1"):
            call(-1)
    with pytest.raises(ValueError, match="no sample at -2"):
        blend.locate_many(np.array([1, -2]))


def test_sources_have_orders_of_their_own() -> None:
    assert source_seed(1234, 0, 1) == 1234  # as ever
    seeds = {source_seed(seed, i, 3) for seed in range(50) for i in range(3)}
    assert len(seeds) == 150
    assert all(0 <= seed < 2**64 for seed in seeds)
    # A source that is added behind leaves the others as they are.
    assert [source_seed(7, i, 2) for i in range(2)] == [source_seed(7, i, 3) for i in range(2)]
    with pytest.raises(ValueError, match="no source 3 of 3"):
        source_seed(1, 3, 3)


def test_sources_are_spread_evenly() -> None:
    """No stretch of a source alone is longer than its share asks for."""
    sources = Blend([0.5, 0.25, 0.25]).locate_many(np.arange(4000))[0]
    for begin in range(0, 4000, 40):
        counts = Counter(sources[begin : begin + 40].tolist())
        assert all(abs(counts[i] - 40 * share) < 2 for i, share in enumerate((0.5, 0.25, 0.25)))
