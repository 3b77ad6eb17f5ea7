"""nvidia-smi -q, as text and as XML, and the plain table."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.check.judging.findings import Finding, worst
from seatrial.check.outputs import smi_query_judge, smi_table
from seatrial.check.outputs.smi_query import parse
from seatrial.check.outputs.tool import Context, Lines, ParseError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
(QUERY,) = smi_query_judge.TOOLS
(TABLE,) = smi_table.TOOLS
TEXT = (FIXTURES / "smi_q_h200_two.txt").read_text()
XML = (FIXTURES / "smi_qx_h100.xml").read_text()
FOUR = (FIXTURES / "smi_table_four.txt").read_text()


def last(text: str, old: str, new: str) -> str:
    """`text` with the last `old` replaced: that of the second GPU."""
    before, found, after = text.rpartition(old)
    assert found, old
    return before + new + after


def bad(found: list[Finding]) -> list[tuple[str, str, int | None]]:
    return [(f.code, f.verdict, f.target.gpu) for f in found if f.verdict != "PASS"]


def test_healthy_text_and_xml_pass() -> None:
    for text in (TEXT, XML):
        assert QUERY.matches(text)
        found = QUERY.read(text, "q")
        assert worst(found) == "PASS", bad(found)
    assert QUERY.inventory_of(TEXT, "q") == {
        "GPUs": 2,
        "driver": "570.86.15",
        "GPU": "NVIDIA H200",
        "VBIOS": "96.00.A0.00.03",
        "memory": "143771 MiB",
    }


@pytest.mark.parametrize(
    ("old", "new", "code", "verdict"),
    [
        ("DRAM Uncorrectable            : 0\n        Aggregate", "DRAM Uncorrectable            : 3\n        Aggregate", "GPU003", "FAIL"),
        ("SRAM Threshold Exceeded       : No", "SRAM Threshold Exceeded       : Yes", "GPU003", "FAIL"),
        ("Remapping Failure Occurred        : No", "Remapping Failure Occurred        : Yes", "GPU004", "FAIL"),
        ("None                          : 0 bank(s)", "None                          : 2 bank(s)", "GPU004", "WARN"),
        ("Reset Required                    : No", "Reset Required                    : Yes", "GPU009", "FAIL"),
        ("Drain and Reset Recommended       : No", "Drain and Reset Recommended       : Yes", "GPU009", "FAIL"),
        ("GPU Recovery Action                   : None", "GPU Recovery Action                   : Reboot", "GPU009", "FAIL"),
        ("HW Power Brake Slowdown       : Not Active", "HW Power Brake Slowdown       : Active", "GPU007", "WARN"),
        ("SW Thermal Slowdown               : Not Active", "SW Thermal Slowdown               : Active", "GPU007", "WARN"),
        ("Current                   : 16x", "Current                   : 8x", "GPU008", "FAIL"),
        ("State                             : Completed", "State                             : In Progress", "NVL005", "FAIL"),
        ("Status                            : Success", "Status                            : Failure", "NVL005", "FAIL"),
        ("Bandwidth                     : Full", "Bandwidth                     : Degraded", "NVL005", "FAIL"),
        ("Route Unhealthy               : False", "Route Unhealthy               : True", "NVL005", "FAIL"),
        ("Fan Speed                             : N/A", "Fan Speed                             : ERR!", "GPU002", "FAIL"),
        ("GPU Current Temp                  : 31 C", "GPU Current Temp                  : GPU requires reset", "GPU009", "FAIL"),
        ("VBIOS Version                         : 96.00.A0.00.03", "VBIOS Version                         : 96.00.74.00.01", "GPU010", "WARN"),
        ("    ECC Mode\n        Current                           : Enabled", "    ECC Mode\n        Current                           : Disabled", "GPU012", "WARN"),
    ],
)  # fmt: skip
def test_each_fault_of_the_second_gpu_is_found_and_laid_on_it(
    old: str, new: str, code: str, verdict: str
) -> None:
    text = last(TEXT, old, new)
    found = QUERY.read(text, "q", Context(node="node7"))
    said = [f for f in found if f.code == code]
    assert any((f.verdict, f.target.gpu, f.target.pci) == (verdict, 1, "0000:43:00") for f in said), bad(
        found
    )
    assert worst(found) == verdict
    lines = text.splitlines()
    shown = [lines[int(e.rpartition(":")[2]) - 1] for f in said if f.target.gpu == 1 for e in f.evidence]
    assert any(line.strip() in new for line in shown), shown


def test_what_is_normal_is_not_flagged() -> None:
    for old, new in (
        ("SW Power Cap                      : Not Active", "SW Power Cap                      : Active"),
        ("Replays Since Reset               : 0", "Replays Since Reset               : 120"),
        ("Performance State                     : P0", "Performance State                     : P8"),
        # An idle card lowers its generation.
        ("  Current                   : 5", "  Current                   : 1"),
        ("Correctable Error                 : 0", "Correctable Error                 : 2"),
    ):
        found = QUERY.read(last(TEXT, old, new), "q")
        assert worst(found) == "PASS", (new, bad(found))


def test_a_consumer_card_may_run_without_ecc_and_with_a_quirk() -> None:
    text = TEXT.replace("NVIDIA H200", "NVIDIA GeForce RTX 4090").replace(
        "ECC Mode\n        Current                           : Enabled",
        "ECC Mode\n        Current                           : Disabled",
    )
    text = text.replace(
        "    Persistence Mode",
        "    Addressing Mode                       : Unknown Error\n    Persistence Mode",
    )
    assert worst(QUERY.read(text, "q")) == "PASS"


def test_a_busy_card_on_a_slow_generation_is_flagged() -> None:
    text = last(TEXT, "  Current                   : 5", "  Current                   : 3")
    text = last(
        text, "Idle                              : Active", "Idle                              : Not Active"
    )
    assert bad(QUERY.read(text, "q")) == [("GPU008", "WARN", 1)]


def test_throttled_clock_under_load_fails_against_peer_median() -> None:
    text = TEXT.replace(
        "Idle                              : Active", "Idle                              : Not Active"
    )
    text = text.replace(
        "SM                                : 345 MHz", "SM                                : 1900 MHz"
    )
    text = last(
        text, "SM                                : 1900 MHz", "SM                                : 900 MHz"
    )
    text = last(text, "HW Thermal Slowdown           : Not Active", "HW Thermal Slowdown           : Active")
    (said,) = [f for f in QUERY.read(text, "q") if f.code == "GPU007"]
    assert (said.verdict, said.measured, said.peers_median) == ("FAIL", 900.0, 1900.0)


def test_pending_row_remap_fails_only_with_new_errors() -> None:
    waits = last(
        TEXT,
        "Pending                           : No\n        Remapping",
        "Pending                           : Yes\n        Remapping",
    )
    (note,) = [f for f in QUERY.read(waits, "q") if f.code == "GPU005"]
    assert (note.verdict, note.action) == ("PASS", "reset the GPU when it is idle")
    fresh = last(
        waits,
        "DRAM Uncorrectable            : 0\n        Aggregate",
        "DRAM Uncorrectable            : 1\n        Aggregate",
    )
    assert ("GPU005", "FAIL", 1) in bad(QUERY.read(fresh, "q"))


def test_retired_pages() -> None:
    found = QUERY.read((FIXTURES / "smi_retired_pages.txt").read_text(), "q")
    assert bad(found) == [("GPU006", "FAIL", 1), ("GPU005", "FAIL", 3)]
    assert [f.target.gpu for f in found if f.code == "GPU005" and f.verdict == "PASS"] == [2]


def test_xml_faults_are_the_same_faults() -> None:
    for old, new, code in (
        ("<remapped_row_failure>No<", "<remapped_row_failure>Yes<", "GPU004"),
        ("<dram_uncorrectable>0<", "<dram_uncorrectable>7<", "GPU003"),
        ("power_brake_slowdown>Not Active<", "power_brake_slowdown>Active<", "GPU007"),
        ("<current_link_width>16x<", "<current_link_width>4x<", "GPU008"),
        ("<current_link_gen>5<", "<current_link_gen>4<", "GPU008"),
        ("<state>Completed<", "<state>Not Started<", "NVL005"),
        ("<gpu_recovery_action>None<", "<gpu_recovery_action>GPU Reset<", "GPU009"),
        ("<reset_required>No<", "<reset_required>Yes<", "GPU009"),
    ):
        found = QUERY.read(XML.replace(old, new, 1), "q.xml")
        assert [f.code for f in found if f.verdict in ("FAIL", "WARN")] == [code], (new, bad(found))
    old_names = XML.replace("clocks_event_reason", "clocks_throttle_reason")
    assert worst(QUERY.read(old_names, "q.xml")) == "PASS"
    slow = old_names.replace("hw_slowdown>Not Active<", "hw_slowdown>Active<", 1)
    assert [f.code for f in QUERY.read(slow, "q.xml") if f.verdict == "WARN"] == ["GPU007"]


def test_entities_are_refused() -> None:
    text = '<!DOCTYPE x [<!ENTITY a "aaaa">]>\n<nvidia_smi_log><gpu id="&a;"></gpu></nvidia_smi_log>'
    with pytest.raises(ParseError, match="entity"):
        parse(Lines.of(text), "q.xml")


def test_no_part_of_a_whole_output_passes() -> None:
    """Cut off anywhere but in the last line's value, which is not judged."""
    lines = TEXT.rstrip("\n").split("\n")
    for end in range(9, len(lines)):
        text = "\n".join(lines[:end])
        if QUERY.matches(text):
            assert worst(QUERY.read(text, "q")) != "PASS", lines[end - 1]
    for begin in range(9, len(lines) - 5):
        text = "\n".join(lines[begin:])
        if QUERY.matches(text):
            assert worst(QUERY.read(text, "q")) != "PASS", lines[begin]


