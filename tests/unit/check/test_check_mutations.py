"""Damaged outputs: no reader ever crashes on one, and none turns one into a PASS."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.check.intake.collect import pieces_of
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.findings import Verdict
from seatrial.check.outputs.registry import recognise, tools
from seatrial.check.outputs.tool import Context, Lines, ParseError

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
TEXTS = {p.name: p.read_text() for p in sorted(FIXTURES.glob("**/*")) if p.is_file()}
NETWORK = {
    n: t for n, t in TEXTS.items() if n.startswith(("ib_", "ibv_", "ibstat", "mlxlink", "ncclscout", "sysfs"))
}


def verdict(text: str | bytes) -> Verdict:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return judge_pieces(pieces_of(data, "f.txt", None)).verdict


HEALTHY = {n: t for n, t in NETWORK.items() if verdict(t) == "PASS"}
ALL_HEALTHY = HEALTHY | {n: t for n, t in TEXTS.items() if n not in NETWORK and verdict(t) == "PASS"}

WORDS = st.sampled_from(
    [
        *"0123456789.:-_[]{}()<>#%|/\\'\" \t\n\r\x00\x1b\x7f",
        *(
            "GPU 0",
            "CA 'mlx5_0'",
            "hca_id:\tmlx5_0",
            "Infiniband device 'mlx5_0' port 1 status:",
            'Switch\t64 "S-01"\t\t# "leaf"',
            "Port 1:",
            "State: Active",
            "RDMA_Write BW Test",
            "#bytes",
            "FAILED",
            "GB/s",
            "NVRM: Xid (PCI:",
        ),
        *(
            "Operational Info",
            "test_info",
            "-" * 87,
            "nan",
            "inf",
            "1e999",
            "-1",
            "9" * 400,
            "²",
            "٣",
            "é",
            "端口",
            "\ufffd",
        ),
    ]
)


@st.composite
def mutated(draw: st.DrawFn, texts: dict[str, str]) -> str:
    """One of `texts` after one to four cuts, copies, insertions, exchanged lines and changed characters."""
    text = texts[draw(st.sampled_from(sorted(texts)))]
    for _ in range(draw(st.integers(1, 4))):
        a, b = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        how = draw(st.sampled_from(["cut", "end", "double", "insert", "replace", "lines", "other"]))
        if how == "cut":
            text = text[:a] + text[min(b, a + 200) :]
        elif how == "end":
            text = text[:a]
        elif how == "double":
            text = text[:b] + text[a:b][:500] + text[b:]
        elif how == "insert":
            text = text[:a] + draw(WORDS) + text[a:]
        elif how == "replace":
            text = text[:a] + draw(WORDS) + text[a + 1 :]
        elif how == "lines":
            lines = text.splitlines(keepends=True)
            if len(lines) > 1:
                i, j = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
                lines[i], lines[j] = lines[j], lines[i]
            text = "".join(lines)
        else:
            text = text[:a] + texts[draw(st.sampled_from(sorted(texts)))][:2000]
    return text


@settings(max_examples=300, deadline=None)
@given(mutated(TEXTS))
def test_no_reader_crashes_on_a_damaged_output(text: str) -> None:
    for tool in tools():
        tool.matches(text)
    for tool in recognise(text):
        try:
            facts = tool.parse(Lines.of(text), "f.txt")
        except ParseError:
            continue
        found = tool.judge(facts, Context())
        assert found, tool.name
        tool.inventory(facts)


@settings(max_examples=150, deadline=None)
@given(mutated(TEXTS), st.sampled_from([t.name for t in tools()]))
def test_no_reader_crashes_on_what_is_not_its_own(text: str, name: str) -> None:
    tool = next(t for t in tools() if t.name == name)
    try:
        facts = tool.parse(Lines.of(text), "f.txt")
    except ParseError:
        return
    tool.judge(facts, Context())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400) | st.text(max_size=400).map(lambda t: t.encode("utf-8", "replace")))
def test_random_bytes_never_pass(data: bytes) -> None:
    assert verdict(data) != "PASS"


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS, max_size=40).map("".join))
def test_the_tools_own_words_in_disorder_never_pass(text: str) -> None:
    assert verdict(text) != "PASS"


WHOLE = (  # how what is told of one device ends, and how the next begins
    ("Link layer:", "CA '"),
    ("link_layer:", "Infiniband device"),
    ("link_layer:", "hca_id:"),
    ("GID[", "hca_id:"),
)


def lost(name: str, text: str, end: int) -> bool:
    """Whether cutting `text` off at `end` loses something whose absence can be told from the rest at all.

    It cannot where a whole CA of ibstat, a whole device of ibstatus or ibv_devinfo, or a whole file of a tree is gone: only
    the plan and the siblings show that. And of the line that closes perftest's table any part closes it, that of the sum as well.
    """
    rest = text[end:].strip()
    if not rest.lstrip("-"):
        return False
    if "Local results:" in text[end - 20 :].partition("#bytes")[0]:
        return False  # what `-b` prints without --report-both is whole
    line = text[:end].rstrip("\n").rpartition("\n")[2].strip()
    if name.startswith("sysfs"):
        device = text[: end + 1].rfind("/hca_type:")
        return (
            device < end < text.index("link_layer:InfiniBand", device) + len("link_layer:InfiniBand")
            if device > 0
            else False
        )
    return not any(line.startswith(last) and rest.startswith(first) for last, first in WHOLE)


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_an_output_that_is_cut_off_never_passes(name: str) -> None:
    text = HEALTHY[name]
    ends = [end for end in range(0, len(text), max(1, len(text) // 400)) if lost(name, text, end)]
    assert len(ends) > 100
    for end in ends:
        assert verdict(text[:end]) != "PASS", f"cut at {end}: ...{text[max(0, end - 60) : end]!r}"


BANDWIDTHS = sorted(n for n in HEALTHY if n.startswith("ib_") and "lat" not in n)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_digit_of_a_result_never_passes(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(BANDWIDTHS))
    text = HEALTHY[name]
    # The row that is judged, the last one: size, (iterations, peak,) average, message rate.
    if name.endswith(".json"):
        keys = (
            ('"MsgSize": ', '"BW_average": ', '"MsgRate": ')
            if '"MsgSize"' in text
            else ("MsgSize: ", "BW_average: ", "MsgRate: ")
        )
        key = data.draw(st.sampled_from(keys))
        start = text.index(key) + len(key)
    else:
        row = next(line for line in reversed(text.splitlines()) if line.strip()[:1].isdigit())
        column = data.draw(st.sampled_from([0, 3, 4]))
        start = text.rindex(row) + list(re.finditer(r"\S+", row))[column].start()
    first = data.draw(st.sampled_from("0123456789").filter(lambda d: d != text[start]))
    assert text[start].isdigit()
    changed = text[:start] + first + text[start + 1 :]
    assert verdict(changed) != "PASS", changed[start - 40 : start + 20]


@pytest.mark.parametrize("name", sorted(ALL_HEALTHY))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_bytes_that_no_tool_writes_never_pass(name: str, data: st.DataObject) -> None:
    raw = ALL_HEALTHY[name].encode()
    at = data.draw(st.integers(0, len(raw)))
    junk = data.draw(st.sampled_from([b"\x00", b"\xff", b"\xc3\x28", b"\x01\x02", b"\x7f"]))
    assert verdict(raw[:at] + junk + raw[at:]) != "PASS"


LINES = {  # lines without which a result means nothing
    "ib_write_bw_ndr.txt": ("RDMA_Write BW Test", "Device", "#bytes", " 65536"),
    "ib_send_lat_ib.txt": ("Send Latency Test", "Device", "#bytes", " 2    "),
    "mlxlink_ndr.txt": ("State  ", "Physical state", "Speed  ", "Width", "Enabled Link", "Status Opcode", "Recommendation", "Operational", "Troubleshooting"),
    "ncclscout_good.txt": ("Total nodes", "Good nodes", "Bad nodes", "Unreachable nodes", "Maximum", "Average", "  n01 <-> n02", "Testing n03", "Test completed", "   n01, n02"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "start"), [(n, s) for n, starts in LINES.items() for s in starts])
def test_a_line_that_is_missing_never_passes(name: str, start: str) -> None:
    lines = TEXTS[name].splitlines(keepends=True)
    kept = [line for line in lines if start not in line]
    assert len(kept) < len(lines)
    assert verdict("".join(kept)) != "PASS"
