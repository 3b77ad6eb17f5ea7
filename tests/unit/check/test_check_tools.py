"""The readers of everyday tools: what is ill is found where it is, what is healthy passes, and what is odd is UNJUDGED."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.check.intake.collect import Piece, pieces_of
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.report import Report
from seatrial.check.outputs.registry import recognise
from seatrial.check.outputs.unknown import recognise_unsupported, unsupported_tools

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"


def pieces(text: str, node: str | None = None) -> list[Piece]:
    return pieces_of(text.encode(), "f.txt", node)


def report(text: str) -> Report:
    return judge_pieces(pieces(text))


def faults(found: Report) -> list[str]:
    """What is not well: "FAIL GPU003 GPU 1"."""
    return sorted({f"{f.verdict} {f.code} {f.target}" for f in found.findings if f.verdict != "PASS"})


@pytest.mark.parametrize(
    ("name", "tool", "found"),
    [
        ("amd_smi_ecc.json", "amd-smi", ["FAIL GPU003 GPU 1"]),
        ("amd_smi_faults.txt", "amd-smi", ["FAIL GPU003 GPU 1", "WARN GPU007 GPU 1"]),
        ("amd_smi_metric.txt", "amd-smi", []),
        ("amd_smi_table.txt", "amd-smi", []),
        ("dcgm_health_failure.json", "dcgmi health", ["FAIL DIA005 GPU 1"]),
        ("dcgm_health_good.txt", "dcgmi health", []),
        ("dcgm_health_off.txt", "dcgmi health", ["UNJUDGED DIA002 -"]),
        ("dcgm_health_warning.txt", "dcgmi health", ["FAIL DIA005 GPU 5", "WARN DIA005 GPU 2"]),
        ("dcgm_nvlink_one_down.txt", "dcgmi nvlink -s", ["FAIL NVL001 GPU 1 NVLink 3"]),
        ("dcgm_nvlink_two.txt", "dcgmi nvlink -s", []),
        ("gpu_burn_faulty.txt", "gpu_burn", ["FAIL DIA001 GPU 1"]),
        ("gpu_burn_two.txt", "gpu_burn", []),
        ("iblinkinfo_lines.txt", "iblinkinfo", []),
        ("iblinkinfo_narrow.txt", "iblinkinfo", ["FAIL TOP002 2 to leaf1"]),
        ("iblinkinfo_two_nodes.txt", "iblinkinfo", []),
        ("ibnetdiscover_ports.txt", "ibnetdiscover -p", []),
        ("ibnetdiscover_ports_slow.txt", "ibnetdiscover -p", ["FAIL TOP002 2 to leaf1"]),
        ("ipmi_sel_faults.txt", "ipmitool sel", ["FAIL SEL001 -", "UNJUDGED SEL001 -", "WARN SEL001 -"]),
        ("ipmi_sel_quiet.txt", "ipmitool sel", []),
        ("lspci_four.txt", "lspci", []),
        ("lspci_rev_ff.txt", "lspci", ["FAIL PCI001 0000:4c:00"]),
        ("lspci_vv.txt", "lspci", []),
        ("lspci_vv_downgraded.txt", "lspci", ["FAIL PCI002 0000:19:00", "WARN PCI002 0000:18:00"]),
        ("nccl_h100.json", "nccl-tests -J", []),
        ("nccl_wrong.json", "nccl-tests -J", ["FAIL NCC001 -", "FAIL NCC002 -", "WARN NCC003 -"]),
        ("nvbandwidth_a100.json", "nvbandwidth", []),
        ("nvbandwidth_dead.json", "nvbandwidth", ["FAIL MSR004 GPU 2 to GPU 1"]),
        ("nvbandwidth_h100.txt", "nvbandwidth", []),
        ("nvbandwidth_slow.txt", "nvbandwidth", ["FAIL MSR003 GPU 2", "FAIL MSR004 GPU 2 to GPU 1"]),
        ("perfquery_clean.txt", "perfquery", []),
        ("perfquery_errors.txt", "perfquery", ["UNJUDGED NET011 Lid 12 port 1"]),
        ("rdma_link_four.txt", "rdma link", []),
        ("rdma_link_one_down.txt", "rdma link", ["FAIL NET001 mlx5_2/1"]),
        ("rocm_smi_ras.txt", "rocm-smi", ["FAIL GPU003 GPU 1"]),
        ("rocm_smi_two.txt", "rocm-smi", []),
        ("slurm_node_down.txt", "scontrol show node", ["FAIL SLM001 n02", "WARN SLM001 n03"]),
        ("slurm_node_idle.txt", "scontrol show node", []),
        (
            "smi_csv_faults.csv",
            "nvidia-smi --query-gpu",
            [
                "FAIL GPU002 GPU 2 (0000:4c:00)",
                "FAIL GPU003 GPU 1 (0000:3b:00)",
                "FAIL GPU005 GPU 1 (0000:3b:00)",
                "WARN GPU007 GPU 1 (0000:3b:00)",
            ],
        ),
        ("smi_csv_h100.csv", "nvidia-smi --query-gpu", []),
        ("smi_csv_no_head.csv", "nvidia-smi --query-gpu", ["UNJUDGED GPU011 -"]),
        ("smi_csv_nounits.csv", "nvidia-smi --query-gpu", []),
        ("smi_p2p_four.txt", "nvidia-smi topo -p2p", []),
        (
            "smi_p2p_one_apart.txt",
            "nvidia-smi topo -p2p",
            [*(f"UNJUDGED NOD023 GPU {n}" for n in (0, 1, 3)), "WARN NOD023 GPU 2"],
        ),
    ],
)
def test_each_output_is_judged_where_it_is_ill(name: str, tool: str, found: list[str]) -> None:
    text = (FIXTURES / name).read_text()
    judged = report(text)
    assert [t.name for t in recognise(text)] == [tool]
    assert faults(judged) == found
    assert judged.verdict == next((v for v in ("FAIL", "WARN", "UNJUDGED") if v in " ".join(found)), "PASS")


# A healthy fixture, what is changed in it (a pattern and its replacement, re.MULTILINE), and what must be found.
CHANGED = [
    ("amd_smi_metric.txt", r"^GPU: 1\n", "", "UNJUDGED OUT002 -"),
    ("amd_smi_metric.txt", r"(?s)^GPU: 1\n.*", "GPU: 1\n    USAGE:\n", "UNJUDGED GPU011 GPU 1"),
    ("amd_smi_table.txt", r"39 °C   0 ", "39 °C   7 ", "FAIL GPU003 GPU 1"),
    ("amd_smi_table.txt", r"(?s)\n\|   1  .*", "\n", "UNJUDGED OUT002 -"),
    ("dcgm_health_good.txt", "Healthy", "Failure", "FAIL DIA005 -"),
    ("dcgm_health_good.txt", "Healthy", "Sleepy", "UNJUDGED DIA005 -"),
    ("dcgm_nvlink_two.txt", r"(?s)\nKey: .*", "\n", "UNJUDGED FILE003 -"),
    ("gpu_burn_two.txt", r"GPU 1: OK", "GPU 1: FAULTY", "FAIL DIA001 GPU 1"),
    ("gpu_burn_two.txt", r"^\tGPU 1: OK\n", "", "UNJUDGED DIA002 -"),
    ("gpu_burn_two.txt", r"errors: 0 - 0   temps: 66", "errors: 0 - 9 (WARNING!)   temps: 66", "FAIL DIA001 GPU 1"),
    ("iblinkinfo_two_nodes.txt", r"(13 .*)Active/  LinkUp", r"\1Init/  LinkUp", "FAIL TOP002 1 to n02 mlx5_0"),
    ("iblinkinfo_two_nodes.txt", r"^CA: n02(?s:.*)", "", "UNJUDGED FILE003 -"),
    ("ibnetdiscover_ports.txt", r"^CA    13 .*\n", "", "UNJUDGED FILE003 -"),
    ("ipmi_sel_quiet.txt", r"\Z", "   9 | 03/02/2026 | 01:00:00 | Processor CPU1 | IERR | Asserted\n", "FAIL SEL001 -"),
    ("ipmi_sel_quiet.txt", r"\Z", "   9 | 03/02/2026 | 01:00:00 | Quux #0x1 | Xyzzy | Asserted\n", "UNJUDGED SEL001 -"),
    ("lspci_four.txt", r"(?s).*", "00:1f.0 ISA bridge: Intel Corporation Device 1b81 (rev 11)\n", "UNJUDGED PCI001 -"),
    ("lspci_vv.txt", r"^\t\tLnkSta:.*\n(?s:.*)", "", "UNJUDGED PCI002 0000:18:00"),
    ("lspci_vv.txt", r"\Z", "        Fabric\n            State                 : In Progress\n", "UNJUDGED OUT002 -"),
    ("mlxlink_ndr.txt", r"^Speed ", "Unable to determine the device handle for GPU 0000:4C:00.0: GPU is lost\nSpeed ", "FAIL GPU002 -"),
    ("ibstat_four_ndr.txt", r"MT4129", "MT412", "UNJUDGED FILE003 -"),
    ("mlxlink_ndr.txt", r"^(Supported Cable Speed .*\()NDR", r"\1NDc", "UNJUDGED NET002 -"),
    ("nvbandwidth_h100.txt", r"\A", "0\n", "UNJUDGED OUT002 -"),
    ("nvbandwidth_h100.txt", r"\Z", "4: ACTIVE\n", "UNJUDGED OUT002 -"),
    ("lspci_vv.txt", r"(?s)\tCapabilities.*", "\tCapabilities: <access denied>\n", "UNJUDGED PCI002 0000:18:00"),
    ("lspci_vv.txt", r"(2.5GT/s.*), Width x16", r"\1, Width x8 (downgraded)", "FAIL PCI002 0000:19:00"),
    ("nccl_h100.json", r'"nwrong":0.000000\}', '"nwrong":3.000000}', "FAIL NCC001 -"),
    ("nccl_h100.json", r'"ngpus":8', '"ngpus":100000000000', "UNJUDGED FILE003 -"),
    ("nvbandwidth_a100.json", r'"276.33"', '"N/A"', "FAIL NOD023 GPU 2 to GPU 0"),
    ("nvbandwidth_a100.json", r'"276.33", ', "", "UNJUDGED OUT002 -"),
    ("nvbandwidth_h100.txt", r"(?s)\n 3    392.*", "\n", "UNJUDGED OUT002 -"),
    ("nvbandwidth_h100.txt", r"^ 1    392.*\n", "", "UNJUDGED OUT002 -"),
    ("nvbandwidth_h100.txt", r"(?s)^memcpy CE CPU.*?\n\n.*?\n\n", "Error: out of memory\n", "FAIL NOD022 -"),
    ("nvbandwidth_h100.txt", r"\Z", "[CUDA_ERROR_ECC_UNCORRECTABLE] uncorrectable\n", "FAIL NOD022 -"),
    ("perfquery_clean.txt", r"(LinkDownedCounter:\.*)0", r"\g<1>255", "UNJUDGED NET011 Lid 12 port 1"),
    ("perfquery_clean.txt", r"(LinkDownedCounter:\.*)0", r"\g<1>0990", "UNJUDGED NET011 Lid 12 port 1"),
    ("perfquery_clean.txt", r"^LinkDownedCounter.*\n", "", "UNJUDGED NET011 Lid 12 port 1"),
    ("rdma_link_four.txt", r"(mlx5_2/1 .*)ACTIVE physical_state LINK_UP", r"\1DOWN physical_state POLLING", "FAIL NET001 mlx5_2/1"),
    ("rocm_smi_two.txt", r"^=+ End of ROCm.*\n", "", "UNJUDGED OUT002 -"),
    ("rocm_smi_two.txt", r"^Device .*\n", "", "UNJUDGED FILE003 -"),
    ("slurm_node_idle.txt", r"State=IDLE", "State=IDLE*", "FAIL SLM001 n01"),
    ("slurm_node_idle.txt", r"State=IDLE", "State=MIXED+DRAIN", "WARN SLM001 n01"),
    ("slurm_node_idle.txt", r"State=IDLE", "State=IDLE+CLOUD", ""),
    ("slurm_node_idle.txt", r"State=IDLE", "State=IDLE+BROODING", "UNJUDGED SLM001 n01"),
    ("slurm_node_idle.txt", r"(?s)   CfgTRES.*", "", "UNJUDGED SLM001 n01"),
    ("smi_csv_h100.csv", r"0x0000000000000001", "0x00000000000000e0", "WARN GPU007 GPU 0 (0000:19:00)"),
    ("smi_csv_h100.csv", r", 0, 0, 0, 0x", ", 3, Yes, No, 0x", "FAIL GPU005 GPU 0 (0000:19:00)"),
    ("smi_csv_h100.csv", r"^2, .*\n", "", "UNJUDGED GPU001 -"),
    ("smi_csv_h100.csv", r"^3, .*", "3, NVIDIA H100 80GB HBM3, 00000000:5D:00.0, P0", "UNJUDGED GPU011 -"),
    ("smi_csv_h100.csv", r"^2, .*", "Unable to determine the device handle for GPU2: 0000:4C:00.0: Unknown Error", "FAIL GPU002 -"),
    ("smi_csv_h100.csv", r"^(2, .* MiB), 0", r"\1, [GPU is lost]", "FAIL GPU002 GPU 2 (0000:4c:00)"),
    ("slurm_node_idle.txt", r"State=IDLE", "State=FAILING", "FAIL SLM001 n01"),
    ("lspci_vv.txt", r"^\t\tLnkSta:\tSpeed 2.5", "\t\tDevSta:\tNonFatalErr- FatalErr+\n\\g<0>", "WARN SYS003 0000:19:00"),
    ("lspci_vv.txt", r"^\t\tLnkSta:\tSpeed 2.5", "\t\tUESta:\tDLP- UnsupReq+ MalfTLP+\n\\g<0>", "WARN SYS003 0000:19:00"),
    ("lspci_vv.txt", r"^\t\tLnkSta:\tSpeed 2.5", "\t\tUESta:\tDLP- UnsupReq+ MalfTLP-\n\\g<0>", ""),
    ("ib_write_bw_ndr.txt", r"\Z", "* Waiting for client to connect... *\n", "UNJUDGED FILE003 -"),
    ("ib_write_bw_ndr.txt", r"\A", "* Waiting for client to connect... *\n", ""),
    ("dcgm3_pass.json", r'"status": "PASS"', '"status": "PASS", "warnings": [{"warning": "GPU 1 XID 48"}]', "WARN DIA001 GPU 1"),
    ("smi_table_four.txt", r"(\n\| N/A   30C .*)0MiB / 143771MiB", r"\1      GPU is lost", "FAIL GPU002 GPU 1 (0000:43:00)"),
    ("smi_p2p_four.txt", r"^ GPU3.*\n", "", "UNJUDGED FILE003 -"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "pattern", "new", "fault"), CHANGED)
def test_what_is_changed_in_a_healthy_output_is_found(name: str, pattern: str, new: str, fault: str) -> None:
    healthy = (FIXTURES / name).read_text()
    text = re.sub(pattern, new, healthy, count=1, flags=re.MULTILINE)
    assert text != healthy
    assert faults(report(healthy)) == []
    found = faults(report(text))
    assert fault in found if fault else found == []


# As people have pasted them in public: github.com/NVIDIA/nvbandwidth issues (0.5, 0.10), OFED's perfquery without CapMask,
# back-to-back adapters in iblinkinfo, rdma of MLNX_OFED, a BMC that lost its clock, one card of older ROCm.
PASTED = {
    "nvbandwidth 0.10": (
        """nvbandwidth Version: v0.10.0
