"""Measured rates instead of the catalogue's: each for the same quantity, none that is old, simulated or of other hardware."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from auto_cases import GIB, all_reduce, edit, gpu_rates, job, rails, report, storage

from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.kernels import Kernels
from seatrial.plan.measured.rates import Measured, measured_rates
from seatrial.plan.model.cluster import Cluster, Group
from seatrial.plan.model.hardware import hardware_of

H100 = find_gpu("H100 SXM")
NDR = find_network("InfiniBand NDR 8x400")
assert H100 is not None
assert NDR is not None
CLUSTER = Cluster(H100, 2, 8, NDR)


def test_without_a_check_nothing_changes(tmp_path: Path) -> None:
    found = measured_rates(tmp_path / "auto", job())
    assert found == Measured()
    assert found.apply(CLUSTER) == CLUSTER
    place = hardware_of(job())
    assert found.at(place) == place


def test_the_model_reaches_the_measured_rates(tmp_path: Path) -> None:
    """Whatever shares of a rate the model reckons with: what comes out is what the check read."""
    measured = {
        "gpu": gpu_rates(gemm=650.0, hbm=2600.0, h2d=50.0, p2p=370.0),
        "all_reduce": [all_reduce(1, 340.0), all_reduce(2, 280.0), all_reduce(2, 90.0, size=1 << 20)],
        "rail": rails(390.0),
        "node": storage(2.0, 2.4),
    }
    report(tmp_path / "auto", measured)
    found = measured_rates(tmp_path / "auto", job())
    after = found.apply(CLUSTER)
    assert after.gpu.best_bf16_tflops == 650.0
    assert after.gpu.bf16_tflops == H100.bf16_tflops  # the peak that MFU is of stays
    assert Kernels(after.gpu, "bf16").memory == pytest.approx(2600e9)
    fabric = Fabric(after)
    assert fabric.bandwidth(Group(8, 8)) == pytest.approx(340e9)
    assert fabric.bandwidth(Group(16, 8)) == pytest.approx(280e9)
    assert after.network is not None
    assert (after.network.nics_per_node, after.network.name) == (8, NDR.name)
    assert found.storage_gb_s == pytest.approx(4.4)
    assert len(found.provenance) == 4
    assert len(found.network_provenance) == 1
    assert all("check.json" in text for text in (*found.provenance, *found.network_provenance))
    assert found.unused == ()


def test_gemm_rates_within_the_error_of_three_shapes_are_unused(tmp_path: Path) -> None:
    report(tmp_path / "auto", {"gpu": gpu_rates(gemm=760.0)})
    found = measured_rates(tmp_path / "auto", job())
    assert found.apply(CLUSTER).gpu.best_bf16_tflops == H100.best_bf16_tflops
    assert "three shapes" in found.unused[0]
    report(tmp_path / "auto", {"gpu": gpu_rates(gemm=810.0)})
    assert measured_rates(tmp_path / "auto", job()).apply(CLUSTER).gpu.best_bf16_tflops == 810.0


def test_a_slow_gpu_is_reported(tmp_path: Path) -> None:
    rates = gpu_rates(gemm=700.0)
    rates["gemm"]["min"] = 500.0
    report(tmp_path / "auto", {"gpu": rates})
    assert any(
        "the slowest GPU reaches 500" in text for text in measured_rates(tmp_path / "auto", job()).provenance
    )


def test_all_reduce_by_nvls_is_not_used(tmp_path: Path) -> None:
    report(tmp_path / "auto", {"gpu": gpu_rates(p2p=376.0), "all_reduce": [all_reduce(1, 475.0)]})
    found = measured_rates(tmp_path / "auto", job())
    assert found.ring_gb_s is None
    assert "switch" in found.unused[0]
    # But no ring is faster than a copy.
    report(tmp_path / "auto", {"gpu": gpu_rates(p2p=200.0), "all_reduce": [all_reduce(1, 475.0)]})
    found = measured_rates(tmp_path / "auto", job())
    assert Fabric(found.apply(CLUSTER)).bandwidth(Group(8, 8)) == pytest.approx(200e9)


def test_an_unnamed_network_is_known_from_its_ports(tmp_path: Path) -> None:
    report(tmp_path / "auto", {"gpu": gpu_rates(), "rail": rails(380.0)})
    found = measured_rates(tmp_path / "auto", job())
    network = found.apply(Cluster(CLUSTER.gpu, 2, 8, None)).network
    assert network is not None
    assert (network.name, network.nics_per_node) == ("measured", 8)
    fabric = Fabric(found.apply(CLUSTER))
    assert fabric._card() == pytest.approx(380e9 / 8)
    assert network.gb_s_per_gpu == fabric.cluster.network.gb_s_per_gpu  # type: ignore[union-attr]


def test_an_explicit_network_is_kept(tmp_path: Path) -> None:
    report(tmp_path / "auto", {"gpu": gpu_rates(hbm=2600.0), "rail": rails(380.0)})
    found = measured_rates(tmp_path / "auto", job())
    asked = hardware_of(job(), "RoCE 4x100")
    place = found.at(asked, keep_network=True)
    assert place.network == asked.network
    assert place.gpu != asked.gpu
    assert not any("network ports" in text for text in place.provenance)
    assert any("network ports" in text for text in found.at(asked).provenance)


def test_ports_that_do_not_divide_by_nodes_are_not_used(tmp_path: Path) -> None:
    report(tmp_path / "auto", {"gpu": gpu_rates(), "rail": rails(380.0, ports=15)})
    found = measured_rates(tmp_path / "auto", job())
    assert found.node_gb_s is None
    assert "15 ports on 2 nodes" in found.unused[0]


def test_all_reduce_as_fast_as_intra_node_is_not_a_network_rate(tmp_path: Path) -> None:
    report(tmp_path / "auto", {"gpu": gpu_rates(), "all_reduce": [all_reduce(2, 360.0)]})
    found = measured_rates(tmp_path / "auto", job())
    assert found.node_gb_s is None
    assert "not slower" in found.unused[0]


def test_all_reduce_above_the_nics_rate_is_not_used(tmp_path: Path) -> None:
    """Over two nodes a sum inside each node first halves what crosses: 300 GB/s say nothing of cards of 200."""
    named = job("cluster.network=InfiniBand HDR 8x200")
    report(tmp_path / "auto", {"gpu": gpu_rates(), "all_reduce": [all_reduce(2, 300.0)]})
    found = measured_rates(tmp_path / "auto", named)
    assert found.node_gb_s is None
    assert "more than the NICs carry in rings, 200 GB/s" in found.unused[0]
    report(
        tmp_path / "auto", {"gpu": gpu_rates(), "all_reduce": [all_reduce(2, 300.0)], "rail": rails(195.0)}
    )
    assert measured_rates(tmp_path / "auto", named).node_gb_s == pytest.approx(195.0)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (all_reduce(2, 100.0, ranks=2), "not all GPUs took part"),
        (all_reduce(2, 100.0, size=1 << 20), "small"),
        ({**all_reduce(2, 100.0), "algorithm": "gloo all-reduce, busbw"}, "not what GPUs use"),
        ({**all_reduce(2, 100.0), "median": None}, "no number"),
        ({**all_reduce(2, 100.0), "unit": "MB/s"}, "another unit"),
        ("text", "no rate at all"),
    ],
)
def test_all_reduces_unlike_trainings_are_not_used(tmp_path: Path, one: object, why: str) -> None:
    report(tmp_path / "auto", {"gpu": gpu_rates(), "all_reduce": [one]})
    assert measured_rates(tmp_path / "auto", job()).node_gb_s is None, why


def test_send_and_receive_is_the_last_resort(tmp_path: Path) -> None:
    def pair(how: str) -> dict[str, object]:
        return {**rails(800.0, ports=2), "algorithm": f"{how} send and receive"}

    report(tmp_path / "auto", {"gpu": gpu_rates(), "send_recv": pair("nccl")})
    assert measured_rates(tmp_path / "auto", job()).node_gb_s == pytest.approx(100.0)
    report(tmp_path / "auto", {"gpu": gpu_rates(), "send_recv": pair("gloo")})
    found = measured_rates(tmp_path / "auto", job())
    assert found.node_gb_s is None
    assert "not the backend that GPUs use" in found.unused[0]


def test_report_of_another_gpu_type_only_provides_storage_rate(tmp_path: Path) -> None:
    report(tmp_path / "auto", {"gpu": gpu_rates("NVIDIA H200", gemm=700.0), "node": storage(3.0)})
    found = measured_rates(tmp_path / "auto", job())
    assert found.gpu is None
    assert found.apply(CLUSTER) == CLUSTER
    assert found.storage_gb_s == 3.0
    assert "H200" in found.unused[0]
    assert "H100" in found.unused[0]
    report(tmp_path / "auto", {"gpu": gpu_rates("NVIDIA H100 NVL", gemm=700.0)})
    assert "not in the catalogue" in measured_rates(tmp_path / "auto", job()).unused[0]


def test_a_job_without_a_gpu_uses_the_checked_one(tmp_path: Path) -> None:
    nameless = job("cluster.gpu=unheard of")
    assert hardware_of(nameless).gpu is None
    report(tmp_path / "auto", {"gpu": gpu_rates("NVIDIA H200", gemm=600.0), "rail": rails(380.0)})
    place = measured_rates(tmp_path / "auto", nameless).at(hardware_of(nameless))
    assert place.gpu is not None
    assert (place.gpu.name, place.why_no_gpu) == ("H200 SXM", "")
    assert place.cluster is not None
    assert any("600" in text for text in place.provenance)


def test_a_measured_network_replaces_the_assumption(tmp_path: Path) -> None:
    named = job(preset="qwen2.5-72b-b300")
    cluster = named.cluster.model_copy(update={"network": None})
    nameless = replace(named, file=named.file.model_copy(update={"cluster": cluster}))
    assumed = hardware_of(nameless)
    assert assumed.network_is_assumed
    report(tmp_path / "r", {"gpu": gpu_rates("NVIDIA B300 SXM6 AC"), "rail": rails(390.0)})
    place = measured_rates(tmp_path / "r", nameless).at(assumed)
    assert not place.network_is_assumed
    assert place.network is not None
    assert place.network.gb_s_per_gpu * 0.95 == pytest.approx(390 / 8)


@pytest.mark.parametrize(
    ("days", "simulated", "text"),
    [(31.0, "", "31 days old"), (0.0, "cluster.toml", "simulated")],
)
def test_old_or_simulated_rates_are_not_used(tmp_path: Path, days: float, simulated: str, text: str) -> None:
    report(tmp_path / "auto", {"gpu": gpu_rates(gemm=500.0)}, days=days, simulated=simulated)
    found = measured_rates(tmp_path / "auto", job())
    assert found.products_tflops is None
    assert text in found.unused[0]


def test_a_report_without_time_is_as_old_as_its_file(tmp_path: Path) -> None:
    file = report(tmp_path / "auto", {"gpu": gpu_rates(gemm=500.0)})
    edit(file, time=None)
    assert measured_rates(tmp_path / "auto", job()).products_tflops == 500.0
    then = file.stat().st_mtime - 31 * 86400
    os.utime(file, (then, then))
    assert "31 days old" in measured_rates(tmp_path / "auto", job()).unused[0]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"schema_version": 2}', '{"schema_version": 1, "measured": []}', "[" * 100000]
)
def test_a_damaged_report_is_reported_and_not_used(tmp_path: Path, content: str) -> None:
    report(tmp_path / "auto", {}).write_text(content)
    found = measured_rates(tmp_path / "auto", job())
    assert found.provenance == ()
    assert len(found.unused) == 1
    assert "check.json" in found.unused[0]


def test_invalid_values_in_a_report_are_ignored(tmp_path: Path) -> None:
    file = report(tmp_path / "auto", {"gpu": gpu_rates(gemm=650.0)})
    measured = json.loads(file.read_text())["measured"]
    for strange in (
        None,
        "x",
        -1,
        True,
        [],
        {"median": "fast", "unit": "TFLOP/s"},
        {"median": GIB**40, "unit": "GB/s"},
    ):
        for key in ("gemm", "hbm", "p2p"):
            edit(file, measured={**measured, "gpu": {**measured["gpu"], key: strange}})
            measured_rates(tmp_path / "auto", job())
        for key in ("all_reduce", "rail", "send_recv", "node", "gpu"):
            edit(file, measured={**measured, key: strange})
            measured_rates(tmp_path / "auto", job())
        edit(file, measured=measured, measured_nodes=strange)
        measured_rates(tmp_path / "auto", job())


def test_cpu_ranks_use_no_measurements(tmp_path: Path) -> None:
    report(tmp_path / "auto", {"gpu": gpu_rates(gemm=500.0)})
    assert measured_rates(tmp_path / "auto", job("cluster.device=cpu")) == Measured()
