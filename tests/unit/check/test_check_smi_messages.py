"""What nvidia-smi says instead of a value, a GPU or a table, and what healthy machines print that looks like a fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.check.intake.collect import pieces_of
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.findings import Finding, Verdict, worst
from seatrial.check.outputs import smi_nvlink, smi_query_judge, smi_table, smi_topo

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
FOUR = (FIXTURES / "smi_table_four.txt").read_text()
QUERY = (FIXTURES / "smi_q_h200_two.txt").read_text()
XML = (FIXTURES / "smi_qx_h100.xml").read_text()
(TABLE,) = smi_table.TOOLS
(ASKED,) = smi_query_judge.TOOLS
(TOPO,) = smi_topo.TOOLS
CORRUPT = "WARNING: infoROM is corrupted at gpu 0000:52:00.0\n"
GPU = "GPU {}: {} (UUID: GPU-00000000-0000-0000-0000-00000000000{})\n"


def bad(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.code, f.verdict) for f in found if f.verdict != "PASS"]


def verdict(text: str) -> Verdict:
    return judge_pieces(pieces_of(text.encode(), "f.txt", None)).verdict


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.183\n",
            "FAIL",
        ),
        ("Failed to initialize NVML: Unknown Error\n", "FAIL"),
        ("root@node7:~# nvidia-smi\nFailed to initialize NVML: Driver Not Loaded\n", "FAIL"),
        ("Failed to initialize NVML: Insufficient Permissions\n", "UNJUDGED"),
        ("No devices found.\n", "FAIL"),
        (
            "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system to recover this GPU\n",
            "FAIL",
        ),
        (
            GPU.format(0, "NVIDIA H200", 0)
            + "Unable to determine the device handle for gpu 0000:02:00.0: Unknown Error\n",
            "FAIL",
        ),
        ("Unable to determine the device handle for GPU1: 0000:52:00.0: Unknown Error\n" + FOUR, "FAIL"),
    ],
)
def test_errors_instead_of_an_output(text: str, expected: str) -> None:
    assert verdict(text) == expected


def test_a_corrupt_inforom_is_found_below_every_output() -> None:
    for tool, text in ((TABLE, FOUR), (ASKED, QUERY), (ASKED, XML)):
        (found,) = [f for f in tool.read(text.rstrip("\n") + "\n" + CORRUPT, "f") if f.verdict != "PASS"]
        assert (found.code, found.verdict, found.target.pci) == ("GPU013", "FAIL", "0000:52:00")
        assert found.evidence == (f"f:{text.rstrip().count(chr(10)) + 2}",)


@pytest.mark.cluster  # slow
def test_a_table_that_ends_anywhere_else_never_passes() -> None:
    end = FOUR.rstrip("\n")
    for cut in range(end.index("|   0 "), len(end)):
        # Three of these GPUs are a fault by themselves.
        assert worst(TABLE.read(end[:cut], "t")) in ("UNJUDGED", "FAIL"), end[:cut][-90:]


def test_table_without_processes_passes_only_with_all_gpus_shown() -> None:
    gpus = FOUR[: FOUR.index("| Processes")].rpartition("+-")[0].rstrip() + "\n"
    assert worst(TABLE.read(gpus, "t")) == "UNJUDGED"
    lines = gpus.splitlines(keepends=True)
    first = next(n for n, x in enumerate(lines) if x.startswith("|   0 "))
    block = lines[first : first + 4]
    eight = [x.replace("|   0 ", f"|   {n} ") for n in range(4, 8) for x in block]
    assert worst(TABLE.read("".join(lines + eight), "t")) == "PASS"


def test_errors_of_a_mig_device_are_its_gpus() -> None:
    rows = """\
+------------------+----------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |                     Memory-Usage |        Vol|        Shared         |
|      ID  ID  Dev |                       BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG |
|                  |                                  |        ECC|                       |
|==================+==================================+===========+=======================|
|  2    9   0   0  |              12MiB /  9856MiB    | 16      0 |  1   0    1    0    1 |
|                  |                 0MiB / 16383MiB  |           |                       |
+------------------+----------------------------------+-----------+-----------------------+
"""
    healthy = (FIXTURES / "smi_table_four.txt").read_text()
    place = healthy.index("+", healthy.index("Processes:") - 100)
    text = healthy[:place] + rows + healthy[place:]
    assert verdict(text) == "PASS"
    (found,) = (
        f for f in smi_table.TOOLS[0].read(text.replace("16      0", "16      7"), "f") if f.verdict == "FAIL"
    )
    assert (found.code, found.target.gpu, found.measured) == ("GPU003", 2, 7)
    assert found.evidence == (f"f:{text[: text.index('|  2    9')].count(chr(10)) + 1}",)


def test_a_prompt_before_the_list_is_ignored() -> None:
    listed = GPU.format(0, "NVIDIA H200", 0)
    assert verdict("[root@node7 ~]# nvidia-smi -L\n" + listed) == "PASS"
    assert verdict("something else\n" + listed) == "UNJUDGED"


def test_no_nvlink_on_a_gpu_that_is_not_the_first() -> None:
    text = GPU + "NVML: Unable to retrieve NVLink information as all links are inactive\n"
    (status,) = [
        tool for tool in smi_nvlink.TOOLS if tool.matches(text.format(6, "NVIDIA A100-SXM4-80GB", 6))
    ]
    assert bad(status.read(text.format(6, "NVIDIA A100-SXM4-80GB", 6), "n")) == [("NVL001", "FAIL")]
    # The first and only one may be all that a virtual machine has.
    assert bad(status.read(text.format(0, "NVIDIA A100-SXM4-80GB", 0), "n")) == [("NVL001", "UNJUDGED")]


def test_a_matrix_whose_colours_lost_their_escape_character() -> None:
    rows = "".join(
        f"GPU{a}\t" + "\t".join(" X " if a == b else "NV18" for b in range(8)) + "\t0-63\t0\t\tN/A\n"
        for a in range(8)
    )
    head = "\t[4mGPU0\t" + "\t".join(f"GPU{n}" for n in range(1, 8)) + "\tCPU Affinity\tNUMA Affinity[0m\n"
    assert TOPO.matches(head + rows)
    assert worst(TOPO.read(head + rows, "t")) == "PASS"


def test_a_slow_link_of_an_idle_gpu_is_not_a_fault() -> None:
    # A cap of the power may be given as the reason instead of idleness; the performance state says that nothing runs.
    text = QUERY.replace(
        "Idle                              : Active", "Idle                              : Not Active"
    )
    assert text != QUERY
    for state, expected in (("P0", "WARN"), ("P8", "PASS")):
        found = ASKED.read(slow(text, state), "q")
        assert {f.verdict for f in found if f.code == "GPU008"} == ({expected} - {"PASS"})


def slow(text: str, state: str) -> str:
    """Every card at PCIe generation 1, in this performance state."""
    lines = []
    inside = False
    for line in text.splitlines(keepends=True):
        inside = "PCIe Generation" in line or (inside and "Link Width" not in line)
        name, colon, _ = line.partition(" : ")
        if inside and name.strip() == "Current":
            line = f"{name}{colon}1\n"
        elif name.strip() == "Performance State":
            line = f"{name}{colon}{state}\n"
        lines.append(line)
    return "".join(lines)


def test_an_unreadable_host_bridge_is_not_a_lost_gpu() -> None:
    asked = re.sub(r"(Host Max +: )5", r"\1Unknown Error", QUERY)
    assert asked != QUERY
    assert bad(ASKED.read(asked, "q")) == []
