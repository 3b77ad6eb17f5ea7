"""mlxlink and ncclscout."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.check.judging.findings import Finding, worst
from seatrial.check.outputs import mlxlink, ncclscout
from seatrial.check.outputs.network import NetworkContext
from seatrial.check.outputs.tool import Lines, ParseError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"


def text_of(name: str) -> str:
    return (FIXTURES / name).read_text()


def link(text: str) -> list[Finding]:
    assert mlxlink.matches(text)
    return mlxlink.TOOLS[0].read(text, "f", NetworkContext())


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [
        ("mlxlink_ndr.txt", "NET008", "PASS"),
        ("mlxlink_hdr_cable.txt", "NET008", "PASS"),  # the cable can do no more
        ("mlxlink_clean_counters.txt", "NET008", "PASS"),  # 15E-255 is zero
        ("mlxlink_ethernet.json", "NET008", "PASS"),
        ("mlxlink_trained_down.txt", "NET002", "FAIL"),
        ("mlxlink_bit_errors.txt", "NET008", "WARN"),
        ("mlxlink_polling.txt", "NET001", "FAIL"),
    ],
)
def test_links(name: str, code: str, verdict: str) -> None:
    (found,) = link(text_of(name))
    assert (found.code, found.verdict) == (code, verdict)


def test_a_link_that_is_down_has_mlxlink_s_recommendation() -> None:
    assert "Cable is unplugged" in link(text_of("mlxlink_polling.txt"))[0].message


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("Width                              : 4x", "Width                              : 1x", "FAIL"),
        (
            "Speed                              : IB-NDR",
            "Speed                              : IB-QQQ",
            "UNJUDGED",
        ),
        (
            "State                              : Active",
            "State                              : Aktiv",
            "UNJUDGED",
        ),
        ("Status Opcode                      : 0", "Status Opcode                      : 15", "WARN"),
        ("No issue was observed", "No iss", "UNJUDGED"),
        ("Status Opcode                      : 0\n", "", "UNJUDGED"),
        ("Enabled Link Speed                 : 0x000000f1 (NDR,HDR,EDR,FDR,SDR)\n", "", "UNJUDGED"),
    ],
)
def test_faulty_and_truncated_links(old: str, new: str, verdict: str) -> None:
    text = text_of("mlxlink_ndr.txt")
    assert text.count(old) == 1
    assert worst(link(text.replace(old, new))) == verdict


def test_duplicate_names_are_allowed_only_in_irrelevant_sections() -> None:
    text = text_of("mlxlink_ndr.txt")
    module = "\nModule Info\n-----------\nWidth                              : OSFP\n"
    assert worst(link(text + module)) == "PASS"
    assert worst(link(text + module + "some words\n")) == "UNJUDGED"
    twice = "Width                              : 4x\n"
    assert worst(link(text.replace(twice, twice * 2))) == "UNJUDGED"


def test_one_lane_is_right_for_ethernet_and_wrong_for_infiniband() -> None:
    text = (
        text_of("mlxlink_ethernet.json")
        .replace("400G_8X", "100G_1X")
        .replace('"400G"', '"100G"')
        .replace("200G_4X", "50G_1X")
    )
    assert worst(link(text.replace('"8x"', '"1x"').replace("100G_2X", "25G"))) == "PASS"


def test_json_that_is_cut_off_is_an_error() -> None:
    with pytest.raises(ParseError, match="JSON cannot be read"):
        mlxlink.parse(Lines.of(text_of("mlxlink_ethernet.json")[:-5]), "f")


def scout(text: str) -> list[Finding]:
    assert ncclscout.matches(text)
    return ncclscout.judge(ncclscout.parse(Lines.of(text), "f"), NetworkContext())


def test_good_pairs() -> None:
    (found,) = scout(text_of("ncclscout_good.txt"))
    assert (found.verdict, found.measured, found.unit) == ("PASS", 449.9, "GB/s")
    assert found.expected is not None
    assert found.expected.value == 440.0


def test_no_data_is_not_a_pass_at_any_threshold() -> None:
    text = text_of("ncclscout_good.txt")
    for number in ("451.20", "449.90", "450.55", "440.0"):
        text = text.replace(number, "0.00")
    assert {(f.code, f.verdict) for f in scout(text)} >= {("NET009", "FAIL")}


def test_node_slow_with_all_partners_is_named_not_its_partners() -> None:
    found = {f.target.node: f for f in scout(text_of("ncclscout_one_bad.txt"))}
    assert {n: (f.code, f.verdict) for n, f in found.items()} == {
        "n04": ("NET009", "FAIL"),
        "n05": ("NET009", "FAIL"),
        "n06": ("NET010", "FAIL"),
    }
    assert found["n04"].measured == 183.9
    assert "every test failed" in found["n05"].message


def test_pairs_without_a_summary_are_not_judged() -> None:
    text = text_of("ncclscout_good.txt").partition("=====")[0]
    assert worst(scout(text)) == "UNJUDGED"


def test_nodes_that_were_not_tested_are_not_judged() -> None:
    text = text_of("ncclscout_good.txt").replace("Total nodes provided: 4", "Total nodes provided: 5")
    text = text.replace(
        "└── Unreachable", "│   ├── Skipped (shape issues): 1\n│   └── Never tested: 0\n└── Unreachable"
    )
    found = scout(text)
    assert [(f.code, f.verdict) for f in found] == [("NET009", "UNJUDGED")]
    assert "1 nodes were reachable and not tested" in found[0].message


def test_a_pair_that_was_tested_again() -> None:
    again = "Retesting n04 with n01... 452.10 GB/s\n" + "=" * 70
    text = (
        text_of("ncclscout_good.txt")
        .replace("=" * 70, again, 1)
        .replace("Maximum: 451.20", "Maximum: 452.10")
    )
    assert worst(scout(text)) == "PASS"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Total nodes provided: 4", "Total nodes provided: 5"),
        ("Good nodes (≥ 440.0 GB/s): 4", "Good nodes (≥ 440.0 GB/s): 3"),
        ("n01, n02, n03, n04", "n01, n02, n03"),
        ("Minimum: 449.90", "Minimum: 149.90"),
        ("Test completed at: 2026-02-03 10:11:12", ""),
        ("  n03 <-> n04: 449.90 GB/s\n", "  n03 <-> n04: 44?.90 GB/s\n"),
    ],
)
def test_a_summary_that_contradicts_its_pairs_is_damaged(old: str, new: str) -> None:
    text = text_of("ncclscout_good.txt")
    assert text.count(old) == 1
    assert worst(scout(text.replace(old, new))) == "UNJUDGED"
