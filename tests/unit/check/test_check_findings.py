"""Findings, codes, and what every tool has in common."""

from __future__ import annotations

import pytest

from seatrial.check.judging.findings import Finding, Target, codes, explain, worst
from seatrial.check.outputs.smi_query_judge import TOOLS
from seatrial.check.outputs.tool import Context as Known
from seatrial.check.outputs.tool import Lines, ParseError, evidence, lines_of, unclaimed_findings
from seatrial.check.ranges import listed


def finding(verdict: str, **fields: object) -> Finding:
    why = "no tool" if verdict == "UNJUDGED" else ""
    return Finding("GPU001", verdict, Target(), "text", why_unjudged=why, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ([], "UNJUDGED"),
        (["PASS"], "PASS"),
        (["PASS", "UNJUDGED"], "UNJUDGED"),
        (["UNJUDGED", "WARN", "PASS"], "WARN"),
        (["WARN", "FAIL", "UNJUDGED"], "FAIL"),
    ],
)
def test_the_worst_verdict_counts_and_nothing_does_not_pass(said: list[str], verdict: str) -> None:
    assert worst(finding(v) for v in said) == verdict


def test_only_unjudged_findings_have_a_reason() -> None:
    assert Finding("GPU001", "UNJUDGED", Target(), "text").why_unjudged == "text"
    assert finding("UNJUDGED").why_unjudged != "text"
    with pytest.raises(AssertionError, match="why_unjudged"):
        Finding("GPU001", "PASS", Target(), "text", why_unjudged="no tool")
    with pytest.raises(AssertionError, match="XYZ999"):
        Finding("XYZ999", "PASS", Target(), "text")


def test_finding_action_defaults_to_the_action_of_its_code() -> None:
    assert finding("FAIL").action == codes()["GPU001"].action
    assert finding("FAIL", action="look").action == "look"
    assert finding("PASS").action == ""


def test_deviation_is_a_share_of_the_peers_median() -> None:
    assert finding("WARN", measured=80.0, peers_median=100.0).deviation == pytest.approx(-0.2)
    assert finding("WARN", measured="x", peers_median=100.0).deviation is None
    assert finding("WARN", measured=80.0).deviation is None
    assert finding("WARN", measured=80.0, peers_median=0.0).deviation is None


def test_every_code_is_complete_and_found_in_any_case() -> None:
    assert codes()
    for name, code in codes().items():
        assert name == code.code == name.upper()
        assert all((code.title, code.meaning, code.action, code.source)), name
    known = explain(" gpu001 ")
    assert known is not None
    assert known.title == "GPU missing"
    assert explain("GPU999") is None


def test_a_target_as_a_person_reads_it() -> None:
    assert str(Target(node="node7", gpu=3, pci="0000:3b:00", link=5)) == "node7 GPU 3 (0000:3b:00) NVLink 5"
    assert str(Target(node="node7", port="mlx5_0/1", peer="node9")) == "node7 mlx5_0/1 to node9"
    assert str(Target()) == "-"


def test_what_cannot_be_read_is_unjudged_with_its_place() -> None:
    text = "<?xml version='1.0'?>\n<nvidia_smi_log>\n<gpu id='00000000:1B:00.0'>\n"
    (said,) = TOOLS[0].read(text, "out.xml", Known(node="node7"))
    assert (said.code, said.verdict, said.target.node) == ("OUT001", "UNJUDGED", "node7")
    assert said.evidence[0].startswith("out.xml:")
    assert TOOLS[0].inventory_of(text, "out.xml") == {}


def test_a_parse_error_names_file_and_line() -> None:
    error = ParseError("torn", file="out.txt", line=7, source_line="GPU 0: NVI")
    assert error.render().startswith("out.txt:7:1: error: torn\n  7 | GPU 0: NVI")
    assert error.exit_code == 2


def test_lines_are_numbered_as_an_editor_does() -> None:
    assert lines_of("a\r\nb\u2028c\x0bd\ne") == ["a", "b\u2028c\x0bd", "e"]


def test_lists_and_places_stay_short() -> None:
    assert evidence("f", [3, 4]) == ("f:3", "f:4")
    assert evidence("f", range(1, 100)) == ("f:1", "f:2", "f:3", "...")
    assert listed([1, 2]) == "1, 2"
    assert listed(range(0, 20, 2), 3) == "0, 2, 4 and 7 more"


def test_leftover_lines_are_shown_without_control_characters() -> None:
    assert unclaimed_findings(Lines([]), "f", Known(), "tool") == []
    (said,) = unclaimed_findings(Lines([(4, "Li\x1b[2Jnk"), (9, "x")]), "f", Known(), "tool")
    assert said.verdict == "UNJUDGED"
    assert "2 lines not recognised, the first: 'Li?[2Jnk'" in said.why_unjudged
    assert said.evidence == ("f:4", "f:9")
