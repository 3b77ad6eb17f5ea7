"""The table of `dcgmi diag`, as DCGM 2 to 4 print it."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.check.judging.findings import Finding, worst
from seatrial.check.outputs import dcgm_diag, dcgm_text

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
GOOD = (FIXTURES / "dcgm3_table.txt").read_text()
FAILED = (FIXTURES / "dcgm4_table_fail.txt").read_text()
(TABLE,) = dcgm_text.TOOLS
(JSON,) = dcgm_diag.TOOLS


def bad(found: list[Finding]) -> list[tuple[str, str, int | None]]:
    return [(f.code, f.verdict, f.target.gpu) for f in found if f.verdict != "PASS"]


def test_a_table_without_faults_passes() -> None:
    assert TABLE.matches(GOOD)
    assert not JSON.matches(GOOD)
    assert worst(TABLE.read(GOOD, "d")) == "PASS"
    assert TABLE.inventory_of(GOOD, "d") == {"DCGM": "3.3.5"}


def test_the_gpu_that_failed_is_named_with_the_reason() -> None:
    found = TABLE.read(FAILED, "d")
    assert bad(found) == [("DIA001", "FAIL", 1), ("DIA002", "UNJUDGED", None)]
    assert (
        "Pending page retirements together with a double bit error were detected on GPU 1" in found[1].message
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "| GPU Memory                | Pass - All       ",
            "| GPU Memory                | Fail - GPUs: 1, 3",
            [("DIA001", "FAIL", 1), ("DIA001", "FAIL", 3)],
        ),
        (
            "| Diagnostic                | Pass - All ",
            "| Diagnostic                | Skip - All ",
            [("DIA002", "UNJUDGED", None)],
        ),
        (
            "| PCIe                      | Pass - All ",
            "| PCIe                      | Warn - All ",
            [("DIA001", "WARN", None)],
        ),
        (
            "| PCIe                      | Pass - All ",
            "| PCIe                      | Psas - All ",
            [("DIA002", "UNJUDGED", None)],
        ),
        (
            "| Persistence Mode          | Pass ",
            "| Persistence Mode          | Fail ",
            [("DIA003", "WARN", None)],
        ),
    ],
)
def test_other_results(old: str, new: str, expected: list[tuple[str, str, int | None]]) -> None:
    assert old in GOOD
    assert bad(TABLE.read(GOOD.replace(old, new), "d")) == expected


def test_no_part_of_the_table_passes() -> None:
    end = GOOD.rstrip()
    for cut in range(len("Successfully"), len(end)):
        if TABLE.matches(end[:cut]):
            assert worst(TABLE.read(end[:cut], "d")) == "UNJUDGED", end[:cut][-60:]


def test_tests_of_software_alone_do_not_pass() -> None:
    short = GOOD[: GOOD.index("+-----  Integration")] + GOOD.rstrip().rpartition("\n")[2] + "\n"
    assert bad(TABLE.read(short, "d")) == [("DIA002", "UNJUDGED", None)]


def test_a_status_only_in_the_summary_of_a_test_counts() -> None:
    text = (
        '{"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": [{"name": "memory", '
        '"results": [{"entity_group": "GPU", "entity_id": 0, "status": "Pass"}], "test_summary": {"status": "%s"}}]}]}}'
    )
    assert worst(JSON.read(text % "Pass", "d")) == "PASS"
    assert worst(JSON.read(text % "Fail", "d")) == "FAIL"