Built from Git version: v0.10

CUDA Runtime Version: 13.3 (13030)
CUDA Driver Version (API): 13.3 (13030)
Driver Version: 610.57.04

Running device_to_device_bidirectional_memcpy_write_ce.
memcpy CE GPU(row) <-> GPU(column) Write1 bandwidth (GB/s)
           0         1         2
 0       N/A    770.33    770.33
 1    770.33       N/A    770.26
 2    770.33    770.26       N/A

SUM device_to_device_bidirectional_memcpy_write_ce_write1 4621.84

memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)
           0         1         2
 0       N/A   1540.38   1540.45
 1   1540.38       N/A   1540.24
 2   1540.45   1540.24       N/A

SUM device_to_device_bidirectional_memcpy_write_ce_total 9242.14
COEFFICIENT_OF_VARIATION device_to_device_bidirectional_memcpy_write_ce_total 0.00
""",
        [],
    ),
    "nvbandwidth 0.5": (
        """nvbandwidth Version: v0.5
Built from Git version: v0.5-1-g4da7d7e

NOTE: This tool reports current measured bandwidth on your system.
Additional system-specific tuning may be required to achieve maximal peak bandwidth.

CUDA Runtime Version: 12040
CUDA Driver Version: 12040
Driver Version: 550.54.15

