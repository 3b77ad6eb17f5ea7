"""What is near a GPU, on trees of files laid out like a kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seatrial.hardware.topology import (
    Gpu,
    cpu_list,
    cpus_of,
    local_gpus,
    rdma_ports,
    transport_facts,
    usable_cores,
)

ALL = set(range(16))


class Host:
    """A machine with two NUMA nodes of eight CPUs; each PCIe switch below a root port has a GPU and perhaps a port."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
            self.write(f"sys/devices/system/node/node{node}/cpulist", cpus)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def device(self, address: str, switch: int, numa: int) -> Path:
        """A PCI device below the root port of `switch`."""
        path = f"sys/devices/pci0000:{switch:02x}/0000:{switch:02x}:01.0/0000:{switch:02x}:02.0/{address}"
        self.write(f"{path}/numa_node", str(numa))
        link = self.root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / path)
        return self.root / path

    def gpu(
        self, minor: int, switch: int, numa: int, model: str = "NVIDIA H100", *, ours: bool = True
    ) -> str:
        address = f"0000:{switch:02x}:00.0"
        self.device(address, switch, numa)
        told = f"Model: \t\t {model}\nGPU UUID: \t GPU-{minor}{minor}ab\nDevice Minor: \t {minor}"
        self.write(f"proc/driver/nvidia/gpus/{address}/information", told)
        if ours:
            self.write(f"dev/nvidia{minor}", "")
        return address

    def port(self, name: str, switch: int, state: str = "4: ACTIVE", layer: str = "InfiniBand") -> None:
        device = self.device(f"0000:{switch:02x}:10.0", switch, 0)
        self.write(f"sys/class/infiniband/{name}/ports/1/state", state)
        self.write(f"sys/class/infiniband/{name}/ports/1/link_layer", layer)
        (self.root / f"sys/class/infiniband/{name}/device").symlink_to(device)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_gpu_gets_the_allowed_cpus_of_its_numa_node(host: Host) -> None:
    # The driver's numbers need not follow the PCI addresses; CUDA's do.
    first, second = host.gpu(1, 0x18, 0), host.gpu(0, 0x2A, 1)
    gpus = local_gpus({}, ALL - {8, 9}, host.root)
    assert [(g.device, g.pci, g.numa, cpu_list(g.cpus)) for g in gpus] == [
        ("0", first, 0, "0-3,10-11"),
        ("1", second, 1, "4-7,12-15"),
    ]
    assert gpus[0].reason == f"the CPUs of NUMA node 0, where {first} is"


@pytest.mark.parametrize(
    ("visible", "order"), [("1,0", [1, 0]), ("GPU-11ab,GPU-0", [1, 0]), ("0", [0]), ("MIG-11ab", [None])]
)
def test_visible_devices_assign_gpus_to_ranks(host: Host, visible: str, order: list[int | None]) -> None:
    addresses = [host.gpu(0, 0x18, 0), host.gpu(1, 0x2A, 1)]
    gpus = local_gpus({"CUDA_VISIBLE_DEVICES": visible}, ALL, host.root)
    assert [g.pci for g in gpus] == [None if i is None else addresses[i] for i in order]


def test_in_a_container_only_gpus_with_a_device_file_count(host: Host) -> None:
    host.gpu(0, 0x18, 0, ours=False)
    mine = host.gpu(1, 0x2A, 1)
    assert [g.pci for g in local_gpus({}, ALL, host.root)] == [mine]


def test_unequal_gpus_are_not_matched_by_guess(host: Host) -> None:
    first = host.gpu(0, 0x18, 0, "NVIDIA A100")
    host.gpu(1, 0x2A, 1)
    (gpu, _) = local_gpus({}, ALL, host.root)
    assert (gpu.pci, gpu.cpus, gpu.reason) == (None, frozenset(), "the PCI address of GPU 0 is not known")
    assert local_gpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ALL, host.root)[0].pci == first


