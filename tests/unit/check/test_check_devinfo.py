"""ibv_devinfo, ibstatus, ibnetdiscover as outputs, `nvidia-smi -L`, and the whole XML of `nvidia-smi -q -x`."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.check.intake.collect import pieces_of
from seatrial.check.intake.offline import judge_paths, judge_pieces
from seatrial.check.judging.findings import Finding
from seatrial.check.judging.report import Report
from seatrial.check.outputs.registry import recognise

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"


def report(text: str, node: str | None = None, port_gbit_s: float | None = None) -> Report:
    return judge_pieces(pieces_of(text.encode(), "f.txt", node), port_gbit_s=port_gbit_s)


def read(name: str) -> str:
    return (FIXTURES / name).read_text()


def bad(text: str, port_gbit_s: float | None = None) -> list[tuple[str, str, str | None]]:
    found = report(text, port_gbit_s=port_gbit_s).findings
    return [(f.verdict, f.code, f.target.port) for f in found if f.verdict != "PASS"]


def only(text: str) -> Finding:
    (found,) = report(text).findings
    return found


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("ibv_devinfo_four_ndr.txt", "ibv_devinfo"),
        ("ibv_devinfo_v_three_ndr.txt", "ibv_devinfo"),
        ("ibv_devinfo_no_list.txt", "ibv_devinfo"),
        ("ibstatus_four_ndr.txt", "ibstatus"),
        ("ibstatus_no_device.txt", "ibstatus"),
        ("ibnetdiscover_four_nodes.txt", "ibnetdiscover"),
        ("smi_qx_h200_v13.xml", "nvidia-smi -q"),
    ],
)
def test_each_is_known_by_its_content(name: str, tool: str) -> None:
    assert [t.name for t in recognise(read(name))] == [tool]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ibstatus_four_ndr.txt", "4 fabric ports (InfiniBand) active at 400 Gb/s"),
        (
            "ibv_devinfo_four_ndr.txt",
            "4 fabric ports (MT4129 InfiniBand) active (rate not in the output)",
        ),
        ("ibv_devinfo_v_three_ndr.txt", "3 fabric ports (MT4129 InfiniBand) active at 400 Gb/s"),
        ("ibv_devinfo_old_library.txt", "2 fabric ports (MT4129 InfiniBand) active at 400 Gb/s"),
        (
            "ibv_devinfo_roce_blanks.txt",
            "2 fabric ports (MT4125 Ethernet) active (rate not in the output)",
        ),
    ],
)
def test_healthy_ports_pass(name: str, says: str) -> None:
    found = only(read(name))
    assert (found.verdict, found.message) == ("PASS", says)


@pytest.mark.parametrize(
    ("name", "code", "port"),
    [
        ("ibstatus_one_down.txt", "NET001", "mlx5_2/1"),
        ("ibstatus_one_slow.txt", "NET002", "mlx5_1/1"),
        ("ibv_devinfo_one_down.txt", "NET001", "mlx5_3/1"),
        ("ibv_devinfo_v_one_slow.txt", "NET002", "mlx5_0/1"),
        ("ibv_devinfo_v_one_polling.txt", "NET001", "mlx5_1/1"),
    ],
)
def test_the_one_port_in_trouble_is_named(name: str, code: str, port: str) -> None:
    assert bad(read(name)) == [("FAIL", code, port)]


def status(device: str, rate: str, layer: str = "InfiniBand", state: str = "4: ACTIVE") -> str:
    block = read("ibstatus_four_ndr.txt").partition("\n\n")[0] + "\n\n"
    block = block.replace("mlx5_0", device).replace("400 Gb/sec (4X NDR)", rate)
    return block.replace("InfiniBand", layer).replace("4: ACTIVE", state)


def test_ibstatus_board_bridges_are_not_counted_as_fabric_ports() -> None:
    fabric = "".join(status(f"mlx5_{i}", "800 Gb/sec (4X XDR)") for i in range(4, 12))
    bridges = [status(f"mlx5_{i}", "100 Gb/sec (1X NDR)") for i in range(4)]
    found = only("".join(bridges) + fabric)
    assert (found.verdict, found.message) == ("PASS", "8 fabric ports (InfiniBand) active at 800 Gb/s")
    assert {c for _, c, _ in bad("".join(bridges[:3]) + fabric)} == {"NET002"}  # three are no bridges
    only_bridges = "".join(bridges)
    assert "4 fabric ports (InfiniBand) active at 100 Gb/s" in only(only_bridges).message


def test_storage_ports_down_on_another_link_layer_are_no_fault() -> None:
    text = read("ibstatus_four_ndr.txt")
    text += status("mlx5_8", "40 Gb/sec (4X QDR)", "Ethernet", "1: DOWN").replace("5: LinkUp", "3: Disabled")
    assert bad(text) == []


def test_a_second_port_that_no_card_uses_is_suspect_at_most() -> None:
    """As NVIDIA's own build prints it, below a prompt."""
    text = read("ibv_devinfo_v_two_ports.txt")
    assert bad(text) == [("WARN", "NET001", f"mlx5_{i}/2") for i in range(2)]
    assert bad(text.replace("# ibv_devinfo -v", "# something else"))[-1][:2] == ("UNJUDGED", "OUT002")