Device 0: NVIDIA A10

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0
 0     25.17

SUM host_to_device_memcpy_ce 25.17
""",
        ["UNJUDGED MSR003 GPU 0"],
    ),
    "perfquery -x, data alone": (
        """# Port extended counters: Lid 61 port 35
PortSelect:......................35
CounterSelect:...................0x1b01
PortXmitData:....................2865699555629
PortRcvData:.....................5818573238645
PortXmitPkts:....................8450135651
PortRcvPkts:.....................15372362298
""",
        ["UNJUDGED NET011 -"],
    ),
    "iblinkinfo, no switch": (
        """CA: hostb mlx4_0:
      0x0002c90300002779      4    1[  ] ==( 4X           5.0 Gbps Active/  LinkUp)==>       3    1[  ] "kvm mlx4_0" ( )
CA: kvm mlx4_0:
      0x0002c90300002f79      3    1[  ] ==( 4X           5.0 Gbps Active/  LinkUp)==>       4    1[  ] "hostb mlx4_0" ( )
""",
        ["UNJUDGED TOP001 -"],
    ),
    "rdma link, numbered": (
        """8/1: mlx5_bond_0/1: state ACTIVE physical_state LINK_UP netdev reth0
9/1: mlx5_bond_1/1: state ACTIVE physical_state LINK_UP netdev reth2
""",
        [],
    ),
    "rdma link, with colons": (
        """link mlx5_0/1: state ACTIVE physical_state LINK_UP netdev ens21f0
