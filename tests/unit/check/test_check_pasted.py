"""Outputs that a person has copied from a terminal, a chat or a page: prompts, fences, indentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.check.intake.collect import pieces_of, without_decoration
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.findings import Verdict

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
OUTPUTS = (
    "ib_write_bw_ndr.txt",
    "ibstat_four_ndr.txt",
    "ibstat_one_down.txt",
    "mlxlink_ndr.txt",
    "smi_table_four.txt",
    "smi_q_h200_two.txt",
    "dcgm3_table.txt",
    "nccl_two_runs.log",
    "kernel_faults.log",
    "kernel_flaps.log",
)
DRESSES = {
    "prompt": lambda t: "[root@node7 ~]# ibstat --of some kind\n" + t,
    "prompts": lambda t: "ubuntu@node7:~$ sudo dmesg -T\n" + t.rstrip("\n") + "\nubuntu@node7:~$ \n",
    "command": lambda t: "$ nvidia-smi -q\n" + t,
    "fence": lambda t: "```text\n" + t.rstrip("\n") + "\n```\n",
    "indented": lambda t: "".join("    " + line for line in t.splitlines(keepends=True)),
    "tab": lambda t: "".join("\t" + line if line.strip() else line for line in t.splitlines(keepends=True)),
    "windows": lambda t: t.replace("\n", "\r\n"),
    "all": lambda t: "".join(
        "  " + line for line in ("```\n$ ibstat\n" + t.rstrip("\n") + "\n```\n").splitlines(keepends=True)
    ),
}


def verdict(text: str) -> Verdict:
    return judge_pieces(pieces_of(text.encode(), "f.txt", None)).verdict


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("dress", sorted(DRESSES))
def test_what_was_copied_along_changes_no_verdict(name: str, dress: str) -> None:
    text = (FIXTURES / name).read_text()
    assert verdict(text) in ("PASS", "WARN", "FAIL")
    assert verdict(DRESSES[dress](text)) == verdict(text)


def test_lines_keep_their_numbers() -> None:
    text = "```\n[root@node7 ~]# ibstat\n" + (FIXTURES / "ibstat_one_down.txt").read_text() + "```\n"
    plain = judge_pieces(pieces_of((FIXTURES / "ibstat_one_down.txt").read_bytes(), "f.txt", None))
    worn = judge_pieces(pieces_of(text.encode(), "f.txt", None))
    (place,) = next(f for j in plain.judged for f in j.findings if f.verdict == "FAIL").evidence
    (moved,) = next(f for j in worn.judged for f in j.findings if f.verdict == "FAIL").evidence
    assert int(moved.partition(":")[2]) == int(place.partition(":")[2]) + 2


@pytest.mark.parametrize(
    "text",
    [
        "# nThread 1 nGpus 8 minBytes 8\n#\n#  Rank  0\n",
        "[   12.000001] user@host: no prompt\n",
        "GPU 0: NVIDIA H200 (UUID: GPU-1)\n",
        "\tGPU0\tGPU1\nGPU0\t X \tNV18\n",
        "    Remapped Rows\n        Pending : No\n".lstrip(" "),
        "```\n",
        "\n",
        "",
    ],
)
def test_what_is_the_output_s_own_stays(text: str) -> None:
    lines = list(enumerate(text.split("\n"), 1))
    assert without_decoration(lines) == lines


def test_a_cut_off_output_in_a_fence_is_cut_off() -> None:
    text = (FIXTURES / "ib_write_bw_ndr.txt").read_text()
    row = text.index("\n 65536")
    for part in (text.index(" #bytes"), row, row + 30):
        assert verdict("```\n$ ib_write_bw node8\n" + text[:part] + "\n```\n") == "UNJUDGED"