def test_a_required_rate_that_is_not_printed_does_not_pass() -> None:
    assert bad(read("ibv_devinfo_four_ndr.txt"), 400.0) == [("UNJUDGED", "NET002", None)]
    assert bad(read("ibv_devinfo_v_three_ndr.txt"), 400.0) == []
    assert [v for v, _, _ in bad(read("ibv_devinfo_v_three_ndr.txt"), 800.0)] == ["FAIL"] * 3


def test_an_unknown_xdr_rate_of_an_old_library_is_ignored() -> None:
    text = read("ibv_devinfo_v_three_ndr.txt").replace("\t4129\n", "\t4131\n")
    found = only(text)
    assert (found.verdict, "not in the output" in found.message) == ("PASS", True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("PORT_ACTIVE (4)", "PORT_ACTIVE (1)"),
        ("PORT_ACTIVE (4)", "PORT_AKTIV (4)"),
        ("LINK_UP (5)", "LINK_UP (2)"),
        ("4X (2)", "3X (2)"),
        ("100.0 Gbps (128)", "200.0 Gbps (128)"),
        ("link_layer:\t\tInfiniBand", "link_layer:\t\tInfiniBend"),
        ("phys_port_cnt:\t\t\t1", "phys_port_cnt:\t\t\t2"),
        ("vendor_part_id:\t\t\t4129", "vendor_part_id:\t\t\tx"),
        ("\t\t\tactive_width:\t\t4X (2)\n", ""),
        ("\t\t\tsm_lid:\t\t\t1\n", ""),
        ("hca_id:\tmlx5_1", "hca_id:\tmlx5_0"),
    ],
)
def test_damage_in_ibv_devinfo_does_not_pass(old: str, new: str) -> None:
    text = read("ibv_devinfo_v_three_ndr.txt")
    assert old in text
    assert report(text.replace(old, new, 1)).verdict in ("UNJUDGED", "FAIL")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("state:\t\t 4: ACTIVE", "state:\t\t unknown"),
        ("state:\t\t 4: ACTIVE", "state:\t\t 4: AKTIV"),
        ("rate:\t\t 400 Gb/sec (4X NDR)", "rate:\t\t 4000 Gb/sec (4X NDR)"),
        ("link_layer:\t InfiniBand", "link_layer:\t Infini"),
        ("base lid:\t 0x10", "base lid:\t 0xzz"),
        ("\tsm lid:\t\t 0x1\n", ""),
        ("device 'mlx5_1'", "device 'mlx5_0'"),
    ],
)
def test_damage_in_ibstatus_does_not_pass(old: str, new: str) -> None:
    text = read("ibstatus_four_ndr.txt")
    assert old in text
    assert report(text.replace(old, new, 1)).verdict in ("UNJUDGED", "FAIL")