link mlx5_1/1: state DOWN physical_state DISABLED netdev ens21f1
""",
        ["FAIL NET001 mlx5_1/1"],
    ),
    "sel elist": (
        """   1 | 05/01/2026 | 13:02:11 | Temperature #0x30 | Upper Critical going high | Asserted
   2 | 05/01/2026 | 13:02:45 | Temperature #0x30 | Upper Critical going high | Deasserted
   4 |  Pre-Init  |Pre-Init   | Memory #0x53 | Correctable ECC | Asserted
   5 | 05/03/2026 | 21:44:19 UTC | Power Supply #0x62 | Presence detected | Asserted
""",
        ["WARN SEL001 -"],
    ),
    "gpu_burn over a serial line": (
        "Burning for 10 seconds.\n"
        "10.0%  proc'd: 4 (100 Gflop/s) - 4 (200 Gflop/s)   errors: 0 - 2 (WARNING!)   temps: 70 C - 71 C\r"
        "100.0%  proc'd: 8 (120 Gflop/s) - 8 (220 Gflop/s)   errors: 0 - 3 (WARNING!)   temps: 72 C - 73 C\n"
        "Killing processes.. Freed memory for dev 0\nUninitted cublas\ndone\n\n"
        "Tested 2 GPUs:\n\tGPU 0: OK\n\tGPU 1: FAULTY\n",
        ["FAIL DIA001 GPU 1"],
    ),
    "rocm-smi --json": (
        '{"card0": {"GPU use (%)": "0"}, "card1": {"GPU use (%)": "0"}, "system": {"Driver version": "6.7.0"}}\n',
        [],
    ),
    "rocm-smi 5": (
        """========================ROCm System Management Interface========================