def test_what_is_not_known_or_not_ours_leaves_a_rank_unbound(host: Host) -> None:
    host.gpu(0, 0x18, -1)
    host.gpu(1, 0x2A, 1)
    unknown, foreign = local_gpus({}, {0, 1}, host.root)
    assert (unknown.numa, unknown.cpus) == (None, frozenset())
    assert "NUMA node of 0000:18:00.0 is not known" in unknown.reason
    assert (foreign.numa, foreign.cpus) == (1, frozenset())
    assert "no CPU that may be used" in foreign.reason


def gpus_of(host: Host) -> list[Gpu]:
    return local_gpus({}, ALL, host.root)


def test_ports_sharing_a_gpu_switch_are_chosen_others_are_named(host: Host) -> None:
    for n, switch in enumerate((0x18, 0x2A)):
        host.gpu(n, switch, 0)
        host.port(f"mlx5_{n}", switch)
    host.port("mlx5_8", 0x60)
    host.port("mlx5_9", 0x61, layer="Ethernet")
    ports = rdma_ports(gpus_of(host), host.root)
    assert ports.chosen == ("mlx5_0:1", "mlx5_1:1")
    assert "mlx5_8:1, mlx5_9:1 with none" in ports.reason


def test_without_evidence_the_choice_is_left_to_nccl(host: Host) -> None:
    host.gpu(0, 0x18, 0)
    assert rdma_ports(gpus_of(host), host.root).reason == "no active InfiniBand or RoCE port"
    host.port("mlx5_8", 0x60)
    away = rdma_ports(gpus_of(host), host.root)
    assert away.chosen == ()
    assert "it is unknown which ports are for storage" in away.reason
    assert rdma_ports([], host.root).chosen == ()
    assert rdma_ports([Gpu("0", None, None, frozenset(), "")], host.root).chosen == ()


def test_a_gpu_whose_port_is_down_takes_the_evidence_away(host: Host) -> None:
    for n, switch in enumerate((0x18, 0x2A)):
        host.gpu(n, switch, 0)
        host.port(f"mlx5_{n}", switch, state="1: DOWN" if n else "4: ACTIVE")
    host.port("mlx5_8", 0x60)
    ports = rdma_ports(gpus_of(host), host.root)
    assert ports.chosen == ()
    assert "all 2 active" in ports.reason


def test_no_port_selection_when_every_port_is_near_a_gpu(host: Host) -> None:
    host.gpu(0, 0x18, 0)
    host.port("mlx5_0", 0x18)
    host.port("efa_0", 0x60, layer="Unspecified")  # no verbs transport of NCCL's
    ports = rdma_ports(gpus_of(host), host.root)
    assert ports.chosen == ()
    assert "all 1 active" in ports.reason
    assert "each shares a PCIe switch" in ports.reason


def test_lists_of_cpus() -> None:
    for text, cpus in (("", set()), ("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("2,4-5", {2, 4, 5})):
        assert cpus_of(text) == cpus
        assert cpu_list(cpus) == text


def test_a_quota_of_the_control_group_counts(tmp_path: Path) -> None:
    mine = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == mine
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod\n")
    group = tmp_path / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == mine
    (group / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 1


def test_facts_about_nccl_s_own_choices_are_reported(host: Host) -> None:
    direct, nvls = transport_facts(host.root)
    assert "it is unknown whether GPUDirect RDMA is available" in direct
    assert "it is unknown whether NVLS is available" in nvls
    host.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1")
    host.write("proc/driver/nvidia-nvswitch/devices/0000:05:00.0/information", "")
    direct, nvls = transport_facts(host.root)
    assert "dma-buf" in direct
    assert nvls.startswith("1 NVSwitch")
    host.write("sys/module/nvidia_peermem/version", "")
    assert transport_facts(host.root)[0].startswith("nvidia_peermem is loaded")