@pytest.mark.parametrize(
    "text",
    [
        read("ibv_devinfo_no_list.txt"),
        "IB device 'mlx5_9' wasn't found\n",
        "0 HCAs found:\n\n",
        read("ibstatus_no_device.txt"),
        "Fatal error:  device 'mlx5_0': sys files not found (/sys/class/infiniband/mlx5_0/ports)\n",
    ],
)
def test_a_host_without_a_device_is_unjudged_with_the_message(text: str) -> None:
    found = only(text)
    assert (found.verdict, found.code) == ("UNJUDGED", "NET007")


def test_a_list_of_device_names_does_not_pass() -> None:
    found = only("2 HCAs found:\n\tmlx5_0\n\tmlx5_1\n\n")
    assert (found.verdict, found.code) == ("UNJUDGED", "NET001")


def test_an_error_after_devices_is_damage() -> None:
    assert ("UNJUDGED", "FILE003", None) in bad(read("ibv_devinfo_four_ndr.txt") + "Failed to open device\n")
    assert ("UNJUDGED", "FILE003", None) in bad(read("ibstatus_four_ndr.txt") + "Fatal error:  No devices\n")


def test_the_three_tools_agree_on_the_number_of_ports(tmp_path: Path) -> None:
    for i, (status, info) in enumerate(
        [("ibstatus_four_ndr.txt", "ibv_devinfo_four_ndr.txt")] * 3
        + [("ibstatus_four_ndr.txt", "ibv_devinfo_v_three_ndr.txt")]
    ):
        (tmp_path / f"n{i}").mkdir()
        (tmp_path / f"n{i}" / "a").write_text(read(status))
        (tmp_path / f"n{i}" / "b").write_text(read(info))
    whole = judge_paths([str(tmp_path)])
    told = [(f.code, f.verdict) for f in whole.findings if f.target.node == "n3" and f.verdict != "PASS"]
    assert ("NET003", "FAIL") in told
    assert ("CMP001", "WARN") in told  # 4 by one tool and 3 by the other
    assert whole.nodes == {"n0": "PASS", "n1": "PASS", "n2": "PASS", "n3": "FAIL"}


# -- ibnetdiscover


def test_a_fabric_is_judged_and_belongs_to_no_node() -> None:
    whole = report(read("ibnetdiscover_four_nodes.txt"))
    assert [(f.code, f.verdict) for f in whole.findings] == [("TOP001", "FAIL"), ("TOP002", "FAIL")]
    assert whole.nodes == {}


def test_healthy_ibnetdiscover_passes_and_truncated_does_not() -> None:
    text = read("ibnetdiscover_four_nodes.txt").replace("2xNDR", "4xNDR")
    text = text.replace('[68]\t"S-fc6a1c0300b00012"[2]\t', '[68]\t"S-fc6a1c0300b00012"[2]\t')
    leaf_a = '[68]\t"S-fc6a1c0300b00012"[2]\t\t# "MF0;spine-2:MQM9700/U1" lid 2 4xNDR\n'
    spine = '[2]\t"S-fc6a1c0300b00001"[68]\t\t# "MF0;leaf-a:MQM9700/U1" lid 1 4xNDR\n'
    assert leaf_a in text
    assert spine in text
    text = text.replace(leaf_a, "").replace(spine, "")  # so that both leaves have three
    assert report(text).verdict == "PASS"
    lines = text.splitlines(keepends=True)
    ends = [n for n, line in enumerate(lines) if line.startswith("[")]
    for end in ends[:-1]:
        assert report("".join(lines[:end])).verdict != "PASS", lines[end]
    assert report(text + "Zeile\n").verdict == "UNJUDGED"


# -- nvidia-smi


