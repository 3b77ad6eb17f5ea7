"""Kernel logs, the fabric manager's log, dcgmi diag and NCCL's outputs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.check.judging.findings import Finding, worst
from seatrial.check.outputs import dcgm_diag, fabric_log, kernel_text, nccl_judge
from seatrial.check.outputs.tool import Context

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
(KERNEL,) = kernel_text.TOOLS
(FABRIC,) = fabric_log.TOOLS
(DCGM,) = dcgm_diag.TOOLS
TESTS, DEBUG = nccl_judge.TOOLS


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text()


def bad(found: list[Finding]) -> list[tuple[str, str]]:
    return [(f.code, f.verdict) for f in found if f.verdict != "PASS"]


# -- kernel log


def test_messages_are_judged_by_nvidias_catalogue() -> None:
    found = KERNEL.read(fixture("kernel_faults.log"), "k", Context(node="node7"))
    said = {(f.target.pci, f.measured): (f.code, f.verdict) for f in found}
    assert said == {
        ("0000:1b:00", 13): ("XID002", "WARN"),
        ("0000:1b:00", 43): ("XID002", "WARN"),
        ("0000:43:00", 63): ("XID003", "WARN"),
        ("0000:52:00", 119): ("XID001", "FAIL"),
        ("0000:52:00", 154): ("XID001", "FAIL"),
        ("0000:61:00", 149): ("XID003", "PASS"),  # taken down on purpose: subcode 38
        ("0000:07:00", 20034): ("NVL007", "FAIL"),  # its line with data is no message of its own
        ("0000:05:00", 12028): ("NVL007", "WARN"),
    }
    assert {f.target.node for f in found} == {"node7"}
    reset = next(f for f in found if f.measured == 154)
    assert reset.action == "the driver requests a GPU reset: nvidia-smi --gpu-reset"
    assert reset.evidence == ("k:6",)


def test_a_quiet_log_passes_and_an_empty_one_does_not() -> None:
    assert KERNEL.matches(fixture("kernel_quiet.log"))
    assert worst(KERNEL.read(fixture("kernel_quiet.log"), "k")) == "PASS"
    assert worst(KERNEL.read("\n\n", "k")) == "UNJUDGED"


@pytest.mark.parametrize("code", [48, 64, 74, 79, 94, 95, 140, 167])
def test_lost_memory_links_and_cards_fail(code: int) -> None:
    assert worst(KERNEL.read(f"NVRM: Xid (PCI:0000:1b:00): {code}, pid=1, name=a, text\n", "k")) == "FAIL"


@pytest.mark.parametrize("code", [106, 121, 137])
def test_messages_that_nvidia_says_to_ignore_pass(code: int) -> None:
    assert worst(KERNEL.read(f"NVRM: Xid (PCI:0000:1b:00): {code}, text\n", "k")) == "PASS"


def test_the_same_message_again_is_one_finding() -> None:
    line = "[{}.000001] NVRM: Xid (PCI:0000:1b:00): 31, pid={}, name=python3, Ch 00000008\n"
    (said,) = KERNEL.read("".join(line.format(100 + i, i) for i in range(50)), "k")
    assert "50 times" in said.message
    assert "at 100.000001 to 149.000001" in said.message
    assert said.evidence == ("k:1", "k:2", "k:3", "...")


@pytest.mark.parametrize(
    ("line", "code", "verdict"),
    [
        (
            "[    8.38] mlx5_core 0001:43:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at "
            "0001:42:01.0 (capable of 126.016 Gb/s with 8.0 GT/s PCIe x16 link)",
            "SYS001",
            "WARN",
        ),
        ("[    9.0001] Out of memory: Killed process 4711 (python3) total-vm:1kB", "SYS002", "WARN"),
        (
            "[    9.0001] pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0",
            "SYS003",
            "FAIL",
        ),
        ("[    9.0001] mce: [Hardware Error]: Machine check events logged", "SYS003", "WARN"),
        ("<0>[    9.0001] Kernel panic - not syncing: Fatal exception", "SYS005", "WARN"),
        ("[    9.0001] NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x26:0x56:1463)", "SYS004", "FAIL"),
    ],
)
def test_other_lines_about_hardware(line: str, code: str, verdict: str) -> None:
    assert bad(KERNEL.read(line + "\n[   10.0001] quiet\n", "k")) == [(code, verdict)]


def test_a_nic_at_its_full_width_gives_no_finding() -> None:
    line = (
        "[    8.38] mlx5_core 0000:5d:00.0: 504.112 Gb/s available PCIe bandwidth (32.0 GT/s PCIe x16 link)\n"
    )
    assert worst(KERNEL.read(line, "k")) == "PASS"


def test_a_truncated_driver_message_does_not_pass() -> None:
    for line in (
        "NVRM: Xid (PCI:0000:1b",
        "NVRM: Xid (PCI:0000:1b:00): ",
        "nvidia-nvswitch1: SXid (PCI:0000:07",
    ):
        assert bad(KERNEL.read(f"[   10.0001] quiet\n[   11.0001] {line}", "k")) == [
            ("OUT002", "UNJUDGED")
        ], line
    torn = "NVRM: Xid (PCI:0000:1b:00): 149, NETIR_LINK_EVT Ffatal XC0 i0 Link 04\n"
    assert worst(KERNEL.read(torn, "k")) == "FAIL"


def test_prose_is_not_a_kernel_log() -> None:
    assert not KERNEL.matches("The Xid 79 means that the GPU has fallen off the bus.\nRestart the node.\n")


# -- fabric manager


def test_the_fabric_manager_s_errors() -> None:
    text = fixture("fabric_manager_errors.log")
    assert FABRIC.matches(text)
    assert not KERNEL.matches(text)
    found = FABRIC.read(text, "f")
    assert [(f.verdict, f.target.pci, f.target.link) for f in found] == [
        ("WARN", "0000:86:00", 61),
        ("FAIL", "0000:87:00", 30),
    ]
    assert "2 times" in found[1].message
    quiet = "".join(x for x in text.splitlines(keepends=True) if "ERROR" not in x)
    assert worst(FABRIC.read(quiet, "f")) == "PASS"
    assert worst(FABRIC.read(quiet + "[Mar 04 2025 08:20:00] [ERR", "f")) == "UNJUDGED"


# -- dcgmi diag


def test_a_failed_and_a_skipped_test() -> None:
    found = DCGM.read(fixture("dcgm_mixed.json"), "d")
    assert bad(found) == [("DIA001", "FAIL"), ("DIA002", "UNJUDGED")]
    assert next(f for f in found if f.code == "DIA001").target.gpu == 1


def test_skips_do_not_pass_in_any_spelling() -> None:
    text = fixture("dcgm3_pass.json")
    assert worst(DCGM.read(text, "d")) == "PASS"
    for word in ("Skip", "SKIPPED?", "Not Run", "NotRun", "Pas"):
        assert (
            worst(DCGM.read(text.replace('"0,1", "status": "PASS"', f'"0,1", "status": "{word}"'), "d"))
            == "UNJUDGED"
        )


def test_tests_of_software_alone_do_not_pass() -> None:
    text = fixture("dcgm3_pass.json")
    only = text[: text.index('      {"category": "Stress"')].rstrip().rstrip(",") + "]}}"
    assert bad(DCGM.read(only, "d")) == [("DIA002", "UNJUDGED")]


def test_a_setting_is_not_the_hardware_s_fault() -> None:
    text = fixture("dcgm_mixed.json").replace('"error_severity": 4', '"error_severity": 5')
    assert bad(DCGM.read(text, "d")) == [("DIA003", "WARN"), ("DIA002", "UNJUDGED")]
    old = fixture("dcgm3_pass.json").replace(
        '{"status": "PASS"}', '{"status": "FAIL", "warnings": "Persistence mode for GPU 0 is disabled."}'
    )
    assert bad(DCGM.read(old, "d")) == [("DIA003", "WARN")]


def test_no_part_of_the_json_passes() -> None:
    text = fixture("dcgm3_pass.json").rstrip()
    for end in range(40, len(text)):
        assert worst(DCGM.read(text[:end], "d")) == "UNJUDGED"
    assert worst(DCGM.read('{"DCGM Diagnostic": {"runtime_error": "no GPU"}}', "d")) == "UNJUDGED"
    assert worst(DCGM.read('{"DCGM Diagnostic": {"test_categories": []}}', "d")) == "UNJUDGED"
    assert worst(DCGM.read('{"DCGM Diagnostic": ' + "[" * 100_000, "d")) == "UNJUDGED"


def test_null_drops_nothing() -> None:
    """DCGM 3.1 leaves null where a test or a GPU did not run (dcgmi/Diag.cpp, v3.1.8: an index of the list is left out)."""
    text, mixed = fixture("dcgm3_pass.json"), fixture("dcgm_mixed.json")
    assert (
        worst(
            DCGM.read(
                text.replace('"tests": [{"name": "Denylist"', '"tests": [null, {"name": "Denylist"'), "d"
            )
        )
        == "PASS"
    )
    assert (
        worst(
            DCGM.read(text.replace('"tests": [{"name": "Targeted', '"tests": [null, {"name": "Targeted'), "d")
        )
        == "UNJUDGED"
    )
    results = text.replace('"results": [{"gpu_ids"', '"results": [null, {"gpu_ids"')
    assert bad(DCGM.read(results, "d")) == [("DIA002", "UNJUDGED")]
    for old, new in (
        ('"tests": [\n        {"name": "pcie"', '"tests": [null, {"name": "pcie"'),
        ('{"category": "Deployment"', 'null, {"category": "Deployment"'),
        ('{"category": "Deployment"', '{"category": "Stress", "tests": null}, {"category": "Deployment"'),
        ('{"name": "software"', '{"name": null}, {"name": "software", "extra": null'),
        ('{"name": "software", "results": [', '{"name": "software", "results": null}, {"name": "x", "results": [null, '),
        ('"status": "Skip"', '"status": null'),
        ('"status": "Skip"', '"status": "Skip", "warnings": null'),
    ):  # fmt: skip
        assert old in mixed
        found = bad(DCGM.read(mixed.replace(old, new, 1), "d"))
        assert ("DIA001", "FAIL") in found, new
        assert {v for _, v in found} == {"FAIL", "UNJUDGED"}
    failed = text.replace('"0,1", "status": "PASS"', '"0,1", "status": "FAIL", "warnings": null')
    assert "None" not in DCGM.read(failed, "d")[1].message


# -- nccl-tests

NODE = fixture("nccl_h100_node.log")


def test_a_healthy_node_passes_in_every_version_s_layout() -> None:
    assert TESTS.matches(NODE)
    found = TESTS.read(NODE, "n")
    assert worst(found) == "PASS"
    stripped = "\n".join(line.lstrip("#") for line in NODE.split("\n"))
    labelled = "\n".join(f"[1,0]<stdout>:{line}" for line in NODE.split("\n"))
    older = (
        NODE.replace("#wrong", "  error").replace("      0 ", "  4e-07 ").replace("      0\n", "  4e-07\n")
    )
    for text in (stripped, labelled, older):
        assert worst(TESTS.read(text, "n")) == "PASS", text[:2000]


def slower(share: float) -> str:
    """The run with every bandwidth scaled."""
    out = []
    for line in NODE.split("\n"):
        words = line.split()
        if len(words) == 13 and words[0].isdigit():
            for k in (6, 7, 10, 11):
                words[k] = f"{float(words[k]) * share:.2f}"
            line = " ".join(words)
        out.append(line)
    return "\n".join(out)


def test_bandwidth_is_judged_at_the_largest_message_only() -> None:
    assert worst(TESTS.read(NODE.replace("300.123", "3.5"), "n")) == "PASS"
    (low,) = [f for f in TESTS.read(slower(0.5), "n") if f.code == "NCC002"]
    assert (low.verdict, low.unit, low.expected.algorithm) == ("FAIL", "GB/s", "ring")  # type: ignore[union-attr]
    assert low.evidence == (
        f"n:{NODE.split(chr(10)).index(next(x for x in NODE.split(chr(10)) if x.strip().startswith('8589934592'))) + 1}",
    )
    (suspect,) = [f for f in TESTS.read(slower(0.67), "n") if f.code == "NCC002"]
    assert suspect.verdict == "WARN"


def test_what_fits_a_ring_but_not_nvls_needs_the_debug_log() -> None:
    (said,) = [f for f in TESTS.read(slower(0.78), "n") if f.code == "NCC002"]
    assert said.verdict == "UNJUDGED"
    assert "NCCL_DEBUG=INFO" in said.why_unjudged
    lines = "".join(
        f"node7:{d}:{d} [{d}] NCCL INFO 16 coll channels, 16 nvls channels, 16 p2p channels\n"
        for d in range(8)
    )
    (with_nvls,) = [f for f in TESTS.read(lines + slower(0.78), "n") if f.code == "NCC002"]
    assert (with_nvls.verdict, with_nvls.expected.algorithm) == ("FAIL", "NVLS")  # type: ignore[union-attr]
    without = lines.replace("16 nvls", "0 nvls")
    (ring,) = [f for f in TESTS.read(without + slower(0.78), "n") if f.code == "NCC002"]
    assert ring.verdict == "PASS"


def test_wrong_numbers_and_failures_fail() -> None:
    for text in (
        NODE.replace("Out of bounds values : 0 OK", "Out of bounds values : 4 FAILED"),
        NODE.replace("      0\n", "      3\n", 1),
        NODE.replace("300.123", "300.123 FAILED"),
        NODE + "node7: Test NCCL failure all_reduce.cu:44 'unhandled system error'\n",
    ):
        assert ("NCC001", "FAIL") in bad(TESTS.read(text, "n"))


def test_a_truncated_run_does_not_pass() -> None:
    lines = NODE.rstrip("\n#").split("\n")
    for end in range(1, len(lines)):
        text = "\n".join(lines[:end])
        if TESTS.matches(text):
            assert worst(TESTS.read(text, "n")) == "UNJUDGED"
    torn = NODE.replace("300.123", "3").replace("# Avg bus bandwidth    : 3\n", "# Avg bus ban")
    assert worst(TESTS.read(torn, "n")) == "UNJUDGED"


def test_unchecked_numbers_and_small_messages_are_unjudged() -> None:
    unchecked = NODE.replace("      0 ", "    N/A ").replace("      0\n", "    N/A\n")
    assert ("NCC001", "UNJUDGED") in bad(TESTS.read(unchecked, "n"))
    small = NODE.replace("8589934592", "      8192").replace("maxBytes       8192", "maxBytes 8192")
    small = "\n".join(x for x in small.split("\n") if not x.strip().startswith(("268", "536", "1073")))
    assert ("NCC002", "UNJUDGED") in bad(TESTS.read(small, "n"))


def test_a_bandwidth_that_falls_with_the_size_is_suspect() -> None:
    falls = NODE.replace(" 478.90 ", " 300.00 ")
    assert ("NCC003", "WARN") in bad(TESTS.read(falls, "n"))


def test_one_rank_uses_no_link() -> None:
    lines = [x for x in NODE.split("\n") if "Rank" not in x or "Rank  0" in x]
    alone = re.sub(r"(\d+\.\d\d +)\d+\.\d\d(?= +0)", r"\g<1>0.00", "\n".join(lines))
    (said,) = TESTS.read(alone, "n")
    assert (said.code, said.verdict) == ("NCC001", "PASS")
    assert "no link was used" in said.message


def test_over_nodes_the_nic_decides() -> None:
    two = re.sub(r"on node7 device  ([4-7])", r"on node8 device  \1", slower(0.6))
    assert two.count("node8") == 4
    (unknown,) = [f for f in TESTS.read(two, "n") if f.code == "NCC002"]
    assert (unknown.verdict, "rate of its NIC" in unknown.why_unjudged) == ("UNJUDGED", True)
    # 287 GB/s x (2 - 1) / (8 - 1) x 8 = 328 Gb/s a GPU.
    (low,) = [f for f in TESTS.read(two, "n", Context(nic_gbit_s=400.0)) if f.code == "NCC002"]
    assert low.verdict == "WARN"
    assert low.measured == pytest.approx(328.4, abs=0.1)
    (fast,) = [f for f in TESTS.read(two, "n", Context(nic_gbit_s=350.0)) if f.code == "NCC002"]
    assert fast.verdict == "PASS"


def test_the_debug_log_shows_a_gpu_that_nccl_works_around() -> None:
    text = fixture("nccl_debug_split.log")
    assert DEBUG.matches(text)
    assert not TESTS.matches(text)
    dated = "".join(f"[2025-03-04 08:15:00] {line}\n" for line in text.splitlines())
    assert DEBUG.matches(dated)
    assert bad(DEBUG.read(dated, "n")) == bad(DEBUG.read(text, "n"))
    found = DEBUG.read(text, "n")
    assert {(f.code, f.verdict) for f in found} == {("NCC004", "FAIL")}
    assert {(f.target.node, f.target.gpu) for f in found} == {(None, None), ("node7", 1)}
    good = (
        text.replace(" not available", " available")
        .replace("nNodes 2", "nNodes 1")
        .replace(": 8 coll", "16 coll")
    )
    good = (
        good.replace("INFO 8 coll", "INFO 16 coll")
        .replace("0 nvls channels, 16 p2p", "16 nvls channels, 16 p2p")
        .replace("116 nvls", "16 nvls")
    )
    assert worst(DEBUG.read(good, "n")) == "PASS"
    assert ("NCC004", "WARN") in bad(
        DEBUG.read(
            good.replace("network IB", "network Socket").replace("node7:101:111 [1]", "node8:101:111 [0]"),
            "n",
        )
    )
    warned = (
        good + "node7:100:110 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error\n"
    )
    assert ("NCC005", "WARN") in bad(DEBUG.read(warned, "n"))
    silent = "\n".join(x for x in good.split("\n") if "channels" not in x)
    assert worst(DEBUG.read(silent, "n")) == "UNJUDGED"
