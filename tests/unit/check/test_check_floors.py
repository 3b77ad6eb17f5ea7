"""The catalogue of what healthy hardware reads."""

from __future__ import annotations

import math

import pytest

from seatrial.check.judging.floors import find_sku, highest, judge_share, nics, shares, skus, targets
from seatrial.hardware.catalogue import find_gpu


def test_floors_have_sources_and_bandwidths_have_definitions() -> None:
    for sku in skus():
        assert sku.source, sku.name
        assert sku.names, sku.name
        for floor in sku.floors:
            assert floor.source, (sku.name, floor)
            assert floor.algorithm, (sku.name, floor)
            assert floor.unit in ("GB/s", "TFLOP/s")
            assert bool(floor.direction) == (floor.unit == "GB/s"), (sku.name, floor)
            if floor.what == "all_reduce":
                assert floor.size_bytes == 8 << 30, (sku.name, floor)
    assert all(nic.source and nic.gbit_s > 0 for nic in nics())


def test_the_issue_s_kinds_are_there() -> None:
    for name in ("A100-80GB SXM", "H100 SXM", "H200 SXM", "B200 SXM", "B300 SXM", "GB200", "MI300X"):
        assert find_sku(name) is not None, name
    layers = {(nic.gbit_s, nic.layer) for nic in nics()}
    assert {
        (200, "InfiniBand"),
        (400, "InfiniBand"),
        (800, "InfiniBand"),
        (400, "Ethernet"),
        (400, "EFA"),
    } <= layers


def test_no_floor_is_above_what_the_data_sheet_promises() -> None:
    """NVLS makes busbw pass the one-way link rate, by at most the share that the network adds up for the GPU."""
    for sku in skus():
        gpu = next((g for n in sku.names if (g := find_gpu(n)) is not None), None)
        for floor in sku.floors:
            if gpu is None:
                continue
            if floor.what == "nvlink_copy":
                limit = gpu.link_gb_s * (2 if floor.direction == "both directions" else 1)
                assert floor.value < limit, (sku.name, floor)
            if floor.what == "gemm_bf16":
                assert floor.value < gpu.bf16_tflops, (sku.name, floor)
            if floor.what == "all_reduce" and floor.algorithm == "ring":
                assert floor.value < gpu.link_gb_s, (sku.name, floor)


def test_the_nvlink_target_is_for_both_directions_and_no_floor() -> None:
    target = targets()["nvlink"]
    assert (target.value, target.unit, target.direction) == (800.0, "GB/s", "both directions")
    floor = find_sku("NVIDIA H100 80GB HBM3").floor("nvlink_copy", direction="both directions")  # type: ignore[union-attr]
    assert floor is not None
    # What healthy cards were seen to read lies below the target, and must pass.
    assert floor.verdict(749.0) == "PASS"
    assert floor.value < target.value


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [(392.0, "PASS"), (368.0, "PASS"), (367.9, "WARN"), (320.0, "WARN"), (319.9, "FAIL"), (math.nan, "FAIL")],
)
def test_between_nodes_below_80_is_broken_and_below_92_suspect(measured: float, verdict: str) -> None:
    assert judge_share(measured / 400.0) == verdict
    assert (shares().broken, shares().suspect) == (0.80, 0.92)


def test_a_gate_has_no_grey_zone() -> None:
    sku = find_sku("H100 SXM")
    assert sku is not None
    gate = sku.floor("host_to_device")
    assert gate is not None
    assert gate.kind == "gate"
    assert gate.verdict(48.0) == "PASS"
    assert gate.verdict(47.9) == "FAIL"
    assert gate.verdict(math.nan) == "FAIL"


def test_names_match_whole_or_not_at_all() -> None:
    assert find_sku("NVIDIA H100 80GB HBM3").name == "H100 SXM"  # type: ignore[union-attr]
    assert find_sku("nvidia a100-sxm4-80gb").name == "A100 SXM"  # type: ignore[union-attr]
    assert find_sku("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert find_sku("NVIDIA H20") is None
    assert find_sku(None) is None


def test_the_lowest_floor_unless_one_is_named() -> None:
    sku = find_sku("H100 SXM")
    assert sku is not None
    assert sku.floor("all_reduce").algorithm == "ring"  # type: ignore[union-attr]
    assert sku.floor("all_reduce", algorithm="NVLS").value == 473.0  # type: ignore[union-attr]
    assert sku.floor("all_reduce", algorithm="tree") is None
    assert highest("all_reduce", ["ring"]).value == 682.0  # type: ignore[union-attr]