def test_a_list_of_gpus_is_counted() -> None:
    lines = "".join(
        f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-0000000{i}-0000-0000-0000-000000000000)\n"
        for i in range(8)
    )
    assert report(lines).verdict == "PASS"
    assert [(v, c) for v, c, _ in bad(lines[: lines.index("GPU 7")])] == [("FAIL", "GPU001")]
    whole = report(lines + "  MIG 1g.10gb     Device  0: (UUID: MIG-00000000-0000-0000-0000-000000000000)\n")
    assert whole.verdict == "PASS"


def test_the_whole_xml_of_driver_595_passes() -> None:
    found = report(read("smi_qx_h200_v13.xml")).findings
    assert {f.verdict for f in found} == {"PASS"}


@pytest.mark.parametrize(
    ("old", "new", "code", "verdict"),
    [
        ("<unrepairable_memory>No", "<unrepairable_memory>Yes", "GPU004", "FAIL"),
        ("<channel_repair_pending>No", "<channel_repair_pending>Yes", "GPU005", "WARN"),
        ("<tpc_repair_pending>No", "<tpc_repair_pending>Yes", "GPU005", "WARN"),
        ("<remapped_row_failure>No", "<remapped_row_failure>Yes", "GPU004", "FAIL"),
        ("<dram_uncorrectable>0", "<dram_uncorrectable>2", "GPU003", "FAIL"),
        ("<sram_uncorrectable_parity>0", "<sram_uncorrectable_parity>1", "GPU003", "FAIL"),
        ("<sram_threshold_exceeded>No", "<sram_threshold_exceeded>Yes", "GPU003", "FAIL"),
        ("<gpu_recovery_action>None", "<gpu_recovery_action>Drain and Reset", "GPU009", "FAIL"),
        ("<current_link_width>16x", "<current_link_width>8x", "GPU008", "FAIL"),
        ("<state>Completed", "<state>In Progress", "NVL005", "FAIL"),
        ("<summary>Healthy", "<summary>Unhealthy", "NVL005", "FAIL"),
        ("<bandwidth>Full", "<bandwidth>Degraded", "NVL005", "FAIL"),
        ("<route_unhealthy>False", "<route_unhealthy>True", "NVL005", "FAIL"),
    ],
)
def test_each_fault_in_the_whole_xml_is_found_on_its_gpu(old: str, new: str, code: str, verdict: str) -> None:
    text = read("smi_qx_h200_v13.xml")
    second = text.rindex("<gpu id=")
    assert old in text[second:]
    ill = text[:second] + text[second:].replace(old, new, 1)
    (found,) = [f for f in report(ill).findings if f.verdict != "PASS"]
    assert (found.code, found.verdict, found.target.gpu) == (code, verdict, 1)


@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_gpu_the_driver_cannot_open_is_found_around_the_xml(where: str) -> None:
    said = "Unable to determine the device handle for GPU0000:9B:00.0: Unknown Error\n"
    text = read("smi_qx_h200_v13.xml").replace("<attached_gpus>2", "<attached_gpus>3")
    inside = text.index("\t<gpu id=")
    ill = {"before": said + text, "inside": text[:inside] + said + text[inside:], "after": text + said}[where]
    assert ("FAIL", "GPU002", None) in bad(ill)


def test_an_xml_in_one_line_is_read() -> None:
    assert (
        report("".join(line.strip() for line in read("smi_qx_h200_v13.xml").splitlines())).verdict == "PASS"
    )


def test_an_assigned_partition_is_not_a_fault() -> None:
    text = read("smi_qx_h200_v13.xml").replace("<partition_assigned>N/A", "<partition_assigned>True")
    assert report(text).verdict == "PASS"


def test_card_without_nvlink_on_8_pcie_lanes_only_warns() -> None:
    text = read("smi_qx_h200_v13.xml").replace("NVIDIA H200", "NVIDIA A10G")
    text = text.replace("<current_link_width>16x", "<current_link_width>8x")
    assert {v for v, c, _ in bad(text) if c == "GPU008"} == {"WARN"}