GPU  Temp (DieEdge)  AvgPwr  SCLK    MCLK     Fan  Perf  PwrCap  VRAM%  GPU%
0    35.0c           93.0W   800Mhz  1600Mhz  0%   auto  560.0W    0%   0%
================================================================================
==============================End of ROCm SMI Log ==============================
""",
        [],
    ),
    "scontrol -o": (
        "NodeName=n7 CoresPerSocket=1 CPUAlloc=17 State=DOWN*+DRAIN CfgTRES=cpu=24,mem=1M AllocTRES= Reason=Not responding\n",
        ["FAIL SLM001 n7"],
    ),
    "a row that waits, and nothing of errors": (
        "pci.bus_id, remapped_rows.pending\n00000000:19:00.0, Yes\n",
        ["UNJUDGED GPU005 GPU 0 (0000:19:00)"],
    ),
    "one column": ("name\nNVIDIA A10\nNVIDIA A10\n", []),
}


@pytest.mark.parametrize("name", PASTED)
def test_outputs_as_people_paste_them(name: str) -> None:
    text, found = PASTED[name]
    assert faults(report(text)) == found


def test_slow_port_of_an_unknown_adapter_is_not_ignored() -> None:
    text = (FIXTURES / "ibstat_one_at_100.txt").read_text()
    assert "NET002 mlx5_3" in " ".join(faults(report(text)))
    place = text.index("CA 'mlx5_3'")
    strange = text[:place] + text[place:].replace("MT4129", "MT4139", 1)
    assert faults(report(strange)) == ["UNJUDGED NET002 mlx5_3/1"]


def test_a_gpu_on_the_bus_but_not_in_the_driver_is_reported() -> None:
    """Of the same node lspci shows four GPUs and nvidia-smi three."""
    bus = (FIXTURES / "lspci_four.txt").read_text()
    driver = "index, count, name\n" + "".join(f"{n}, 3, NVIDIA A10\n" for n in range(3))
    both = judge_pieces(pieces(bus, "n1") + pieces(driver, "n1"))
    assert "GPUs: 4 by lspci, 3 by nvidia-smi --query-gpu" in [f.message for f in both.findings]
    some = "\n".join(line for line in bus.splitlines()[-2:]) + "\n"  # lspci | grep NVIDIA | tail -2
    asked = judge_pieces(pieces(some, "n1") + pieces(driver, "n1"))
    assert not [f for f in asked.findings if "by lspci" in f.message]


# A line or two of each output that is known by its looks alone.
UNKNOWN = {
    "nvidia-smi -q, without its beginning": "    ECC Errors\n        Volatile\n  x\n",
    "the table of nvidia-smi, without its beginning": "| N/A   31C    P0    71W / 700W |      0MiB / 81559MiB |      0%      Default |\n",
    "nvidia-smi dmon or pmon": "# gpu    pwr  gtemp  mtemp     sm    mem\n# Idx      W      C      C      %      %\n",
    "nvidia-smi --query-compute-apps": "pid, process_name, used_gpu_memory [MiB]\n4711, python, 512 MiB\n",
    "nvidia-smi nvlink -c or another of its lists": "\t Link 0, P2P is supported: true\n",
    "nvidia-smi -h": "NVIDIA System Management Interface -- v550.54.15\n",
    "dcgmi dmon": "#Entity   GPUTL                       POWER\nID\n".replace("#Entity", "# Entity"),
    "dcgmi discovery": "8 GPUs found.\n",
    "dcgmi nvlink -e, topo, stats or health -f": "| Topology Information                             |\n",
    "p2pBandwidthLatencyTest": "[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]\n",
    "bandwidthTest of the CUDA samples": "[CUDA Bandwidth Test] - Starting...\n",
    "rccl-tests' file of rows (-x)": "numCycle,name,nranks,size,type,redop,inPlace,time,algBw,busBw\n",
    "nccl-tests, without its beginning": "# Avg bus bandwidth\n  8589934592    2147483648     float     sum      -1\n",
    "OSU micro-benchmarks": "# OSU MPI Bandwidth Test v7.1\n",
    "ucx_perftest": "|    Stage     | # iterations | 50.0%ile | average | overall |\n",
    "iperf": "Connecting to host 10.0.0.2, port 5201\n",
    "an MLPerf or HPL log": ":::MLLOG {\"namespace\": \"\"}\n",
    "perfquery, without its beginning": "SymbolErrorCounter:..............0\n",
    "ibqueryerrors": "Errors for \"leaf1\"\n",
    "ibdiagnet": "-I- Using port 1 as the local port.\n",
    "sminfo, ibping or saquery": "sminfo: sm lid 1 sm guid 0x2c90200423e1d, activity count 1 priority 0 state 3 SMINFO_MASTER\n",
    "show_gids or ibdev2netdev": "mlx5_0 port 1 ==> ens7f0np0 (Up)\n",
    "mst status or mlxconfig": "MST modules:\n------------\n",
    "ethtool": "Settings for ens7f0np0:\n",
    "ip or ifconfig": "2: ens7f0np0: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP\n",
    "the journal as JSON": '{"__REALTIME_TIMESTAMP": "1", "MESSAGE": "x"}\n',
    "dmesg as JSON": '{\n   "dmesg": [\n',
    "ipmitool sel -v, or a dump of the log": "SEL Record ID          : 0001\n",
    "ipmitool sdr or sensor": "CPU1 Temp        | 58 degrees C      | ok\n",
    "sinfo": "PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\n",
    "squeue or sacct": "  JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n",
    "kubectl": "NAME    STATUS   ROLES    AGE   VERSION\n",
    "lsmod, lscpu, numactl or free": "Module                  Size  Used by\n",
    "systemctl status": "x.service - X\n     Loaded: loaded (/lib/systemd/system/x.service; enabled)\n",
    "smartctl or nvme": "=== START OF SMART DATA SECTION ===\n",
    "hl-smi (Gaudi)": "| HL-SMI Version:                              hl-1.17.0 |\n",
    "nvidia-bug-report": "Start of NVIDIA bug report log file.  Please send this report\n",
    "a log of PyTorch or of a launcher": "[rank3]: RuntimeError: CUDA error\n",
    "amd-smi monitor, topology or xgmi": "GPU  POWER  GPU_T  MEM_T\n  0  139 W  41 °C  37 °C\n",
}  # fmt: skip


@pytest.mark.parametrize("tool", unsupported_tools(), ids=lambda tool: tool.name)
def test_an_unknown_output_is_named_with_what_to_collect_instead(tool) -> None:  # type: ignore[no-untyped-def]
    [finding] = report(UNKNOWN[tool.name]).findings
    assert (finding.code, finding.verdict) == ("FILE001", "UNJUDGED")
    assert finding.message == f"looks like {tool.name}, which is not supported"
    assert finding.action == f"collect {tool.instead} instead"


def test_unrecognised_output_is_reported_as_such() -> None:
    [finding] = report("Lorem ipsum dolor sit amet\n").findings
    assert finding.message == "not the output of a known tool, or not in English"
    assert set(UNKNOWN) == {tool.name for tool in unsupported_tools()}
    assert recognise_unsupported("Lorem ipsum") is None