@pytest.mark.parametrize(
    "section", ["Retired Pages", "ECC Errors", "Clocks Event Reasons", "PCI", "Remapping Failure"]
)
def test_a_missing_line_does_not_pass(section: str) -> None:
    text = "\n".join(line for line in TEXT.split("\n") if not line.strip().startswith(section))
    assert worst(QUERY.read(text, "q")) != "PASS"


def test_a_value_nvidia_smi_never_prints_does_not_pass() -> None:
    text = last(TEXT, "Remapping Failure Occurred        : No", "Remapping Failure Occurred        : Ye5")
    assert bad(QUERY.read(text, "q")) == [("GPU011", "UNJUDGED", 1)]
    text = last(TEXT, "Remapping Failure Occurred", "Remapping F\u00fchler Occurred")
    assert worst(QUERY.read(text, "q")) != "PASS"


def test_one_selected_gpu_is_not_a_missing_gpu() -> None:
    one = TEXT[: TEXT.index("GPU 00000000:43")]
    assert [(f.code, f.verdict) for f in QUERY.read(one, "q") if f.verdict != "PASS"] == [
        ("GPU011", "UNJUDGED")
    ]


def test_a_lost_gpu_fails() -> None:
    text = TEXT.replace(
        "Attached GPUs                             : 2", "Attached GPUs                             : 3"
    )
    text += "Unable to determine the device handle for GPU0000:61:00.0: Unknown Error\n"
    assert ("GPU002", "FAIL", None) in bad(QUERY.read(text, "q"))


def test_a_part_without_a_heading() -> None:
    part = (
        "    Fabric\n        State                         : {}\n        Status                        : {}\n"
    )
    assert worst(QUERY.read(part.format("Completed", "Success"), "q")) == "PASS"
    assert bad(QUERY.read(part.format("In Progress", "N/A"), "q")) == [("NVL005", "FAIL", None)]
    half = part.format("Completed", "Success").rpartition("        Status")[0]
    assert worst(QUERY.read(half, "q")) == "UNJUDGED"


def test_a_missing_gpu_by_plan_and_by_board() -> None:
    assert bad(QUERY.read(TEXT, "q", Context(gpus=8))) == [("GPU001", "FAIL", None)]
    block = TEXT[TEXT.index("GPU 00000000:43") :]
    three = TEXT.replace(
        "Attached GPUs                             : 2", "Attached GPUs                             : 3"
    )
    three += block.replace("43:00.0", "61:00.0")
    assert bad(QUERY.read(three, "q")) == [("GPU001", "FAIL", None)]


# -- the table


def test_a_healthy_table_passes() -> None:
    found = TABLE.read(FOUR, "t")
    assert worst(found) == "PASS"
    assert TABLE.inventory_of(FOUR, "t") == {
        "GPUs": 4,
        "driver": "570.86.15",
        "GPU": "NVIDIA H200",
        "memory": "143771 MiB",
    }


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("| N/A   31C ", "| ERR!  31C ", "GPU002"),
        ("77W /  700W", "ERR!/  700W", "GPU002"),
        (
            "|   00000000:52:00.0 Off |                    0 |",
            "|   00000000:52:00.0 Off |                    4 |",
            "GPU003",
        ),
    ],
)
def test_a_fault_in_the_table(old: str, new: str, code: str) -> None:
    assert bad(TABLE.read(FOUR.replace(old, new), "t")) == [(code, "FAIL", 2)]


def test_an_error_instead_of_a_table_fails() -> None:
    for text in (
        "No devices were found\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
    ):
        assert TABLE.matches(text)
        assert worst(TABLE.read(text, "t")) == "FAIL"


def test_a_cut_off_table_is_unjudged() -> None:
    lines = FOUR.split("\n")
    for end in range(2, 12):
        assert worst(TABLE.read("\n".join(lines[:end]), "t")) == "UNJUDGED"
    three = FOUR.replace("".join(x + "\n" for x in lines[20:24]), "")
    assert bad(TABLE.read(three, "t")) == [("GPU001", "FAIL", None)]


def test_a_part_whose_head_is_cut_off_may_lack_gpus() -> None:
    """`-d` prints how many GPUs are attached before the first of them, as the whole output does."""
    gpu = "GPU 00000000:{:02X}:00.0\n    ECC Errors\n        Volatile\n            DRAM Uncorrectable : 0\n        Aggregate\n            DRAM Uncorrectable : 0\n"
    head = "==============NVSMI LOG==============\n\nTimestamp : Tue Mar  4 08:15:00 2025\nDriver Version : 535.161.08\n\nAttached GPUs : 4\n"
    whole = head + "".join(gpu.format(n) for n in range(4))
    assert worst(QUERY.read(whole, "q")) == "PASS"
    for begin in (
        whole.index("GPU 00000000:00"),
        whole.index("GPU 00000000:01"),
        whole.index("GPU 00000000:03"),
    ):
        assert worst(QUERY.read(whole[begin:], "q")) == "UNJUDGED"
